"""Start the product's entry points as a user would, or forked from a process that has loaded what takes seconds."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SHARED = ROOT.parent / "shared"
Done = subprocess.CompletedProcess[str]


def run_deepspeed(ranks: int, script: str, *arguments: str, timeout: float = 420) -> Done:
    """Run a script on ranks that are started as DeepSpeed's launcher starts them, but forked; stderr is of all ranks.

    A rank that fails ends the others, as under the launcher.
    """
    from support.forked_ranks import warm_server

    return warm_server().run_script(ranks, [script, *arguments], timeout)


def run_script(script: str, *arguments: str, timeout: float = 300) -> Done:
    """`python SCRIPT ARGUMENTS` from the root, forked."""
    from support.forked_ranks import warm_server

    return warm_server().run_script(0, [script, *arguments], timeout)


def run_python(*arguments: str, timeout: float = 300) -> Done:
    """`python ARGUMENTS` from the root, in a process that has loaded nothing yet."""
    command, env = [sys.executable, *arguments], environment()
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=timeout, check=False)


def run_without_library(code: str, *arguments: str) -> Done:
    """Python code, in a process that has loaded nothing yet and in which this library cannot be imported."""
    return run_python("-c", f"import sys\nsys.modules['ds_trainer'] = None\n{code}", *arguments)


def free_port() -> int:
    """A port that nobody uses now; what runs beside the tests mostly has DeepSpeed's default."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


def environment() -> dict[str, str]:
    """The environment variables of a test's processes."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # the launcher looks for ninja there
    inherited = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    inherited["PYTHONPATH"] = f"{ROOT}{os.pathsep}{ROOT / 'tests'}"  # for the drivers in tests/support
    # one thread: tiny models gain nothing from two, and two processes of two threads on 2 cores wait for each other
    return inherited | {"OMP_NUM_THREADS": "1", "PATH": path}
