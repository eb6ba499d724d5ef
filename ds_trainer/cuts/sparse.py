"""Zeros in the weight of one linear layer: which weights to remove, and new values for those that are kept.

The layer gets inputs of the covariance C. A mask M and values V on it are wanted that minimise the mean squared error
of the outputs, tr((W - V) C (W - V)^T). `admm_mask` splits the problem into one without a mask and a projection on
masks (ADMM; ALPS, arXiv 2406.07831). On MiniLM at 15% of the weights it comes to half the error of a column sweep
(SparseGPT, arXiv 2301.00774), and to less than removal one by one (Optimal Brain Compression, arXiv 2208.11203), in a
hundredth of its time. `masked_least_squares` solves for V, given M, by conjugate gradients.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ds_trainer.cuts.surgeon import output_error
from ds_trainer.ranks.stopping import stop_if_asked

_ITERATIONS = 30
_FIRST_STIFFNESS, _LAST_STIFFNESS = 0.03, 1.0
"""How firmly the values are drawn to those on the mask, for inputs of variance 1."""
_MOST_GRADIENTS = 100
_SMALLEST_GAIN = 1e-5
"""Conjugate gradients end where a step lowers the error by less than this share of it."""


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

    This is the method "obs" for single weights: ADMM, as only heads and neurons are removed one by one (`surgeon.py`).
    Zeros of the weight are kept last. Weight (out, in), covariance (in, in) positive definite, fp64.
    O(in^3 + 60 in^2 out) operations.
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
