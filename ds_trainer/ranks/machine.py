"""The hardware and software of a run: versions, hosts, devices, the memory that a rank has held, and seconds."""

import contextlib
import importlib.metadata
import platform
import resource
import socket
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

import ds_trainer
from ds_trainer.ranks import distributed

_LIBRARIES = ("torch", "transformers", "deepspeed", "numpy")


def session() -> dict[str, Any]:
    """Return the versions on rank 0, and for each host the number of ranks by device. Collective."""
    mine = (socket.gethostname(), device_name())
    hosts: dict[str, dict[str, int]] = {}
    for (host, device), ranks in Counter(distributed.broadcast(distributed.gather(mine))).items():
        hosts.setdefault(host, {})[device] = ranks
    return {"hosts": hosts, "versions": versions()}


def versions() -> dict[str, str]:
    """Return the versions of this library, of Python, and of the libraries that a result depends on most."""
    libraries = {name: importlib.metadata.version(name) for name in _LIBRARIES}
    return {"ds_trainer": ds_trainer.__version__, "python": platform.python_version(), **libraries}


def device_name() -> str:
    """Return the product name of this rank's device."""
    return torch.cuda.get_device_name(distributed.device()) if torch.cuda.is_available() else cpu_name()


def cpu_name() -> str:
    """Return the product name of the CPU, or its architecture where the system does not name it."""
    return _fields(Path("/proc/cpuinfo")).get("model name", platform.machine())


def peak_memory() -> dict[str, int]:
    """Return the most bytes that this process has held since the last call: `resident`, and `device` of its GPU.

    Some systems cannot reset the peak of `resident`: there it is the most since the process began. Waits for no GPU,
    whose allocator counts on the host.
    """
    peaks = {"resident": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss}
    with contextlib.suppress(OSError, KeyError):
        peaks["resident"] = 1024 * int(_fields(Path("/proc/self/status"))["VmHWM"].split()[0])
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # resets it to the memory held now
    if torch.cuda.is_available():
        peaks["device"] = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
    return peaks


def seconds(call: Callable[[], object], device: torch.device) -> float:
    """Return the wall-clock seconds of `call` with all its work on `device`, and none that was queued there before."""
    wait = partial(torch.cuda.synchronize, device) if device.type == "cuda" else lambda: None
    wait()
    started = time.perf_counter()
    call()
    wait()
    return time.perf_counter() - started


def _fields(path: Path) -> dict[str, str]:
    """Read a file of lines NAME: VALUE; nothing where it does not exist."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
