"""The prune technique on the library's own models, by weights, heads, neurons and other granularities."""

import logging
import re

import pytest
import torch
from support.launching import exhaustive
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.pytorch_utils import Conv1D

from ds_trainer.models.layers import count_weights, encoder_layers, encoder_linears, layers_of, sizes_of
from ds_trainer.models.shrink import shrink
from ds_trainer.models.shrunk_model import resize
from ds_trainer.ranks.failures import NonFiniteLossError
from ds_trainer.recipe.recipe import parse_recipe
from ds_trainer.recipe.technique_specs import PruneSpec
from ds_trainer.tasks.task import Forward
from ds_trainer.techniques.prune.masked import MaskedLinear, hard_concrete, score_penalty
from ds_trainer.techniques.prune.prune import KeepZeros, Prune
from ds_trainer.techniques.technique import PhaseLength

SMALL = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": 64}
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}
GROUPED = SMALL | {"num_key_value_heads": 2, "head_dim": 8}
FAMILIES = {
    "bert": SMALL,
    "distilbert": {"dim": 32, "n_layers": 3, "n_heads": 4, "hidden_dim": 48, "vocab_size": 64},
    "modernbert": SMALL | SPECIAL,
    "gpt2": {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_inner": 48, "n_positions": 32, "vocab_size": 64},
    "llama": GROUPED,
    "qwen3": GROUPED,
    "deberta-v2": SMALL | {"max_position_embeddings": 40},
}
if exhaustive():
    FAMILIES |= {"roberta": SMALL | {"max_position_embeddings": 40}, "electra": SMALL}
DECODERS = ("gpt2", "llama", "qwen3")
NEURONS_ALONE = {"attention": "block", "feed_forward": "neuron"}
UNIFORM = {"mask_init": "uniform", "mask_scale": 1.0}
METHODS = ["topK", "magnitude", "threshold", "sigmoied_threshold", "l0"]
GLOBAL = {"global_topk": True, "global_topk_frequency_compute": 4}


def make_model(family: str = "bert") -> nn.Module:
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **FAMILIES[family])
    model = (AutoModelForCausalLM if family in DECODERS else AutoModelForSequenceClassification).from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.1)
    return model.eval()


def run(model: nn.Module) -> Tensor:
    ids = torch.arange(18).view(2, 9) % 50 + 5
    return model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits


def make_prune(total: int = 10, **spec) -> Prune:
    return Prune(
        PruneSpec(**({"initial_warmup": 0, "final_warmup": 0} | spec)), PhaseLength(total, 0, seed=3), task=None
    )


def pruned(family: str = "bert", step: int = 10, **spec) -> tuple[Prune, nn.Module]:
    """The technique on a model, by default at its last step and for half of the heads and neurons, with that model."""
    prune = make_prune(**({"granularity": "hybrid", "final_threshold": 0.5, "mask_init": "kaiming"} | spec))
    model = prune.attach(make_model(family)).eval()
    prune.start(torch.device("cpu"))
    prune.on_step(step)
    return prune, model


def rows_of(linear: nn.Module, values: Tensor | None = None) -> Tensor:
    """The weight, or values of its shape, as (outputs, inputs)."""
    values = linear.weight if values is None else values
    return values.t() if isinstance(linear, Conv1D) else values


def kept_of(prune: Prune, kind: str) -> list[int]:
    return [int(value) for name, value in prune.readings().items() if name.startswith("prune/kept/") and kind in name]


@pytest.fixture
def told(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("ds_trainer"), "propagate", True)
    return caplog


