"""The surgery on one linear layer: which inputs or weights to remove, and new values for those that are kept.

A layer y = W x + b gets inputs of the covariance C, which `Gram` and `Fitting` estimate from calibration examples.

Inputs go by optimal brain surgeon. If the inputs of a group g (one neuron, or a head's `width`) are
removed and the other weights adapt, the mean squared error of its outputs grows by tr(W_g [(C^-1)_gg]^-1 W_g^T)
(Hassibi and Stork 1993; in blocks: ZipLM, arXiv 2302.04089). The group of the least cost goes first; then W and C^-1
are updated as if it had never been part of the layer. These costs add up, so one order gives the error at any number.

Single weights go by ADMM. A mask M and values V on it are wanted that minimise the mean squared error of the outputs,
tr((W - V) C (W - V)^T). `admm_mask` splits the problem into one without a mask and a projection on masks (ALPS, arXiv
2406.07831). On MiniLM at 15% of the weights it comes to half the error of a column sweep (SparseGPT, arXiv 2301.00774),
and to less than removal one by one (Optimal Brain Compression, arXiv 2208.11203), in a hundredth of its time.
`masked_least_squares` solves for V, given M, by conjugate gradients.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ds_trainer.models.layers import rows_of
from ds_trainer.ranks import distributed
from ds_trainer.ranks.stopping import stop_if_asked

_BLOCK = 128
"""Products of inputs are symmetric: blocks of this many rows are computed from the diagonal on."""
_PENDING = 96
"""Removals between two updates of the whole matrices; one large product is faster than many small ones."""
_ITERATIONS = 30
_FIRST_STIFFNESS, _LAST_STIFFNESS = 0.03, 1.0
"""How firmly ADMM draws the values to those on the mask, for inputs of variance 1."""
_MOST_GRADIENTS = 100
_SMALLEST_GAIN = 1e-5
"""Conjugate gradients end where a step lowers the error by less than this share of it."""


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
    """A weight (out, kept) for the input columns that a linear layer keeps, and a bias, in fp32 on the CPU.

    The error is that of `CutRecord`.
    """

    weight: Tensor
    columns: Tensor | slice
    bias: Tensor | None
    error: float

    @torch.no_grad()
    def write(self, linear: Any) -> None:
        """Give a linear layer this weight and bias."""
        rows = rows_of(linear.weight, type(linear))
        rows.zero_()
        rows[:, self.columns] = self.weight.to(rows)
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
        for start in range(0, len(sums), _BLOCK):
            block = slice(start, start + _BLOCK)
            self.products[block, start:] += deviations[:, block].T @ deviations[:, start:]
        self.products.addr_(sums, mean)

    def add_ranks(self) -> None:
        """Add up the sums of all ranks, in place, and complete the products; collective."""
        self.tokens = sum(count for (count,) in distributed.numbers_of_all([self.tokens]))
        self.sums = distributed.total(self.sums)
        upper = distributed.total(self.products).triu_()
        self.products = upper + upper.triu(1).T


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

    def replacement(self, weight: Tensor, columns: Tensor | slice = slice(None)) -> Replacement:
        """Return a new weight (out, kept) for these columns, and the bias that makes up for the means of the rest."""
        whole = torch.zeros_like(self.weight)
        largest = max(self._error(whole), torch.finfo(weight.dtype).tiny)
        whole[:, columns] = weight
        bias = None if self.bias is None else (self.bias + (self.weight - whole) @ self.mean).float().cpu()
        return Replacement(weight.float().cpu(), columns, bias, self._error(whole) / largest)

    def _error(self, weight: Tensor) -> float:
        """Return the mean squared error of all outputs together, for inputs without the damping."""
        of_damping = float(((self.weight - weight).square() * self._damping).sum())
        return max(0.0, output_error(self.weight, self.damped, weight) - of_damping)


def removal(weight: Tensor, covariance: Tensor, width: int) -> tuple[list[int], list[float]]:
    """Order all groups of `width` inputs by greedy removal. Weight (out, in), covariance (in, in) positive definite.

    Returns the order, and the mean squared error (of all outputs together) that each removal adds. Computed in fp64 on
    the device of the tensors, in O(in^3 + in^2 out) operations.
    """
    weight, covariance = weight.double(), covariance.double()
    factor, failed = torch.linalg.cholesky_ex(covariance)
    # with little damping, rounding may have left a matrix that is not positive definite
    inverse = torch.linalg.inv(covariance) if failed else torch.cholesky_inverse(factor)
    numbers = torch.arange(weight.shape[1] // width, device=weight.device)  # of the groups that the matrices still hold
    order: list[int] = []
    errors: list[float] = []
    while len(numbers):
        stop_if_asked()
        pending = _Pending(weight, inverse, width)
        errors += [pending.remove_cheapest() for _ in range(min(max(1, _PENDING // width), len(numbers)))]
        order += numbers[pending.removed].tolist()
        numbers = numbers[pending.kept]
        weight, inverse = pending.applied()
    return order, errors


def least_squares(weight: Tensor, covariance: Tensor, columns: Tensor) -> Tensor:
    """Return the weight (out, kept), fp64, by which the kept input columns best give all outputs of `weight`."""
    covariance = covariance.double()
    products = weight.double() @ covariance[:, columns]
    return torch.linalg.solve(covariance[columns][:, columns], products, left=False)


def output_error(weight: Tensor, covariance: Tensor, cut: Tensor) -> float:
    """Return the mean squared error (of all outputs together) of a weight `cut`, of the shape of `weight`."""
    lost = weight.double() - cut.double()
    return float((lost @ covariance.double() * lost).sum())


@dataclass(frozen=True)
class Pattern:
    """What is kept or removed as one in a weight (out, in), and among which parts of it the choice is."""

    block: tuple[int, int] = (1, 1)
    """The outputs and inputs of a block; those at an edge are smaller."""
    group: int | None = None
    """Groups of this many neighbouring inputs of an output keep the same share; None: the matrix is one group."""

    def means(self, scores: Tensor) -> Tensor:
        """Return the mean score of each block."""
        return scores if self.block == (1, 1) else F.avg_pool2d(scores[None], self.block, ceil_mode=True)[0]

    def mask(self, scores: Tensor, share: float) -> Tensor:
        """Keep this share of the blocks, of the largest scores: bools of the shape of `scores`, which is (out, in).

        At least one block stays in every group.
        """
        means = self.means(scores)
        groups = means.reshape(-1, self.group or means.numel())
        largest = groups.topk(max(1, round(share * groups.shape[1])), dim=1, sorted=False).indices
        kept = torch.zeros_like(groups, dtype=torch.bool).scatter_(1, largest, True).view(means.shape)
        if self.block == (1, 1):
            return kept
        rows, columns = self.block
        return kept.repeat_interleave(rows, 0).repeat_interleave(columns, 1)[: scores.shape[0], : scores.shape[1]]


def admm_mask(weight: Tensor, covariance: Tensor, share: float, pattern: Pattern) -> tuple[Tensor, Tensor]:
    """Return the mask that keeps a share of a weight at little error, and values for `masked_least_squares` to refine.

    This is the method "obs" for single weights, as only heads and neurons are removed one by one. Zeros of the
    weight are kept last. Weight (out, in), covariance (in, in) positive definite, fp64. O(in^3 + 60 in^2 out)
    operations.
    """
    scale, present = covariance.diagonal().sqrt(), weight != 0
    values, vectors = torch.linalg.eigh(covariance / scale / scale[:, None])
    dense = weight * scale
    target = dense @ vectors * values  # in the basis of the eigenvectors, as all products with the covariance
    sparse, dual, stiffness = dense, torch.zeros_like(dense), _FIRST_STIFFNESS
    growth = (_LAST_STIFFNESS / _FIRST_STIFFNESS) ** (1 / _ITERATIONS)
    for _ in range(_ITERATIONS):
        stop_if_asked()
        # the best values without a mask, drawn to those on it: a ridge regression, solved in the eigenbasis
        free = (target + stiffness * ((sparse - dual) @ vectors)) / (values + stiffness) @ vectors.T
        mask = pattern.mask((free + dual).square() * present, share)
        sparse = (free + dual) * mask
        # the dual is scaled by the stiffness, and shrinks where that grows
        dual = (free + dual - sparse) / growth
        stiffness *= growth
    return mask, sparse / scale


def masked_least_squares(weight: Tensor, covariance: Tensor, mask: Tensor, start: Tensor) -> Tensor:
    """Return the values on the mask, and zeros elsewhere, by which inputs of this covariance best give W's outputs.

    All rows are solved at once by conjugate gradients, scaled by the variances of the inputs. All tensors in fp64.
    """
    scale, values = covariance.diagonal(), start * mask
    residual = (weight - values) @ covariance * mask
    direction = residual / scale
    slope = (residual * direction).sum(1, keepdim=True)
    error = output_error(weight, covariance, values)
    for _ in range(_MOST_GRADIENTS):
        stop_if_asked()
        curved = direction @ covariance * mask
        step = slope / (direction * curved).sum(1, keepdim=True).clamp(min=torch.finfo(weight.dtype).tiny)
        values, residual = values + step * direction, residual - step * curved
        gain = float((step * slope).sum())
        error -= gain
        if gain <= _SMALLEST_GAIN * error:
            break
        before, slope = slope, (residual.square() / scale).sum(1, keepdim=True)
        direction = residual / scale + slope / before.clamp(min=torch.finfo(weight.dtype).tiny) * direction
    return values


class _Pending:
    """Removals whose updates of the weight and of the inverse are gathered, to be applied by one product.

    Removing a group g takes W_g [(C^-1)_gg]^-1 (C^-1)_g from the weight, and (C^-1)_g^T [(C^-1)_gg]^-1 (C^-1)_g from
    the inverse: the rest of the weights adapts, and the rest of the inverse is that of the smaller covariance. To apply
    this to the whole matrices each time would be bound by memory. Up to then only the parts that the costs need are
    updated: the `diagonal` blocks of the inverse, and the `products` W_g^T W_g, both (groups, width, width).
    """

    def __init__(self, weight: Tensor, inverse: Tensor, width: int) -> None:
        self.weight, self.inverse, self.width = weight, inverse, width
        groups = weight.shape[1] // width
        self.kept = torch.ones(groups, dtype=torch.bool, device=weight.device)
        self.removed: list[int] = []
        # still to be applied: inverse -= rows^T solved, weight -= columns^T solved
        self.rows = inverse.new_zeros(0, weight.shape[1])
        self.solved = inverse.new_zeros(0, weight.shape[1])
        self.columns = weight.new_zeros(0, weight.shape[0])
        blocks = inverse.view(groups, width, groups, width)
        self.diagonal = blocks.diagonal(dim1=0, dim2=2).permute(2, 0, 1).clone()
        grouped = weight.view(-1, groups, width)
        self.products = torch.einsum("ogi,ogj->gij", grouped, grouped)

    def remove_cheapest(self) -> float:
        """Remove the group that costs least, and return its cost."""
        # tr(W_g [(C^-1)_gg]^-1 W_g^T) needs W_g^T W_g alone, since a trace lets factors go around
        if self.width == 1:  # the blocks are numbers: their quotients take a tenth of the time
            costs = (self.products / self.diagonal).flatten()
        else:
            costs = torch.linalg.solve(self.diagonal, self.products).diagonal(dim1=1, dim2=2).sum(1)
        costs[~self.kept] = torch.inf
        group = int(costs.argmin())
        places = slice(group * self.width, (group + 1) * self.width)
        # the group's part of both matrices as it is after the removals that are still pending
        row = self.inverse[places] - self.rows[:, places].T @ self.solved
        column = self.weight[:, places].T - self.solved[:, places].T @ self.columns
        solved = torch.linalg.solve(row[:, places], row)
        self._update_costs(row, column, solved)
        self.rows = torch.cat((self.rows, row))
        self.solved = torch.cat((self.solved, solved))
        self.columns = torch.cat((self.columns, column))
        self.kept[group] = False
        self.removed.append(group)
        # the block of a removed group becomes zero, up to rounding; the next solve needs one that can be inverted
        self.diagonal[~self.kept] = torch.eye(self.width, dtype=row.dtype, device=row.device)
        return float(costs[group])

    def _update_costs(self, row: Tensor, column: Tensor, solved: Tensor) -> None:
        """Update the blocks of W^T W and of the inverse: W loses column^T solved, the inverse row^T solved.

        (W - c^T s)^T (W - c^T s) = W^T W - s^T (c W) - (c W)^T s + s^T (c c^T) s, block by block.
        """
        inner = column @ self.weight - (column @ self.columns.T) @ self.solved
        by_group = (self.width, len(self.kept), self.width)
        row, solved, inner = row.view(by_group), solved.view(by_group), inner.view(by_group)
        crossed = torch.einsum("agi,agj->gij", solved, inner)
        squared = torch.einsum("agi,ab,bgj->gij", solved, column @ column.T, solved)
        self.products += squared - crossed - crossed.mT
        self.diagonal -= torch.einsum("agi,agj->gij", row, solved)

    def applied(self) -> tuple[Tensor, Tensor]:
        """Return the weight and the inverse of the groups that are kept."""
        columns = self.kept.repeat_interleave(self.width).nonzero().flatten()
        rows, solved = self.rows[:, columns], self.solved[:, columns]
        weight = self.weight[:, columns].addmm_(self.columns.T, solved, alpha=-1)
        inverse = self.inverse[columns[:, None], columns].addmm_(rows.T, solved, alpha=-1)
        return weight, inverse
