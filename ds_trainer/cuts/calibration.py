"""The training examples that a cut is fitted to, and how far its answers are from the dense model's."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ds_trainer.cuts.costs import BatchSize
from ds_trainer.cuts.layerwise import Calibration, finite
from ds_trainer.ranks import distributed
from ds_trainer.ranks.stopping import in_step
from ds_trainer.tasks.data import ExampleIds
from ds_trainer.tasks.losses import soft_target_loss
from ds_trainer.tasks.task import Batch, Task

_BATCH = 32
_PROBED, _PROBE_BATCH = 64, 8
"""About how many of the examples are run for each divergence that is measured, and in batches of how many."""
_PROBED_ROWS = 64
"""About how many rows of logits of each batch are compared: those of language models are long, and many."""


def calibration_of(task: Task, count: int, seed: int) -> Calibration:
    """Draw `count` training examples (all, where there are fewer), and deal their batches out to the ranks.

    The batches, sorted by length, are the same for any number of ranks. Collective where the split is not read yet.
    """
    examples = task.examples("train")
    batches, probes = (
        [task.collate(examples, ids) for ids in parts[distributed.rank() :: distributed.world_size()]]
        for parts in _drawn(task, count, seed)
    )
    return Calibration(
        inputs=[batch.inputs for batch in batches],
        attended=[batch.mask.bool() for batch in batches],
        answers=lambda model: _answers(task, model, in_step(probes, len(probes))),
        divergence=lambda dense, cut: _divergence(task, dense, cut),
        loss=lambda model, index: _loss(task, model, batches[index]),
        device=distributed.device(),
    )


def calibration_sizes(task: Task, count: int, seed: int) -> tuple[list[BatchSize], list[BatchSize]]:
    """Return the sizes of the batches that all ranks together run, and of those that a divergence is measured on."""
    multiple = task.spec.pad_to_multiple_of

    def size(ids: ExampleIds) -> BatchSize:
        lengths = task.examples("train").lengths[ids]
        return BatchSize(len(ids), -(-int(lengths.max()) // multiple) * multiple, int(lengths.sum()))

    batches, probes = _drawn(task, count, seed)
    return list(map(size, batches)), list(map(size, probes))


def _drawn(task: Task, count: int, seed: int) -> tuple[list[ExampleIds], list[ExampleIds]]:
    """Draw batches of training examples, sorted by length, and choose examples that a divergence is measured on."""
    lengths = task.examples("train").lengths
    chosen = np.random.default_rng(seed).permutation(len(lengths))[:count]
    chosen = chosen[np.argsort(lengths[chosen], kind="stable")]
    probed = chosen[:: max(1, len(chosen) // _PROBED)]
    batches = [chosen[start : start + _BATCH] for start in range(0, len(chosen), _BATCH)]
    return batches, [probed[start : start + _PROBE_BATCH] for start in range(0, len(probed), _PROBE_BATCH)]


@torch.no_grad()
def _answers(task: Task, model: nn.Module, batches: Iterable[Batch]) -> list[tuple[Tensor, ...]]:
    """Return logits of each batch, each (rows, classes)."""
    device = next(task.adapt(model).parameters()).device
    answers = []
    for batch in (batch.to(device) for batch in batches):
        logits = task.logits(model(**batch.inputs), batch)
        answers.append(tuple(rows[:: max(1, len(rows) // _PROBED_ROWS)].clone() for rows in logits))
    return answers


def _loss(task: Task, model: nn.Module, batch: Batch) -> Tensor:
    """Return the task's mean loss over a batch, times its examples or the sum of their weights, with gradient."""
    counts = task.counts(task.examples("train"), batch.ids.numpy()) if task.loss_unit == "weight" else {}
    batch = batch.to(next(model.parameters()).device)
    return task.loss(model(**batch.inputs), batch) * counts.get("weight", len(batch.ids))


def _divergence(task: Task, dense: Any, cut: Any) -> float:
    """Return KL(dense || cut), or the squared difference of a regression, as a mean over the rows of all ranks."""
    sums = torch.zeros(2, dtype=torch.float64)
    for teachers, students in zip(dense, cut, strict=True):
        for teacher, student in zip(teachers, students, strict=True):
            loss = soft_target_loss(task, student, teacher.clone(), temperature=1.0)
            sums += torch.tensor([float(loss) * len(student), len(student)], dtype=torch.float64)
    total, rows = finite(distributed.total(sums), "the divergences of the model's answers").tolist()
    return total / max(1, rows)