@pytest.mark.parametrize("family", FAMILIES)
def test_any_model_is_masked_trained_and_folded(family, tmp_path):
    """Only linear layers of the encoder are swapped, and their scores learn.

    The saved folder is the family's own, of the exact density in each matrix, and its logits are the masked ones.
    """
    model = make_model(family)
    linears = {name: type(linear) for name, linear in encoder_linears(model).items()}
    a_layer = {"modernbert": 4, "gpt2": 4, "llama": 7, "qwen3": 7}.get(family, 6)
    assert (len(encoder_layers(model)), len(linears)) == (3, 3 * a_layer)
    prune = make_prune(final_threshold=0.3, mask_init="kaiming")
    model = prune.attach(model)
    assert {name for name, m in model.named_modules() if isinstance(m, MaskedLinear)} == set(linears)
    prune.on_step(10)
    out = run(model)
    out.square().sum().backward()
    assert all(layer.mask_scores.grad.abs().sum() > 0 for layer in prune.layers.values())
    prune.fold(model).save_pretrained(tmp_path)
    reloaded = type(model).from_pretrained(tmp_path).eval()
    assert {name: type(reloaded.get_submodule(name)) for name in linears} == linears
    torch.testing.assert_close(run(reloaded), out)
    counts = count_weights(reloaded)["layers"]
    assert set(counts) == set(linears)
    assert all(count["kept"] == round(0.3 * count["total"]) for count in counts.values())


@pytest.mark.parametrize("family", FAMILIES)
def test_heads_and_neurons_are_masked_and_folded(family):
    """The scores' gradient is that of gates on what enters the outer matrix, in plain autograd; what fell gets none in
    any inner matrix. The folded model is plain, computes the same, and has zeros in all matrices of what fell."""
    granularity = NEURONS_ALONE if family == "deberta-v2" else "hybrid"
    prune, model = pruned(family, granularity=granularity, block_shape=[5, 7], **UNIFORM)
    expected = run(model)
    expected.square().sum().backward()
    plain, gates = make_model(family), {}
    for name, layer in prune.layers.items():
        if prune.sites[name].inner:
            gates[name] = layer.mask.open.float().requires_grad_()
            width = layer.in_features // len(gates[name])
            plain.get_submodule(name).register_forward_pre_hook(
                lambda _, inputs, gate=gates[name], width=width: (inputs[0] * gate.repeat_interleave(width),)
            )
        else:  # DeBERTa's attention, in blocks
            plain.get_submodule(name).weight.data = layer.masked_weight().detach()
    run(plain).square().sum().backward()
    density, kept = prune.readings()["prune/density"], {name: gate.bool() for name, gate in gates.items()}
    for name, gate in gates.items():
        torch.testing.assert_close(prune.layers[name].mask_scores.grad, gate.grad, atol=1e-4, rtol=1e-4)
        for inner, linear in prune.sites[name].inner.items():
            torch.testing.assert_close(linear.weight.grad, plain.get_submodule(inner).weight.grad)
    folded = prune.fold(model)
    assert not any(isinstance(module, MaskedLinear) for module in folded.modules())
    torch.testing.assert_close(run(folded), expected, atol=1e-6, rtol=1e-5)
    counts = count_weights(folded)["encoder"]
    assert counts["kept"] / counts["total"] == pytest.approx(density, abs=1e-9)
    for name, open_gates in kept.items():
        assert not open_gates.all()
        for linear in map(folded.get_submodule, prune.sites[name].inner):
            for values in (rows_of(linear), rows_of(linear, linear.weight.grad), linear.bias):
                if values is not None:
                    parts = values.reshape(prune.sites[name].parts, len(open_gates), -1)
                    assert torch.equal((parts != 0).any(2).all(0), open_gates)


def test_gates_of_heads_and_neurons_are_folded():
    """Gates between 0 and 1 as they are at evaluation."""
    prune, model = pruned(pruning_method="l0", mask_init="uniform", mask_scale=5.0, final_threshold=1.0)
    with torch.no_grad():
        expected = run(model)
    density, folded = prune.readings()["prune/density"], prune.fold(model)
    torch.testing.assert_close(run(folded), expected, atol=1e-6, rtol=1e-5)
    counts = count_weights(folded)["encoder"]
    assert counts["kept"] / counts["total"] == pytest.approx(density, abs=1e-9) != 1


