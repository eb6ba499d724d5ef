"""The k-th largest of many scores, exactly and without sorting them.

A strided sample brackets the threshold; one pass counts what lies above the bracket and picks out what lies in it, and
the k-th of those few is the k-th of all (the idea of Floyd and Rivest's SELECT, CACM 18(3), 1975). Chunks are visited
one after the other and never joined, so that the threshold over all layers needs no copy of all scores, and
partitioned scores are gathered a chunk at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from ds_trainer.ranks.failures import NonFiniteLossError

Chunks = Callable[[], Iterable[Tensor]]

_SAMPLE = 8192
_SLACK = 4.0  # standard deviations of a sampled quantile: a random sample misses once in 10,000 searches
_EVERYTHING = (-math.inf, math.inf)


@dataclass(frozen=True)
class Cut:
    """Keep the values above `threshold` and, of the first `ties_end` in memory order, also those equal to it."""

    threshold: float
    ties_end: int
    kept: int


@dataclass(frozen=True)
class Sizes:
    """The numbers of decisions that a matrix or block may keep: at least so many, and a multiple, or all."""

    least: int = 0
    multiple: int = 1

    def lowest(self, whole: int) -> int:
        """The fewest of `whole` that may be kept."""
        return min(whole, math.ceil(self.least / self.multiple) * self.multiple)

    def nearest(self, count: Tensor, whole: int) -> Tensor:
        """What to keep of `whole` in the place of `count`, a scalar; of some, at least one multiple."""
        rounded = (count + self.multiple // 2) // self.multiple * self.multiple
        some = rounded.clamp(min(self.multiple, whole), whole)
        kept = torch.where(count >= whole, whole, torch.where(count > 0, some, 0))
        return kept.clamp(min=self.lowest(whole))


def select_largest(chunks: Chunks, sizes: Sequence[int], k: int) -> list[Cut]:
    """Find, for each chunk, the cut that keeps exactly the `k` largest values over all chunks together.

    `chunks()` is called a few times and yields contiguous tensors of one floating dtype, of the given sizes, without
    NaN. Ties at the threshold are kept in memory order. `k` runs from 0 to sum(sizes).
    """
    if k == 0:
        return [Cut(math.inf, 0, 0) for _ in sizes]
    if k == sum(sizes):
        return [Cut(-math.inf, size, size) for size in sizes]
    low, high, dtype = _bracket(chunks, sum(sizes), k)
    above, inside = _split(chunks, low, high)
    if not 0 < k - sum(above) <= sum(part.numel() for part in inside):
        above, inside = _split(chunks, *_EVERYTHING)  # the sample misled
    wanted = k - sum(above)
    joined = torch.cat(inside)
    if joined.numel() < wanted:
        raise diverged()
    value = float(joined.kthvalue(joined.numel() - wanted + 1).values)
    greater = [count + int((part > value).count_nonzero()) for count, part in zip(above, inside, strict=True)]
    ties = [int((part == value).count_nonzero()) for part in inside]
    return _cuts(chunks, value, just_below(value, dtype), greater, ties, k - sum(greater))


def diverged() -> NonFiniteLossError:
    """The error of every rank, since all of them see the same scores."""
    return NonFiniteLossError("the scores hold NaN: the run has diverged; lower mask_scores_learning_rate")


def cut_at(values: Tensor, threshold: float, at_least: int) -> Cut:
    """Keep what is above `threshold`, but never fewer than the `at_least` largest."""
    threshold = float(torch.tensor(threshold, dtype=values.dtype))
    kept = int((values > threshold).count_nonzero())
    if kept >= at_least:
        return Cut(threshold, 0, kept)
    return select_largest(lambda: [values], [values.numel()], at_least)[0]


def ranks(values: Tensor) -> Tensor:
    """The place of each value, 0 for the largest and of equal ones for the first: int64, in the values' shape."""
    order = values.flatten().argsort(descending=True, stable=True)
    found = torch.empty_like(order)
    found[order] = torch.arange(len(order), device=order.device)
    return found.view(values.shape)


def recount(cut: Cut, values: Tensor) -> Cut:
    """The same cut with `kept` counted anew, for values that have changed since."""
    flat = values.flatten()
    ties = int((flat[: cut.ties_end] == cut.threshold).count_nonzero())
    return replace(cut, kept=int((flat > cut.threshold).count_nonzero()) + ties)


def just_below(value: float, dtype: torch.dtype) -> float:
    """The largest number of `dtype` under `value`: x > just_below(value) is x >= value."""
    if math.isinf(value):
        return value
    return float(torch.nextafter(torch.tensor(value, dtype=dtype), torch.tensor(-math.inf, dtype=dtype)))


