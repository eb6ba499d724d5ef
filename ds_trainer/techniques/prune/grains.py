"""The grain of a matrix: the blocks of it that one score decides on, and how gates on them meet its weights."""

import math
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Grain:
    """Blocks of `rows` outputs by `columns` inputs, None for all of them; at an edge the last may be smaller.

    A row is (1, None), a column (None, 1), and the part of a block's outer matrix that reads one head (None, width).
    """

    out_features: int
    in_features: int
    rows: int | None
    columns: int | None
    turned: bool = False
    """Whether the weight is (in, out), as that of a `Conv1D`."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the decisions, their gates and scores: one axis for each side that is cut."""
        sides = ((self.out_features, self.rows), (self.in_features, self.columns))
        return tuple(math.ceil(size / part) for size, part in sides if part is not None)

    def times(self, values: Tensor, gates: Tensor) -> Tensor:
        """Multiply each weight's value by the gate of its decision. Returns the weight's shape."""
        if self.turned:
            values = values.t()
        if self.columns is None:
            gates = gates[:, None]
        else:
            gates = gates.repeat_interleave(self.columns, -1)[..., : self.in_features]
        # gates are (rows of blocks, in) by now: repeated for every row, they would be another matrix
        if self.rows is None or self.rows == 1:
            product = values * gates
        elif self.out_features % self.rows == 0:
            product = (values.unflatten(0, (-1, self.rows)) * gates[:, None]).flatten(0, 1)
        else:
            product = values * gates.repeat_interleave(self.rows, 0)[: self.out_features]
        return product.t() if self.turned else product

    def sums(self, values: Tensor) -> Tensor:
        """Sum the weight's values over each decision. Returns `shape`."""
        if self.turned:
            values = values.t()
        if self.rows is None and self.columns is not None:
            return values.sum(0).view(-1, self.columns).sum(1)
        rows, columns = self.rows or self.out_features, self.columns or self.in_features
        below, beside = -self.out_features % rows, -self.in_features % columns
        if below or beside:
            values = F.pad(values, (0, beside, 0, below))
        return values.unflatten(1, (-1, columns)).unflatten(0, (-1, rows)).sum((1, 3)).view(self.shape)

    @cached_property
    def sizes(self) -> Tensor:
        """Count the matrix's weights that each decision is about: int64, on the CPU."""
        ones = torch.ones(self.out_features, self.in_features)
        return self.sums(ones.t() if self.turned else ones).long()
