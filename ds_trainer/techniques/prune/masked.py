"""Masks, and linear layers whose weight is masked in the forward and whose scores learn in the backward.

A weight W with scores S and a mask M(S) computes with W' = W * M(S). A hard mask is 0 or 1: a comparison of the
weights' scores with a cutoff, or bools that are stored. It has no derivative, and is passed straight through: dL/dS =
dL/dW' * W (arXiv 2005.07683, eq. 5). A soft mask has hard-concrete gates (arXiv 1712.01312), whose derivative is
dL/dS = dL/dW' * W * M'(S). Where a score decides on several weights, dL/dS is summed over them.

The mask of single weights is never stored in training: it is a comparison of the scores with a cutoff, made again
wherever it is needed. So a masked layer costs its scores and, while it computes, one more buffer of the size of its
weight. The gates of larger decisions are few, and so are stored once a step.

The penalty on the scores is computed in the layer's own forward, and its gradient in the layer's own backward, because
there ZeRO-3 has gathered the scores anyway. Which scores are kept is decided in `selection.py`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from ds_trainer.models.layers import AnyLinear, is_recomputing, rows_of
from ds_trainer.ranks.failures import NonFiniteLossError

# (values, scores, t) -> values where scores > t, else 0: one pass; `torch.where` takes several
_zero_where_at_most = torch.ops.aten.threshold_backward

# The hard-concrete distribution of arXiv 1712.01312: its temperature, and the interval to which (0, 1) is stretched.
_TEMPERATURE = 2 / 3
_LOW, _HIGH = -0.1, 1.1

L0_KEPT_ABOVE = math.log(-_LOW / _HIGH)
"""A gate without noise is above 0 if log-alpha is above this value: sigmoid(x) * (_HIGH - _LOW) + _LOW > 0."""

_PENALTY_SHIFT = {"l1": 0.0, "l0": -_TEMPERATURE * L0_KEPT_ABOVE}
"""sigmoid(log-alpha + shift) of "l0" is the probability that a hard-concrete gate is not 0 (eq. 12)."""


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


def score_penalty(scores: Tensor, kind: str) -> Tensor:
    """Return the mean of sigmoid(scores + shift) over one matrix, a scalar in [0, 1].

    "l1" is the L1 norm of sigmoid(scores), divided by the number of scores (arXiv 2005.07683, section 4). "l0" is the
    expected share of hard-concrete gates that are not 0.
    """
    return torch.sigmoid(scores.float() + _PENALTY_SHIFT[kind]).mean()


def score_penalty_slope(scores: Tensor, kind: str) -> Tensor:
    """Return the gradient of `score_penalty` by the scores, in their shape and always in fp32.

    A gradient is at most 1 / (4 * number of scores). For a million scores fp16 cannot hold such a value accurately: the
    caller must multiply by the loss scale before it casts.
    """
    share = torch.sigmoid(scores.float() + _PENALTY_SHIFT[kind])
    return (1 - share).mul_(share).div_(scores.numel())


def hard_concrete(log_alpha: Tensor, uniform: Tensor | None) -> Tensor:
    """Return gates in [0, 1], shaped like log-alpha; `uniform` is noise in (0, 1), None at evaluation (eq. 10-13)."""
    return (_concrete(log_alpha, uniform) * (_HIGH - _LOW) + _LOW).clamp(0, 1)


def hard_concrete_slope(log_alpha: Tensor, uniform: Tensor | None) -> Tensor:
    """Return the elementwise derivative of `hard_concrete` by log-alpha; it is 0 where a gate is clamped."""
    concrete = _concrete(log_alpha, uniform)
    gates = concrete * (_HIGH - _LOW) + _LOW
    between = (gates > 0) & (gates < 1)
    del gates  # each of these is as large as a matrix in fp32
    scale = _HIGH - _LOW if uniform is None else (_HIGH - _LOW) / _TEMPERATURE
    return (1 - concrete).mul_(concrete).mul_(scale).mul_(between)


def _concrete(log_alpha: Tensor, uniform: Tensor | None) -> Tensor:
    if uniform is None:
        return torch.sigmoid(log_alpha)
    return torch.logit(uniform).add_(log_alpha).mul_(1 / _TEMPERATURE).sigmoid_()


def diverged() -> NonFiniteLossError:
    """Return the error to raise where scores hold NaN; every rank raises it, since all of them see the same scores."""
    return NonFiniteLossError("the scores hold NaN: the run has diverged; lower mask_scores_learning_rate")


def just_below(value: float, dtype: torch.dtype) -> float:
    """Return the largest number of `dtype` below `value`: x > just_below(value) is x >= value."""
    return float(torch.nextafter(torch.tensor(value, dtype=dtype), torch.tensor(-math.inf, dtype=dtype)))


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
