"""Compares DeepSpeed's collectives, as this library leaves them, with torch's own; started by a test on some ranks.

`OUT` gets a list of what is wrong.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from unittest.mock import MagicMock

import deepspeed.comm as comm
import torch
import torch.distributed as dist
from deepspeed.comm.reduce_op import ReduceOp

from ds_trainer.ranks import distributed, shared_memory

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64)
SIZES = (1, 1000, 100_003, 5_000_001)
"""The kernel has one way for less than 1 MB and another for more, in parts of 32 MB; odd sizes end within a vector."""


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
    shared_memory._LARGEST = 1_000_000  # elements: the largest size below is summed in several calls
    distributed.start()
    replaced = comm.comm.cdb.all_reduce.__self__
    counted = MagicMock(wraps=replaced._sum)
    replaced._sum = counted
    cases = [*product(DTYPES, SIZES[:-1], (False, True)), *product(DTYPES[:3], SIZES[-1:], (False,))]
    wrong = [f"{case}: {name}" for case in cases for name in differing(*case)]
    sums = counted.call_count
    if sums < 3 * 2 * (2 * len(SIZES) - 1):  # two collectives, synchronous or not, of three types
        wrong.append(f"of all sums only {sums} were the kernel's")
    empty = torch.empty(0)
    comm.all_gather_into_tensor(torch.empty(0), empty)
    alone = [dist.new_group([rank]) for rank in range(2)][distributed.rank()]
    if distributed.is_main():  # a kernel for all ranks would wait for the other one for ever
        ones = torch.ones(3)
        comm.all_reduce(ones, group=alone)
        if ones.tolist() != [1.0] * 3:
            wrong.append("all_reduce of a part of the ranks")
        wrong += map(str, Path("/dev/shm").glob(f"deepspeed_*_{os.environ['MASTER_PORT']}_*"))
        Path(out).write_text(json.dumps(wrong))
    distributed.stop()


if __name__ == "__main__":
    main(sys.argv[-1])
    distributed.leave(0)
