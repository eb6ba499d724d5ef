"""The prune technique on the library's own models."""

import logging
import re
from itertools import product

import pytest
import torch
from support.exhaustive import chosen
from support.prune_phases import FAMILIES, SMALL, make_model, make_prune
from torch import nn
from transformers.pytorch_utils import Conv1D

from ds_trainer.config.prune_specs import PruneSpec
from ds_trainer.models.layers import count_weights, encoder_layers, encoder_linears
from ds_trainer.tasks.losses import hard_concrete, score_penalty
from ds_trainer.tasks.task import Forward
from ds_trainer.techniques.prune import advice
from ds_trainer.techniques.prune.masked import MaskedLinear
from ds_trainer.techniques.prune.prune import Prune
from ds_trainer.techniques.technique import PhaseLength

GPT2 = {"n_embd": 32, "n_layer": 3, "n_head": 2, "n_positions": 16, "vocab_size": 64}
LINEARS_A_LAYER = {"modernbert": 4}


@pytest.mark.parametrize("family", FAMILIES)
def test_any_encoder_is_masked_trained_and_folded(family):
    """Only linear layers of the encoder are swapped; folding gives plain ones, the same logits and the asked zeros."""
    model = make_model(family)
    linears = encoder_linears(model)
    assert len(linears) == 3 * LINEARS_A_LAYER.get(family, 6)
    prune = make_prune(final_threshold=0.3, mask_init="kaiming")
    model = prune.attach(model)
    assert {name for name, m in model.named_modules() if isinstance(m, MaskedLinear)} == set(linears)
    prune.on_step(10)
    inputs = {"input_ids": torch.randint(3, 60, (2, 7)), "attention_mask": torch.ones(2, 7).long()}
    out = model(**inputs).logits
    out.sum().backward()
    assert all(layer.mask_scores.grad.abs().sum() > 0 for layer in prune.layers.values())
    folded = prune.fold(model)
    assert not any(isinstance(module, MaskedLinear) for module in folded.modules())
    assert type(folded.get_submodule(next(iter(linears)))) is nn.Linear
    torch.testing.assert_close(folded(**inputs).logits, out)
    for name in linears:
        weight = folded.get_submodule(name).weight
        assert int(weight.count_nonzero()) == round(0.3 * weight.numel())
    assert not any("mask_scores" in name for name in folded.state_dict())


def make_decoder(family: str) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    sizes = GPT2 if family == "gpt2" else SMALL
    config = AutoConfig.for_model(family, bos_token_id=1, eos_token_id=2, **sizes)
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize(("family", "a_layer", "plain"), [("gpt2", 4, Conv1D), ("llama", 7, nn.Linear)])
def test_a_decoder_is_pruned_to_a_plain_one(family, a_layer, plain, tmp_path):
    """The saved folder is the family's own, of the exact density in each matrix, and its logits are the masked ones."""
    from transformers import AutoModelForCausalLM

    model = make_decoder(family)
    linears = encoder_linears(model)
    assert len(encoder_layers(model)) == 3
    assert len(linears) == 3 * a_layer
    prune = make_prune(final_threshold=0.3, mask_init="kaiming")
    model = prune.attach(model)
    prune.on_step(10)
    inputs = {"input_ids": torch.randint(3, 60, (2, 7))}
    out = model(**inputs).logits
    out.square().sum().backward()
    assert all(layer.mask_scores.grad.abs().sum() > 0 for layer in prune.layers.values())
    prune.fold(model).save_pretrained(tmp_path)
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert type(reloaded) is type(model)
    assert {type(reloaded.get_submodule(name)) for name in linears} == {plain}
    torch.testing.assert_close(reloaded(**inputs).logits, out)
    layers = count_weights(reloaded)["layers"]
    assert set(layers) == set(linears)
    assert all(counts["kept"] == round(0.3 * counts["total"]) for counts in layers.values())


