"""The training examples that a cut is fitted to, and how far its answers are from the dense model's."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ds_trainer.models.layers import AnyLinear, in_features
from ds_trainer.ranks import distributed
from ds_trainer.ranks.failures import UserError
from ds_trainer.ranks.stopping import in_step
from ds_trainer.recipe.cut_specs import CutSpec
from ds_trainer.tasks.data import ExampleIds
from ds_trainer.tasks.losses import soft_target_loss
from ds_trainer.tasks.task import Task

_CPU = torch.device("cpu")
_BATCH = 32
_PROBED, _PROBE_BATCH = 64, 8
"""About how many of the examples are run for each divergence that is measured, and in batches of how many."""
_PROBED_ROWS = 64
"""About how many rows of logits of each batch are compared: those of language models are long, and many."""


@dataclass(frozen=True)
class Calibration:
    """This rank's part of the examples that a cut is fitted to, in batches, on the CPU.

    `inputs` are the model's, `attended` are bools (rows, length) that are true where there is a token. `answers` runs a
    model, on whichever device it is, on some of the examples; they are logits of each batch, each (rows, classes).
    `divergence(dense, cut)` is KL(dense || cut), or the squared difference of a regression, as a mean over the compared
    rows of all ranks; it is collective. `loss` returns the task's mean loss over one batch, by its number, times its
    examples or the sum of their weights, with gradient; the model is whole on one device. `device` is the one on which
    layers run and are solved.
    """

    inputs: Sequence[Mapping[str, Tensor]]
    attended: Sequence[Tensor]
    answers: Callable[[nn.Module], Any]
    divergence: Callable[[Any, Any], float]
    loss: Callable[[nn.Module, int], Tensor]
    device: torch.device = _CPU


def calibration_of(task: Task, count: int, seed: int, batch: int = _BATCH) -> Calibration:
    """Draw `count` training examples (all, where there are fewer), and deal their batches out to the ranks.

    The batches, sorted by length, are the same for any number of ranks. Collective where the split is not read yet.
    """
    examples = task.examples("train")
    batches, probes = (
        [task.collate(examples, ids) for ids in parts[distributed.rank() :: distributed.world_size()]]
        for parts in drawn(task, count, seed, batch)
    )

    @torch.no_grad()
    def answers(model: nn.Module) -> list[tuple[Tensor, ...]]:
        device, results = next(task.adapt(model).parameters()).device, []
        for batch in (batch.to(device) for batch in in_step(probes, len(probes))):
            logits = task.logits(model(**batch.inputs), batch)
            results.append(tuple(rows[:: max(1, len(rows) // _PROBED_ROWS)].clone() for rows in logits))
        return results

    def divergence(dense: Any, cut: Any) -> float:
        sums = torch.zeros(2, dtype=torch.float64)
        for teachers, students in zip(dense, cut, strict=True):
            for teacher, student in zip(teachers, students, strict=True):
                loss = soft_target_loss(task, student, teacher.clone(), temperature=1.0)
                sums += torch.tensor([float(loss) * len(student), len(student)], dtype=torch.float64)
        total, rows = finite(distributed.total(sums), "the divergences of the model's answers").tolist()
        return total / max(1, rows)

    def loss(model: nn.Module, index: int) -> Tensor:
        batch = batches[index].to(next(model.parameters()).device)
        if task.vectors or task.by_query:
            # for random directions the squared gradient is, on average, that of the squared distance between answers
            torch.manual_seed(index)
            (vectors,) = task.logits(model(**batch.inputs), batch)
            return (torch.randn_like(vectors) * vectors).sum()
        counts = task.counts(examples, batch.ids.cpu().numpy()) if task.loss_unit == "weight" else {}
        return task.loss(model(**batch.inputs), batch) * counts.get("weight", len(batch.ids))

    inputs, attended = [batch.inputs for batch in batches], [batch.mask.bool() for batch in batches]
    return Calibration(inputs, attended, answers, divergence, loss, distributed.device())


def finite(sums: Tensor, of: str) -> Tensor:
    """Return sums of all ranks over the calibration examples. UserError where they are not finite."""
    if not sums.isfinite().all():
        raise UserError(
            f"cut: {of} are not finite (NaN or infinity) on the calibration examples, though all weights are finite: "
            "the model overflows on these texts: train it again, with a lower learning rate"
        )
    return sums


def check_sound(model: Any, calibration: Calibration) -> None:
    """Raise UserError where a weight is not finite, or no example has a token to fit anything to; collective."""
    broken = next((name for name, weight in model.named_parameters() if not weight.isfinite().all()), None)
    if broken is not None:
        raise UserError(
            f"cut: {broken} holds values that are not finite (NaN or infinity): train the model of start_from again, "
            "with a lower learning rate, or in bf16 instead of fp16"
        )
    if not _count_tokens(calibration):
        raise UserError(
            "cut: the calibration examples have no token that is attended: the training texts are empty, or the "
            "tokenizer makes nothing of them"
        )


def check_tokens(linears: Iterable[AnyLinear], calibration: Calibration, spec: CutSpec) -> None:
    """Warn where a layer that is fitted has more inputs than the calibration examples have tokens; collective."""
    tokens, widest = _count_tokens(calibration), max(map(in_features, linears))
    if tokens < widest and (spec.method == "obs" or spec.update_weights):
        distributed.warn(
            f"cut: the cut of {widest:,} inputs is fitted to {tokens:,} tokens, too few to fit it: damping decides "
            "the rest; raise calibration_examples, if there are more examples"
        )


def _count_tokens(calibration: Calibration) -> int:
    """Count the attended tokens of all ranks; collective."""
    here = sum(int(attended.sum()) for attended in calibration.attended)
    return sum(count for (count,) in distributed.numbers_of_all([here]))


def drawn(task: Task, count: int, seed: int, batch: int) -> tuple[list[ExampleIds], list[ExampleIds]]:
    """Draw batches of training examples, sorted by length, and choose examples that a divergence is measured on."""
    lengths = task.examples("train").lengths
    chosen = np.random.default_rng(seed).permutation(len(lengths))[:count]
    chosen = chosen[np.argsort(lengths[chosen], kind="stable")]
    probed = chosen[:: max(1, len(chosen) // _PROBED)]
    batches = [chosen[start : start + batch] for start in range(0, len(chosen), batch)]
    return batches, [probed[start : start + _PROBE_BATCH] for start in range(0, len(probed), _PROBE_BATCH)]
