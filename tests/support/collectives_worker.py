"""Compares DeepSpeed's collectives, as this library leaves them, with torch's own; started by a test on some ranks.

`OUT` gets the cases that differ, and the names of the methods that now stand for DeepSpeed's.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import deepspeed.comm as comm
import torch
import torch.distributed as dist
from deepspeed.comm.reduce_op import ReduceOp

from ds_trainer.ranks import distributed, shared_memory

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64)
SIZES = (1, 7, 1000, 100_003)
"""The kernel has one way for less than 1 MB and another for more; odd sizes end in the middle of a vector."""


def differing(dtype: torch.dtype, size: int, is_async: bool) -> Iterator[str]:
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    mine = torch.randint(-8, 8, (world * size,)).to(dtype)  # small integers have exact sums, in any order
    total = mine.clone()
    dist.all_reduce(total)

    def wait(work) -> None:
        if is_async:
            work.wait()

    summed = mine.clone()
    wait(comm.all_reduce(summed, async_op=is_async))
    if not torch.equal(summed, total):
        yield "all_reduce"
    largest, expected = mine.clone(), mine.clone()
    dist.all_reduce(expected, dist.ReduceOp.MAX)
    wait(comm.all_reduce(largest, ReduceOp.MAX, async_op=is_async))
    if not torch.equal(largest, expected):
        yield "all_reduce of the largest"
    columns = mine.view(world, size).t()
    comm.all_reduce(columns)
    if not torch.equal(columns, total.view(world, size).t()):
        yield "all_reduce of a transposed tensor"
    mine = columns.t().reshape(-1).div(2).to(dtype)
    part, before = torch.empty(size, dtype=dtype), mine.clone()
    expected = mine.clone()
    dist.all_reduce(expected)
    wait(comm.reduce_scatter_tensor(part, mine, async_op=is_async))
    if not (torch.equal(part, expected.view(world, size)[rank]) and torch.equal(mine, before)):
        yield "reduce_scatter_tensor"
    gathered = torch.empty_like(mine)
    wait(comm.all_gather_into_tensor(gathered, part, async_op=is_async))
    if not torch.equal(gathered, expected):
        yield "all_gather_into_tensor"


def main(out: str) -> None:
    distributed.start()
    cases = product(DTYPES, SIZES, (False, True))
    wrong = [f"{case}: {name}" for case in cases for name in differing(*case)]
    pair = dist.new_group([0, 1])
    if distributed.rank() < 2:  # a kernel for all ranks would wait for the third for ever
        ones = torch.ones(3)
        comm.all_reduce(ones, group=pair)
        if ones.tolist() != [2.0] * 3:
            wrong.append("all_reduce of a part of the ranks")
    shared = [
        name
        for name in ("all_reduce", "reduce_scatter_tensor", "all_gather_into_tensor")
        if isinstance(getattr(comm.comm.cdb, name).__self__, shared_memory.SharedMemoryCollectives)
    ]
    if distributed.is_main():
        Path(out).write_text(json.dumps({"wrong": wrong, "shared": shared}))
    distributed.stop()


if __name__ == "__main__":
    main(sys.argv[-1])
    distributed.leave(0)
