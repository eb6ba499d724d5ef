"""A linear layer and the inputs that it gets, to which new weights of it are fitted."""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from ds_trainer.models.cut.layerwise import Gram
from ds_trainer.models.cut.surgeon import output_error
from ds_trainer.models.layers import rows_of


@dataclass(frozen=True)
class CutRecord:
    """What a cut did to a block, or to a matrix: of `count` heads, neurons or weights so many are kept."""

    name: str
    unit: Literal["heads", "neurons", "weights"]
    count: int
    kept: int
    error: float
    """The mean squared error of the outputs on the calibration examples, as a share of their variance."""


@dataclass(frozen=True)
class Replacement:
    """A weight (out, in) and a bias for a linear layer, in fp32 on the CPU, and the error as in `CutRecord`."""

    weight: Tensor
    bias: Tensor | None
    error: float

    @torch.no_grad()
    def write(self, linear: Any) -> None:
        """Give a linear layer this weight and bias."""
        rows_of(linear.weight, type(linear)).copy_(self.weight)
        if self.bias is not None:
            linear.bias.copy_(self.bias)


class Fitting:
    """The weight (out, in) and the bias of a linear layer, and the moments (in, in) of its inputs, all in fp64.

    A bias makes up for the means of the inputs that are removed, so that the weight is fitted to the covariance of the
    inputs; without a bias it is fitted to their second moments. The moments are `damped`.
    """

    def __init__(self, linear: Any, gram: Gram, damping: float) -> None:
        self.mean = gram.mean
        self.weight = rows_of(linear.weight, type(linear)).detach().double()
        self.bias = None if linear.bias is None else linear.bias.detach().double()
        self.damped, self._damping = gram.second_moments(self.bias is not None, damping)

    @property
    def squares(self) -> Tensor:
        """The mean square of each input (in,)."""
        moments = self.damped.diagonal() - self._damping
        return moments if self.bias is None else moments + self.mean.square()

    def replacement(self, weight: Tensor) -> Replacement:
        """Return the layer with a new weight (out, in), and the bias that goes with it."""
        largest = max(self._error(torch.zeros_like(weight)), torch.finfo(weight.dtype).tiny)
        bias = None if self.bias is None else (self.bias + (self.weight - weight) @ self.mean).float().cpu()
        return Replacement(weight.float().cpu(), bias, self._error(weight) / largest)

    def _error(self, weight: Tensor) -> float:
        """Return the mean squared error of all outputs together, for inputs without the damping."""
        of_damping = float(((self.weight - weight).square() * self._damping).sum())
        return max(0.0, output_error(self.weight, self.damped, weight) - of_damping)
