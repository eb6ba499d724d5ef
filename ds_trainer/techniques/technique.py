"""The interface of a technique: one paper, one object, layered on a model and a task that it gets as values.

To write one, subclass `Technique`, override the hooks it needs, and add the class to `registry.TECHNIQUES`, or to the
`TECHNIQUES` of a plugin. Every hook does nothing by default. `KeepZeros` in `prune/prune.py` is the shortest technique,
`distill/distill.py` one with loss terms.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ds_trainer.recipe.recipe import GroupRule
from ds_trainer.tasks.task import Forward, Predict, Task, Unit


@dataclass(frozen=True)
class PhaseLength:
    """How long a phase is, in optimizer steps, and the seed from which all that is random in it is drawn."""

    total: int
    warmup: int
    """The steps in which the learning rate rises."""
    seed: int


@dataclass(frozen=True)
class Measured:
    """What a technique measures of the exported model; the values are JSON values."""

    scores: Mapping[str, float]
    """By name, such as `early_exit/accuracy`."""
    summary: Any
    """What the results of the phase hold under the technique's name."""
    details: Any
    """What the folder `eval` holds in a file of the technique's name."""


class Technique:
    """A technique of a phase, built as `Class(spec, length, task)`: `spec` is its entry in the recipe, of type `Spec`.

    It never sees the loop, the engine or another technique, and no hook decides what the loop does next. An object is
    made for one of four purposes, and its hooks are called in this order:

    - training, on all ranks: `attach` and `parameter_rules`, before the engine has the model. Then `resume` if the run
      continues from a checkpoint, and `start`. At every step `on_step`, and `terms` for each micro-batch; for every
      record of the log `readings`, at every evaluation `on_step` and `views`, with every checkpoint `state`. At the end
      `resume` and `on_step` if the run goes back to its best checkpoint, `state` for the export, and `stop`.
    - export, on rank 0, the model on the CPU: `attach`, `resume` with that state, `on_step` with the step that is
      exported, `fold` and `save`. There is no `start` before. A checkpoint is exported in this way without a run.
    - rehearsal, on all ranks, before anything is written: `check`, `attach` and `parameter_rules`, and in a dry run
      `rehearse`, `on_step`, `terms` and `bytes_held`. Where an earlier phase trains the model that this phase starts
      from, `attach` gets the model that the earlier phase starts from.
    - measuring, on all ranks, after the export: `after_export` and `measure`, without `attach` before.
    """

    name: ClassVar[str]
    """Its key under `techniques` in the recipe, and the prefix of its loss terms and readings."""
    Spec: ClassVar[type]
    """The type that checks its entry in the recipe: a pydantic model, or bool where the entry is just `true`.

    Its class attribute `models`, if it has one, names the fields that hold the name of a model, such as a teacher: a
    folder, a hub name, "@model", or "@NAME" of a phase.
    """
    cheap_views: bool = False
    """Whether `views` runs at evaluations during training too: it costs little, or the recipe asks for it."""
    term_units: Mapping[str, Unit] = MappingProxyType({})
    """The loss terms that this object offers, and the unit that each is a mean over. The recipe sets their weights."""

    def __init__(self, spec: Any, length: PhaseLength, task: Task) -> None:
        self.spec, self.task = spec, task

    def check(self, optimizer: str, travel: float) -> str | None:
        """Return a warning about the phase's training, or None; raise UserError for one that cannot work.

        `optimizer` is the type of the engine file. `travel` is the sum of the learning rates of all steps: about the
        farthest that Adam moves a weight.
        """
        return None

    def attach(self, model: nn.Module) -> nn.Module:
        """Change the model for training, before the engine takes it. Changing nothing is an error."""
        return model

    def parameter_rules(self, model: nn.Module) -> Sequence[GroupRule]:
        """Return rules that set learning rates, or freeze parameters. The rules of the recipe go before them.

        A rule that sets a rate is for parameters that the technique has added. It names them between wildcards, as in
        `*.mask_scores`. A rule of the recipe reaches these parameters only if its pattern contains that name.
        """
        return ()

    def start(self, device: torch.device) -> None:
        """Load what only training needs; collective."""

    def rehearse(self, device: torch.device) -> None:
        """Load what a step needs that only measures memory; models of earlier phases are not trained yet."""
        self.start(device)

    def bytes_held(self) -> tuple[int, int]:
        """Return the bytes that it keeps on each rank's device beside the model, and those on all ranks together.

        Called once it is rehearsed.
        """
        return 0, 0

    def stop(self) -> None:
        """Release what `start` has loaded."""

    def on_step(self, step: int) -> None:
        """Prepare optimizer step `step`, counted from 0, before its first forward; collective in training."""

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint must hold of it beside parameters and step; collective.

        The values are JSON values, and the same on every rank.
        """
        return {}

    def resume(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state` returned; not collective, since an export calls it on rank 0 alone."""

    def terms(self, forward: Forward) -> dict[str, Tensor]:
        """Return unweighted scalar loss terms, by the names in `term_units`: means over the micro-batch's units."""
        return {}

    def readings(self) -> dict[str, float]:
        """Return numbers for the log, by slash names such as `prune/density`; collective."""
        return {}

    def views(self, forward: Forward, predict: Predict) -> dict[str, Any]:
        """Return further outputs for the batch, to score beside the model's own: a teacher's, an early exit's.

        `forward` is the model's own; `predict` runs the model once more, on every rank.
        """
        return {}

    def fold(self, model: nn.Module) -> nn.Module:
        """Undo the surgery of `attach` on a model with whole weights, so that it computes the same as before."""
        return model

    def save(self, folder: Path) -> None:
        """Write the files that belong beside the folded model into its folder."""

    def after_export(self, folder: Path, batch_size: int) -> None:
        """Settle in the exported folder what depends on the exported model, such as thresholds; collective."""

    def measure(self, folder: Path, batch_size: int) -> Measured | None:
        """Return what an evaluation of the exported folder adds to the scores of its model; collective."""
        return None
