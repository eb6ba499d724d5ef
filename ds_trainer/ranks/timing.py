"""Wall-clock seconds of a call, also where a GPU does its work."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch


def seconds(call: Callable[[], object], device: torch.device) -> float:
    """Wall seconds of `call`, all of its work on `device` in it, and nothing of what was asked of that before."""
    _wait(device)
    started = time.perf_counter()
    call()
    _wait(device)
    return time.perf_counter() - started


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
