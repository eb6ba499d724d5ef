"""Start the product's own entry points as processes, as a user would."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SHARED = ROOT.parent / "shared"


def run_deepspeed(ranks: int, *arguments: str, timeout: float = 420) -> subprocess.CompletedProcess[str]:
    """`deepspeed --num_gpus RANKS ARGUMENTS` from the root, at a free port; stderr holds what the ranks wrote."""
    launcher = [str(Path(sys.executable).with_name("deepspeed")), "--num_gpus", str(ranks)]
    return _run([*launcher, "--master_port", str(free_port()), *arguments], timeout)


def run_python(*arguments: str, timeout: float = 300) -> subprocess.CompletedProcess[str]:
    """`python ARGUMENTS` from the root."""
    return _run([sys.executable, *arguments], timeout)


def free_port() -> int:
    """One that nobody uses now; what runs beside the tests mostly has DeepSpeed's default."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


def forget_port(port: int) -> None:
    """Remove what killed ranks leave in shared memory, under their port: 69 MB each."""
    for buffer in Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_*_{port}_*"):
        buffer.unlink(missing_ok=True)


def environment() -> dict[str, str]:
    """What the processes of a test are started with."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # the launcher looks for ninja there
    inherited = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    inherited["PYTHONPATH"] = f"{ROOT}{os.pathsep}{ROOT / 'tests'}"  # for the drivers in tests/support
    # one thread: tiny models gain nothing from two, and two processes of two threads on 2 cores wait for each other
    return inherited | {"OMP_NUM_THREADS": "1", "PATH": path}


def _run(command: list[str], timeout: float) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
