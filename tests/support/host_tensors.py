"""A pretended accelerator, on which alone this library's collectives work, as NCCL's do.

A tensor is on it where a call names a device for it, and so is what is computed from it, until `Tensor.cpu`. All else
is the host's: a collective of the library over that raises what a process group of NCCL raises.
"""

from __future__ import annotations

import sys
from functools import wraps

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree


class PretendedDevice(TorchFunctionMode):
    """Marks the tensors that are on the device; a mark goes with the Python object."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        tensors = [value for value in pytree.tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)]
        named = any(isinstance(value, torch.device) for value in (*args, *kwargs.values()))
        if function is not torch.Tensor.cpu and (named or any(map(is_on_device, tensors))):
            for value in pytree.tree_leaves(result):
                if isinstance(value, torch.Tensor):
                    value.on_device = True
        return result


def is_on_device(tensor: torch.Tensor) -> bool:
    return getattr(tensor, "on_device", False)


def pretend() -> None:
    """From now on, and to the end of the process."""
    PretendedDevice().__enter__()
    get_backend, all_reduce = dist.get_backend, dist.all_reduce

    def is_ours() -> bool:
        return "/ds_trainer/" in sys._getframe(2).f_code.co_filename

    @wraps(all_reduce)
    def checked(tensor, *args, group=None, **kwargs):
        if is_ours() and group is None and not is_on_device(tensor):
            raise RuntimeError("No backend type associated with device type cpu")
        return all_reduce(tensor, *args, group=group, **kwargs)

    dist.all_reduce = checked
    dist.get_backend = lambda *args: "nccl" if is_ours() else get_backend(*args)
