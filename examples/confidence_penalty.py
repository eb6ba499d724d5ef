"""A technique of one's own: a penalty on confident outputs (arXiv 1701.06548). It works with every task.

    deepspeed launch/train.py --plugin examples/confidence_penalty.py --deepspeed_config FILE --recipe RECIPE ...

where a phase of RECIPE has

    "techniques": {"confidence": {"temperature": 1.0}}, "loss": {"task": 1.0, "confidence.penalty": 0.1}
"""

from __future__ import annotations

from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from ds_trainer import Task, Technique
from ds_trainer.recipe.fields import Strict
from ds_trainer.tasks.task import Forward
from ds_trainer.techniques.technique import PhaseLength


class ConfidenceSpec(Strict):
    """What a recipe may say of it; unknown keys are errors."""

    temperature: float = Field(1.0, gt=0, description="of the softmax whose entropy is raised")


class ConfidencePenalty(Technique):
    """Adds the negative entropy of the model's predictions as a loss term."""

    name = "confidence"
    Spec = ConfidenceSpec

    def __init__(self, spec: Any, length: PhaseLength, task: Task) -> None:
        super().__init__(spec, length, task)
        self.term_units = {"confidence.penalty": task.logits_unit}
        self._entropy = torch.zeros(())

    def terms(self, forward: Forward) -> dict[str, Tensor]:
        """The mean over the rows of all logits, each (rows, classes), computed in fp32."""
        entropies = []
        for logits in self.task.logits(forward.out, forward.batch):
            log_p = (logits.float() / self.spec.temperature).log_softmax(-1)
            entropies.append(-(log_p.exp() * log_p).sum(-1).mean())
        entropy = torch.stack(entropies).mean()
        self._entropy = entropy.detach()
        return {"confidence.penalty": -entropy}

    def readings(self) -> dict[str, float]:
        """The entropy of this rank's latest micro-batch, in nats."""
        return {"confidence/entropy": float(self._entropy)}


TECHNIQUES = {"confidence": ConfidencePenalty}
