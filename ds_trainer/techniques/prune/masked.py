"""A linear layer whose weight is masked in the forward, and whose scores learn in the backward.

The mask of single weights is never stored in training: it is a comparison of the scores with a cutoff, made again
wherever it is needed. So a masked layer costs its scores and, while it computes, one more buffer of the size of its
weight. The gates of larger decisions are few, and so are stored once a step.

The penalty on the scores is computed in the layer's own forward, and its gradient in the layer's own backward, because
there ZeRO-3 has gathered the scores anyway.

Which scores are kept is decided in `selection.py`, and how a mask multiplies and passes gradients in `masks.py`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from ds_trainer.models.layers import AnyLinear, rows_of
from ds_trainer.models.recomputing import is_recomputing
from ds_trainer.tasks.losses import score_penalty, score_penalty_slope
from ds_trainer.techniques.prune.masks import HardMask, Mask


@dataclass
class StepMask:
    """A layer's mask during one optimizer step. Without a `mask`, the step's first forward makes it of the scores."""

    make: Callable[[Tensor], Mask] | None = None
    mask: Mask | None = None
    draws: int = 0  # how often noise was drawn: each training forward of the step has its own
    evaluation_weight: Tensor | None = None  # the masked weight, which all batches of an evaluation share


class MaskedLinear(nn.Linear):
    """A linear layer (or `Conv1D`) with the parameters of `linear`, and `mask_scores` unless magnitude scores it.

    The scores have the weight's shape or one entry per decision. Without them the score of a weight is its magnitude.

    `step_mask` is set once per optimizer step. The next forward makes the mask, where ZeRO-3 has gathered the scores,
    and the following ones use it. `penalty` is the latest forward's penalty, a scalar with gradient, or None.
    """

    mask_scores: nn.Parameter | None

    def __init__(self, linear: AnyLinear, initial_scores: Tensor | None, penalty_kind: str | None) -> None:
        nn.Module.__init__(self)  # that of nn.Linear would allocate a second weight
        # the weight stays in the layout of this class: masking is elementwise, only the products turn it
        self.plain = Conv1D if isinstance(linear, Conv1D) else nn.Linear
        self.out_features, self.in_features = rows_of(linear.weight, self.plain).shape
        self.weight, self.bias = linear.weight, linear.bias
        self.register_parameter("mask_scores", None if initial_scores is None else nn.Parameter(initial_scores))
        self.weight_size = linear.weight.numel()  # ZeRO-3 leaves an empty weight between forwards
        self.penalty_kind = penalty_kind
        self.penalty: Tensor | None = None
        self.step_mask = StepMask()

    @property
    def mask(self) -> Mask | None:
        """The mask of this step, once a forward has made it."""
        return self.step_mask.mask

    def scores(self) -> Tensor:
        """Return what masks compare: the learned scores, or the magnitudes of the weights. They must be gathered."""
        return self.weight.detach().abs() if self.mask_scores is None else self.mask_scores.detach()

    def find_mask(self) -> Mask:
        """Return the step's mask with the noise of this forward. Scores and weight must be gathered."""
        step = self.step_mask
        if step.mask is None:
            assert step.make is not None, "a step's mask is set before its first forward"
            step.mask = step.make(self.scores())
        step.draws += self.training and not is_recomputing()
        return step.mask.drawn(step.draws if self.training else None)

    def masked_weight(self) -> Tensor:
        """Return the weight that the forward multiplies by."""
        mask = self.find_mask()
        return mask.times(self.weight, _compared(self.weight, self.mask_scores, mask))

    def forward(self, hidden: Tensor) -> Tensor:
        step = self.step_mask
        if not self.training and not torch.is_grad_enabled():
            if step.make is None and step.mask is None:  # another technique tries the model out when it is attached
                return F.linear(hidden, rows_of(self.weight, self.plain), self.bias)
            weight = step.evaluation_weight
            if weight is None:
                weight = self.masked_weight()
            if not hasattr(self.weight, "ds_id"):  # kept for the evaluation, but not by ZeRO-3, which spares the memory
                step.evaluation_weight = weight
            return F.linear(hidden, rows_of(weight, self.plain), self.bias)
        step.evaluation_weight = None  # training changes the weight that an evaluation has masked
        how = (self.find_mask(), self.penalty_kind, self.plain)
        out, penalty = _MaskedLinear.apply(hidden, self.weight, self.bias, self.mask_scores, how)
        if not is_recomputing():  # the second penalty would keep alive what the backward has just computed again
            self.penalty = penalty if self.penalty_kind else None
        return out

    @torch.no_grad()
    def folded(self) -> AnyLinear:
        """Return a plain layer of the original's class with the masked weight, as the layer computes at evaluation."""
        with torch.device("meta"):
            inputs, outputs = self.in_features, self.out_features
            linear = Conv1D(outputs, inputs) if self.plain is Conv1D else nn.Linear(inputs, outputs)
        linear.weight = nn.Parameter(self.eval().masked_weight(), requires_grad=self.weight.requires_grad)
        linear.bias = self.bias
        return linear


