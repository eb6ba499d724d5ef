"""The loss of a phase: the named, weighted sum of the task's loss and the techniques' terms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ds_trainer.tasks.task import Task
from ds_trainer.techniques import Forward, Technique


class Objective:
    """Weights are checked at start-up: each must name a term on offer, and each technique's term must have one."""

    def __init__(self, task: Task, techniques: Sequence[Technique], weights: Mapping[str, float]) -> None:
        offered = ["task", *(name for technique in techniques for name in technique.term_names)]
        mistakes = [
            f'loss: "{name}" is no term of this phase; on offer: {", ".join(offered)}'
            for name in weights
            if name not in offered
        ] + [
            f'loss: the term "{name}" has no weight: add it to the phase\'s loss table'
            for name in offered
            if name not in weights
        ]
        if mistakes:
            raise ValueError("\n".join(mistakes))
        self.task, self.techniques, self.weights = task, techniques, dict(weights)

    def __call__(self, forward: Forward) -> tuple[Tensor, dict[str, Tensor]]:
        """The scalar to differentiate, and every unweighted term by name, detached."""
        terms = {"task": self.task.loss(forward.out, forward.batch)}
        for technique in self.techniques:
            terms |= technique.terms(forward)
        loss = torch.stack([self.weights[name] * term for name, term in terms.items()]).sum()
        return loss, {name: term.detach() for name, term in terms.items()}
