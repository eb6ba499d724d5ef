"""The mask of a layer's scores: exact, in every dtype, whatever the values."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.launching import exhaustive
from torch import Tensor, nn

from ds_trainer.ranks.failures import NonFiniteLossError
from ds_trainer.techniques.prune.masked import Grain, HardMask
from ds_trainer.techniques.prune.selection import largest_on_device, mask_of, select_largest
from ds_trainer.techniques.prune.sites import Site


def kept_by(mask, values: Tensor) -> Tensor:
    return mask.times(torch.ones_like(values), values) > 0


def check(chunks: list[Tensor], k: int) -> None:
    masks = select_largest(lambda: chunks, [chunk.numel() for chunk in chunks], k)
    gates = [kept_by(mask, chunk) for mask, chunk in zip(masks, chunks, strict=True)]
    assert [int(gate.sum()) for gate in gates] == [mask.kept for mask in masks]
    joined, kept = torch.cat([chunk.flatten() for chunk in chunks]), torch.cat([gate.flatten() for gate in gates])
    expected = torch.zeros_like(kept)
    expected[joined.sort(descending=True, stable=True).indices[:k]] = True
    assert torch.equal(kept, expected)
    if len(chunks) == 1:
        assert torch.equal(largest_on_device(chunks[0], k).flatten(), expected)


@settings(max_examples=150 if exhaustive() else 50, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 40_000), min_size=1, max_size=4),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    kind=st.sampled_from(["normal", "tied", "constant", "sorted", "outliers"]),
    share=st.floats(0, 1),
    seed=st.integers(0, 2**31),
)
def test_exactly_k_of_the_largest_are_kept(sizes, dtype, kind, share, seed):
    """Over one or many chunks, the first k of a stable sort are kept: of equal ones those that come first."""
    generator = torch.Generator().manual_seed(seed)
    chunks = [torch.randn(size, generator=generator) for size in sizes]
    if kind == "tied":
        chunks = [chunk.round() for chunk in chunks]
    elif kind == "constant":
        chunks = [torch.zeros_like(chunk) for chunk in chunks]
    elif kind == "sorted":
        chunks = [chunk.sort().values for chunk in chunks]
    elif kind == "outliers":
        chunks = [chunk**15 for chunk in chunks]
    check([chunk.to(dtype) for chunk in chunks], max(1, round(share * sum(sizes))))


def test_a_misleading_sample_costs_time_but_not_exactness():
    """The cut is exact where the strided sample sees one value of two, and where scores depend on their column only."""
    values = torch.zeros(100_000)
    values[1::2] = 1.0
    values[:: (100_000 // 8192) | 1] = 2.0
    check([values], 60_000)
    check([torch.arange(384.0).repeat(1536, 1)], 12_345)


def site_of(scores: Tensor, granularity: str) -> Site:
    linear = nn.Linear(3, len(scores)) if granularity != "weight" else nn.Linear(scores.shape[1], len(scores))
    grain = None if granularity == "weight" else Grain(len(scores), 3, 1, None)
    return Site(linear, granularity, grain, linear.weight.numel())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("granularity", ["weight", "row", "neuron"])
def test_a_threshold_keeps_what_is_above_and_half_a_percent_at_least(granularity, dtype):
    """Of ties the first in memory; only heads and neurons may all fall. A sigmoid is compared as its score."""
    scores = torch.randn(40, 50, generator=torch.Generator().manual_seed(3)).to(dtype)
    scores = scores if granularity == "weight" else scores.flatten()[:1000]
    site, least = site_of(scores, granularity), {"weight": 10, "row": 5, "neuron": 0}[granularity]

    def kept(method: str, threshold: float, values: Tensor = scores) -> Tensor:
        mask = mask_of(values, site, method, threshold, seed=0)
        gates = kept_by(mask, values) if granularity == "weight" else mask.open
        assert mask.kept == int(gates.sum()) * (1 if granularity == "weight" else 3)
        return gates

    assert torch.equal(kept("threshold", 0.1), scores > 0.1)
    assert torch.equal(kept("sigmoied_threshold", 0.6), scores > float(torch.tensor(0.6).logit()))
    assert bool(kept("sigmoied_threshold", -0.1).all())
    few = kept("threshold", 99.0)
    assert int(few.sum()) == least
    assert not least or scores[few].min() >= scores[~few].max()
    assert kept("threshold", 9.0, torch.zeros_like(scores)).flatten().nonzero().flatten().tolist() == [*range(least)]


@pytest.mark.parametrize("method", ["topK", "threshold", "l0"])
def test_nan_is_refused_not_ranked(method):
    """A sort would call it the largest; it is noticed where the decisions are read."""
    scores = torch.tensor([1.0, torch.nan, 0.0, -1.0])
    with pytest.raises(NonFiniteLossError, match="the scores hold NaN: the run has diverged"):
        assert mask_of(scores, site_of(scores, "row"), method, 0.5, seed=0).kept
    with pytest.raises(NonFiniteLossError, match="the scores hold NaN"):
        select_largest(lambda: [torch.tensor([1.0, torch.nan, 0.0, torch.nan])], [4], 3)
    assert not largest_on_device(scores, 1).any()
    assert isinstance(mask_of(torch.zeros(4, 3), site_of(torch.zeros(4, 3), "weight"), "topK", 0.5, 0), HardMask)
