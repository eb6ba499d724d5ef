"""What a technique is: one paper, one object, layered on a model and a task it is given as values.

A technique sees neither the loop nor the engine, and no other technique. Every hook does nothing by default.
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
from ds_trainer.tasks.task import Forward, Predict, Unit


@dataclass(frozen=True)
class Clock:
    """The optimizer steps of a phase, and those of its learning-rate warm-up; `seed` is the run's."""

    total: int
    warmup: int
    seed: int


class Technique:
    name: ClassVar[str]
    cheap_views: bool = False
    """Whether evaluations while training have `views` too: they cost little, or the recipe asks for them."""
    term_units: Mapping[str, Unit] = MappingProxyType({})
    """The loss terms on offer, as this object is set up, and what each is a mean over."""

    def attach(self, model: nn.Module) -> nn.Module:
        """Change the model for training, before the engine takes it."""
        return model

    def parameter_rules(self, model: nn.Module) -> Sequence[GroupRule]:
        """Rates and freezing of the parameters it cares about; the recipe's own rules come first.

        A rule that does not freeze is about what the technique has added, by its name between wildcards: of the
        recipe's rules those alone reach it that contain this name.
        """
        return ()

    def start(self, device: torch.device) -> None:
        """Load what only training needs, once the engine has the model and a run that goes on its state; collective."""

    def stop(self) -> None:
        """Release what `start` loaded."""

    def on_step(self, step: int) -> None:
        """Called once per optimizer step, before its first forward."""

    def state(self) -> dict[str, Any]:
        """What a checkpoint must keep beside parameters and step: JSON values, alike on every rank; collective."""
        return {}

    def resume(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` gave, in training or to be exported; not collective."""

    def terms(self, forward: Forward) -> dict[str, Tensor]:
        """Unweighted scalar loss terms, by the names in `term_units`: each the mean over the micro-batch's units."""
        return {}

    def readings(self) -> dict[str, float]:
        """What to log at a flush: density, threshold, ..."""
        return {}

    def views(self, forward: Forward, predict: Predict) -> dict[str, Any]:
        """Other outputs for the batch, to evaluate beside the model's own: a teacher's, an early exit's.

        `forward` is the model's own; `predict` runs the model once more, on every rank alike.
        """
        return {}

    def fold(self, model: nn.Module) -> nn.Module:
        """Undo the training-only surgery on a whole (not partitioned) model."""
        return model

    def save(self, folder: Path) -> None:
        """Write what belongs beside the folded model into its folder."""
