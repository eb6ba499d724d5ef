"""The k-th largest of many scores, exactly and without sorting them.

A strided sample brackets the k-th largest value. One pass counts the values above the bracket and picks out those
inside it, and the right one of those few is the k-th largest of all (the idea of Floyd and Rivest's SELECT, CACM
18(3), 1975). The values come in chunks, one for each layer, which are visited one after the other and never joined: a
threshold over all layers then needs no copy of all scores, and partitioned scores are gathered a chunk at a time.
"""

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


@dataclass(frozen=True)
class Cutoff:
    """Keep the values above `threshold` and, among the first `ties_end` in memory order, also those equal to it."""

    threshold: float
    ties_end: int
    kept: int


@dataclass(frozen=True)
class AllowedCounts:
    """How many decisions a matrix or block may keep: at least `least`, and a multiple of `multiple`, or all."""

    least: int = 0
    multiple: int = 1

    def lowest(self, total: int) -> int:
        """The fewest of `total` decisions that may be kept."""
        return min(total, math.ceil(self.least / self.multiple) * self.multiple)

    def nearest(self, count: Tensor, total: int) -> Tensor:
        """The allowed count nearest to `count`, a scalar; at least one multiple unless `count` is 0."""
        rounded = (count + self.multiple // 2) // self.multiple * self.multiple
        some = rounded.clamp(min(self.multiple, total), total)
        kept = torch.where(count >= total, total, torch.where(count > 0, some, 0))
        return kept.clamp(min=self.lowest(total))


def select_largest(chunks: Chunks, sizes: Sequence[int], k: int) -> list[Cutoff]:
    """Return, for each chunk, the cutoff that keeps exactly the `k` largest values over all chunks together.

    `chunks()` is called a few times and yields contiguous tensors of one floating dtype, of the given sizes, without
    NaN. Ties at the threshold are kept in memory order. `k` runs from 0 to sum(sizes).
    """
    if k == 0:
        return [Cutoff(math.inf, 0, 0) for _ in sizes]
    if k == sum(sizes):
        return [Cutoff(-math.inf, size, size) for size in sizes]
    low, high, dtype = _bracket(chunks, sum(sizes), k)
    above, inside = _split(chunks, low, high)
    if not 0 < k - sum(above) <= sum(part.numel() for part in inside):
        above, inside = _split(chunks, -math.inf, math.inf)  # the sample misled: look at all values
    wanted = k - sum(above)
    joined = torch.cat(inside)
    if joined.numel() < wanted:
        raise diverged()
    value = float(joined.kthvalue(joined.numel() - wanted + 1).values)
    greater = [count + int((part > value).count_nonzero()) for count, part in zip(above, inside, strict=True)]
    ties = [int((part == value).count_nonzero()) for part in inside]
    missing, cutoffs, divided = k - sum(greater), [], {}
    for index, (more, equal) in enumerate(zip(greater, ties, strict=True)):
        taken = min(equal, missing)
        missing -= taken
        cutoffs.append(Cutoff(just_below(value, dtype) if taken == equal else value, 0, more + taken))
        if 0 < taken < equal:
            divided[index] = taken
    # the one chunk that keeps some of its ties and drops others is visited again, to see where the last kept one lies
    for index, chunk in enumerate(chunks() if divided else ()):
        if index in divided:
            places = (chunk.detach().flatten() == value).nonzero().flatten()
            cutoffs[index] = replace(cutoffs[index], ties_end=int(places[divided[index] - 1]) + 1)
    return cutoffs


def largest_on_device(values: Tensor, k: int) -> Tensor:
    """Mark the values that `select_largest` keeps of one chunk: bools, a byte each. Never waits for the device.

    Where a value is NaN, none is marked.
    """
    if not 0 < k < values.numel():
        return torch.full_like(values, k > 0, dtype=torch.bool)
    flat = values.detach().flatten()
    threshold = flat.topk(k, sorted=False).values.amin()
    above, ties = flat > threshold, flat == threshold
    first = ties.cumsum(0, dtype=torch.int32) <= k - above.sum()
    return (above | ties & first).view(values.shape)


def diverged() -> NonFiniteLossError:
    """Return the error to raise where scores hold NaN; every rank raises it, since all of them see the same scores."""
    return NonFiniteLossError("the scores hold NaN: the run has diverged; lower mask_scores_learning_rate")


def cutoff_at(values: Tensor, threshold: float, at_least: int) -> Cutoff:
    """Return the cutoff that keeps the values above `threshold`, but never fewer than the `at_least` largest."""
    threshold = float(torch.tensor(threshold, dtype=values.dtype))
    kept = int((values > threshold).count_nonzero())
    if kept >= at_least:
        return Cutoff(threshold, 0, kept)
    return select_largest(lambda: [values], [values.numel()], at_least)[0]


def ranks(values: Tensor) -> Tensor:
    """Number the values from 0 for the largest, and of equal ones for the first: int64, in the values' shape."""
    order = values.flatten().argsort(descending=True, stable=True)
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), device=order.device)
    return places.view(values.shape)


