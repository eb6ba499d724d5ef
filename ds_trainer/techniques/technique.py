"""The interface of a technique: one paper, one object, layered on a model and a task that it gets as values.

To write one, subclass `Technique`, override the hooks it needs, and add the class to `registry.TECHNIQUES`. Every hook
does nothing by default. They are called in this order:

    attach            the model, before DeepSpeed takes it: swap or add modules
    parameter_rules   learning rates and freezing of what was added
    start             after the engine has the model, and the checkpoint is loaded
    on_step           once per optimizer step
    terms             once per micro-batch: further loss terms
    readings          at every flush of the log
    views             at every evaluation: further outputs to score
    state, resume     with every checkpoint, and when a run continues from one
    stop              after the last step
    fold, save        at the export: give an ordinary model back

A technique never sees the loop, the engine or another technique, and no hook decides what the loop does next.
`prune/keep_zeros.py` is the shortest technique, `distill/distill.py` one with loss terms.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ds_trainer.config.recipe import GroupRule
from ds_trainer.tasks.task import Forward, Predict, Task, Unit


@dataclass(frozen=True)
class Clock:
    """How long the phase is: its optimizer steps, and those of its learning-rate warm-up. `seed` is the run's."""

    total: int
    warmup: int
    seed: int


class Technique:
    """Built as `Class(spec, clock, task)`, where `spec` is the technique's entry in the recipe, an object of `Spec`."""

    name: ClassVar[str]
    """Its key under `techniques` in the recipe, and the prefix of its loss terms and readings."""
    Spec: ClassVar[type]
    """What its entry in the recipe is checked by: a pydantic model, or bool for an entry of `true`."""
    cheap_views: bool = False
    """Whether `views` runs at evaluations during training too: it costs little, or the recipe asks for it."""
    term_units: Mapping[str, Unit] = MappingProxyType({})
    """The loss terms that this object offers, and the unit that each is a mean over. The recipe sets their weights."""

    def __init__(self, spec: Any, clock: Clock, task: Task) -> None:
        self.spec, self.clock, self.task = spec, clock, task

    def attach(self, model: nn.Module) -> nn.Module:
        """Change the model for training, before the engine takes it. Changing nothing is an error."""
        return model

    def parameter_rules(self, model: nn.Module) -> Sequence[GroupRule]:
        """Return learning rates and freezing of parameters. The recipe's own rules come first.

        A rule that does not freeze is about parameters that the technique has added, and has their name between
        wildcards (`*.mask_scores`): only those of the recipe's rules that contain this name reach these parameters.
        """
        return ()

    def start(self, device: torch.device) -> None:
        """Load what only training needs. Every rank takes part."""

    def stop(self) -> None:
        """Release what `start` has loaded."""

    def on_step(self, step: int) -> None:
        """Prepare optimizer step `step`, counted from 0, before its first forward. Every rank takes part."""

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint must hold beside parameters and step: JSON values, the same on every rank.

        Every rank takes part.
        """
        return {}

    def resume(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state` returned, in training or at an export. Ranks do not take part together."""

    def terms(self, forward: Forward) -> dict[str, Tensor]:
        """Return unweighted scalar loss terms, by the names in `term_units`: means over the micro-batch's units."""
        return {}

    def readings(self) -> dict[str, float]:
        """Return numbers for the log, by slash names: `prune/density`."""
        return {}

    def views(self, forward: Forward, predict: Predict) -> dict[str, Any]:
        """Return other outputs for the batch, to score beside the model's own: a teacher's, an early exit's.

        `forward` is the model's own; `predict` runs the model once more, on every rank.
        """
        return {}

    def fold(self, model: nn.Module) -> nn.Module:
        """Undo the surgery of `attach` on a whole (not partitioned) model, which computes the same afterwards."""
        return model

    def save(self, folder: Path) -> None:
        """Write files that belong beside the folded model into its folder."""
