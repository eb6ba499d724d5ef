"""What a recipe may ask of pruning, and what the message says where that cannot be."""

import pytest

from ds_trainer.recipe.recipe import parse_recipe
from ds_trainer.recipe.technique_specs import PruneSpec

HYBRID = {"attention": "head", "feed_forward": "neuron"}


def parse(**prune) -> PruneSpec:
    recipe = parse_recipe({"phases": [{"max_steps": 10, "techniques": {"prune": prune}}]})
    return recipe.phases[0].techniques.prune


def test_a_granularity_by_key():
    """One name is of all linear layers, or of the blocks that it goes with; an object stays as it is, in its order."""
    for granularity, choices in (
        ("block", {"*": "block"}),
        ("hybrid", HYBRID),
        ("head", {"attention": "head"}),
        ({"attention": "block", "*": "row"}, {"attention": "block", "*": "row"}),
    ):
        assert list(parse(granularity=granularity).choices.items()) == list(choices.items())


@pytest.mark.parametrize(
    ("prune", "told"),
    [
        ({"granularity": "heads"}, ["prune.granularity", '"heads"', "known are weight", "hybrid"]),
        ({"granularity": {"attention": "hybrid"}}, ["'hybrid'", "attention, feed_forward or name patterns"]),
        ({"granularity": {}}, ["known are weight", "not {}"]),
        ({"granularity": {"feed_forward": "head"}}, ["head goes with the key", '"attention"', '"feed_forward"']),
        ({"granularity": {"*.dense": "neuron"}}, ["neuron goes with the key", '"*.dense"']),
        ({"granularity": {"attention": "head", "*": "weight"}, "global_topk": True}, ["like with like", "head"]),
        ({"granularity": "block", "block_shape": [4]}, ["block_shape", "at least 2"]),
        ({"granularity": "block", "block_shape": [0, 4]}, ["block_shape", "greater than 0"]),
        ({"mask_init": "cut", "initial_threshold": None}, ['mask_init "cut" was removed in 0.3', "keep_zeros"]),
        ({"final_threshold": 0.0}, ["final_threshold is 0.0: topK takes the share to keep"]),
        ({"initial_threshold": 1.5, "pruning_method": "magnitude"}, ["initial_threshold is 1.5", "in (0, 1]"]),
        ({"granularity": {"attention": "2:4"}}, ["2:4 is a granularity of cuts"]),
        (
            {"granularity": {"feed_forward": "head"}, "pruning_method": "l0", "global_topk": True, "final_lambda": 1},
            ["head goes with", "global_topk goes with topK or magnitude, not with l0", "there is none"],
        ),
    ],
)
def test_what_cannot_be_is_told(prune, told):
    """All mistakes at once, each with what is allowed or what replaces it."""
    with pytest.raises(ValueError) as caught:
        parse(**prune)
    assert all(part in str(caught.value) for part in told), caught.value
