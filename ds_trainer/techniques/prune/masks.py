"""Masks of a weight, and the rules by which a step's masks follow from the scores.

Exact ones keep what a cut through the scores leaves, or what gates of 0 and 1 let through; soft ones have hard-concrete
gates. Where one score decides on more than a weight, the gates have the decisions' shape and a grain says how they
meet the weights. The gradient of the scores is straight-through, dL/dscores = dL/dW' * W (arXiv 2005.07683, eq. 5),
summed over a decision's weights.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from ds_trainer.tasks.losses import L0_KEPT_ABOVE, hard_concrete, hard_concrete_slope
from ds_trainer.techniques.prune.grains import Grain
from ds_trainer.techniques.prune.selection import (
    Cut,
    Sizes,
    cut_at,
    diverged,
    just_below,
    ranks,
    recount,
    select_largest,
)

_zero_where_at_most = torch.ops.aten.threshold_backward
"""(values, scores, t) -> values where scores > t, else 0: one pass; `torch.where` takes several."""


class Mask(Protocol):
    """How a weight is masked by its scores, and how gradients come back. All tensors have one shape.

    Of a `DecisionMask` the scores, and their gradient, have the decisions'.
    """

    @property
    def kept(self) -> int:
        """How many weights it keeps."""

    def drawn(self, number: int | None) -> Mask:
        """With the noise of this draw, where it has noise; without where that is None."""

    def times(self, values: Tensor, scores: Tensor) -> Tensor:
        """values * mask."""

    def scores_gradient(self, gradient: Tensor, weight: Tensor, scores: Tensor, penalty: Tensor | None) -> Tensor:
        """dL/dscores in their dtype, from dL/d(masked weight) and, in fp32, dL/dscores of the penalty.

        Overwrites `penalty`. The two parts are added in fp32 and rounded once. Added after rounding, a penalty smaller
        than the other part's rounding error would be lost in every score. In fp16 the result may be off by 2**-25,
        which is more than 1% of gradients below 3e-6; the loss scale is for those.
        """


@dataclass(frozen=True)
class HardMask:
    """0 or 1, by a cut through the scores."""

    cut: Cut

    @property
    def kept(self) -> int:
        return self.cut.kept

    def drawn(self, number: int | None) -> Mask:
        return self

    def times(self, values: Tensor, scores: Tensor) -> Tensor:
        kept = _zero_where_at_most(values, scores, self.cut.threshold)
        end = self.cut.ties_end
        if end:
            below = just_below(self.cut.threshold, scores.dtype)
            kept.view(-1)[:end] = _zero_where_at_most(values.reshape(-1)[:end], scores.view(-1)[:end], below)
        return kept

    def scores_gradient(self, gradient: Tensor, weight: Tensor, scores: Tensor, penalty: Tensor | None) -> Tensor:
        return _straight_through(gradient, weight, scores, penalty)


@dataclass(frozen=True)
class SoftMask:
    """Hard-concrete gates in [0, 1] (arXiv 1712.01312): noise drawn from `seed`, or none where it is None.

    The noise is drawn again in the backward from the same seed instead of being kept. All ranks draw the same, so
    that a run does not depend on their number.
    """

    seed: int | None
    kept: int

    def drawn(self, number: int | None) -> Mask:
        return SoftMask(None if self.seed is None or number is None else self.seed + number, self.kept)

    def times(self, values: Tensor, scores: Tensor) -> Tensor:
        return values * hard_concrete(scores.float(), self._noise(scores)).to(values.dtype)

    def scores_gradient(self, gradient: Tensor, weight: Tensor, scores: Tensor, penalty: Tensor | None) -> Tensor:
        total = hard_concrete_slope(scores.float(), self._noise(scores)).mul_(gradient).mul_(weight)
        return (total if penalty is None else total.add_(penalty)).to(scores.dtype)

    def _noise(self, scores: Tensor) -> Tensor | None:
        if self.seed is None:
            return None
        generator = torch.Generator(scores.device).manual_seed(self.seed)
        eps = torch.finfo(torch.float32).eps
        return torch.empty(scores.shape, device=scores.device).uniform_(eps, 1 - eps, generator=generator)


@dataclass(frozen=True)
class GateMask:
    """0 or 1, found once: a bool for each value, which takes a byte of it."""

    gates: Tensor

    @property
    def kept(self) -> int:
        return int(self.gates.count_nonzero())

    def drawn(self, number: int | None) -> Mask:
        return self

    def times(self, values: Tensor, scores: Tensor) -> Tensor:
        return values * self.gates

    def scores_gradient(self, gradient: Tensor, weight: Tensor, scores: Tensor, penalty: Tensor | None) -> Tensor:
        return _straight_through(gradient, weight, scores, penalty)


@dataclass(frozen=True)
class DecisionMask:
    """A mask in the decisions' shape, on the weight they are about.

    `sizes`, on the CPU, is how many weights each decides on, in other matrices too; `gates` is which of them evaluation
    keeps and `spoilt` whether a score was NaN, on the scores' device: they are read where `open` is asked for, since
    each step would wait for the device to tell.
    """

    mask: Mask
    grain: Grain
    sizes: Tensor
    gates: Tensor
    spoilt: Tensor

    @property
    def open(self) -> Tensor:
        """Which decisions evaluation keeps. RuntimeError where they were made by scores that hold NaN."""
        if self.spoilt:
            raise diverged()
        return self.gates

    @property
    def kept(self) -> int:
        return int((self.sizes * self.open.cpu()).sum())

    @property
    def decisions(self) -> int:
        """How many of them are kept."""
        return int(self.open.count_nonzero())

    def drawn(self, number: int | None) -> Mask:
        return replace(self, mask=self.mask.drawn(number))

    def times(self, values: Tensor, scores: Tensor) -> Tensor:
        return self.grain.times(values, self.mask.times(values.new_ones(self.grain.shape), scores))

    def scores_gradient(self, gradient: Tensor, weight: Tensor, scores: Tensor, penalty: Tensor | None) -> Tensor:
        sums = self.grain.sums(gradient.float() * weight)  # in fp16 the products vanish that make up the sum
        return self.mask.scores_gradient(sums, torch.ones_like(sums), scores, penalty)


class MaskRule(Protocol):
    """How the mask of one optimizer step follows from the scores."""

    def __call__(self, scores: Tensor) -> Mask: ...


@dataclass(frozen=True)
class KeepShare:
    """Keep the largest `share` of a matrix (topK, magnitude), ties included."""

    share: float

    def __call__(self, scores: Tensor) -> Mask:
        size = scores.numel()
        return HardMask(select_largest(lambda: [scores], [size], round(self.share * size))[0])


@dataclass(frozen=True)
class KeepAbove:
    """Keep scores, or their sigmoid, above a threshold, and never fewer than 0.5% of the matrix."""

    threshold: float
    of_sigmoid: bool

    def __call__(self, scores: Tensor) -> Mask:
        threshold = _logit(self.threshold) if self.of_sigmoid else self.threshold
        return HardMask(cut_at(scores, threshold, at_least=math.ceil(0.005 * scores.numel())))


@dataclass(frozen=True)
class KeepCut:
    """Keep a cut that was found over all layers together (global top-k), maybe some steps ago."""

    cut: Cut

    def __call__(self, scores: Tensor) -> Mask:
        return HardMask(recount(self.cut, scores))


@dataclass(frozen=True)
class OpenGates:
    """Hard-concrete gates, with the seed of the layer's next noise."""

    seed: int

    def __call__(self, scores: Tensor) -> Mask:
        return SoftMask(self.seed, int((scores > L0_KEPT_ABOVE).count_nonzero()))