_How = tuple[Mask, str | None, type[nn.Module]]  # the mask, the kind of penalty, and the class of the plain layer


class _MaskedLinear(torch.autograd.Function):
    """(hidden (..., in), weight in the layout of the plain class, bias, scores) -> output (..., out), penalty ().

    With W' = W * M(S) and G = dL/dW' = (dL/dout)^T hidden, the gradients are

        dL/dhidden = dL/dout W'      dL/dW = G * M(S)      dL/dS = `Mask.scores_gradient` of G (G * W if M is hard)

    They are written by hand because plain autograd would keep W' of every layer from forward to backward: a second copy
    of the model. This function saves only its inputs, of which weight and scores are the parameters themselves, and
    masks again in the backward, which costs one elementwise pass.

    That pass must see what the forward saw. It does: the mask and its noise are the same objects, the optimizer does
    not touch parameters between the two, and under ZeRO-3, where the saved tensors are the partitioned parameters, the
    engine gathers them again before the module's backward.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, scores: Tensor | None, how: _How
    ) -> tuple[Tensor, Tensor]:
        mask, kind, plain = how
        device = hidden.device.type
        # inside a custom function autocast casts nothing: compute in its dtype by hand, as F.linear would
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
        ctx.save_for_backward(hidden, weight, scores)
        ctx.mask, ctx.kind, ctx.plain, ctx.dtype = mask, kind, plain, dtype
        with torch.autocast(device, enabled=False):
            masked = mask.times(weight, _compared(weight, scores, mask)).to(dtype)
            out = F.linear(hidden.to(dtype), rows_of(masked, plain), None if bias is None else bias.to(dtype))
            penalty = score_penalty(scores, kind) if kind and scores is not None else out.new_zeros(())
        return out, penalty

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, penalty_gradient: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, scores = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias, needs_scores = ctx.needs_input_grad[:4]
        compared = _compared(weight, scores, ctx.mask)
        gradient = gradient.to(ctx.dtype)
        rows = gradient.reshape(-1, gradient.shape[-1])
        hidden_gradient = weight_gradient = scores_gradient = None
        with torch.autocast(gradient.device.type, enabled=False):
            if needs_hidden:
                masked = ctx.mask.times(weight, compared).to(ctx.dtype)
                hidden_gradient = gradient.matmul(rows_of(masked, ctx.plain)).to(hidden.dtype)
                del masked  # or the peak would be one matrix higher
            if needs_weight or needs_scores:
                # G, of which the weight gets the masked part, and the scores all
                inputs = hidden.reshape(-1, hidden.shape[-1]).to(ctx.dtype)
                turned = inputs.t().matmul(rows) if ctx.plain is Conv1D else rows.t().matmul(inputs)
                weight_gradient = turned.to(weight.dtype)
                del inputs, turned
            if needs_scores:
                # multiplied in fp32 by the incoming gradient, which has the loss scale: see score_penalty_slope
                penalty = score_penalty_slope(scores, ctx.kind).mul_(penalty_gradient) if ctx.kind else None
                scores_gradient = ctx.mask.scores_gradient(weight_gradient, weight, scores, penalty)
            weight_gradient = ctx.mask.times(weight_gradient, compared) if needs_weight else None
            bias_gradient = rows.sum(0).to(weight.dtype) if needs_bias else None
        return hidden_gradient, weight_gradient, bias_gradient, scores_gradient, None


def _compared(weight: Tensor, scores: Tensor | None, mask: Mask) -> Tensor:
    """Return what the mask compares. Stored gates compare nothing, so that no magnitudes are computed for them."""
    if scores is not None:
        return scores
    return weight.abs() if isinstance(mask, HardMask) else weight
