"""DeepSpeed's collectives between CPU ranks of one host give what torch's own give, and go through shared memory."""

import json

from support.launching import run_deepspeed


def test_shared_memory_gives_what_gloo_gives(tmp_path):
    """Every type, small and large, synchronous or not; what the kernel does not know goes to gloo."""
    done = run_deepspeed(3, "tests/support/collectives_worker.py", str(tmp_path / "out.json"))
    assert done.returncode == 0, done.stderr[-3000:]
    results = json.loads((tmp_path / "out.json").read_text())
    assert results == {"wrong": [], "shared": ["all_reduce", "reduce_scatter_tensor", "all_gather_into_tensor"]}
