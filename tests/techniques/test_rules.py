"""What is chosen over all layers together: by scores that can be compared, within bounds, and held between choices."""

import pytest
import torch
from support.exhaustive import chosen
from support.prune_phases import make_prune
from support.pruned_models import NEURONS_ALONE, kept_of, make_model, pruned, run
from support.zero_matrix import ToyTask, batch_of, bert, phase_of
from torch import Tensor
from transformers import AutoModelForSequenceClassification

from ds_trainer.ranks.failures import NonFiniteLossError
from ds_trainer.tasks.task import Forward
from ds_trainer.techniques.registry import build_techniques
from ds_trainer.techniques.technique import PhaseLength


def test_a_global_choice_over_mixed_grains_counts_weights():
    """Blocks and neurons, each by how far above its kind's mean in its deviations, until the kept are the share."""
    prune, model = pruned(
        granularity=NEURONS_ALONE, block_shape=[16, 16], global_topk=True, mask_init="uniform", mask_scale=1.0
    )
    run(model)
    assert prune.readings()["prune/density"] == pytest.approx(0.5, abs=256 / (3 * (4 * 32**2 + 2 * 32 * 48)))
    found = []
    for granularity in ("block", "neuron"):
        layers = [layer for name, layer in prune.layers.items() if prune.sites[name].granularity == granularity]
        scores = torch.cat([layer.scores().flatten() for layer in layers]).double()
        found.append((scores - scores.mean()) / scores.std(correction=0))
        kept = torch.cat([layer.mask.open.flatten() for layer in layers])
        found[-1] = found[-1][kept], found[-1][~kept]
    assert min(kept.min() for kept, _ in found) > max(fallen.max() for _, fallen in found)
    alone, model = pruned(granularity="neuron", global_topk=True, final_threshold=0.25)
    run(model)
    assert sum(kept_of(alone, "feed_forward")) == 36


@pytest.mark.parametrize("spec", [{"target_flops": 0.5}, {"global_topk": True}])
@pytest.mark.parametrize("larger", ["attention", "feed_forward"])
def test_no_kind_is_emptied_for_one_of_larger_scores(larger, spec):
    """What is kept is the same where the scores of heads, or of neurons, are 1000 times as large and far from zero."""
    kept = []
    for scale in (1, 1000):
        prune = make_prune(granularity="hybrid", final_threshold=0.5, mask_init="uniform", mask_scale=1.0, **spec)
        model = prune.attach(make_model()).eval()
        for name, layer in prune.layers.items():
            if prune.sites[name].role == larger:
                layer.mask_scores.data.add_(scale - 1).mul_(scale)
        prune.on_step(10)
        run(model)
        kept.append([layer.mask.open.tolist() for layer in prune.layers.values()])
        for kind, whole in (("attention", 12), ("feed_forward", 144)):
            assert whole / 4 < sum(kept_of(prune, kind)) < whole
    assert kept[0] == kept[1]


@pytest.mark.parametrize("granularity", ["weight", "neuron"])
def test_a_threshold_is_compared_with_the_sigmoid_of_a_score(granularity):
    """By the method sigmoied_threshold, whether a score is of a weight or of more."""
    spec = {"pruning_method": "sigmoied_threshold", "mask_init": "uniform", "mask_scale": 5.0}
    prune, model = pruned(granularity=granularity, final_threshold=0.6, **spec)
    run(model)
    for layer in prune.layers.values():
        scores = layer.mask_scores.detach()
        passing = layer.mask.open if granularity == "neuron" else layer.mask.times(torch.ones_like(scores), scores) > 0
        assert torch.equal(passing, scores.sigmoid() > 0.6)


def test_one_kind_alone_is_chosen_by_its_scores():
    """Over all layers, with layers of larger scores kept more: nothing is standardised."""
    prune = make_prune(granularity="head", target_flops=0.8, final_threshold=0.8, mask_init="uniform", mask_scale=1.0)
    model = prune.attach(make_model()).eval()
    first, *others = prune.layers.values()
    first.mask_scores.data.add_(2)
    prune.on_step(10)
    run(model)
    scores = torch.cat([layer.mask_scores.detach() for layer in prune.layers.values()])
    kept = torch.cat([layer.mask.open for layer in prune.layers.values()])
    assert bool(first.mask.open.all())
    assert 0 < sum(int(layer.mask.open.sum()) for layer in others) < 8
    assert scores[kept].min() > scores[~kept].max()


