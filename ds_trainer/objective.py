"""The loss of a phase: the named, weighted sum of the task's loss and the techniques' terms."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ds_trainer.ranks.failures import UserError
from ds_trainer.tasks.task import Forward, Task, Unit
from ds_trainer.techniques.technique import Technique


class Objective:
    """Weights are checked at start-up: each must name a term on offer, and each technique's term must have one."""

    def __init__(self, task: Task, techniques: Sequence[Technique], weights: Mapping[str, float]) -> None:
        self.units: dict[str, Unit] = {"task": task.loss_unit}
        for technique in techniques:
            self.units |= technique.term_units
        mistakes = [
            f'loss: "{name}" is no term of this phase; on offer: {", ".join(self.units)}'
            for name in weights
            if name not in self.units
        ] + [
            f'loss: the term "{name}" has no weight: add it to the phase\'s loss table'
            for name in self.units
            if name not in weights
        ]
        if mistakes:
            raise UserError("\n".join(mistakes))
        self.task, self.techniques, self.weights = task, techniques, dict(weights)

    def __call__(self, forward: Forward) -> tuple[Tensor, dict[str, Tensor]]:
        """The scalar to differentiate, and every unweighted term by name, detached.

        A term is the micro-batch's mean times its share of the step's units, so that the mean over the micro-batches of
        all ranks, which the engine takes of the gradients, is the mean over the global batch however it is cut.
        """
        terms = {"task": self.task.loss(forward.out, forward.batch)}
        for technique in self.techniques:
            terms |= technique.terms(forward)
        terms = {name: term * forward.shares.get(self.units[name], 1.0) for name, term in terms.items()}
        loss = torch.stack([self.weights[name] * term for name, term in terms.items()]).sum()
        return loss, {name: term.detach() for name, term in terms.items()}
