"""Masks: how the weights of a layer are multiplied by 0, 1 or a gate between, and how gradients come back to scores.

A weight W with scores S and a mask M(S) computes with W' = W * M(S). A hard mask is 0 or 1: a comparison of the
weights' scores with a cutoff, or bools that are stored. It has no derivative, and is passed straight through: dL/dS =
dL/dW' * W (arXiv 2005.07683, eq. 5). A soft mask has hard-concrete gates (arXiv 1712.01312), whose derivative is
dL/dS = dL/dW' * W * M'(S). Where a score decides on several weights, dL/dS is summed over them.
"""

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor

from ds_trainer.ranks.failures import NonFiniteLossError
from ds_trainer.tasks.losses import hard_concrete, hard_concrete_slope

# (values, scores, t) -> values where scores > t, else 0: one pass; `torch.where` takes several
_zero_where_at_most = torch.ops.aten.threshold_backward


@dataclass(frozen=True)
class Grain:
    """The blocks of a matrix that one score decides on: `rows` outputs by `columns` inputs, None for all of them.

    At an edge the last block may be smaller. A row is (1, None), a column (None, 1), and the part of an attention's
    outer matrix that reads one head (None, width). `turned` says that the weight is (in, out), as that of a `Conv1D`.
    """

    out_features: int
    in_features: int
    rows: int | None
    columns: int | None
    turned: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the decisions, their gates and scores: one axis for each side that is cut."""
        sides = ((self.out_features, self.rows), (self.in_features, self.columns))
        return tuple(math.ceil(size / part) for size, part in sides if part is not None)

    def times(self, values: Tensor, gates: Tensor) -> Tensor:
        """Multiply each weight's value by the gate of its decision. Returns the weight's shape."""
        blocks = self._blocks(values)
        # gates repeated for every weight would be another matrix
        product = blocks * gates.view(blocks.shape[0], 1, blocks.shape[2], 1)
        product = product.flatten(2).flatten(0, 1)[: self.out_features, : self.in_features]
        return (product.t() if self.turned else product).contiguous()

    def sums(self, values: Tensor) -> Tensor:
        """Sum the weight's values over each decision. Returns `shape`."""
        return self._blocks(values).sum((1, 3)).view(self.shape)

    @cached_property
    def sizes(self) -> Tensor:
        """Count the matrix's weights that each decision is about: int64, on the CPU."""
        ones = torch.ones(self.out_features, self.in_features)
        return self.sums(ones.t() if self.turned else ones).long()

    def _blocks(self, values: Tensor) -> Tensor:
        """View a matrix as (blocks below each other, rows, blocks beside each other, columns), padded by zeros."""
        rows, columns = self.rows or self.out_features, self.columns or self.in_features
        values = values.t() if self.turned else values
        beside, below = -self.in_features % columns, -self.out_features % rows
        if beside or below:  # a pad of nothing would copy the matrix
            values = F.pad(values, (0, beside, 0, below))
        return values.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))


class _Mask:
    """What masks a weight during one optimizer step. Weight, values and gradients have one shape.

    The scores have that shape too or, with a grain, one entry per decision (head, row, block). Every mask has `kept`,
    the number of weights that it keeps at evaluation, and `times`, which returns values * mask.
    """

    grain: Grain | None = None

    def drawn(self, number: int | None) -> Self:
        """Return this mask with the noise of draw `number`, or without noise for None. Hard masks have none."""
        return self

    def slope(self, scores: Tensor) -> Tensor | None:
        """Return the derivative of the gates by the scores, a new tensor in fp32; None where it is passed through."""
        return None

    def scores_gradient(self, gradient: Tensor, weight: Tensor, scores: Tensor, penalty: Tensor | None) -> Tensor:
        """Return dL/dscores in their dtype, from dL/d(masked weight) and, in fp32, dL/dscores of the penalty.

        Overwrites `penalty`. The two parts are added in fp32 and rounded once: added after rounding, a penalty smaller
        than the other part's rounding error would be lost in every score. In fp16 the result may be off by 2**-25,
        which is more than 1% of gradients below 3e-6; the loss scale is there to keep gradients above.
        """
        if self.grain is not None:
            # A gate g on the weights W_i of a decision has dL/dg = sum_i dL/dW'_i * W_i. The sum is taken in fp32: in
            # fp16 the single products vanish, though their sum does not.
            gradient = self.grain.sums(gradient.float() * weight)
            weight = gradient.new_ones(())
        slope = self.slope(scores)
        if slope is not None:
            gradient = slope.mul_(gradient)
        total = gradient * weight if penalty is None else penalty.addcmul_(gradient, weight)
        return total.to(scores.dtype)


