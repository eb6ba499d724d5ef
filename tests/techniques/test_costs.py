"""What decisions cost, measured: of a layer that is run, for a run and what it exports."""

import json
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from support.prune_phases import make_prune
from support.pruned_models import FAMILIES, kept_of, make_model, pruned, run
from torch.utils.flop_counter import FlopCounterMode

from ds_trainer.models.flops import decision_flops, encoder_flops
from ds_trainer.models.layer_seconds import LayerSeconds, layer_seconds
from ds_trainer.models.layers import blocks_of, decisions_of, layers_of
from ds_trainer.models.shrunk_model import shrunk_class
from ds_trainer.techniques.prune.costs import Costs, seconds_costs
from ds_trainer.techniques.prune.selection import AllowedCounts

CPU = torch.device("cpu")
MEASURED = LayerSeconds(10e-3, {"attention": 1e-3, "feed_forward": 1e-4}, {"attention": 4, "feed_forward": 48})
TARGET = {"target_latency": 0.5, "final_threshold": 0.5, "mask_init": "uniform", "mask_scale": 1.0}


@pytest.fixture
def by_operations(monkeypatch):
    """Measure once, by a clock of operations, of which every round takes as many."""
    monkeypatch.setattr("ds_trainer.models.layer_seconds.seconds", operations)
    monkeypatch.setattr("ds_trainer.models.layer_seconds._ROUNDS", 1)


def operations(call, device) -> float:
    """In the place of a call's seconds: as many as it takes floating-point operations."""
    with FlopCounterMode(display=False) as counter:
        call()
    return float(counter.get_total_flops())


@pytest.mark.parametrize("family", FAMILIES)
def test_a_layer_is_measured_whole_and_by_its_decisions(family, by_operations):
    """By a clock of operations: what is run is one layer, and what is put down to a decision is what it computes."""
    model = make_model(family)
    model.config._attn_implementation = "eager"
    found = layer_seconds(type(model.base_model), model.config, 16, CPU)
    layer = next(iter(layers_of(model).values()))
    counts = {block.kind: decisions_of(block, layer, model.config) for block in blocks_of(layer)}
    assert found.count == counts
    assert found.layer == pytest.approx(encoder_flops(model, 16) / 3, rel=0.02)
    for block in blocks_of(layer):
        assert found.decision[block.kind] == pytest.approx(decision_flops(block, layer, model.config, 16))


def test_a_class_that_resizes_is_measured_as_what_it_resizes(by_operations):
    """With a config that says sizes of three layers: one layer, whole."""
    plain = make_model().base_model
    whole = layer_seconds(type(plain), plain.config, 16, CPU)
    plain.config.shrunk = {"heads": [4, 0, 2], "neurons": [48, 24, 0]}
    assert layer_seconds(shrunk_class(type(plain)), plain.config, 16, CPU) == whole
    assert plain.config.shrunk["heads"] == [4, 0, 2]


def test_what_is_not_pruned_is_fixed():
    """Of three layers of which the heads are decided on: all else, and never less than nothing."""
    prune = make_prune(granularity="head", final_threshold=0.5)
    prune.attach(make_model())
    counted = Counter(layers=3, attention=12, feed_forward=144)
    costs = seconds_costs(MEASURED, counted, prune.sites)
    assert costs.fixed == pytest.approx(30e-3 - 12e-3)
    assert [cost.tolist() for cost in costs.each.values()] == [[1e-3] * 4] * 3
    noisy = LayerSeconds(1e-3, MEASURED.decision, MEASURED.count)
    assert seconds_costs(noisy, Counter(layers=3, attention=12), prune.sites).fixed == 0


def test_a_target_that_cannot_be_reached_is_told():
    """Less than what is fixed; or than that and the cheapest of what must be kept."""
    costs = Costs({"a": torch.tensor([3.0, 1.0]), "b": torch.tensor([2.0, 2.0])}, 2.0)
    sites = {name: SimpleNamespace(allowed=AllowedCounts(least=1), count=2) for name in "ab"}
    costs.check(0.5, "target_flops", sites)
    with pytest.raises(ValueError, match=r"target_flops is 0.4, and what must be kept is 0.500 of the encoder"):
        costs.check(0.4, "target_flops", sites)
    with pytest.raises(ValueError, match=r"target_flops is 0.1, and what must be kept is 0.200"):
        costs.check(0.1, "target_flops", {name: SimpleNamespace(allowed=AllowedCounts(), count=2) for name in "ab"})


def test_seconds_are_measured_once_for_a_run_and_what_it_exports(monkeypatch):
    """Costs go with the state: a resumed run and the exported model choose by the same, and do not measure."""
    taken = [MEASURED]
    monkeypatch.setattr("ds_trainer.techniques.prune.costs.layer_seconds", lambda *_: taken.pop())
    prune, model = pruned(**TARGET)
    run(model)
    kept = sum(kept_of(prune, "attention")) * 1e-3 + sum(kept_of(prune, "feed_forward")) * 1e-4
    fixed = 10e-3 - 4e-3 - 4.8e-3
    assert (kept / 3 + fixed) / 10e-3 == pytest.approx(0.5, abs=1e-3 / 30e-3)
    other = make_prune(granularity="hybrid", **TARGET)
    copy = other.attach(make_model())
    other.resume(json.loads(json.dumps(prune.state())))
    other.start(CPU)
    other.on_step(10)
    run(copy)
    assert kept_of(other, "prune") == kept_of(prune, "prune")
    assert other.state() == prune.state()


def test_a_measured_target_out_of_reach_is_told_before_training(monkeypatch):
    """Where the decisions take 5 of 10 ms, a tenth cannot be had."""
    slow = LayerSeconds(10e-3, {"attention": 1e-3, "feed_forward": 1e-5}, {"attention": 4, "feed_forward": 48})
    monkeypatch.setattr("ds_trainer.techniques.prune.costs.layer_seconds", lambda *_: slow)
    with pytest.raises(ValueError, match=r"target_latency is 0.1, and what must be kept is 0.552"):
        pruned(**TARGET | {"target_latency": 0.1, "final_threshold": 0.1})