@pytest.mark.parametrize("together", [False, True])
def test_magnitudes_of_heads_are_over_all_matrices(together):
    """A head whose queries alone are large is kept: the root mean square is over query, key, value and output."""
    spec = {"granularity": "head", "pruning_method": "magnitude", "final_threshold": 0.25}
    prune, model = make_prune(global_topk=together, **spec), make_model()
    attention = layers_of(model)["bert.encoder.layer.1"].attention
    inner = [getattr(attention.self, name) for name in ("query", "key", "value")]
    with torch.no_grad():
        inner[0].weight[8:16] = 3.0
    parts = [*(linear.weight.view(4, -1) for linear in inner), attention.output.dense.weight.t().reshape(4, -1)]
    expected = torch.cat(parts, 1).square().mean(1).sqrt()
    prune.attach(model)
    prune.on_step(10)
    run(model)
    name = "bert.encoder.layer.1.attention.output.dense"
    torch.testing.assert_close(prune.sites[name].magnitudes(prune.layers[name].weight), expected)
    assert bool(prune.layers[name].mask.open[1])
    assert int(prune.layers[name].mask.open.sum()) == 1 or together


def test_keys_and_modules_choose_what_is_pruned():
    """The first key that matches decides; modules restrict it. Rows are outputs and columns inputs, in a Conv1D too."""
    keys = {"attention": "block", "*.layer.0.*": "row", "*.output.dense": "column"}
    prune, _ = pruned(granularity=keys, block_shape=[16, 16])
    chosen = {name.removeprefix("bert.encoder.layer."): site.granularity for name, site in prune.sites.items()}
    assert chosen["0.attention.output.dense"] == chosen["2.attention.self.key"] == "block"
    assert chosen["0.intermediate.dense"] == chosen["0.output.dense"] == "row"
    assert chosen["1.output.dense"] == "column"
    assert "1.intermediate.dense" not in chosen
    blocks, _ = pruned(modules=["*.layer.1.*", "*.layer.0.attention.*"])
    outer = ["0.attention.output.dense", "1.attention.output.dense", "1.output.dense"]
    assert list(blocks.layers) == [f"bert.encoder.layer.{name}" for name in outer]
    shapes = {"row": (32,), "column": (48,), "block": (2, 3)}  # of an outer matrix of 48 inputs and 32 outputs
    for family, name in (("gpt2", "transformer.h.0.mlp.c_proj"), ("bert", "bert.encoder.layer.0.output.dense")):
        for granularity, shape in shapes.items():
            prune, _ = pruned(family, granularity=granularity, block_shape=[16, 16])
            assert prune.layers[name].mask_scores.shape == shape
    with pytest.raises(ValueError, match='"classifier" matches no linear layer'):  # nor is it one of the encoder
        pruned(granularity="weight", modules=["*.query", "classifier"])


@pytest.mark.parametrize(
    ("family", "granularity", "modules", "message"),
    [
        ("deberta-v2", "hybrid", None, '"attention" prunes nothing of Deberta.* by head.* choose block, row'),
        ("bert", {"*.quary": "row"}, None, r'"\*\.quary" prunes nothing of Bert'),
        ("bert", "head", ["*.query"], r"takes bert.*layer\.0\.attention\.self\.key, .* out"),
        ("bert", {"*.query": "block", "attention": "head"}, None, "head is of all matrices"),
    ],
)
def test_what_cannot_be_done_on_a_model_is_refused(family, granularity, modules, message):
    """With the key of the granularity, the model, and what can be chosen."""
    with pytest.raises(ValueError, match=message):
        make_prune(granularity=granularity, modules=modules).attach(make_model(family))


def test_every_step_keeps_exactly_the_scheduled_share():
    """Within 0.1% of each matrix at every step, from constant scores (all tied) on, in bf16."""
    prune = make_prune(final_threshold=0.1)
    model = prune.attach(make_model().bfloat16())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(11):
        prune.on_step(step)
        run(model).float().square().sum().backward()
        densities = [value for name, value in prune.readings().items() if name.startswith("prune/density")]
        assert densities == pytest.approx([prune.threshold] * len(densities), abs=1e-3)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(("groups", "share"), [(1, 0.5), (4, 0.1)])
