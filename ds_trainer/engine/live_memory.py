"""Count the bytes of tensors that live at once, on any device: a CPU has no allocator that could be asked."""

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveMemory(TorchDispatchMode):
    """While it is on, keep the sum of the storages that operations have made and that are not yet freed.

    What an operation needs only inside itself is not counted, nor is what existed before.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {_address(value) for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)}
        for value in tree_leaves(out):
            if isinstance(value, Tensor) and value.device.type != "meta" and _address(value) not in given:
                self._add(value.untyped_storage())
        return out

    def _add(self, storage: Any) -> None:
        if storage._cdata not in self._sizes:
            self._sizes[storage._cdata] = storage.nbytes()
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._drop, storage._cdata)

    def _drop(self, address: int) -> None:
        self.now -= self._sizes.pop(address)


def _address(value: Tensor) -> int:
    return int(value.untyped_storage()._cdata) if value.layout == torch.strided else 0