@pytest.mark.parametrize("spec", [{"target_flops": 0.65, "final_threshold": 0.65}, {"global_topk": True}])
def test_a_choice_over_all_layers_keeps_min_heads(spec):
    """In every block, beside neurons of whatever scores, and also where these heads are more than the share."""
    spec = {"final_threshold": 0.05, "min_heads": 3, "mask_init": "uniform", "mask_scale": 1.0} | spec
    prune = make_prune(granularity="hybrid", **spec)
    model = prune.attach(make_model()).eval()
    for name, layer in prune.layers.items():
        if "layer.0.attention" in name:
            layer.mask_scores.data.sub_(100)
    prune.on_step(10)
    run(model)
    assert kept_of(prune, "attention")[0] == 3
    assert min(kept_of(prune, "attention")) >= 3
    if spec.get("target_flops"):
        assert prune.readings()["prune/flops"] == pytest.approx(0.65, abs=0.02)
    else:
        assert sum(kept_of(prune, "prune")) == 9


@pytest.mark.parametrize(
    "spec", [{}, {"pruning_method": "threshold", "final_threshold": 0.0}, {"global_topk": True}, {"target_flops": 0.5}]
)
def test_scores_that_are_nan_end_the_run(spec):
    """They are not taken for the largest: it is told where the decisions are read."""
    spec = {"granularity": "hybrid", "final_threshold": 0.5, "mask_init": "uniform", "mask_scale": 1.0} | spec
    prune = make_prune(**spec)
    model = prune.attach(make_model()).eval()
    next(iter(prune.layers.values())).mask_scores.data[0] = torch.nan

    def read() -> None:
        prune.on_step(10)
        run(model)
        prune.readings()

    with pytest.raises(NonFiniteLossError, match="the scores hold NaN: the run has diverged"):
        read()


def test_a_choice_over_all_layers_is_held_and_resumed():
    """Between refreshes the decisions stay, whatever the scores become, also in a run that goes on from its state."""
    spec = {"global_topk": True, "global_topk_frequency_compute": 4, "mask_init": "uniform", "mask_scale": 1.0}
    prune = make_prune(granularity="hybrid", final_threshold=0.5, **spec)
    model = prune.attach(make_model())
    prune.on_step(8)
    run(model)
    held = [layer.mask.open.clone() for layer in prune.layers.values()]
    other = make_prune(granularity="hybrid", final_threshold=0.5, **spec)
    copy = other.attach(make_model())
    other.resume(prune.state())
    with torch.no_grad():
        for layer in (*prune.layers.values(), *other.layers.values()):
            layer.mask_scores.mul_(-1)
    for each, its in ((prune, model), (other, copy)):
        each.on_step(9)
        run(its)
        assert all(torch.equal(a.mask.open, b) for a, b in zip(each.layers.values(), held, strict=True))
    prune.on_step(10)
    run(model)
    assert not all(torch.equal(a.mask.open, b) for a, b in zip(prune.layers.values(), held, strict=True))


def outputs(prune, model, step: int) -> tuple[Tensor, Tensor]:
    """The logits of an evaluation at this step, and those of its view at the final threshold; of its second batch."""
    prune.on_step(step)
    with torch.no_grad():
        for _ in range(2):
            own = run(model)
            view = prune.views(Forward(None, own, 0), lambda _: run(model))
    return own, view["final_threshold"]


