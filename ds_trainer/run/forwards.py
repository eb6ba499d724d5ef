"""The forwards of an optimizer step: one for each micro-batch, and one more where a loss compares all examples.

Where a task compares the examples of a step with each other, each micro-batch needs the values of all others, on all
ranks. They are computed first, without gradient, and then each micro-batch but the first once more with gradient,
beside the values of the others (GradCache, arXiv 2101.06983). So the gradient is that of the whole batch, however it is
cut, in the memory of a micro-batch.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ds_trainer.engine.engine import Engine
from ds_trainer.ranks import distributed
from ds_trainer.tasks.data import ExampleIds, shard
from ds_trainer.tasks.task import Batch, Task, Unit
from ds_trainer.tasks.whole_step import WholeStep

MicroBatch = tuple[Batch, Mapping[Unit, float]]
"""A micro-batch, and its `Forward.shares`."""


def forwards(
    task: Task, micro_batches: Iterable[MicroBatch], indices: ExampleIds, ds_engine: Engine, seed: int
) -> Iterator[tuple[Batch, Any, Mapping[Unit, float]]]:
    """Yield each micro-batch of this rank with the engine's output for it, and its shares.

    `indices` are the examples of the global batch, and `seed` draws the dropout.
    """
    if not task.compares_examples:
        for batch, shares in micro_batches:
            yield batch, ds_engine(**batch.inputs), shares
        return
    batches = list(micro_batches)

    def output(place: int) -> Any:
        torch.manual_seed(hash((seed, distributed.rank(), place)) & (2**63 - 1))  # both times the same dropout
        return ds_engine(**batches[place][0].inputs)

    def logits(out: Any, batch: Batch) -> Tensor:
        (values,) = task.logits(out, batch)
        return values

    with torch.no_grad():
        others = [logits(output(place), batches[place][0]) for place in range(1, len(batches))]
    out = output(0)  # last, so that the first micro-batch needs no second forward
    own = [logits(out, batches[0][0]).detach(), *others]
    steps = whole_steps(task, indices, torch.cat(own), len(batches))
    for place, (batch, shares) in enumerate(batches):
        out = output(place) if place else out
        yield replace(batch, step=steps[place]), out, shares


def whole_steps(task: Task, indices: ExampleIds, own: Tensor, accumulation: int) -> list[WholeStep]:
    """Gather the values of all ranks, and return the `WholeStep` of each micro-batch of this rank; collective.

    `own` are this rank's values, of all its micro-batches.
    """
    world, examples = distributed.world_size(), task.examples("train")
    by_rank = [shard(indices, examples.lengths, rank, world, accumulation) for rank in range(world)]
    rows = [[int(task.counts(examples, ids)["label"]) for ids in micro_batches] for micro_batches in by_rank]
    starts = list(accumulate(map(sum, rows), initial=0))
    before = starts[distributed.rank()]
    values = own.new_zeros(starts[-1], *own.shape[1:])
    values[before : before + len(own)] = own.detach()
    values = distributed.total(values)  # of zeros, but on one rank
    places = accumulate(rows[distributed.rank()][:-1], initial=before)
    ids = np.concatenate([part.reshape(-1) for part in by_rank])
    return [WholeStep(ids, values, start, world * accumulation) for start in places]
