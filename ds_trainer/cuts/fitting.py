"""A linear layer, the moments of its inputs on the calibration examples, and new weights that are fitted to them."""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from ds_trainer.cuts.surgeon import output_error
from ds_trainer.models.layers import rows_of
from ds_trainer.ranks import distributed


@dataclass(frozen=True)
class CutRecord:
    """What a cut did to a block or a matrix, which had `count` heads, neurons or weights, and keeps `kept` of them."""

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


class Gram:
    """Sums over tokens of a linear layer's inputs x (in,), and of their products x x^T (in, in), in fp64.

    Each batch's products are computed in the precision of the inputs, around the mean of the batch: otherwise rounding
    would hide the variance of an input that is nearly constant. All sums over batches and ranks are in fp64.
    """

    def __init__(self, features: int, device: torch.device) -> None:
        self.tokens = 0
        self.sums = torch.zeros(features, dtype=torch.float64, device=device)
        self.products = torch.zeros(features, features, dtype=torch.float64, device=device)

    def add(self, inputs: Tensor) -> None:
        """Add inputs (tokens, in)."""
        sums = inputs.sum(0, dtype=torch.float64)
        mean = sums / max(1, len(inputs))
        deviations = inputs - mean.to(inputs.dtype)
        self.tokens += len(inputs)
        self.sums += sums
        # sum of x x^T = sum of (x - mean) (x - mean)^T + (sum of x) mean^T
        self.products += deviations.T @ deviations
        self.products.addr_(sums, mean)

    def add_ranks(self) -> None:
        """Add up the sums of all ranks, in place; collective."""
        self.tokens = sum(count for (count,) in distributed.numbers_of_all([self.tokens]))
        self.sums = distributed.total(self.sums)
        self.products = distributed.total(self.products)


class Fitting:
    """The weight (out, in) and the bias of a linear layer, and the moments (in, in) of its inputs, all in fp64.

    With a bias, the weight is fitted to the covariance of the inputs, since the bias makes up for every mean; without
    one, to their second moments E[x x^T]. The moments are `damped`: `damping`, a share of the mean diagonal, is added
    to their diagonal, so that they have an inverse, and few examples do not decide about large weights.
    """

    def __init__(self, linear: Any, gram: Gram, damping: float) -> None:
        self.mean = gram.sums / gram.tokens
        self.weight = rows_of(linear.weight, type(linear)).detach().double()
        self.bias = None if linear.bias is None else linear.bias.detach().double()
        self.damped = gram.products / gram.tokens
        # what remains of the variance of inputs that never vary is the rounding of their squares
        rounding = 1e-12 * self.damped.diagonal()
        if self.bias is not None:
            self.damped.addr_(self.mean, self.mean, alpha=-1)
        self._damping = damping * self.damped.diagonal().mean() + rounding
        self._damping.clamp_(min=torch.finfo(torch.float32).tiny)
        self.damped.diagonal().add_(self._damping)

    @property
    def squares(self) -> Tensor:
        """The mean square of each input (in,)."""
        moments = self.damped.diagonal() - self._damping
        return moments if self.bias is None else moments + self.mean.square()

    def replacement(self, weight: Tensor) -> Replacement:
        """Return a new weight (out, in) for the layer, and the bias that makes up for the means of what it lacks."""
        bias = None if self.bias is None else (self.bias + (self.weight - weight) @ self.mean).float().cpu()
        largest = max(self._error(torch.zeros_like(weight)), torch.finfo(weight.dtype).tiny)
        return Replacement(weight.float().cpu(), bias, self._error(weight) / largest)

    def _error(self, weight: Tensor) -> float:
        """Return the mean squared error of all outputs together, for inputs without the damping."""
        of_damping = float(((self.weight - weight).square() * self._damping).sum())
        return max(0.0, output_error(self.weight, self.damped, weight) - of_damping)
