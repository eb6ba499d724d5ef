"""What a run takes place on: versions, hosts and devices; and the most memory that a rank has held."""

from __future__ import annotations

import importlib.metadata
import platform
import resource
import socket
from collections import Counter
from pathlib import Path
from typing import Any

import torch

import ds_trainer
from ds_trainer.ranks import distributed

_LIBRARIES = ("torch", "transformers", "deepspeed", "numpy")


def session() -> dict[str, Any]:
    """The versions of this library and of those below it, on rank 0, and every host's ranks by device; collective."""
    mine = (socket.gethostname(), device_name())
    hosts: dict[str, dict[str, int]] = {}
    for (host, device), ranks in Counter(distributed.broadcast(distributed.gather(mine))).items():
        hosts.setdefault(host, {})[device] = ranks
    return {"hosts": hosts, "versions": versions()}


def versions() -> dict[str, str]:
    """The versions of this library, of Python, and of the libraries that a result depends on most."""
    libraries = {name: importlib.metadata.version(name) for name in _LIBRARIES}
    return {"ds_trainer": ds_trainer.__version__, "python": platform.python_version(), **libraries}


def device_name() -> str:
    """What this rank computes on, by its maker's name."""
    return torch.cuda.get_device_name(distributed.device()) if torch.cuda.is_available() else cpu_name()


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.machine())


def peak_memory() -> dict[str, int]:
    """The most bytes that this process has held since the last call: `resident`, and of a GPU `device`.

    Where the system does not let it be reset, or does not tell it, `resident` is the most since the process began.
    Waits for no GPU: its allocator counts on the host.
    """
    found = {"resident": _resident_peak()}
    if torch.cuda.is_available():
        found["device"] = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
    return found


def _resident_peak() -> int:
    try:
        lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
        peak = next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # from now on it is what is held now
    except (OSError, StopIteration):
        return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak
