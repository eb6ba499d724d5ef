"""A linear layer whose weights are masked: exactly, by a cut through its scores, or softly, by hard-concrete gates.

The mask is never stored in training: it is a comparison, made again where it is needed, so that a layer masked by its
scores costs these and, while it computes, one more buffer of the size of its weight. Evaluation keeps the masked
weight. The gradient of the scores is straight-through, dL/dscores = dL/dW' * W (arXiv 2005.07683, eq. 5). The penalty
on the scores is computed in the layer's own forward and its gradient in the layer's own backward: there ZeRO-3 has
the scores at hand.

Which share is kept, and when, is not decided here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from ds_trainer.losses import (
    L0_KEPT_ABOVE,
    hard_concrete,
    hard_concrete_slope,
    score_penalty,
    score_penalty_slope,
)
from ds_trainer.models import AnyLinear
from ds_trainer.techniques.selection import Cut, cut_at, just_below, recount, select_largest

_zero_where_at_most = torch.ops.aten.threshold_backward
"""(values, scores, t) -> values where scores > t, else 0: one pass; `torch.where` takes several."""


class Mask(Protocol):
    """How a weight is masked by its scores, and how gradients come back. All tensors have the weight's shape."""

    @property
    def kept(self) -> int:
        """How many weights it keeps."""

    def times(self, values: Tensor, scores: Tensor) -> Tensor:
        """values * mask."""

    def scores_gradient(self, gradient: Tensor, weight: Tensor, scores: Tensor) -> Tensor:
        """dL/dscores, from dL/d(masked weight)."""


@dataclass(frozen=True)
class HardMask:
    """0 or 1, by a cut through the scores."""

    cut: Cut

    @property
    def kept(self) -> int:
        return self.cut.kept

    def times(self, values: Tensor, scores: Tensor) -> Tensor:
        kept = _zero_where_at_most(values, scores, self.cut.threshold)
        end = self.cut.ties_end
        if end:
            below = just_below(self.cut.threshold, scores.dtype)
            kept.view(-1)[:end] = _zero_where_at_most(values.reshape(-1)[:end], scores.view(-1)[:end], below)
        return kept

    def scores_gradient(self, gradient: Tensor, weight: Tensor, scores: Tensor) -> Tensor:
        return gradient * weight


@dataclass(frozen=True)
class SoftMask:
    """Hard-concrete gates in [0, 1] (arXiv 1712.01312): noise drawn from `seed`, or none where it is None.

    The noise is drawn again in the backward from the same seed instead of being kept. All ranks draw the same, so
    that a run does not depend on their number.
    """

    seed: int | None
    kept: int

    def times(self, values: Tensor, scores: Tensor) -> Tensor:
        return values * hard_concrete(scores.float(), self._noise(scores)).to(values.dtype)

    def scores_gradient(self, gradient: Tensor, weight: Tensor, scores: Tensor) -> Tensor:
        slope = hard_concrete_slope(scores.float(), self._noise(scores))
        return gradient * weight * slope.to(weight.dtype)

    def _noise(self, scores: Tensor) -> Tensor | None:
        if self.seed is None:
            return None
        generator = torch.Generator(scores.device).manual_seed(self.seed)
        eps = torch.finfo(torch.float32).eps
        return torch.empty(scores.shape, device=scores.device).uniform_(eps, 1 - eps, generator=generator)


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