@dataclass(frozen=True)
class KeepLargest:
    """Keep so many of the decisions, those of the largest scores; of equal ones the first. Waits for no device."""

    count: int | Tensor
    sizes: Sizes

    def __call__(self, scores: Tensor) -> Mask:
        count = self.count
        if not isinstance(count, Tensor):
            count = torch.full((), count, device=scores.device)  # a copy from the host would wait
        return GateMask(ranks(scores) < self.sizes.nearest(count, scores.numel()))


@dataclass(frozen=True)
class KeepPassing:
    """Keep the decisions whose score, or its sigmoid, is above a threshold, and never fewer than a share of them."""

    threshold: float
    of_sigmoid: bool
    at_least: float
    sizes: Sizes

    def __call__(self, scores: Tensor) -> Mask:
        return KeepLargest(self.count(scores), self.sizes)(scores)

    def count(self, scores: Tensor) -> Tensor:
        """How many pass, a scalar."""
        threshold = _logit(self.threshold) if self.of_sigmoid else self.threshold
        return (scores > threshold).count_nonzero().clamp(min=math.ceil(self.at_least * scores.numel()))


@dataclass(frozen=True)
class KeepGates:
    """Keep the decisions that were chosen over all layers together, maybe some steps ago."""

    gates: Tensor

    def __call__(self, scores: Tensor) -> Mask:
        return GateMask(self.gates.to(scores.device))


@dataclass(frozen=True)
class KeepOfFour:
    """Keep so many of every four neighbouring inputs' weights: those of the largest scores, of equal ones the first."""

    count: int
    inputs_at: int
    """The dimension of the weight along which the inputs lie."""

    def __call__(self, scores: Tensor) -> Mask:
        four = scores.unflatten(self.inputs_at, (-1, 4)).unbind(self.inputs_at + 1)
        leads = {(i, j): four[i] >= four[j] for j in range(4) for i in range(j)}
        gates = []
        for own in range(4):  # comparisons: sorting ten million fours takes seconds
            ahead = [leads[i, own] for i in range(own)] + [~leads[own, j] for j in range(own + 1, 4)]
            gates.append(sum(one.byte() for one in ahead) < self.count)
        return GateMask(torch.stack(gates, self.inputs_at + 1).view(scores.shape))


def _straight_through(gradient: Tensor, weight: Tensor, scores: Tensor, penalty: Tensor | None) -> Tensor:
    if penalty is None:
        return (gradient * weight).to(scores.dtype)
    return penalty.addcmul_(gradient, weight).to(scores.dtype)


def _logit(share: float) -> float:
    if 0 < share < 1:
        return math.log(share / (1 - share))
    return -math.inf if share <= 0 else math.inf
