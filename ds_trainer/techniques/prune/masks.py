"""Masks: how the weights of a layer are multiplied by 0, 1 or a gate between, and how gradients come back to scores.

A weight W with scores S and a mask M(S) computes with W' = W * M(S). A hard mask is 0 or 1: a comparison of the
weights' scores with a cutoff or, for larger decisions, a bool for each. It has no derivative, and is passed straight
through: dL/dS = dL/dW' * W (arXiv 2005.07683, eq. 5), summed over the weights of a decision. A soft mask has
hard-concrete gates (arXiv 1712.01312), whose derivative is dL/dS = dL/dW' * W * M'(S).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ds_trainer.tasks.losses import hard_concrete, hard_concrete_slope
from ds_trainer.techniques.prune.grains import Grain
from ds_trainer.techniques.prune.selection import Cutoff, diverged, just_below

_zero_where_at_most = torch.ops.aten.threshold_backward
"""(values, scores, t) -> values where scores > t, else 0: one pass; `torch.where` takes several."""


class Mask:
    """What masks a weight during one optimizer step. Weight, values, scores and gradients have one shape.

    A `DecisionMask` is the exception: its scores, and their gradient, have one entry per decision (head, row, block).
    """

    @property
    def kept(self) -> int:
        """How many weights the mask keeps at evaluation. Waits for the device."""
        raise NotImplementedError

    def drawn(self, number: int | None) -> Mask:
        """Return this mask with the noise of draw `number`, or without noise for None. Hard masks have none."""
        return self

    def times(self, values: Tensor, scores: Tensor) -> Tensor:
        """Return values * mask."""
        raise NotImplementedError

    def scores_gradient(self, gradient: Tensor, weight: Tensor, scores: Tensor, penalty: Tensor | None) -> Tensor:
        """Return dL/dscores in their dtype, from dL/d(masked weight) and, in fp32, dL/dscores of the penalty.

        Overwrites `penalty`. The two parts are added in fp32 and rounded once: added after rounding, a penalty smaller
        than the other part's rounding error would be lost in every score. In fp16 the result may be off by 2**-25,
        which is more than 1% of gradients below 3e-6; the loss scale is there to keep gradients above.
        """
        if penalty is None:
            return (gradient * weight).to(scores.dtype)
        return penalty.addcmul_(gradient, weight).to(scores.dtype)


@dataclass(frozen=True)
class HardMask(Mask):
    """0 or 1 by comparing the scores with a cutoff. They are compared again at every use: the mask takes no memory."""

    cutoff: Cutoff

    @property
    def kept(self) -> int:
        return self.cutoff.kept

    def times(self, values: Tensor, scores: Tensor) -> Tensor:
        kept = _zero_where_at_most(values, scores, self.cutoff.threshold)
        end = self.cutoff.ties_end
        if end:
            # The first `end` values also keep scores equal to the threshold: x >= t is x > (the number just below t).
            # So exactly k are kept where many scores are equal, as all are at the start, without a stored mask.
            below = just_below(self.cutoff.threshold, scores.dtype)
            kept.view(-1)[:end] = _zero_where_at_most(values.reshape(-1)[:end], scores.view(-1)[:end], below)
        return kept


@dataclass(frozen=True)
class GateMask(Mask):
    """0 or 1 as stored: a bool, one byte, for each value."""

    gates: Tensor

    @property
    def kept(self) -> int:
        return int(self.gates.count_nonzero())

    def times(self, values: Tensor, scores: Tensor) -> Tensor:
        return values * self.gates


@dataclass(frozen=True)
class CountedMask(GateMask):
    """Gates of which `count` are open. A NaN score closes all, which shows at a record, when they are counted."""

    count: int

    @property
    def kept(self) -> int:
        """NonFiniteLossError where the scores held NaN."""
        if super().kept != self.count:
            raise diverged()
        return self.count


@dataclass(frozen=True)
class SoftMask(Mask):
    """Hard-concrete gates in [0, 1] whose noise is drawn from `seed`, or that have no noise where it is None.

    The backward draws the noise again from the same seed: kept, it would take as much memory as the weight. All ranks
    draw the same, so that a run does not depend on their number.
    """

    seed: int | None
    count: Tensor
    """How many gates are above 0 without noise, a scalar that stays on the device until it is read."""

    @property
    def kept(self) -> int:
        return int(self.count)

    def drawn(self, number: int | None) -> Mask:
        return replace(self, seed=None if self.seed is None or number is None else self.seed + number)

    def times(self, values: Tensor, scores: Tensor) -> Tensor:
        return values * hard_concrete(scores.float(), self._noise(scores)).to(values.dtype)

    def scores_gradient(self, gradient: Tensor, weight: Tensor, scores: Tensor, penalty: Tensor | None) -> Tensor:
        total = hard_concrete_slope(scores.float(), self._noise(scores)).mul_(gradient).mul_(weight)
        return (total if penalty is None else total.add_(penalty)).to(scores.dtype)

    def _noise(self, scores: Tensor) -> Tensor | None:
        if self.seed is None:
            return None
        generator = torch.Generator(scores.device).manual_seed(self.seed)
        eps = torch.finfo(torch.float32).eps  # 0 and 1 have no logit
        return torch.empty(scores.shape, device=scores.device).uniform_(eps, 1 - eps, generator=generator)


@dataclass(frozen=True)
class DecisionMask(Mask):
    """A mask with one entry per decision, spread by a grain over the weights that each is about.

    `gates`, bools, says which decisions evaluation keeps, and `spoilt` whether a score was NaN. Both stay on the device
    until they are read in `open`: reading them at every step would make the host wait for the device.
    """

    mask: Mask
    grain: Grain
    gates: Tensor
    spoilt: Tensor

    @property
    def open(self) -> Tensor:
        """The decisions that evaluation keeps, as bools. NonFiniteLossError where the scores held NaN."""
        if self.spoilt:
            raise diverged()
        return self.gates

    @property
    def kept(self) -> int:
        return int((self.grain.sizes * self.open.cpu()).sum())

    def drawn(self, number: int | None) -> Mask:
        return replace(self, mask=self.mask.drawn(number))

    def times(self, values: Tensor, scores: Tensor) -> Tensor:
        return self.grain.times(values, self.mask.times(values.new_ones(self.grain.shape), scores))

    def scores_gradient(self, gradient: Tensor, weight: Tensor, scores: Tensor, penalty: Tensor | None) -> Tensor:
        # A gate g on the weights W_i of a decision has dL/dg = sum_i dL/dW'_i * W_i. The sum is taken in fp32: in
        # fp16 the single products vanish, though their sum does not.
        sums = self.grain.sums(gradient.float() * weight)
        return self.mask.scores_gradient(sums, torch.ones_like(sums), scores, penalty)


Rule = Callable[[Tensor], Mask]
"""Scores -> the mask of one optimizer step."""