def _bracket(chunks: Chunks, total: int, k: int) -> tuple[float, float, torch.dtype]:
    """Values such that (low, high] very likely holds the k-th largest, and the chunks' dtype."""
    stride = max(1, total // _SAMPLE) | 1  # odd, so that it does not fall in step with the width of a matrix
    parts = [chunk.detach().flatten()[::stride].clone() for chunk in chunks()]  # a view would keep the chunk alive
    sample = torch.cat(parts)
    dtype, count = sample.dtype, sample.numel()
    share = k / total
    slack = _SLACK * math.sqrt(count * share * (1 - share)) + 2
    first, last = (
        math.floor(share * count - slack),
        math.ceil(share * count + slack),
    )  # ranks from the largest
    sample = sample.float()
    high = float(sample.kthvalue(count - first + 1).values) if first >= 1 else math.inf
    low = float(sample.kthvalue(count - last + 1).values) if last <= count else -math.inf
    return just_below(low, dtype), high, dtype


def _split(chunks: Chunks, low: float, high: float) -> tuple[list[int], list[Tensor]]:
    """For each chunk, how many values are above `high`, and, as fp32, those in (low, high]."""
    above, inside = [], []
    for chunk in chunks():
        values = chunk.detach().flatten()
        over = values > high
        above.append(int(over.count_nonzero()))
        inside.append(values[(values > low).logical_and_(over.logical_not_())].float())
    return above, inside


def _cuts(chunks: Chunks, value: float, below: float, greater: list[int], ties: list[int], wanted: int) -> list[Cut]:
    """Share the `wanted` ties at `value` out to the chunks in order; `below` is the number just below it.

    The chunks are visited only if one of them keeps some of its ties and drops others.
    """
    cuts, partial = [], {}
    for index, (more, equal) in enumerate(zip(greater, ties, strict=True)):
        taken = min(equal, wanted)
        wanted -= taken
        cuts.append(Cut(below if taken == equal else value, 0, more + taken))
        if 0 < taken < equal:
            partial[index] = taken
    for index, chunk in enumerate(chunks() if partial else ()):
        if index in partial:
            at = (chunk.detach().flatten() == value).nonzero().flatten()
            cuts[index] = replace(cuts[index], ties_end=int(at[partial[index] - 1]) + 1)
    return cuts


def standardised(values: Sequence[Tensor]) -> list[Tensor]:
    """All chunks' values less their common mean, in units of their common standard deviation; fp64, on the CPU.

    Zeros where all are alike.
    """
    chunks = _sound(values)
    joined = torch.cat([chunk.flatten() for chunk in chunks])
    mean, deviation = joined.mean(), joined.std(correction=0)
    return [(chunk - mean) / deviation if deviation > 0 else torch.zeros_like(chunk) for chunk in chunks]


def largest_within(
    values: Sequence[Tensor], costs: Sequence[Tensor], sizes: Sequence[Sizes], budget: float
) -> list[Tensor]:
    """Take the largest of all chunks' values until what they cost is as near to `budget` as can be: bools, on the CPU.

    Costs have the values' shapes. The lowest number that a chunk's sizes allow is taken whatever the budget; of the
    rest only so many at a time as the multiple says, by their mean, and at the end what is left.
    """
    chunks = _sound(values)
    bundles = [_bundles(*each) for each in zip(chunks, costs, sizes, strict=True)]
    means, spent, certain = (torch.cat(parts) for parts in zip(*bundles, strict=True))
    order = means.masked_fill(certain, math.inf).argsort(descending=True, stable=True)
    taken = torch.empty(len(order), dtype=torch.bool)
    taken[order] = spent[order].cumsum(0) - spent[order] / 2 <= budget
    parts = (taken | certain).split([len(bundle[0]) for bundle in bundles])
    kept = [int(part.sum()) * size.multiple for part, size in zip(parts, sizes, strict=True)]
    return [ranks(chunk) < count for chunk, count in zip(chunks, kept, strict=True)]


def _sound(values: Sequence[Tensor]) -> list[Tensor]:
    """In fp64, on the CPU. RuntimeError where one is NaN."""
    chunks = [value.detach().double().cpu() for value in values]
    if any(bool(chunk.isnan().any()) for chunk in chunks):
        raise diverged()
    return chunks


def _bundles(values: Tensor, cost: Tensor, sizes: Sizes) -> tuple[Tensor, Tensor, Tensor]:
    """Of values that are taken together, largest first: their mean, their cost, and whether they are taken anyway."""
    order = values.flatten().argsort(descending=True, stable=True)
    missing = -len(order) % sizes.multiple
    sums, spent, counts = (
        F.pad(each, (0, missing)).view(-1, sizes.multiple).sum(1)
        for each in (values.flatten()[order], cost.flatten().double()[order], torch.ones(len(order)))
    )
    return sums / counts, spent, torch.arange(len(sums)) * sizes.multiple < sizes.lowest(len(order))