VIEWED = {
    "topK": {},
    "magnitude": {"pruning_method": "magnitude"},
    "threshold": {"pruning_method": "threshold", "final_threshold": 0.4},
    "sigmoied": {"pruning_method": "sigmoied_threshold", "final_threshold": 0.6},
    "l0": {"pruning_method": "l0", "initial_threshold": 0.0},
    "2:4": {"granularity": "2:4", "final_threshold": 0.5},
    "row": {"granularity": "row"},
    "hybrid": {"granularity": "hybrid"},
    "hybrid magnitude": {"granularity": "hybrid", "pruning_method": "magnitude"},
    "uniform": {"granularity": "hybrid", "pruning_method": "threshold", "final_threshold": 0.4, "uniform": True},
    "global": {"global_topk": True, "global_topk_frequency_compute": 4},
    "global magnitude": {"global_topk": True, "global_topk_frequency_compute": 4, "pruning_method": "magnitude"},
    "global hybrid": {"global_topk": True, "global_topk_frequency_compute": 4, "granularity": "hybrid"},
    "flops": {
        "target_flops": 0.5,
        "final_threshold": 0.5,
        "global_topk_frequency_compute": 4,
        "granularity": "hybrid",
        "pruning_method": "magnitude",
    },
}


REPRESENTATIVES = ("topK", "l0", "2:4", "hybrid magnitude", "uniform", "global", "global hybrid", "flops")
"""Every way to make masks; the others differ in what a score is, or in the threshold that it is compared with."""


@pytest.mark.parametrize("name", chosen(VIEWED, REPRESENTATIVES.__contains__))
def test_the_view_at_the_final_threshold(name):
    """It is the model as its last step would have it; the model's own answers and all that trains it stay as they are.

    Also where a choice over all layers is held, in a run that goes on from its state, and where a stop ends the view.
    """
    spec = {"final_threshold": 0.3, "mask_init": "uniform", "mask_scale": 1.0, "schedule": "linear"} | VIEWED[name]
    plain = make_prune(**spec)
    model = plain.attach(make_model()).eval()
    prune = make_prune(evaluate_at_final_threshold=True, **spec)
    viewed = prune.attach(make_model()).eval()
    assert (prune.cheap_views, plain.cheap_views) == (True, False)
    assert plain.views(Forward(None, None, 0), None) == {}
    with torch.no_grad():
        for step in (0, 4, 5):  # a choice over all layers is held after step 4
            plain.on_step(step)
            own, view = outputs(prune, viewed, step)
            assert torch.equal(own, run(model))
        other = make_prune(evaluate_at_final_threshold=True, **spec)
        resumed = other.attach(make_model()).eval()
        other.resume(prune.state())
        assert [torch.equal(a, b) for a, b in zip(outputs(other, resumed, 5), (own, view), strict=True)] == [True, True]
        before = [layer.mask for layer in prune.layers.values()], prune.state()
        with pytest.raises(InterruptedError):
            prune.views(Forward(None, own, 0), stopped)
        assert all(layer.mask is mask for layer, mask in zip(prune.layers.values(), before[0], strict=True))
        assert (prune.state(), plain.state()) == (before[1], before[1])
        assert prune.readings() == plain.readings()
        plain.on_step(10)
        assert torch.equal(view, run(model))
        assert torch.equal(own, view) == (spec.get("pruning_method") == "l0")
        own, view = outputs(prune, viewed, 10)
        assert view is own


def stopped(_) -> None:
    raise InterruptedError


def test_exit_heads_are_asked_about_the_models_own_forward():
    """Their views are those of a phase without the one at the final threshold, which runs the layers once more."""
    phase = phase_of("all")
    logits = []
    for viewed in (False, True):
        torch.manual_seed(0)
        prune = phase.techniques.prune.model_copy(update={"evaluate_at_final_threshold": viewed})
        specs = phase.techniques.model_copy(update={"prune": prune, "distill": None})
        techniques = build_techniques(specs, PhaseLength(6, 1, seed=5), ToyTask())
        model = AutoModelForSequenceClassification.from_config(bert(num_hidden_layers=3)).eval()
        for technique in techniques:
            model = technique.attach(model)
            technique.on_step(1)
        batch = batch_of(0, 0, 0)
        with torch.no_grad():
            for _ in range(2):
                forward = Forward(batch, model(**batch.inputs), 0)
                views = {}
                for technique in techniques:
                    views |= technique.views(forward, lambda batch, model=model: model(**batch.inputs))
        assert ("final_threshold" in views) == viewed
        logits.append({name: view.logits for name, view in views.items()} | {"own": forward.out.logits})
    for name, values in logits[0].items():
        assert torch.equal(values, logits[1][name])
    assert not torch.equal(logits[1]["final_threshold"], logits[1]["own"])
