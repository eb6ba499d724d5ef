"""The cut through the scores: exact, in every dtype, whatever the values."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.exhaustive import exhaustive
from torch import Tensor

from ds_trainer.ranks.failures import NonFiniteLossError
from ds_trainer.techniques.prune.masks import CountedMask
from ds_trainer.techniques.prune.selection import (
    AllowedCounts,
    Cutoff,
    cutoff_at,
    just_below,
    largest_on_device,
    largest_within,
    select_largest,
    standardised,
)


def kept_by(cut: Cutoff, values: Tensor) -> Tensor:
    flat = values.flatten()
    kept = flat > cut.threshold
    kept[: cut.ties_end] |= flat[: cut.ties_end] == cut.threshold
    return kept


def check(chunks: list[Tensor], k: int) -> None:
    cuts = select_largest(lambda: chunks, [chunk.numel() for chunk in chunks], k)
    masks = [kept_by(cut, chunk) for cut, chunk in zip(cuts, chunks, strict=True)]
    assert [int(mask.sum()) for mask in masks] == [cut.kept for cut in cuts]
    joined, kept = torch.cat([chunk.flatten() for chunk in chunks]), torch.cat(masks)
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
    check([chunk.to(dtype) for chunk in chunks], round(share * sum(sizes)))


def test_a_misleading_sample_costs_time_but_not_exactness():
    """Where the strided sample sees only one value of two, the cut is still exact."""
    values = torch.zeros(100_000)
    values[1::2] = 1.0
    values[:: (100_000 // 8192) | 1] = 2.0
    check([values], 60_000)


def test_scores_as_wide_as_a_matrix_do_not_fall_in_step_with_the_sample():
    """Scores that depend on their column only are cut exactly."""
    check([torch.arange(384.0).repeat(1536, 1)], 12_345)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_threshold_keeps_its_minimum(dtype):
    """A threshold above every value still keeps the asked number of them, and one below keeps all."""
    values = torch.randn(1000, generator=torch.Generator().manual_seed(1)).to(dtype)
    assert int(kept_by(cutoff_at(values, 99.0, at_least=5), values).sum()) == 5
    assert cutoff_at(values, -99.0, at_least=5).kept == 1000
    middle = cutoff_at(values, 0.1, at_least=5)
    assert middle.kept == int((values > 0.1).sum())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_just_below_is_the_next_number_down(dtype):
    """Above just_below(x) is at or above x, and nothing lies between."""
    value = torch.tensor(0.15, dtype=dtype)
    below = just_below(float(value), dtype)
    assert below < float(value)
    assert float(torch.nextafter(torch.tensor(below, dtype=dtype), value)) == float(value)


@pytest.mark.parametrize("multiple", [1, 8])
@pytest.mark.parametrize("least", [0, 3])
@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 1.0])
def test_the_largest_within_a_budget(share, least, multiple):
    """As near to the budget as one bundle allows, but never fewer than the least of each chunk, in multiples or all."""
    generator = torch.Generator().manual_seed(3)
    values = [torch.randn(size, generator=generator) for size in (40, 20, 32)]
    values[1] -= 100
    costs = [torch.full_like(chunk, cost) for chunk, cost in zip(values, (1.0, 5.0, 2.0), strict=True)]
    sizes = AllowedCounts(least, multiple)
    gates = largest_within(values, costs, [sizes] * 3, share * 204)
    spent = sum(float(cost[gate].sum()) for cost, gate in zip(costs, gates, strict=True))
    lowest = sum(sizes.lowest(len(cost)) * float(cost[0]) for cost in costs)
    assert abs(spent - max(share * 204, lowest)) <= 5 * multiple
    for gate, chunk in zip(gates, values, strict=True):
        count = int(gate.sum())
        assert count >= least
        assert count % multiple == 0 or count == len(chunk)
        assert torch.equal(gate, chunk >= chunk.sort(descending=True).values[count - 1]) if count else not gate.any()


def test_values_are_standardised_over_all_chunks():
    """Mean 0 and deviation 1 together, in their order; zeros where all are alike."""
    values = [torch.tensor([1.0, 3.0]), torch.tensor([[5.0], [7.0]])]
    first, second = standardised(values)
    joined = torch.cat([first, second.flatten()])
    assert second.shape == (2, 1)
    torch.testing.assert_close(joined, torch.tensor([-3.0, -1.0, 1.0, 3.0], dtype=torch.float64) / 5**0.5)
    assert all(float(chunk.abs().max()) == 0 for chunk in standardised([torch.full((3,), 0.1), torch.full((2,), 0.1)]))


def test_nan_is_refused_not_ranked():
    """A sort would have it first."""
    values = [torch.tensor([1.0, torch.nan]), torch.ones(2)]
    for refuse in (
        lambda: CountedMask(largest_on_device(values[0], 1), 1).kept,
        lambda: standardised(values),
        lambda: largest_within(values, values, [AllowedCounts()] * 2, 1.0),
    ):
        with pytest.raises(NonFiniteLossError, match="the scores hold NaN"):
            refuse()
