"""Which scores a step's masks keep: in each layer, or by one choice over all layers; exactly, and without sorting them.

The k-th largest of many scores: a strided sample brackets it, one pass counts the values above the bracket and picks
out those inside it, and the right one of those few is the k-th largest of all (the idea of Floyd and Rivest's SELECT,
CACM 18(3), 1975). The values come in chunks, one for each layer, which are visited one after the other and never
joined: a threshold over all layers then needs no copy of all scores, and partitioned scores are gathered a chunk at a
time.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ds_trainer.models.layers import gathered
from ds_trainer.recipe.technique_specs import BY_SHARE, WHOLE_BLOCKS
from ds_trainer.techniques.prune.masked import (
    L0_KEPT_ABOVE,
    GateMask,
    HardMask,
    Mask,
    MaskedLinear,
    SoftMask,
    StepMask,
    diverged,
    just_below,
)
from ds_trainer.techniques.prune.sites import Site

Chunks = Callable[[], Iterable[Tensor]]

_SAMPLE = 8192
_SLACK = 4.0  # standard deviations of a sampled quantile: a random sample misses once in 10,000 searches
_LEAST_SHARE = 0.005  # a threshold keeps at least this share of a matrix's decisions; heads and neurons may all fall


def mask_of(scores: Tensor, site: Site, method: str, threshold: float, seed: int) -> Mask:
    """Return the mask of one layer for one step, by its scores alone; noise is drawn from `seed`.

    On a CPU the cutoff through the scores of single weights is found without a stored mask. A GPU would stand still at
    each of the comparisons that finding it takes: there bools are stored, as they are for decisions, which are few.
    """
    single, by_share, total = site.grain is None, method in BY_SHARE, scores.numel()
    if method == "l0":
        gates = scores > L0_KEPT_ABOVE
        return SoftMask(gates.count_nonzero() if single else gates, scores.isnan().any(), site.grain, seed)
    if by_share:
        count = max(1, round(threshold * total))  # half of a layer's only head is not nothing
    else:
        count = 0 if site.granularity in WHOLE_BLOCKS else math.ceil(_LEAST_SHARE * total)
    if method == "sigmoied_threshold":
        # comparing with the score whose sigmoid it is spares the sigmoid of every score
        threshold = float(torch.tensor(threshold, dtype=torch.float64).clamp(0, 1).logit())
    if not single or scores.is_cuda:
        gates = largest_on_device(scores, count)
        return GateMask(gates if by_share else gates | (scores > threshold), scores.isnan().any(), site.grain)
    if not by_share:
        threshold = float(torch.tensor(threshold, dtype=scores.dtype))
        kept = int((scores > threshold).count_nonzero())
        if kept >= count:
            return HardMask(threshold, 0, kept)
    return select_largest(lambda: [scores], [total], count)[0]


def mask_together(layers: Mapping[str, MaskedLinear], sites: Mapping[str, Site], share: float) -> None:
    """Mask all layers by one choice among the scores of all of them, so that the kept weights are the share.

    Gathers one layer after another: every rank takes part. Scores of several granularities are each standardised over
    all layers first. A score sums the movement of its decision's weights, and a head has a hundred times as many as a
    neuron: otherwise one kind would be kept whole before any decision of the other is.
    """

    def chunks() -> Iterator[Tensor]:
        for name, layer in layers.items():
            if layer.mask_scores is None and sites[name].grain:
                yield sites[name].magnitudes(layer.weight)
            else:
                with gathered(layer.weight if layer.mask_scores is None else layer.mask_scores):
                    yield layer.scores()

    if all(site.grain is None for site in sites.values()):
        sizes = [layer.weight_size for layer in layers.values()]
        masks = select_largest(chunks, sizes, max(1, round(share * sum(sizes))))
        for layer, mask in zip(layers.values(), masks, strict=True):
            layer.step_mask = StepMask(mask=mask)
        return
    scores = dict(zip(layers, [chunk.flatten().cpu().double() for chunk in chunks()], strict=True))
    if any(bool(values.isnan().any()) for values in scores.values()):
        raise diverged()  # a sort would call NaN the largest
    kinds = {site.granularity for site in sites.values()}
    for kind in kinds if len(kinds) > 1 else ():
        names = [name for name, site in sites.items() if site.granularity == kind]
        of_kind = torch.cat([scores[name] for name in names])
        mean, deviation = of_kind.mean(), of_kind.std(correction=0)
        for name in names:
            scores[name] = (scores[name] - mean) / deviation if deviation > 0 else torch.zeros_like(scores[name])
    order = torch.cat([*scores.values()]).argsort(descending=True, stable=True)
    weights = torch.cat([sites[name].sizes.flatten() for name in layers])[order].double()
    kept = torch.empty_like(order, dtype=torch.bool)
    # a decision that crosses the share is kept if at most half of its weights lie beyond
    kept[order] = weights.cumsum(0) - weights / 2 <= share * weights.sum()
    for name, gates in zip(layers, kept.split([len(values) for values in scores.values()]), strict=True):
        layers[name].step_mask = StepMask(mask=sites[name].gated(gates))


def select_largest(chunks: Chunks, sizes: Sequence[int], k: int) -> list[HardMask]:
    """Return, for each chunk, the mask that keeps exactly the `k` largest values over all chunks together.

    `chunks()` is called a few times and yields contiguous tensors of one floating dtype, of the given sizes, without
    NaN. Ties at the threshold are kept in memory order. `k` runs from 1 to sum(sizes).
    """
    if k == sum(sizes):
        return [HardMask(-math.inf, 0, size) for size in sizes]
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
    missing, masks, divided = k - sum(greater), [], {}
    for index, (more, part) in enumerate(zip(greater, inside, strict=True)):
        equal = int((part == value).count_nonzero())
        taken = min(equal, missing)
        missing -= taken
        masks.append(HardMask(just_below(value, dtype) if taken == equal else value, 0, more + taken))
        if 0 < taken < equal:
            divided[index] = taken
    # the one chunk that keeps some of its ties and drops others is visited again, to see where the last kept one lies
    for index, chunk in enumerate(chunks() if divided else ()):
        if index in divided:
            places = (chunk.detach().flatten() == value).nonzero().flatten()
            masks[index] = replace(masks[index], ties_end=int(places[divided[index] - 1]) + 1)
    return masks


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
