"""What a micro-batch knows of the other examples of its optimizer step, where a loss compares them."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ds_trainer.tasks.data import ExampleIds


@dataclass(frozen=True)
class WholeStep:
    """What a loss compares of all examples of an optimizer step, on all ranks (GradCache, arXiv 2101.06983).

    `ids` are the examples, in the order of `values`, (rows, ...) fp32, which have no gradient. Those of this
    micro-batch begin at row `start`. `parts` is the number of micro-batches on all ranks, over which the engine
    averages gradients.
    """

    ids: ExampleIds
    values: Tensor
    start: int
    parts: int

    def with_own(self, values: Tensor) -> Tensor:
        """Put this micro-batch's values, with gradient, among the others'.

        Gradients are multiplied by `parts`, since the engine divides by it.
        """
        end = self.start + len(values)
        whole = torch.cat([self.values[: self.start], values, self.values[end:]])
        whole.register_hook(lambda slope: slope * self.parts)
        return whole