def test_every_step_keeps_exactly_the_scheduled_share():
    """Within 0.1% of each matrix at every step, in fp32 and bf16, from constant scores (all tied) on."""
    for dtype in (torch.float32, torch.bfloat16):
        model = make_model("bert").to(dtype)
        prune = make_prune(final_threshold=0.1)
        model = prune.attach(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for step in range(11):
            prune.on_step(step)
            model(input_ids=torch.randint(0, 60, (2, 5))).logits.float().square().sum().backward()
            for layer in prune.layers.values():
                scores = layer.scores()
                kept = layer.mask.times(torch.ones_like(scores), scores).float().sum() / scores.numel()
                assert abs(float(kept) - prune.threshold) <= 0.001 + 0.5 / scores.numel()
            assert prune.readings()["prune/density"] == pytest.approx(prune.threshold, abs=1e-3)
            optimizer.step()
            optimizer.zero_grad()


def test_patterns_choose_layers_and_never_heads():
    """A pattern picks what it matches; one that matches nothing, or only pooler or heads, is refused by name."""
    prune = make_prune(modules=["*.attention.self.query", "*.layer.2.output.dense"])
    prune.attach(make_model("bert"))
    assert sorted(prune.layers) == [f"bert.encoder.layer.{i}.attention.self.query" for i in range(3)] + [
        "bert.encoder.layer.2.output.dense"
    ]
    for pattern in ("*.quary", "classifier", "bert.pooler.dense", "*embeddings*"):
        with pytest.raises(ValueError, match=rf'"{pattern}" matches no linear layer'.replace("*", r"\*")):
            make_prune(modules=["*.query", pattern]).attach(make_model("bert"))


def test_global_topk_shares_one_threshold():
    """Over all layers together exactly the share is kept, and single layers differ from it."""
    prune = make_prune(final_threshold=0.2, global_topk=True, mask_init="uniform", mask_scale=1.0)
    model = prune.attach(make_model("bert"))
    with torch.no_grad():
        next(iter(prune.layers.values())).mask_scores.add_(2.0)
    prune.on_step(10)
    model(input_ids=torch.randint(0, 60, (2, 5)))
    readings = prune.readings()
    size = sum(layer.weight_size for layer in prune.layers.values())
    assert readings["prune/density"] == round(0.2 * size) / size
    densities = [value for name, value in readings.items() if name.startswith("prune/density/")]
    assert densities[0] == 1.0
    assert max(densities[1:]) < 0.2


def test_global_threshold_is_held_between_refreshes():
    """With a refresh every 4 steps the cut changes at 0, 4, 8 and at the phase's end only."""
    prune = make_prune(global_topk=True, global_topk_frequency_compute=4, mask_init="kaiming", final_threshold=0.1)
    prune.attach(make_model("bert"))
    masks = []
    for step in range(11):
        prune.on_step(step)
        masks.append(next(iter(prune.layers.values())).mask)
    changed = [step for step in range(1, 11) if masks[step] is not masks[step - 1]]
    assert changed == [4, 8, 10]


@pytest.mark.parametrize(("kind", "method"), [("l1", "sigmoied_threshold"), ("l0", "l0")])
def test_the_penalty_is_the_mean_over_layers_scaled_by_the_threshold(kind, method):
    """threshold / final_threshold x the mean penalty of the layers, from the closed form."""
    thresholds = {"initial_threshold": 0.0, "mask_init": "uniform", "mask_scale": 2.0}
    prune = make_prune(pruning_method=method, regularization=kind, **thresholds)
    model = prune.attach(make_model("bert"))
    prune.on_step(5)
    out = model(input_ids=torch.randint(0, 60, (2, 5)))
    term = prune.terms(Forward(None, out, 5))["prune.penalty"]
    penalties = [score_penalty(layer.mask_scores, kind) for layer in prune.layers.values()]
    ramp = prune.threshold / prune.spec.final_threshold
    assert 0 < ramp < 1
    torch.testing.assert_close(term, torch.stack(penalties).mean() * ramp)


def test_l0_penalty_is_the_chance_of_an_open_gate():
    """The closed form agrees with sampling: the share of gates above 0."""
    scores = torch.linspace(-3, 3, 7).repeat(40_000, 1)
    uniform = torch.rand(scores.shape, generator=torch.Generator().manual_seed(0)).clamp(1e-6, 1 - 1e-6)
    open_share = (hard_concrete(scores, uniform) > 0).float().mean()
    assert float(score_penalty(scores, "l0")) == pytest.approx(float(open_share), abs=3e-3)


def test_initial_scores():
    """constant is mask_scale, uniform lies within it, kaiming within 1/sqrt(fan in); the same on every rank."""
    layers = {}
    for init in ("constant", "uniform", "kaiming"):
        prune = make_prune(mask_init=init, mask_scale=0.5)
        prune.attach(make_model("bert"))
        layers[init] = next(iter(prune.layers.values())).mask_scores
    assert bool((layers["constant"] == 0.5).all())
    assert 0.45 < float(layers["uniform"].detach().abs().max()) <= 0.5
    assert 0.15 < float(layers["kaiming"].detach().abs().max()) <= 32**-0.5
    prune = make_prune(mask_init="kaiming")
    prune.attach(make_decoder("gpt2"))
    down = prune.layers["transformer.h.0.mlp.c_proj"].mask_scores  # (in 128, out 32)
    assert 0.9 * 128**-0.5 < float(down.detach().abs().max()) <= 128**-0.5
    torch.manual_seed(99)
    again = make_prune(mask_init="uniform", mask_scale=0.5)
    again.attach(make_model("bert"))
    assert torch.equal(next(iter(again.layers.values())).mask_scores, layers["uniform"])


def test_a_model_without_layers_is_refused():
    """The message says what was looked for."""
    with pytest.raises(ValueError, match="no list of equal layers"):
        encoder_layers(nn.Sequential(nn.Linear(2, 2)))


def steps_of(prune: Prune, model: nn.Module, steps: int, rate: float = 0.0) -> list[float]:
    """The density at each of so many steps; every score moves by `rate` against the sign of its gradient."""
    densities = []
    for step in range(steps):
        prune.on_step(step)
        model(input_ids=torch.randint(0, 60, (2, 5))).logits.square().sum().backward()
        densities.append(prune.readings()["prune/density"])
        for layer in prune.layers.values() if rate else ():
            layer.mask_scores.data -= rate * layer.mask_scores.grad.sign()
            layer.mask_scores.grad = None
    return densities


def jump_of(caplog) -> list[str]:
    return [record.message for record in caplog.records if "training should start" in record.message]


@pytest.fixture
def told(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("ds_trainer"), "propagate", True)
    return caplog


DENSE = ["topK", "magnitude", "threshold", "sigmoied_threshold", "l0"]


@pytest.mark.parametrize("granularity", chosen(["weight", "hybrid", "block"], lambda name: name != "block"))
@pytest.mark.parametrize("method", DENSE)
def test_the_defaults_of_every_method_start_dense(method, granularity, told):
    """All weights are kept while the threshold is held at its start, and by l0's gates each is let through by 0.98."""
    prune = make_prune(total=100, initial_warmup=4, pruning_method=method, granularity=granularity)
    prune = Prune(prune.spec, PhaseLength(100, 1, seed=3), task=None)
    model = prune.attach(make_model("bert"))
    rate = 0.0 if method == "magnitude" else prune.spec.mask_scores_learning_rate
    assert steps_of(prune, model, 4, rate) == [1.0] * 4
    assert jump_of(told) == []
    if method == "l0":
        assert float(hard_concrete(torch.tensor(prune.spec.mask_scale), None)) == pytest.approx(0.98, abs=1e-3)
        assert (prune.threshold / prune.spec.final_threshold, rate) == (1, 0.1)


@pytest.mark.parametrize(
    ("init", "method"),
    chosen(product(["uniform", "kaiming"], DENSE), lambda case: case[0] == "uniform" or "l0" in case),
)
def test_every_kind_of_scores_starts_dense_or_is_told(method, init, told):
    """Scores around 0 are dense where a share is kept, or a sigmoid is above 0; else half of them, which is told."""
    prune = make_prune(pruning_method=method, mask_init=init, total=1000)
    densities = steps_of(prune, prune.attach(make_model("bert")), 3)
    half = method in ("threshold", "l0")
    if method != "l0":
        assert densities[0] == pytest.approx(0.5 if half else 1.0, abs=0.02)
    assert len(jump_of(told)) == half
    assert not half or 'set mask_init to "constant"' in jump_of(told)[0]


@pytest.mark.parametrize(
    ("spec", "step", "way"),
    [
        ({"pruning_method": "threshold", "mask_scale": 0.0}, 0, "mask_scale above initial_threshold by many steps"),
        ({"pruning_method": "threshold", "mask_scale": 0.005}, 1, "mask_scale above initial_threshold by many steps"),
        ({"pruning_method": "sigmoied_threshold", "initial_threshold": 0.5}, 0, "lower initial_threshold"),
        (
            {"pruning_method": "l0", "mask_scale": 0.0},
            0,
            "the gates are open by 50.0%, and training should start with 100%",
        ),
        ({"pruning_method": "threshold", "mask_scale": 0.0, "granularity": "hybrid"}, 0, "the density is 0.0%"),
        ({"final_warmup": 1.0}, 0, "lower initial_warmup or final_warmup"),
    ],
)
def test_a_jump_at_the_first_steps_is_told_once(spec, step, way, told):
    """With the step, the density, and what to change; also where the scores cross the threshold in one step."""
    prune = make_prune(**spec)
    steps_of(prune, prune.attach(make_model("bert")), 4, rate=0.01)
    (message,) = jump_of(told)
    assert message.startswith(f"prune: at step {step} ")
    assert way in message


def test_a_start_as_the_recipe_says_is_no_jump(told):
    """A share of a half from the start is what was asked for; a schedule of few steps moves fast after the first."""
    for spec in ({"initial_threshold": 0.5}, {"total": 3}):
        prune = make_prune(**spec)
        model = prune.attach(make_model("bert"))
        for step in (0, 1, 1, 2):  # an evaluation between two steps
            prune.on_step(step)
            model(input_ids=torch.randint(0, 60, (2, 5)))
    assert jump_of(told) == []


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            {"granularity": "head", "final_threshold": 0.1},
            "of 50.0%, .* final_threshold .* 10.0%.*finer granularity",
        ),
        ({"pruning_method": "sigmoied_threshold"}, "of 100.0%, next to no pruning: set regularization"),
        ({"pruning_method": "l0", "regularization": "l0"}, "of 100.0%, next to no pruning: .* raise final_lambda"),
        (
            {"pruning_method": "l0", "regularization": "l0", "mask_scale": -3.0},
            "of 0.0%, next to nothing: lower final_lambda",
        ),
        ({"final_threshold": 0.1}, ""),
        ({"pruning_method": "l0", "mask_init": "uniform", "mask_scale": 5.0}, ""),
    ],
)
def test_an_end_far_from_the_recipe_is_told(spec, message, told):
    """Where a share is asked for, a fifth more or less; else, where nothing was pruned or nothing is left."""
    prune = make_prune(**spec)
    model = prune.attach(make_model("bert")).eval()
    for step in (5, 10):
        prune.on_step(step)
        model(input_ids=torch.randint(0, 60, (2, 5)))
    prune.fold(model)
    found = [record.message for record in told.records if "the run ends" in record.message]
    assert len(found) == bool(message)
    assert not found or re.search(message, found[0])


