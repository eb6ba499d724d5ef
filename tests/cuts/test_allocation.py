"""How many heads and neurons each layer keeps under a budget for all layers."""

import copy
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.calibrated import answers_of, calibration
from support.zeroed import empty, model_of, uneven

from ds_trainer.cuts import allocation
from ds_trainer.cuts.allocation import Curve, Prices, allocate, cheapest_sizes
from ds_trainer.cuts.blocks import cut_places
from ds_trainer.cuts.cut import cut_model, outline
from ds_trainer.models.costs import encoder_flops
from ds_trainer.models.layers import layers_of, sizes_of
from ds_trainer.models.shrink import shrink
from ds_trainer.ranks.failures import UserError
from ds_trainer.recipe.cut_specs import CutSpec

GIVEN = calibration()


def seconds_of(model, *_):
    """What decisions and the encoder take, where a layer spends 3.6 ms of its 10 beside its heads and neurons."""
    heads, neurons = (sum(sizes) for sizes in sizes_of(model).values())
    return {"attention": 1e-3, "feed_forward": 1e-4}, 3 * 3.6e-3 + 1e-3 * heads + 1e-4 * neurons


@st.composite
def problems(draw):
    """Up to four blocks of up to five sizes, with losses that fall with the size, and a budget that fits the least."""
    curves, each = {}, {}
    for name in "abcd"[: draw(st.integers(1, 4))]:
        sizes = sorted(draw(st.sets(st.integers(0, 40), min_size=1, max_size=5)))
        losses = sorted(draw(st.lists(st.floats(0, 9), min_size=len(sizes), max_size=len(sizes))), reverse=True)
        curves[name], each[name] = Curve(np.array(sizes), np.array(losses)), draw(st.floats(1e-3, 1e3))
    least, most = (sum(curves[name].sizes[end] * each[name] for name in curves) for end in (0, -1))
    return curves, Prices(each, least + draw(st.floats(0, 1.2)) * (most - least), most)


@given(problem=problems())
@settings(max_examples=200, deadline=None)
def test_the_choice_is_the_best_of_all_combinations(problem):
    """It never exceeds the budget, and no combination within the budget, less its rounding, has less loss."""
    curves, prices = problem
    sizes_of_blocks = cheapest_sizes(curves, prices)
    chosen = [sizes_of_blocks[name] for name in curves]

    def cost(sizes):
        return sum(size * prices.each[name] for name, size in zip(curves, sizes, strict=True))

    table = [dict(zip(curve.sizes.tolist(), curve.losses.tolist(), strict=True)) for curve in curves.values()]
    least = cost([min(losses) for losses in table])
    rest = prices.budget - least
    loss = sum(losses[size] for losses, size in zip(table, chosen, strict=True))
    assert cost(chosen) <= prices.budget + 1e-9 * (abs(prices.budget) + 1)
    within = [sizes for sizes in product(*table) if cost(sizes) - least <= rest * (1 - len(curves) / 4096)]
    best = min((sum(map(dict.__getitem__, table, sizes)) for sizes in within), default=np.inf)
    assert loss <= best + 1e-9


def share_of_weights(model, dense) -> float:
    """How much of the weights in its blocks a model has kept."""
    small, whole = (
        sum(linear.weight.numel() for place in cut_places(each, CutSpec(keep=0.5)).values() for linear in place.linears)
        for each in (model, dense)
    )
    return small / whole


@pytest.mark.parametrize("family", ["bert", "llama", "gpt2", "deberta-v2", "modernbert"])
def test_a_share_of_the_weights_or_operations_is_kept(family):
    """At most the share, and within a few percent of it; layers differ."""
    dense, target = model_of(family), 0.97 if family == "deberta-v2" else 0.7
    small, records = cut_model(copy.deepcopy(dense), GIVEN, CutSpec(keep=0.5))
    assert 0.45 < share_of_weights(small, dense) <= 0.5
    assert len({record.kept for record in records}) > 1
    assert answers_of(small, GIVEN.inputs).isfinite().all()
    small, _ = cut_model(copy.deepcopy(dense), GIVEN, CutSpec(target_flops=target, cost_tokens=16))
    assert target - 0.06 < encoder_flops(small, 16) / encoder_flops(dense, 16) <= target


def test_a_target_of_seconds_is_met(monkeypatch):
    """By what was measured; of an encoder that was cut before, a share of what it takes now."""
    monkeypatch.setattr(allocation, "measured_seconds", seconds_of)
    whole = model_of("bert")
    for dense, target in ((whole, 0.6), (shrink(empty(copy.deepcopy(whole), uneven(whole))), 0.8)):
        small, _ = cut_model(copy.deepcopy(dense), GIVEN, CutSpec(target_latency=target))
        share = seconds_of(small)[1] / seconds_of(dense)[1]
        assert target - 0.05 < share <= target + 1e-9


def test_heads_that_must_stay_stay_and_may_cost_too_much():
    """Three of four in every layer; a target below them, and all that no cut removes, is told from the start."""
    model = model_of("bert")
    small, _ = cut_model(model, GIVEN, CutSpec(keep=0.6, min_heads=3))
    assert min(sizes_of(small)["heads"]) >= 3
    for made in (outline, lambda model, spec: cut_model(model, GIVEN, spec)):
        with pytest.raises(UserError, match=r"keep is 0\.3, .* cost 72\.7%: raise it, or lower min_heads \(now 9\)"):
            made(model_of("bert"), CutSpec(keep=0.3, min_heads=9))
        with pytest.raises(UserError, match=r"target_flops is 0\.1, .*: raise it"):
            made(model_of("deberta-v2"), CutSpec(target_flops=0.1))


@torch.no_grad()
def test_blocks_that_add_nothing_go_wholly():
    """The first layer's attention and the last one's feed-forward give nearly nothing: a small budget drops them."""
    model = model_of("bert")
    first, *_, last = layers_of(model).values()
    for outer in (first.attention.output.dense, last.output.dense):
        outer.weight.mul_(1e-4)
    small, _ = cut_model(model, GIVEN, CutSpec(keep=0.6))
    sizes = sizes_of(small)
    assert sizes["heads"][0] == sizes["neurons"][-1] == 0
    assert min(sizes["heads"][1:]) > 0


@pytest.mark.parametrize("method", ["obs", "magnitude"])
def test_the_model_is_as_before_after_its_sizes_were_chosen(method):
    """Bit by bit, while it was cut again and again to measure what that costs."""
    model = model_of("llama")
    before, spec = copy.deepcopy(model.state_dict()), CutSpec(keep=0.5, method=method)
    places = cut_places(model, spec)
    prices = Prices(dict.fromkeys(places, 1.0), 40.0, 84.0)
    counts = allocate(model, places, prices, GIVEN, spec)
    assert sum(prices.each[name] * count for name, count in counts.items()) <= 40
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
