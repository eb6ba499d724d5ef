"""What a recipe may ask of pruning's grains, and what it is told where that cannot be."""

from __future__ import annotations

import pytest

from ds_trainer.config.recipe import PruneSpec, parse_recipe

HYBRID = {"attention": "head", "feed_forward": "neuron"}


def parse(**prune) -> PruneSpec:
    found = parse_recipe({"phases": [{"max_steps": 10, "techniques": {"prune": prune}}]})
    return found.phases[0].techniques.prune


@pytest.mark.parametrize(
    ("granularity", "choices"),
    [
        ("weight", {"*": "weight"}),
        ("block", {"*": "block"}),
        ("2:4", {"*": "2:4"}),
        ("hybrid", HYBRID),
        ("head", {"attention": "head"}),
        ("neuron", {"feed_forward": "neuron"}),
        ({"attention": "block", "*": "row"}, {"attention": "block", "*": "row"}),
    ],
)
def test_a_granularity_by_key(granularity, choices):
    """One name is of all linear layers, or of the blocks that it goes with; an object stays as it is, in its order."""
    assert list(parse(granularity=granularity).choices.items()) == list(choices.items())


def test_what_is_left_out():
    """Weights one by one; 2:4 keeps half, a target is the last value of the schedule; and all can be written back."""
    assert (parse().granularity, parse().block_shape) == ("weight", [32, 32])
    assert parse(granularity={"attention": "2:4", "*": "row"}).final_threshold == 0.5
    spec = parse(granularity="hybrid", target_flops=0.4)
    assert (spec.initial_threshold, spec.final_threshold, spec.target) == (1.0, 0.4, 0.4)
    assert parse(**spec.model_dump()) == spec


def test_a_target_on_a_recipe_that_was_written_back():
    """It has a final_threshold: one of its own target goes, another is told to be set to null, and then it goes."""
    targeted = parse(granularity="hybrid", target_latency=0.4).model_dump()
    assert parse(**targeted).final_threshold == 0.4
    dumped = parse(granularity="hybrid").model_dump() | {"target_flops": 0.5}
    with pytest.raises(ValueError, match=r"final_threshold, which is 0\.15: leave that out or, .* set it to null"):
        parse(**dumped)
    assert parse(**dumped | {"final_threshold": None}).final_threshold == 0.5
    assert parse(pruning_method="l0", initial_threshold=None, final_threshold=None) == parse(pruning_method="l0")


@pytest.mark.parametrize(
    ("prune", "told"),
    [
        ({"granularity": "heads"}, ["prune.granularity", "'heads'", "known are weight", "hybrid"]),
        ({"granularity": {"attention": "hybrid"}}, ["'hybrid'", "attention, feed_forward or name patterns"]),
        ({"granularity": {}}, ["no granularity"]),
        ({"granularity": {"feed_forward": "head"}}, ["head goes with the key", '"attention"', '"feed_forward"']),
        ({"granularity": {"*.dense": "neuron"}}, ["neuron goes with the key", '"*.dense"']),
        ({"granularity": "2:4", "final_threshold": 0.3}, ["0.3", "2:4 keeps half"]),
        ({"granularity": "2:4", "pruning_method": "threshold"}, ["2:4 goes with topK or magnitude", "threshold"]),
        ({"granularity": "2:4", "global_topk": True}, ["global_topk", "two of every four"]),
        ({"granularity": {"attention": "head", "*": "weight"}, "global_topk": True}, ["like with like", "head"]),
        ({"granularity": "block", "block_shape": [4]}, ["block_shape", "at least 2"]),
        ({"granularity": "block", "block_shape": [0, 4]}, ["block_shape", "greater than 0"]),
        ({"granularity": "row", "target_flops": 0.5}, ["target_flops", "heads and neurons"]),
        ({"granularity": "hybrid", "target_flops": 1.5}, ["target_flops", "1"]),
        ({"granularity": "hybrid", "target_flops": 0.5, "target_latency": 0.5}, ["both set", "keep one"]),
        ({"granularity": "hybrid", "target_flops": 0.5, "final_threshold": 0.4}, ["final_threshold, which is 0.4"]),
        ({"granularity": "hybrid", "target_latency": 0.5, "pruning_method": "l0"}, ["target_latency goes with topK"]),
        ({"uniform": True, "global_topk": True}, ["uniform", "global_topk"]),
        ({"granularity": "hybrid", "uniform": True, "target_flops": 0.5}, ["uniform", "target_flops"]),
        ({"granularity": "hybrid", "uniform": True, "pruning_method": "l0"}, ["uniform", "gates"]),
        ({"granularity": "hybrid", "min_heads": 1, "pruning_method": "l0"}, ["min_heads", "gates"]),
        ({"granularity": "hybrid", "multiple_of": 8, "pruning_method": "l0"}, ["multiple_of", "gates"]),
        ({"uniform": True, "pruning_method": "threshold"}, ["uniform", "larger grains"]),
        ({"granularity": "neuron", "min_heads": 1}, ["min_heads is 1", "hybrid"]),
        ({"granularity": "head", "multiple_of": 8}, ["multiple_of", '"head"']),
        ({"granularity": "neuron", "multiple_of": 12}, ["multiple_of", "1, 8, 16 or 64"]),
    ],
)
def test_what_cannot_be_is_told(prune, told):
    """Each message has what was found and what is allowed."""
    with pytest.raises(ValueError) as caught:
        parse(**prune)
    assert all(part in str(caught.value) for part in told), caught.value


def test_all_mistakes_are_told_at_once():
    """Of one object that is wrong in three ways, all three."""
    with pytest.raises(ValueError) as caught:
        parse(granularity={"feed_forward": "head"}, min_heads=2, uniform=True, pruning_method="l0", global_topk=True)
    assert all(part in str(caught.value) for part in ("head goes with", "global_topk goes with", "uniform keeps"))