@pytest.mark.parametrize(
    ("travel", "spec", "warns"),
    [
        (0.21, {}, True),
        (0.39, {}, False),
        (0.1, {"pruning_method": "sigmoied_threshold"}, True),
        (0.1, {"pruning_method": "magnitude"}, False),
        (0.1, {"pruning_method": "l0"}, False),
        (0.1, {"train_weights": False}, False),
        (0.1, {"granularity": "hybrid"}, False),
    ],
)
def test_too_short_a_way_for_the_scores_of_single_weights_is_told(travel, spec, warns):
    """Magnitudes and gates, scores trained alone, and those of larger parts need less."""
    assert (advice.of_length(PruneSpec(**spec), 765, travel) is not None) == warns


def test_a_run_that_is_resumed_with_fewer_steps_exports_the_masks_of_its_scores():
    """A choice over all layers, held since step 8, is made anew at step 9 of 7."""
    spec = {"global_topk": True, "global_topk_frequency_compute": 4, "mask_init": "kaiming", "final_threshold": 0.1}
    longer, shorter = make_prune(total=10, **spec), make_prune(total=7, **spec)
    longer.attach(make_model("bert"))
    longer.on_step(8)
    model = shorter.attach(make_model("bert"))
    shorter.resume(longer.state())
    with torch.no_grad():
        for layer in shorter.layers.values():
            layer.mask_scores.neg_()
    shorter.on_step(9)
    scores = {name: layer.mask_scores.detach().clone() for name, layer in shorter.layers.items()}
    folded = shorter.fold(model)
    kept = torch.cat([folded.get_submodule(name).weight.flatten() != 0 for name in scores])
    order = torch.cat([values.flatten() for values in scores.values()]).argsort(descending=True, stable=True)
    assert kept.nonzero().flatten().tolist() == sorted(order[: round(0.1 * len(order))].tolist())
    assert shorter.readings()["prune/density"] == pytest.approx(0.1, abs=1e-4)


def test_a_run_that_is_resumed_with_fewer_steps_is_told_of_its_end(told):
    """The advice on a density far from the recipe comes at step 10 of 7, as it does at step 7."""
    prune = make_prune(total=7, pruning_method="sigmoied_threshold")
    model = prune.attach(make_model("bert")).eval()
    prune.on_step(10)
    prune.fold(model)
    assert "next to no pruning" in told.text
