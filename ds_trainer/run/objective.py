"""The loss of a phase: the named, weighted sum of the task's loss and the techniques' terms."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ds_trainer.ranks.failures import raise_mistakes
from ds_trainer.tasks.task import Forward, Task, Unit
from ds_trainer.techniques.technique import Technique


class Objective:
    """Computes the loss. Each weight must be that of a term of this phase, and each term must have a weight.

    `weights` is the loss table of the phase, by the name of the term. Raises UserError with every mistake in it.
    """

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
        raise_mistakes(mistakes)
        self.task, self.techniques, self.weights = task, techniques, dict(weights)

    def __call__(self, forward: Forward) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the scalar to differentiate, and by name every term before its loss weight, detached.

        A term is the mean over the micro-batch times the micro-batch's share of the step's units. The engine averages
        gradients over the micro-batches of all ranks. With these shares that is the mean over the global batch,
        however the batch is cut.
        """
        terms = {"task": self.task.loss(forward.out, forward.batch)}
        for technique in self.techniques:
            terms |= technique.terms(forward)
        terms = {name: term * forward.shares.get(self.units[name], 1.0) for name, term in terms.items()}
        loss = torch.stack([self.weights[name] * term for name, term in terms.items()]).sum()
        return loss, {name: term.detach() for name, term in terms.items()}