def test_heads_that_share_a_key_and_value_fall_together(groups, share, monkeypatch):
    """A decision is a group of heads with its key and value, and of a share of few of them one at least is kept."""
    monkeypatch.setitem(FAMILIES, "llama", GROUPED | {"num_key_value_heads": groups})
    prune, model = pruned("llama", granularity="head", final_threshold=share)
    assert [layer.mask_scores.shape for layer in prune.layers.values()] == [(groups,)] * 3
    run(model)
    assert kept_of(prune, "attention") == [1] * 3
    attention = layers_of(prune.fold(model))["model.layers.0"].self_attn
    rows = [int((linear.weight != 0).any(1).sum()) for linear in (attention.q_proj, attention.k_proj)]
    assert rows == [32 // groups, 8]


def test_what_is_already_shrunk_is_pruned_further():
    """Emptied blocks have no decisions, the others those that they have left; folded and cut it computes the same."""
    model = make_model()
    model.config.shrunk = {"heads": [4, 0, 2], "neurons": [48, 24, 0]}
    resize(model, model.config.shrunk)
    prune = make_prune(granularity="hybrid", final_threshold=0.5, mask_init="kaiming")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.1)
        model = prune.attach(model).eval()
        prune.on_step(10)
        expected = run(model)
        assert kept_of(prune, "prune") == [2, 24, 12, 1]
        folded = prune.fold(model)
        torch.testing.assert_close(run(folded), expected, atol=1e-6, rtol=1e-5)
        cut = shrink(folded)
        torch.testing.assert_close(run(cut), expected, atol=1e-6, rtol=1e-5)
    assert sizes_of(cut) == {"heads": [2, 0, 1], "neurons": [24, 12, 0]}


def test_static_pruning_trains_scores_alone():
    """With train_weights false all but the scores is frozen; with magnitude no score exists."""
    prune, model = pruned(train_weights=False)
    scores, frozen = prune.parameter_rules(model)
    assert (scores.params, scores.learning_rate, scores.weight_decay) == ("*.mask_scores", 1e-2, 0.0)
    assert (frozen.params, frozen.frozen) == ("*", True)
    prune, model = pruned(pruning_method="magnitude")
    assert prune.parameter_rules(model) == ()


@pytest.mark.parametrize(("kind", "method"), [("l1", "sigmoied_threshold"), ("l0", "l0")])
def test_the_penalty_is_the_mean_over_layers_scaled_by_the_threshold(kind, method):
    """threshold / final_threshold x the mean penalty of the layers, from the closed form."""
    thresholds = {"initial_threshold": 0.0, "mask_init": "uniform", "mask_scale": 2.0}
    prune = make_prune(pruning_method=method, regularization=kind, **thresholds)
    model = prune.attach(make_model())
    prune.on_step(5)
    term = prune.terms(Forward(None, run(model), 5))["prune.penalty"]
    penalties = [score_penalty(layer.mask_scores, kind) for layer in prune.layers.values()]
    ramp = prune.threshold / prune.spec.final_threshold
    assert 0 < ramp < 1
    torch.testing.assert_close(term, torch.stack(penalties).mean() * ramp)


def test_initial_scores():
    """constant is mask_scale, uniform lies within it, kaiming within 1/sqrt(fan in); the same on every rank."""
    scores = {}
    for init in ("constant", "uniform", "kaiming", "uniform"):
        torch.manual_seed(len(scores))
        prune = make_prune(mask_init=init, mask_scale=0.5)
        prune.attach(make_model("gpt2"))
        values = prune.layers["transformer.h.0.mlp.c_proj"].mask_scores.detach()  # of 48 inputs and 32 outputs
        assert init not in scores or torch.equal(scores[init], values)
        assert not torch.equal(values, prune.layers["transformer.h.1.mlp.c_proj"].mask_scores) or init == "constant"
        scores[init] = values
    assert bool((scores["constant"] == 0.5).all())
    assert 0.4 < float(scores["uniform"].abs().max()) <= 0.5
    assert float(scores["uniform"].min()) < -0.4
    assert 0.8 * 48**-0.5 < float(scores["kaiming"].abs().max()) <= 48**-0.5


