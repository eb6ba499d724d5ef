"""Measure the wall-clock seconds of a call, also where a GPU does the work."""

import time
from collections.abc import Callable

import torch


def seconds(call: Callable[[], object], device: torch.device) -> float:
    """Return the wall-clock seconds of `call` with all its work on `device`, and none that was queued there before."""
    _wait(device)
    started = time.perf_counter()
    call()
    _wait(device)
    return time.perf_counter() - started


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
