"""The training examples that a cut is fitted to, and how far its answers are from the dense model's."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ds_trainer.models.cut.layerwise import Calibration
from ds_trainer.ranks import distributed
from ds_trainer.tasks.soft_targets import soft_target_loss
from ds_trainer.tasks.task import Batch, Task

_BATCH = 32
_PROBED = 64
"""About how many of the examples are run for each divergence that is measured."""


def calibration_of(task: Task, count: int, seed: int) -> Calibration:
    """Draw `count` training examples (all, where there are fewer), and deal their batches out to the ranks.

    The batches, sorted by length, are the same for any number of ranks. Collective where the split is not read yet.
    """
    examples = task.examples("train")
    chosen = np.random.default_rng(seed).permutation(len(examples))[:count]
    chosen = chosen[np.argsort(examples.lengths[chosen], kind="stable")]
    rank, world = distributed.rank(), distributed.world_size()
    ids = [chosen[start : start + _BATCH] for start in range(0, len(chosen), _BATCH)]
    probed = ids[:: max(1, len(chosen) // _PROBED)]
    batches, probes = ([task.collate(examples, part) for part in parts[rank::world]] for parts in (ids, probed))
    return Calibration(
        inputs=[batch.inputs for batch in batches],
        attended=[batch.mask.bool() for batch in batches],
        answers=lambda model: _answers(task, model, probes),
        divergence=lambda dense, cut: _divergence(task, dense, cut),
        loss=lambda model, index: _loss(task, model, batches[index]),
    )


@torch.no_grad()
def _answers(task: Task, model: nn.Module, batches: Sequence[Batch]) -> list[tuple[Tensor, ...]]:
    """Return the logits of each batch, each (rows, classes)."""
    device = next(model.parameters()).device
    on_device = [batch.to(device) for batch in batches]
    return [task.logits(model(**batch.inputs), batch) for batch in on_device]


def _loss(task: Task, model: nn.Module, batch: Batch) -> Tensor:
    """Return the task's loss, as a sum over the examples of a batch, with gradient."""
    batch = batch.to(next(model.parameters()).device)
    return task.loss(model(**batch.inputs), batch) * len(batch.ids)


def _divergence(task: Task, dense: Any, cut: Any) -> float:
    """Return KL(dense || cut), or the squared difference of a regression, as a mean over the rows of all ranks."""
    sums = torch.zeros(2, dtype=torch.float64)
    for teachers, students in zip(dense, cut, strict=True):
        for teacher, student in zip(teachers, students, strict=True):
            loss = soft_target_loss(task, student, teacher.clone(), temperature=1.0)
            sums += torch.tensor([float(loss) * len(student), len(student)], dtype=torch.float64)
    total, rows = distributed.total(sums).tolist()
    return total / max(1, rows)