@dataclass(frozen=True)
class HardMask(_Mask):
    """1 for scores above `threshold` and, among the first `ties_end` in memory order, for those equal to it; else 0.

    Scores are compared again at every use: the mask takes no memory.
    """

    threshold: float
    ties_end: int
    kept: int

    def times(self, values: Tensor, scores: Tensor) -> Tensor:
        kept, end = _zero_where_at_most(values, scores, self.threshold), self.ties_end
        if end:
            # The first `end` values also keep scores equal to the threshold: x >= t is x > (the number just below t).
            # So exactly k are kept where many scores are equal, as all are at the start, without a stored mask.
            below = just_below(self.threshold, scores.dtype)
            kept.view(-1)[:end] = _zero_where_at_most(values.reshape(-1)[:end], scores.view(-1)[:end], below)
        return kept


@dataclass(frozen=True)
class GateMask(_Mask):
    """0 or 1 as stored: a bool, one byte, for each weight or, with a grain, for each decision.

    `spoilt` says whether a score was NaN. Both stay on the device until they are read in `open`: reading them at every
    step would make the host wait for the device.
    """

    gates: Tensor
    spoilt: Tensor | bool = False
    grain: Grain | None = None

    @property
    def open(self) -> Tensor:
        """What evaluation keeps, as bools. NonFiniteLossError where the scores held NaN."""
        if self.spoilt:
            raise diverged()
        return self.gates

    @property
    def kept(self) -> int:
        """Waits for the device."""
        return int(self.open.sum() if self.grain is None else (self.grain.sizes * self.open.cpu()).sum())

    def times(self, values: Tensor, scores: Tensor) -> Tensor:
        return values * self.gates if self.grain is None else self.grain.times(values, self.gates)


@dataclass(frozen=True)
class SoftMask(GateMask):
    """Hard-concrete gates in [0, 1] whose noise is drawn from `seed`, or that have no noise where it is None.

    The backward draws the noise again from the same seed: kept, it would take as much memory as the weight. All ranks
    draw the same, so that a run does not depend on their number. `gates` says which are above 0 without noise; for
    single weights it is only how many are, a scalar.
    """

    seed: int | None = None

    def drawn(self, number: int | None) -> Self:
        return replace(self, seed=None if self.seed is None or number is None else self.seed + number)

    def times(self, values: Tensor, scores: Tensor) -> Tensor:
        gates = hard_concrete(scores.float(), self._noise(scores)).to(values.dtype)
        return values * gates if self.grain is None else self.grain.times(values, gates)

    def slope(self, scores: Tensor) -> Tensor:
        return hard_concrete_slope(scores.float(), self._noise(scores))

    def _noise(self, scores: Tensor) -> Tensor | None:
        if self.seed is None:
            return None
        generator = torch.Generator(scores.device).manual_seed(self.seed)
        eps = torch.finfo(torch.float32).eps  # 0 and 1 have no logit
        return torch.empty(scores.shape, device=scores.device).uniform_(eps, 1 - eps, generator=generator)


Mask = HardMask | GateMask


def diverged() -> NonFiniteLossError:
    """Return the error to raise where scores hold NaN; every rank raises it, since all of them see the same scores."""
    return NonFiniteLossError("the scores hold NaN: the run has diverged; lower mask_scores_learning_rate")


def just_below(value: float, dtype: torch.dtype) -> float:
    """Return the largest number of `dtype` below `value`: x > just_below(value) is x >= value."""
    return float(torch.nextafter(torch.tensor(value, dtype=dtype), torch.tensor(-math.inf, dtype=dtype)))
