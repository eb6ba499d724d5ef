"""Grains of a matrix: the parts of it that one score decides on, and how gates on them meet its weights.

A grain's gates and scores have the shape of the decisions: (out,) for rows, (in / width,) for columns of a width, (out
/ rows, in / columns) for blocks, both rounded up. All here goes by a weight's rows as outputs: `Turned` is of Conv1D.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


class Grain(Protocol):
    @property
    def shape(self) -> tuple[int, ...]:
        """Of the decisions."""

    def times(self, values: Tensor, gates: Tensor) -> Tensor:
        """Each weight's value times its decision's gate, in the weight's shape."""

    def sums(self, values: Tensor) -> Tensor:
        """Over the weights of each decision."""

    def sizes(self) -> Tensor:
        """How many weights of the matrix each decision is on: int64, on the CPU."""


@dataclass(frozen=True)
class Rows:
    out_features: int
    in_features: int

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.out_features,)

    def times(self, values: Tensor, gates: Tensor) -> Tensor:
        return values * gates[:, None]

    def sums(self, values: Tensor) -> Tensor:
        return values.sum(1)

    def sizes(self) -> Tensor:
        return torch.full(self.shape, self.in_features)


@dataclass(frozen=True)
class Columns:
    """Groups of `width` neighbouring columns: of a single one, a neuron's, or all of a head."""

    out_features: int
    in_features: int
    width: int = 1

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.in_features // self.width,)

    def times(self, values: Tensor, gates: Tensor) -> Tensor:
        return values * (gates if self.width == 1 else gates.repeat_interleave(self.width))

    def sums(self, values: Tensor) -> Tensor:
        return values.sum(0).view(-1, self.width).sum(1)

    def sizes(self) -> Tensor:
        return torch.full(self.shape, self.out_features * self.width)


@dataclass(frozen=True)
class Blocks:
    """Of `rows` x `columns`; where these do not divide the matrix, the last are smaller."""

    out_features: int
    in_features: int
    rows: int
    columns: int

    @property
    def shape(self) -> tuple[int, ...]:
        return math.ceil(self.out_features / self.rows), math.ceil(self.in_features / self.columns)

    def times(self, values: Tensor, gates: Tensor) -> Tensor:
        if self._missing() != (0, 0):
            tall = gates.repeat_interleave(self.rows, 0)[: self.out_features]
            return values * tall.repeat_interleave(self.columns, 1)[:, : self.in_features]
        return (self._parted(values) * gates[:, None, :, None]).flatten(2).flatten(0, 1)

    def sums(self, values: Tensor) -> Tensor:
        below, beside = self._missing()
        return self._parted(F.pad(values, (0, beside, 0, below)) if below or beside else values).sum((1, 3))

    def sizes(self) -> Tensor:
        return self.sums(torch.ones(self.out_features, self.in_features)).long()

    def _missing(self) -> tuple[int, int]:
        """Rows and columns that the last blocks lack."""
        return -self.out_features % self.rows, -self.in_features % self.columns

    def _parted(self, values: Tensor) -> Tensor:
        return values.unflatten(1, (-1, self.columns)).unflatten(0, (-1, self.rows))


@dataclass(frozen=True)
class Turned:
    """A grain on a weight of (in, out)."""

    grain: Grain

    @property
    def shape(self) -> tuple[int, ...]:
        return self.grain.shape

    def times(self, values: Tensor, gates: Tensor) -> Tensor:
        return self.grain.times(values.t(), gates).t()

    def sums(self, values: Tensor) -> Tensor:
        return self.grain.sums(values.t())

    def sizes(self) -> Tensor:
        return self.grain.sizes()