def test_global_topk_shares_one_threshold():
    """Over all layers together exactly the share is kept, and layers of larger scores keep more."""
    prune, model = pruned(granularity="weight", final_threshold=0.2, global_topk=True, **UNIFORM)
    next(iter(prune.layers.values())).mask_scores.data.add_(2.0)
    prune.on_step(10)
    run(model)
    readings, size = prune.readings(), sum(layer.weight_size for layer in prune.layers.values())
    assert readings["prune/density"] == round(0.2 * size) / size
    first, *others = (value for name, value in readings.items() if name.startswith("prune/density/"))
    assert (first, max(others) < 0.2) == (1.0, True)


def test_a_global_choice_over_mixed_granularities_counts_weights():
    """Blocks and neurons, each by how far above its kind's mean in its deviations, until the kept are the share."""
    prune, model = pruned(granularity=NEURONS_ALONE, block_shape=[16, 16], global_topk=True, **UNIFORM)
    for name, site in prune.sites.items():
        prune.layers[name].mask_scores.data.mul_(10.0 if site.granularity == "block" else 1.0)
    prune.on_step(10)
    run(model)
    assert prune.readings()["prune/density"] == pytest.approx(0.5, abs=128 / (3 * (4 * 32**2 + 2 * 32 * 48)))
    standardised = []
    for granularity in ("block", "neuron"):
        layers = [layer for name, layer in prune.layers.items() if prune.sites[name].granularity == granularity]
        scores = torch.cat([layer.scores().flatten() for layer in layers]).double()
        scores = (scores - scores.mean()) / scores.std(correction=0)
        kept = torch.cat([layer.mask.open.flatten() for layer in layers])
        standardised.append((scores[kept], scores[~kept]))
    assert min(kept.min() for kept, _ in standardised) > max(fallen.max() for _, fallen in standardised)
    alone, model = pruned(granularity="neuron", global_topk=True, final_threshold=0.25)
    run(model)
    scores = torch.cat([layer.scores() for layer in alone.layers.values()])
    assert torch.equal(torch.cat([layer.mask.open for layer in alone.layers.values()]), scores > scores.sort()[0][107])


def test_a_global_choice_divides_by_no_deviation_of_0_and_refuses_nan():
    """Where all scores of both kinds are equal, the first are kept; a sort would call NaN the largest."""
    prune, model = pruned(global_topk=True, mask_init="constant", mask_scale=0.1)
    run(model)
    assert prune.readings()["prune/density"] == pytest.approx(0.5, abs=0.05)
    next(iter(prune.layers.values())).mask_scores.data[0] = torch.nan
    with pytest.raises(NonFiniteLossError, match="the scores hold NaN"):
        prune.on_step(10)


@pytest.mark.parametrize("granularity", ["weight", "hybrid"])
def test_a_choice_over_all_layers_is_held_and_resumed(granularity):
    """It changes at steps 0, 4, 8 and at the end only, also in a run that goes on from its state.

    Of weights the threshold is held, of decisions what is kept. A run that is resumed with fewer steps chooses anew.
    """
    spec = {"granularity": granularity, "mask_init": "kaiming", "final_threshold": 0.1, **GLOBAL}
    prune = make_prune(**spec)
    prune.attach(make_model())
    masks = []
    for step in range(11):
        prune.on_step(step)
        masks.append(next(iter(prune.layers.values())).mask)
        if step == 8:
            state = prune.state()
    assert [step for step in range(1, 11) if masks[step] is not masks[step - 1]] == [4, 8, 10]
    other, shorter = make_prune(**spec), make_prune(total=7, **spec)
    for each in (other, shorter):
        each.attach(make_model())
        each.resume(state)
        for layer in each.layers.values():
            layer.mask_scores.data.neg_()
        each.on_step(9)
    assert other.state() == state != shorter.state()


