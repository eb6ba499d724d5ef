"""Pruning that starts from the zeros of a cut: `mask_init` "cut"."""

import pytest
import torch
from support.prune_phases import make_model, make_prune

from ds_trainer.config.prune_specs import PruneSpec
from ds_trainer.models.layers import encoder_linears

INPUTS = {"input_ids": torch.arange(3, 17).view(2, 7)}


def cut_model(granularity="weight"):
    """A model half of whose matrices' weights, 8 x 8 blocks, or two of four weights, are zeros."""
    model, generator = make_model("bert"), torch.Generator().manual_seed(2)
    with torch.no_grad():
        for linear in encoder_linears(model).values():
            shape = {"weight": (1, 1), "2:4": (1, 1), "block": (8, 8)}[granularity]
            rows, columns = linear.out_features // shape[0], linear.in_features // shape[1]
            draws = torch.rand(rows, columns, generator=generator)
            draws = draws.view(-1, 4) if granularity == "2:4" else draws.view(1, -1)
            zeros = draws.argsort(1).argsort(1) < draws.shape[1] // 2
            linear.weight[zeros.view(rows, columns).repeat_interleave(shape[0], 0).repeat_interleave(shape[1], 1)] = 0
    return model


def zeros_of(model):
    return {name: linear.weight.detach() == 0 for name, linear in encoder_linears(model).items()}


@pytest.mark.parametrize("together", [False, True], ids=["each", "global"])
@pytest.mark.parametrize("granularity", ["weight", "block", "2:4"])
def test_the_first_masks_are_the_zeros_of_the_model(granularity, together):
    """At step 0 the model computes as it did, at its own density, and its zeros are those that a fold would leave."""
    if together and granularity == "2:4":
        return  # the spec refuses it
    model = cut_model(granularity)
    before, zeros = model(**INPUTS).logits.detach(), zeros_of(model)
    prune = make_prune(mask_init="cut", granularity=granularity, block_shape=[8, 8], global_topk=together)
    model = prune.attach(model)
    prune.start(torch.device("cpu"))
    prune.on_step(0)
    torch.testing.assert_close(model(**INPUTS).logits, before)
    assert prune.readings()["prune/density"] == pytest.approx(0.5)
    folded = zeros_of(prune.fold(model))
    assert all(torch.equal(folded[name], zeros[name]) for name in zeros)


def test_masks_move_on_from_the_zeros():
    """Scores of kept weights that fall below those of zeros leave the mask, and zeros take their places."""
    model = cut_model()
    zeros = zeros_of(model)
    prune = make_prune(total=100, mask_init="cut", final_threshold=0.5)
    model = prune.attach(model)
    prune.start(torch.device("cpu"))
    scores = [layer.mask_scores for layer in prune.layers.values()]
    steps = torch.optim.Adam(scores, 1e-2)
    for step in range(40):
        prune.on_step(step)
        model(**INPUTS).logits.square().sum().backward()
        steps.step()
        steps.zero_grad()
    prune.on_step(40)
    folded = zeros_of(prune.fold(model.eval()))
    assert any((folded[name] & ~zeros[name]).any() for name in zeros)


def test_a_threshold_of_the_recipe_wins():
    """With `initial_threshold` the phase starts there; without, at the density of the model, and goes to the end's."""
    given = make_prune(mask_init="cut", initial_threshold=0.4, final_threshold=0.2)
    read = make_prune(mask_init="cut", final_threshold=0.2)
    for prune in (given, read):
        prune.attach(cut_model())
        prune.start(torch.device("cpu"))
    assert [prune.schedule(0) for prune in (given, read)] == [0.4, pytest.approx(0.5)]
    assert [prune.schedule(10) for prune in (given, read)] == [0.2, 0.2]


def test_what_cannot_start_from_a_cut_is_refused():
    """A model without zeros, matrices cut to unequal shares, other methods, granularities, and a scale of 0."""
    prune = make_prune(mask_init="cut")
    prune.attach(make_model("bert"))
    with pytest.raises(ValueError, match="the model has no zeros: start from a cut"):
        prune.start(torch.device("cpu"))
    model = cut_model()
    with torch.no_grad():
        next(iter(encoder_linears(model).values())).weight[:4] = 0
    prune = make_prune(mask_init="cut")
    prune.attach(model)
    with pytest.raises(ValueError, match=r"of one matrix and 50\.0% of another: set global_topk, or uniform"):
        prune.start(torch.device("cpu"))
    for fields in ({"pruning_method": "magnitude"}, {"granularity": "hybrid"}, {"pruning_method": "l0"}):
        with pytest.raises(ValueError, match="mask_init cut goes with topK, and granularity weight, block or 2:4"):
            PruneSpec(mask_init="cut", **fields)
    with pytest.raises(ValueError, match="mask_init cut needs it above 0"):
        PruneSpec(mask_init="cut", mask_scale=0.0)


def test_a_recipe_that_a_run_has_written_is_read_again():
    """The resolved spec keeps null for the density that only the model knows."""
    spec = PruneSpec(mask_init="cut", final_threshold=0.1)
    assert PruneSpec(**spec.model_dump()) == spec
    assert (spec.initial_threshold, spec.mask_scale) == (None, 0.1)