class MaskedLinear(nn.Linear):
    """`linear` with its own parameters, and `mask_scores` of the weight's shape unless scored by magnitude.

    That of a `Conv1D` keeps its weight as (in, out): what masks is elementwise, so only the products turn it.

    `plan` is called once per optimizer step; the next forward finds the mask, when ZeRO-3 has gathered the scores, and
    the following ones use it. `penalty` is the penalty of the latest forward, a scalar with gradient, or None.
    """

    mask_scores: nn.Parameter | None

    def __init__(self, linear: AnyLinear, initial_scores: Tensor | None, penalty_kind: str | None) -> None:
        nn.Module.__init__(self)
        self.plain = Conv1D if isinstance(linear, Conv1D) else nn.Linear
        self.out_features, self.in_features = _as_linear(linear.weight, self.plain).shape
        self.weight, self.bias = linear.weight, linear.bias
        self.register_parameter("mask_scores", None if initial_scores is None else nn.Parameter(initial_scores))
        self.weight_size = linear.weight.numel()  # ZeRO-3 leaves an empty weight between forwards
        self.penalty_kind = penalty_kind
        self.penalty: Tensor | None = None
        self.rule: MaskRule | None = None
        self.mask: Mask | None = None
        self.draws = 0
        self.evaluation_weight: Tensor | None = None

    def plan(self, rule: MaskRule) -> None:
        """Say how the next forward finds its mask."""
        self.rule, self.mask, self.draws, self.evaluation_weight = rule, None, 0, None

    def scores(self) -> Tensor:
        """What the cut goes through: the learned scores, or the magnitude of the weights."""
        return self.weight.detach().abs() if self.mask_scores is None else self.mask_scores.detach()

    def find_mask(self) -> Mask:
        """The mask of this step; scores and weight must be at hand."""
        if self.mask is None:
            assert self.rule is not None, "plan() comes before the first forward"
            self.mask = self.rule(self.scores())
        return self._drawn(self.mask)

    def forward(self, hidden: Tensor) -> Tensor:
        if not self.training and not torch.is_grad_enabled():
            return F.linear(hidden, _as_linear(self._evaluation_weight(), self.plain), self.bias)
        self.evaluation_weight = None  # this forward is of weights that will change
        how = (self.find_mask(), self.penalty_kind, self.plain)
        out, penalty = _MaskedLinear.apply(hidden, self.weight, self.bias, self.mask_scores, *how)
        self.penalty = penalty if self.penalty_kind else None
        return out

    def _evaluation_weight(self) -> Tensor:
        """The masked weight, made once an evaluation; at every forward under ZeRO-3, which is to spare the memory."""
        if self.evaluation_weight is not None:
            return self.evaluation_weight
        weight = self.find_mask().times(self.weight, self.scores())
        if not hasattr(self.weight, "ds_id"):
            self.evaluation_weight = weight
        return weight

    @torch.no_grad()
    def folded(self) -> AnyLinear:
        """A plain layer of the original's class with the masked weight, as it computes at evaluation."""
        with torch.device("meta"):
            linear = (
                Conv1D(self.out_features, self.in_features)
                if self.plain is Conv1D
                else nn.Linear(self.in_features, self.out_features, bias=self.bias is not None)
            )
        weight = self.eval().find_mask().times(self.weight, self.scores())
        linear.weight = nn.Parameter(weight, requires_grad=self.weight.requires_grad)
        linear.bias = self.bias
        return linear

    def _drawn(self, mask: Mask) -> Mask:
        """Soft masks draw new noise at every training forward, and none at evaluation."""
        if not isinstance(mask, SoftMask):
            return mask
        self.draws += self.training
        return SoftMask(mask.seed + self.draws if self.training and mask.seed is not None else None, mask.kept)


class _MaskedLinear(torch.autograd.Function):
    """(hidden (..., in), weight in the layout of `plain`, bias, scores) -> output (..., out), penalty ().

    Saves its inputs only and masks the weight again in the backward: autograd would keep the masked weight of every
    layer from forward to backward. Computes in the autocast dtype where autocast is on, as `F.linear` does.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        scores: Tensor | None,
        mask: Mask,
        kind: str | None,
        plain: type[nn.Module],
    ) -> tuple[Tensor, Tensor]:
        device = hidden.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
        ctx.save_for_backward(hidden, weight, scores)
        ctx.mask, ctx.kind, ctx.plain, ctx.dtype = mask, kind, plain, dtype
        with torch.autocast(device, enabled=False):
            masked = mask.times(weight, _scores_of(weight, scores)).to(dtype)
            out = F.linear(hidden.to(dtype), _as_linear(masked, plain), None if bias is None else bias.to(dtype))
            penalty = score_penalty(scores, kind) if kind and scores is not None else out.new_zeros(())
        return out, penalty

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, penalty_gradient: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, scores = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias, needs_scores = ctx.needs_input_grad[:4]
        by = _scores_of(weight, scores)
        gradient = gradient.to(ctx.dtype)
        rows = gradient.reshape(-1, gradient.shape[-1])
        hidden_gradient = weight_gradient = scores_gradient = None
        with torch.autocast(gradient.device.type, enabled=False):
            if needs_hidden:
                masked = ctx.mask.times(weight, by).to(ctx.dtype)
                hidden_gradient = gradient.matmul(_as_linear(masked, ctx.plain)).to(hidden.dtype)
                del masked
            if needs_weight or needs_scores:
                seen = hidden.reshape(-1, hidden.shape[-1]).to(ctx.dtype)
                weight_gradient = _weight_gradient(rows, seen, ctx.plain).to(weight.dtype)
                del seen
            if needs_scores:
                scores_gradient = ctx.mask.scores_gradient(weight_gradient, weight, scores)
                if ctx.kind:
                    scores_gradient += penalty_gradient * score_penalty_slope(scores, ctx.kind)
            weight_gradient = ctx.mask.times(weight_gradient, by) if needs_weight else None
            bias_gradient = rows.sum(0).to(weight.dtype) if needs_bias else None
        return hidden_gradient, weight_gradient, bias_gradient, scores_gradient, None, None, None


def _as_linear(weight: Tensor, plain: type[nn.Module]) -> Tensor:
    """The weight of such a layer as (out, in), a view."""
    return weight.t() if plain is Conv1D else weight


def _weight_gradient(gradient: Tensor, hidden: Tensor, plain: type[nn.Module]) -> Tensor:
    """dL/dweight, contiguous in the weight's own layout, from (rows, out) and (rows, in)."""
    return hidden.t().matmul(gradient) if plain is Conv1D else gradient.t().matmul(hidden)


def _scores_of(weight: Tensor, scores: Tensor | None) -> Tensor:
    return weight.abs() if scores is None else scores


def _logit(share: float) -> float:
    if 0 < share < 1:
        return math.log(share / (1 - share))
    return -math.inf if share <= 0 else math.inf
