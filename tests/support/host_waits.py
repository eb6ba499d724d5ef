"""Count where a program makes the host wait for its GPU, by whose code asks for it.

On a GPU torch itself reports every wait (`torch.cuda.set_sync_debug_mode`). On a CPU nothing waits; there the
operations are counted that would, so that the same checks run without a GPU: those that give the host a value, or a
size that depends on values.
"""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

OWNERS = ("ds_trainer", "deepspeed", "transformers", "accelerate")
_ATEN = torch.ops.aten
_READS = (_ATEN._local_scalar_dense, _ATEN.nonzero, _ATEN.masked_select, _ATEN.equal)


def host_waits(call: Callable[[], object], device: torch.device) -> Counter[str]:
    """Run `call`, and return how often the host waited, by the library and line whose code made it wait."""
    waits: Counter[str] = Counter()
    with _reported(waits) if device.type == "cuda" else _Reads(waits):
        call()
    return waits


def of(owner: str, waits: Counter[str]) -> int:
    """How many of the waits are a library's."""
    return sum(count for place, count in waits.items() if place.startswith(f"{owner}/"))


@contextmanager
def _reported(waits: Counter[str]) -> Iterator[None]:
    """Count torch's warnings of operations that synchronise."""

    def note(message: Any, *_: Any, **__: Any) -> None:
        if "synchronizing CUDA operation" in str(message):
            waits[place()] += 1

    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")


class _Reads(TorchDispatchMode):
    """Counts the operations for which a GPU's host would wait."""

    def __init__(self, waits: Counter[str]) -> None:
        super().__init__()
        self._waits = waits

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        by_mask = function is _ATEN.index.Tensor and any(i is not None and i.dtype == torch.bool for i in args[1])
        if by_mask or function.overloadpacket in _READS:
            self._waits[place()] += 1
        return function(*args, **(kwargs or {}))


def place() -> str:
    """The innermost line of one of OWNERS' packages on the stack, as `ds_trainer/run/loop.py:96 train_step`."""
    roots = {f"{sys.modules[name].__path__[0]}/": name for name in OWNERS if name in sys.modules}
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        for root, name in roots.items():
            if code.co_filename.startswith(root):
                return f"{name}/{code.co_filename.removeprefix(root)}:{frame.f_lineno} {code.co_name}"
        frame = frame.f_back
    return "another program"
