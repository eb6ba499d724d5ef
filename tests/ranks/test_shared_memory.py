"""DeepSpeed's collectives between CPU ranks of one host give what torch's own give, and go through shared memory."""

import json
import os

import pytest
from support.launching import run_deepspeed


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="ranks that share a core use gloo")
def test_shared_memory_gives_what_gloo_gives(tmp_path):
    """Every type, small and large, synchronous or not; what the kernel does not know goes to gloo; no file is left."""
    done = run_deepspeed(2, "tests/support/collectives_worker.py", str(tmp_path / "out.json"), shared_memory=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads((tmp_path / "out.json").read_text()) == []
