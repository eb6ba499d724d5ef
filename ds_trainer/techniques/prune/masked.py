"""A linear layer whose weights are masked: exactly, by a cut through its scores, or softly, by hard-concrete gates.

The mask of a weight of scores is never stored in training: it is a comparison, made again where it is needed, so that
a layer masked by its scores costs these and, while it computes, one more buffer of the size of its weight. Decisions
on more than a weight are few: their gates are found once a step and kept, as those of 2:4 are, at a byte a weight.
Evaluation keeps the masked weight. The penalty on the scores is computed in the layer's own forward and its gradient
in the layer's own backward: there ZeRO-3 has the scores at hand.

Which share is kept, and when, is not decided here.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from ds_trainer.models.layers import AnyLinear, rows_of
from ds_trainer.tasks.losses import score_penalty, score_penalty_slope
from ds_trainer.techniques.prune.grains import Grain
from ds_trainer.techniques.prune.masks import DecisionMask, HardMask, Mask, MaskRule


class Planned(NamedTuple):
    """What `MaskedLinear.plan` says, and what the forwards since have made of it."""

    rule: MaskRule | None = None
    mask: Mask | None = None
    draws: int = 0
    evaluation_weight: Tensor | None = None


class MaskedLinear(nn.Linear):
    """`linear` with its own parameters, and `mask_scores` unless scored by magnitude.

    These have the weight's shape, or with a grain that of its decisions: what a decision is worth by magnitude is the
    root mean square of its weights, unless `worth` says so of a block of several matrices.

    That of a `Conv1D` keeps its weight as (in, out): what masks is elementwise, so only the products turn it.

    `plan` is called once per optimizer step; the next forward finds the mask, when ZeRO-3 has gathered the scores, and
    the following ones use it. `penalty` is the penalty of the latest forward, a scalar with gradient, or None.
    """

    mask_scores: nn.Parameter | None

    def __init__(
        self,
        linear: AnyLinear,
        initial_scores: Tensor | None,
        penalty_kind: str | None,
        grain: Grain | None = None,
        sizes: Tensor | None = None,
    ) -> None:
        nn.Module.__init__(self)
        self.plain = Conv1D if isinstance(linear, Conv1D) else nn.Linear
        self.out_features, self.in_features = rows_of(linear.weight, self.plain).shape
        self.weight, self.bias = linear.weight, linear.bias
        self.register_parameter("mask_scores", None if initial_scores is None else nn.Parameter(initial_scores))
        self.grain = grain
        self.sizes = grain.sizes() if grain is not None and sizes is None else sizes
        """How many weights each decision is about, in this matrix and, as `sizes` says, others."""
        self.worth: Tensor | None = None
        self.weight_size = linear.weight.numel()  # ZeRO-3 leaves an empty weight between forwards
        self.penalty_kind = penalty_kind
        self.penalty: Tensor | None = None
        self.planned = Planned()

    @property
    def planned(self) -> Planned:
        """To be put aside for another plan, and set again: what was found is not found anew."""
        return Planned(self.rule, self.mask, self.draws, self.evaluation_weight)

    @planned.setter
    def planned(self, planned: Planned) -> None:
        self.rule, self.mask, self.draws, self.evaluation_weight = planned

    def plan(self, rule: MaskRule) -> None:
        """Say how the next forward finds its mask."""
        self.planned = Planned(rule)

    @property
    def covered(self) -> int:
        """How many weights its mask is about."""
        return self.weight_size if self.sizes is None else int(self.sizes.sum())

    def scores(self) -> Tensor:
        """What the cut goes through: the learned scores, or the magnitude of the weights or decisions."""
        if self.mask_scores is not None:
            return self.mask_scores.detach()
        if self.grain is None or self.sizes is None:
            return self.weight.detach().abs()
        if self.worth is not None:
            return self.worth
        squares = self.grain.sums(self.weight.detach().float().square())
        return (squares / self.sizes.to(squares.device)).sqrt()

    def find_mask(self) -> Mask:
        """The mask of this step; scores and weight must be at hand."""
        if self.mask is None:
            assert self.rule is not None, "plan() comes before the first forward"
            self.mask = self._on_weights(self.rule(self.scores()))
        self.draws += self.training
        return self.mask.drawn(self.draws if self.training else None)

    def forward(self, hidden: Tensor) -> Tensor:
        if not self.training and not torch.is_grad_enabled():
            return F.linear(hidden, rows_of(self._evaluation_weight(), self.plain), self.bias)
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

    def _on_weights(self, mask: Mask) -> Mask:
        """A mask of the scores' shape as one of the weight."""
        if self.grain is None or self.sizes is None:
            return mask
        scores = self.scores()
        gates = mask.drawn(None).times(torch.ones_like(scores), scores)
        return DecisionMask(mask, self.grain, self.sizes, gates > 0, scores.isnan().any())


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
            masked = mask.times(weight, _scores_of(weight, scores, mask)).to(dtype)
            out = F.linear(hidden.to(dtype), rows_of(masked, plain), None if bias is None else bias.to(dtype))
            penalty = score_penalty(scores, kind) if kind and scores is not None else out.new_zeros(())
        return out, penalty

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, penalty_gradient: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, scores = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias, needs_scores = ctx.needs_input_grad[:4]
        by = _scores_of(weight, scores, ctx.mask)
        gradient = gradient.to(ctx.dtype)
        rows = gradient.reshape(-1, gradient.shape[-1])
        hidden_gradient = weight_gradient = scores_gradient = None
        with torch.autocast(gradient.device.type, enabled=False):
            if needs_hidden:
                masked = ctx.mask.times(weight, by).to(ctx.dtype)
                hidden_gradient = gradient.matmul(rows_of(masked, ctx.plain)).to(hidden.dtype)
                del masked
            if needs_weight or needs_scores:
                seen = hidden.reshape(-1, hidden.shape[-1]).to(ctx.dtype)
                weight_gradient = _weight_gradient(rows, seen, ctx.plain).to(weight.dtype)
                del seen
            if needs_scores:
                penalty = score_penalty_slope(scores, ctx.kind).mul_(penalty_gradient) if ctx.kind else None
                scores_gradient = ctx.mask.scores_gradient(weight_gradient, weight, scores, penalty)
            weight_gradient = ctx.mask.times(weight_gradient, by) if needs_weight else None
            bias_gradient = rows.sum(0).to(weight.dtype) if needs_bias else None
        return hidden_gradient, weight_gradient, bias_gradient, scores_gradient, None, None, None


def _weight_gradient(gradient: Tensor, hidden: Tensor, plain: type[nn.Module]) -> Tensor:
    """dL/dweight, contiguous in the weight's own layout, from (rows, out) and (rows, in)."""
    return hidden.t().matmul(gradient) if plain is Conv1D else gradient.t().matmul(hidden)


def _scores_of(weight: Tensor, scores: Tensor | None, mask: Mask) -> Tensor:
    """What the mask compares; gates that were found by magnitude compare nothing any more."""
    if scores is not None:
        return scores
    return weight.abs() if isinstance(mask, HardMask) else weight