VIEWED = {
    "l0": {"pruning_method": "l0", "initial_threshold": 0.0},
    "magnitude": {"granularity": "hybrid", "pruning_method": "magnitude"},
    "global": GLOBAL,
}


def outputs(prune: Prune, model: nn.Module, step: int) -> tuple[Tensor, Tensor]:
    """The logits of an evaluation at this step, and those of its view at the final threshold; of its second batch."""
    prune.on_step(step)
    with torch.no_grad():
        for _ in range(2):
            logits = run(model)
            view = prune.views(Forward(None, logits, 0), lambda _: run(model))
    return logits, view["final_threshold"]


def stopped(_) -> None:
    raise InterruptedError


@pytest.mark.parametrize("name", VIEWED)
def test_the_view_at_the_final_threshold(name):
    """It is the model as its last step would have it; the model's own answers and all that trains it stay as they are.

    Also where a choice over all layers is held, and where a stop ends the view.
    """
    spec = {"final_threshold": 0.3, "schedule": "linear"} | UNIFORM | VIEWED[name]
    plain = make_prune(**spec)
    model = plain.attach(make_model()).eval()
    prune = make_prune(evaluate_at_final_threshold=True, **spec)
    viewed = prune.attach(make_model()).eval()
    assert (prune.cheap_views, plain.cheap_views) == (True, False)
    assert plain.views(Forward(None, None, 0), None) == {}
    with torch.no_grad():
        for step in (0, 4, 5):  # a choice over all layers is held after step 4
            plain.on_step(step)
            logits, view = outputs(prune, viewed, step)
            assert torch.equal(logits, run(model))
        before = [layer.mask for layer in prune.layers.values()], prune.state()
        with pytest.raises(InterruptedError):
            prune.views(Forward(None, logits, 0), stopped)
        assert all(layer.mask is mask for layer, mask in zip(prune.layers.values(), before[0], strict=True))
        assert (prune.state(), plain.state()) == (before[1], before[1])
        assert prune.readings() == plain.readings()
        plain.on_step(10)
        assert torch.equal(view, run(model))
        assert torch.equal(logits, view) == (spec.get("pruning_method") == "l0")
        logits, view = outputs(prune, viewed, 10)
        assert view is logits


@pytest.mark.parametrize("granularity", ["weight", "hybrid"])
@pytest.mark.parametrize("method", METHODS)
def test_the_defaults_of_every_method_start_dense(method, granularity):
    """All weights are kept while the threshold is held at its start, whichever way the scores move at their rate, and
    by l0's gates each is let through by 0.98."""
    spec = PruneSpec(initial_warmup=4, final_warmup=0, pruning_method=method, granularity=granularity)
    prune = Prune(spec, PhaseLength(100, 1, seed=3), task=None)
    model = prune.attach(make_model())
    for step in range(4):
        prune.on_step(step)
        run(model).square().sum().backward()
        assert prune.readings()["prune/density"] == 1.0
        for layer in prune.layers.values() if method != "magnitude" else ():
            layer.mask_scores.data -= spec.mask_scores_learning_rate * layer.mask_scores.grad.sign()
    if method == "l0":
        assert float(hard_concrete(torch.tensor(spec.mask_scale), None)) == pytest.approx(0.98, abs=1e-3)
        assert (prune.threshold / spec.final_threshold, spec.mask_scores_learning_rate) == (1, 0.1)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"granularity": "head", "final_threshold": 0.1}, "of 25.0%, .* final_threshold is 10.0%.*finer granularity"),
        ({"pruning_method": "sigmoied_threshold", "total": 7}, "of 100.0%, next to no pruning: set regularization"),
        ({"pruning_method": "l0", "mask_scale": -3.0}, "of 0.0%, next to nothing: lower final_lambda"),
        ({"final_threshold": 0.1}, None),
    ],
)
def test_an_end_far_from_the_recipe_is_told(spec, message, told):
    """Where a share is asked for, a fifth more or less; else, where nothing was pruned or nothing is left.

    Also of a run that is resumed with fewer steps than it has taken, at step 10 of 7.
    """
    prune = make_prune(**spec)
    model = prune.attach(make_model()).eval()
    for step in (5, 10):
        prune.on_step(step)
        run(model)
    prune.fold(model)
    found = [record.message for record in told.records if "the run ends" in record.message]
    assert len(found) == bool(message)
    assert not message or re.search(message, found[0])


