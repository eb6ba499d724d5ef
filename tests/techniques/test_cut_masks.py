"""Pruning that starts from the zeros of a cut: `mask_init` "cut"."""

import pytest
import torch
from support.prune_phases import make_model, make_prune, run

from ds_trainer.models.layers import encoder_linears

CPU = torch.device("cpu")


def cut_model(shape=(1, 1)):
    """A model of which half of the weights of each matrix, or of the blocks of this shape, are zeros."""
    model, generator = make_model(), torch.Generator().manual_seed(2)
    with torch.no_grad():
        for linear in encoder_linears(model).values():
            rows, columns = linear.out_features // shape[0], linear.in_features // shape[1]
            zeros = torch.rand(rows * columns, generator=generator).argsort() < rows * columns // 2
            zeros = zeros.view(rows, columns).repeat_interleave(shape[0], 0).repeat_interleave(shape[1], 1)
            linear.weight[zeros] = 0
    return model


def zeros_of(model):
    return {name: linear.weight.detach() == 0 for name, linear in encoder_linears(model).items()}


@pytest.mark.parametrize("together", [False, True], ids=["each", "global"])
@pytest.mark.parametrize(("granularity", "shape"), [("weight", (1, 1)), ("block", (8, 8))])
def test_the_first_masks_are_the_zeros_of_the_model(granularity, shape, together):
    """At step 0 the model computes as it did, at its own density, and its zeros are those that a fold would leave."""
    model = cut_model(shape)
    before, zeros = run(model).detach(), zeros_of(model)
    prune = make_prune(mask_init="cut", granularity=granularity, block_shape=[8, 8], global_topk=together)
    model = prune.attach(model)
    prune.start(CPU)
    prune.on_step(0)
    torch.testing.assert_close(run(model), before)
    assert prune.readings()["prune/density"] == pytest.approx(0.5)
    folded = zeros_of(prune.fold(model))
    assert all(torch.equal(folded[name], zeros[name]) for name in zeros)


def test_masks_move_on_from_the_zeros():
    """Scores of kept weights that fall below those of zeros leave the mask, and zeros take their places."""
    model = cut_model()
    zeros = zeros_of(model)
    prune = make_prune(total=100, mask_init="cut", final_threshold=0.5)
    model = prune.attach(model)
    steps = torch.optim.Adam([layer.mask_scores for layer in prune.layers.values()], 1e-2)
    for step in range(40):
        prune.on_step(step)
        run(model).square().sum().backward()
        steps.step()
        steps.zero_grad()
    prune.on_step(40)
    folded = zeros_of(prune.fold(model.eval()))
    assert any((folded[name] & ~zeros[name]).any() for name in zeros)


def test_a_threshold_of_the_recipe_wins():
    """With `initial_threshold` the phase starts there; without, at the density of the model, and goes to the end's."""
    for spec, start in (({"initial_threshold": 0.4}, 0.4), ({}, pytest.approx(0.5))):
        prune = make_prune(mask_init="cut", final_threshold=0.2, **spec)
        prune.attach(cut_model())
        assert (prune.schedule(0), prune.threshold, prune.spec.initial_threshold) == (start, start, start)
        assert prune.schedule(10) == 0.2


@pytest.mark.parametrize("together", [False, True])
def test_what_cannot_start_from_a_cut_is_refused(together):
    """A model without zeros and, unless one threshold is for all, matrices that were cut to unequal shares.

    A rehearsal, which may be given a stand-in for a model that is cut later, does not refuse it.
    """
    unequal = cut_model()
    with torch.no_grad():
        next(iter(encoder_linears(unequal).values())).weight[:4] = 0
    for model, shares in ((make_model(), "100.0% to 100.0%"), (unequal, r"4\d\.\d% to 50\.0%")):
        prune = make_prune(mask_init="cut", global_topk=together)
        prune.attach(model)
        prune.rehearse(CPU)
        if model is unequal and together:
            prune.start(CPU)
        else:
            with pytest.raises(ValueError, match=f"keep {shares} of their weights: start from a cut, and set uniform"):
                prune.start(CPU)
