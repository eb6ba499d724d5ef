"""Optimal brain surgeon on one linear layer: which inputs to remove, and new weights for those that are kept.

A layer y = W x + b gets inputs of the covariance C. If the inputs of a group g (one neuron, or a head's `width`) are
removed and the other weights adapt, the mean squared error of its outputs grows by tr(W_g [(C^-1)_gg]^-1 W_g^T)
(Hassibi and Stork 1993; in blocks: ZipLM, arXiv 2302.04089). The group of the least cost goes first; then W and C^-1
are updated as if it had never been part of the layer. These costs add up, so one order gives the error at any number.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ds_trainer.ranks.stopping import stop_if_asked

_PENDING = 96
"""Removals between two updates of the whole matrices; one large product is faster than many small ones."""


@dataclass(frozen=True)
class Removal:
    """An order in which to remove groups, and the mean squared error (of all outputs together) that each one adds."""

    order: list[int]
    errors: list[float]


def removal(weight: Tensor, covariance: Tensor, width: int) -> Removal:
    """Order all groups of `width` inputs by greedy removal. Weight (out, in), covariance (in, in) positive definite.

    Computed in fp64 on the device of the tensors, in O(in^3 + in^2 out) operations.
    """
    weight, inverse = weight.double(), torch.linalg.inv(covariance.double())
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
    return Removal(order, errors)


def magnitude_removal(magnitudes: Tensor) -> Removal:
    """Order the groups by their magnitudes (groups,), the smallest first. Each error, which is not known, is 1."""
    return Removal(magnitudes.argsort().tolist(), [1.0] * len(magnitudes))


def least_squares(weight: Tensor, covariance: Tensor, columns: Tensor) -> Tensor:
    """Return the weight (out, kept), fp64, by which the kept input columns best give all outputs of `weight`."""
    covariance = covariance.double()
    products = weight.double() @ covariance[:, columns]
    return torch.linalg.solve(covariance[columns][:, columns], products, left=False)


def output_error(weight: Tensor, covariance: Tensor, cut: Tensor) -> float:
    """Return the mean squared error (of all outputs together) of a weight `cut`, of the shape of `weight`."""
    lost = weight.double() - cut.double()
    return float((lost @ covariance.double() * lost).sum())


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