def just_below(value: float, dtype: torch.dtype) -> float:
    """Return the largest number of `dtype` below `value`: x > just_below(value) is x >= value."""
    if math.isinf(value):
        return value
    return float(torch.nextafter(torch.tensor(value, dtype=dtype), torch.tensor(-math.inf, dtype=dtype)))


def _bracket(chunks: Chunks, total: int, k: int) -> tuple[float, float, torch.dtype]:
    """Return values such that (low, high] very likely holds the k-th largest, and the chunks' dtype.

    The share of a random sample of n values that lies above the k-th of all has the mean p = k / total and the
    standard deviation sqrt(p (1 - p) / n): the bracket reaches `_SLACK` of these to both sides.
    """
    stride = max(1, total // _SAMPLE) | 1  # odd, so that it does not fall in step with the width of a matrix
    parts = [chunk.detach().flatten()[::stride].clone() for chunk in chunks()]  # a view would keep the chunk alive
    sample = torch.cat(parts)
    dtype, count = sample.dtype, sample.numel()
    share = k / total
    slack = _SLACK * math.sqrt(count * share * (1 - share)) + 2
    first, last = math.floor(share * count - slack), math.ceil(share * count + slack)  # places from the largest
    sample = sample.float()
    high = float(sample.kthvalue(count - first + 1).values) if first >= 1 else math.inf
    low = float(sample.kthvalue(count - last + 1).values) if last <= count else -math.inf
    return just_below(low, dtype), high, dtype


def _split(chunks: Chunks, low: float, high: float) -> tuple[list[int], list[Tensor]]:
    """Return for each chunk how many values are above `high` and, as fp32, the values in (low, high]."""
    above, inside = [], []
    for chunk in chunks():
        values = chunk.detach().flatten()
        over = values > high
        above.append(int(over.count_nonzero()))
        inside.append(values[(values > low).logical_and_(over.logical_not_())].float())
    return above, inside


def standardised(values: Sequence[Tensor]) -> list[Tensor]:
    """Subtract the common mean of all chunks and divide by their common standard deviation; fp64, on the CPU.

    Returns zeros where all values are equal.
    """
    chunks = _finite(values)
    joined = torch.cat([chunk.flatten() for chunk in chunks])
    mean, deviation = joined.mean(), joined.std(correction=0)
    return [(chunk - mean) / deviation if deviation > 0 else torch.zeros_like(chunk) for chunk in chunks]


def largest_within(
    values: Sequence[Tensor], costs: Sequence[Tensor], allowed: Sequence[AllowedCounts], budget: float
) -> list[Tensor]:
    """Take the largest values of all chunks until their cost is as near to `budget` as it can be: bools, on the CPU.

    Costs have the values' shapes. The lowest count that a chunk allows is taken whatever the budget. A chunk's other
    values are taken in bundles of its multiple, each in the order of its mean value.
    """
    chunks = _finite(values)
    bundles = [_bundles(*each) for each in zip(chunks, costs, allowed, strict=True)]
    means, spent, certain = (torch.cat(parts) for parts in zip(*bundles, strict=True))
    order = means.masked_fill(certain, math.inf).argsort(descending=True, stable=True)
    taken = torch.empty(len(order), dtype=torch.bool)
    # a bundle that crosses the budget is taken if at most half of it lies beyond
    taken[order] = spent[order].cumsum(0) - spent[order] / 2 <= budget
    parts = (taken | certain).split([len(bundle[0]) for bundle in bundles])
    counts = [int(part.sum()) * each.multiple for part, each in zip(parts, allowed, strict=True)]
    return [ranks(chunk) < count for chunk, count in zip(chunks, counts, strict=True)]


def _finite(values: Sequence[Tensor]) -> list[Tensor]:
    """Copy the values in fp64 to the CPU. NonFiniteLossError where one is NaN: a sort would call it the largest."""
    chunks = [value.detach().double().cpu() for value in values]
    if any(bool(chunk.isnan().any()) for chunk in chunks):
        raise diverged()
    return chunks


def _bundles(values: Tensor, cost: Tensor, allowed: AllowedCounts) -> tuple[Tensor, Tensor, Tensor]:
    """Return the mean and the cost of each bundle, largest values first, and whether it is taken in any case."""
    order = values.flatten().argsort(descending=True, stable=True)
    padding = -len(order) % allowed.multiple
    sums, spent, counts = (
        F.pad(each, (0, padding)).view(-1, allowed.multiple).sum(1)
        for each in (values.flatten()[order], cost.flatten().double()[order], torch.ones(len(order)))
    )
    return sums / counts, spent, torch.arange(len(sums)) * allowed.multiple < allowed.lowest(len(order))
