"""Faster collectives for CPU ranks that share a host, in place of gloo's, which copies more and sends all by sockets.

DeepSpeed has a kernel that sums in shared memory, and uses it for inference only. This module uses it for training
too, and replaces an all_gather by one broadcast from each rank. `tests/bench/two_ranks.py` measures what that gains.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.comm.reduce_op import ReduceOp

from ds_trainer.ranks import distributed

_SUMMED = (torch.float32, torch.bfloat16, torch.float16)
_LARGEST = 2**28
"""Elements that are summed in one call, since the kernel counts bytes in a C int."""
_LEAST_FILE = 2 * (2**20 + 2**25)
"""The bytes of a rank's file: two buffers for small tensors and two for the parts of large ones."""
REPLACED = ("all_reduce", "reduce_scatter_tensor", "all_gather_into_tensor")


class SharedMemoryCollectives:
    """Three collectives of DeepSpeed's torch backend, with its arguments; the backend does what they cannot.

    They are for the group of all ranks, contiguous tensors, and sums of floating-point numbers.
    """

    def __init__(self, backend: Any) -> None:
        self._sum = backend.inference_all_reduce  # which calls gloo where the processor lacks the kernel's instructions
        self._gloo = {name: getattr(backend, name) for name in REPLACED}

    def all_reduce(
        self, tensor: torch.Tensor, op: Any = ReduceOp.SUM, group: Any = None, async_op: bool = False
    ) -> _Works | None:
        """Sum a tensor over the ranks, in place."""
        if not (_can_sum(tensor, op, group) and tensor.is_contiguous()):
            return self._gloo["all_reduce"](tensor, op, group, async_op)
        dist.barrier()  # the kernel would wait for ever for a rank that hangs or is gone; gloo has a time limit
        for part in tensor.view(-1).split(_LARGEST):
            self._sum(part, op)
        return _Works() if async_op else None

    def reduce_scatter_tensor(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        op: Any = ReduceOp.SUM,
        group: Any = None,
        async_op: bool = False,
    ) -> _Works | None:
        """Sum the input (world * n) over the ranks and give each rank its part (n); the input stays as it is."""
        if not _can_sum(input_tensor, op, group):
            return self._gloo["reduce_scatter_tensor"](output_tensor, input_tensor, op, group, async_op)
        total = input_tensor.clone(memory_format=torch.contiguous_format)
        self.all_reduce(total)
        output_tensor.copy_(total.view(dist.get_world_size(), *output_tensor.shape)[dist.get_rank()])
        return _Works() if async_op else None

    def all_gather_into_tensor(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any = None, async_op: bool = False
    ) -> _Works | None:
        """Write the parts (n) of all ranks one after the other into the output (world * n)."""
        if not (_is_of_all(group) and output_tensor.is_contiguous()):
            return self._gloo["all_gather_into_tensor"](output_tensor, input_tensor, group, async_op)
        parts = output_tensor.view(dist.get_world_size(), input_tensor.numel())
        parts[dist.get_rank()].copy_(input_tensor.reshape(-1))  # DeepSpeed's input often is this part already
        works = _Works(*(dist.broadcast(part, rank, async_op=True) for rank, part in enumerate(parts)))
        if async_op:
            return works
        works.wait()
        return None


class _Works:
    """The handle of broadcasts under way, or of a collective that is done."""

    def __init__(self, *works: dist.Work) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)


def share_memory() -> None:
    """Let DeepSpeed train with these collectives where they can be used; collective, after its start.

    The kernel is ready where DeepSpeed's launcher has started all ranks on this host, and has named their number. It
    waits without giving up its core, and so needs one for each rank. DeepSpeed does not notice where shared memory is
    too small for its files.
    """
    from deepspeed.comm import comm

    world = distributed.world_size()
    if world > len(os.sched_getaffinity(0)) or os.environ.get("LOCAL_SIZE") != str(world):
        return
    dist.barrier()  # a rank may not have initialised its part when others are ready
    sizes = [distributed.shared_memory_file(rank).stat().st_size for rank in range(world)]
    dist.barrier()
    distributed.free_shared_memory()  # which only removes the name: all ranks have opened all files
    if min(sizes) < _LEAST_FILE:
        distributed.warn("/dev/shm is too small for the ranks' 70 MB each: their collectives are gloo's, and slower")
        return
    collectives = SharedMemoryCollectives(comm.cdb)
    for name in REPLACED:
        setattr(comm.cdb, name, getattr(collectives, name))


def _can_sum(tensor: torch.Tensor, op: Any, group: Any) -> bool:
    return op is ReduceOp.SUM and tensor.dtype in _SUMMED and _is_of_all(group)


def _is_of_all(group: Any) -> bool:
    return dist.get_world_size(group) == dist.get_world_size()