def test_an_encoder_without_a_head_is_told(told):
    """Once, by the kind that is gone everywhere; a layer without any is no more than was asked for."""
    prune, model = pruned(pruning_method="threshold", final_threshold=9.0, mask_init="constant")
    attention = [layer for name, layer in prune.layers.items() if "attention" in name]
    for layer in prune.layers.values():
        layer.mask_scores.data.fill_(-99.0 if layer in attention else 99.0)
    for best in (99.0, -99.0):
        attention[0].mask_scores.data[0] = best
        for step in (9, 10):
            prune.on_step(step)
            run(model)
            prune.readings()
        assert told.text.count("no head is left in any layer: change final_threshold") == (best < 0)
    assert "no neuron" not in told.text


def test_too_short_a_way_for_the_scores_of_single_weights_is_told():
    """Magnitudes and gates, scores trained alone, and those of larger parts need less."""
    for spec in ({}, {"pruning_method": "sigmoied_threshold"}):
        assert "move a weight by 0.21 at most" in make_prune(**spec).check("AdamW", 0.21)
    assert make_prune().check("AdamW", 0.39) is None
    for spec in ({"pruning_method": "l0"}, {"train_weights": False}, {"granularity": "hybrid"}):
        assert make_prune(**spec).check("AdamW", 0.1) is None


@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_zeros_stay_and_all_else_is_trained(family):
    """After three steps the zeros are where they were, every layer's other weights have moved, and no more is saved."""
    model = make_model(family)
    for linear in encoder_linears(model).values():
        linear.weight.data.mul_(torch.rand_like(linear.weight) < 0.3)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    technique = KeepZeros(True, PhaseLength(10, 0, 0), task=None)
    model = technique.attach(model)
    technique.start(torch.device("cpu"))
    steps = torch.optim.AdamW(model.parameters(), 1e-2, weight_decay=0.1)
    for _ in range(3):
        run(model).square().sum().backward()
        steps.step()
        steps.zero_grad()
    model = technique.fold(model)
    assert model.state_dict().keys() == before.keys()
    kept = total = 0
    for name, linear in encoder_linears(model).items():
        zeros = before[f"{name}.weight"] == 0
        assert torch.equal(linear.weight == 0, zeros)
        assert not torch.equal(linear.weight, before[f"{name}.weight"])
        kept, total = kept + int((~zeros).sum()), total + zeros.numel()
    assert technique.readings() == {"keep_zeros/density": kept / total}


def test_where_it_changes_nothing_or_cannot_hold_it_is_refused():
    """Without zeros; beside prune, which makes others; and by Muon, which turns a matrix as a whole."""
    technique = KeepZeros(True, PhaseLength(10, 0, 0), task=None)
    technique.attach(make_model())
    technique.rehearse(torch.device("cpu"))  # of a stand-in for a model that is pruned later
    with pytest.raises(ValueError, match="have no zeros to keep: start from a pruned model"):
        technique.start(torch.device("cpu"))
    phase = {"max_steps": 1, "techniques": {"prune": {}, "keep_zeros": True}}
    with pytest.raises(ValueError, match="keep_zeros keeps the zeros that are there, and prune makes others"):
        parse_recipe({"model": {"name_or_path": "x"}, "phases": [phase]})
    with pytest.raises(ValueError, match=r"optimizer.type is Muon, whose steps are not made weight by weight"):
        technique.check("Muon", 1.0)
    assert technique.check("AdamW", 1.0) is None
