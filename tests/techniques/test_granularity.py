"""Pruning by heads, neurons and other grains, on the library's own models."""

from itertools import product

import pytest
import torch
from support.exhaustive import chosen
from support.prune_phases import make_prune
from support.pruned_models import (
    FAMILIES,
    GROUPED,
    NEURONS_ALONE,
    kept_of,
    make_model,
    pruned,
    run,
)
from torch import nn

from ds_trainer.config.prune_specs import PruneSpec
from ds_trainer.models.flops import encoder_flops
from ds_trainer.models.layers import count_weights, layers_of, sizes_of
from ds_trainer.models.shrink import shrink
from ds_trainer.models.shrunk_model import resize
from ds_trainer.techniques.prune import advice
from ds_trainer.techniques.prune.masked import MaskedLinear

METHODS = ["topK", "threshold", "sigmoied_threshold", "magnitude", "l0"]


@pytest.mark.parametrize(
    ("family", "method"),
    chosen(product(FAMILIES, METHODS), lambda case: case[0] == "bert" or case[1] == "topK"),
)
def test_whole_decisions_are_masked_and_folded(family, method):
    """The folded model is plain, computes the masked one's logits, and has zeros in all matrices of what fell."""
    thresholds = {"threshold": 0.0, "sigmoied_threshold": 0.5, "l0": 1.0}
    granularity = NEURONS_ALONE if family == "deberta-v2" else "hybrid"
    spread = {"mask_init": "uniform", "mask_scale": 5.0}
    prune, model = pruned(
        family,
        pruning_method=method,
        granularity=granularity,
        block_shape=[5, 7],
        **({"final_threshold": thresholds[method]} if method in thresholds else {}),
        **spread,
    )
    with torch.no_grad():
        expected = run(model)
    kept = {name: layer.mask.open.clone() for name, layer in prune.layers.items()}
    density = prune.readings()["prune/density"]
    folded = prune.fold(model)
    assert not any(isinstance(module, MaskedLinear) for module in folded.modules())
    torch.testing.assert_close(run(folded), expected, atol=1e-6, rtol=1e-5)
    counts = count_weights(folded)["encoder"]
    assert counts["kept"] / counts["total"] == pytest.approx(density, abs=1e-9)
    fallen = 0
    for name, site in prune.sites.items():
        for member in site.inner:
            linear = folded.get_submodule(member)
            weight = linear.weight.t() if type(linear).__name__ == "Conv1D" else linear.weight
            rows = weight.reshape(site.block[1].parts, len(kept[name]), -1)
            assert torch.equal((rows != 0).any(2).all(0), kept[name])
            fallen += int((~kept[name]).sum())
            if linear.bias is not None:
                biases = linear.bias.view(site.block[1].parts, len(kept[name]), -1)
                assert torch.equal((biases != 0).any(2).all(0), kept[name])
    assert fallen > 0


@pytest.mark.parametrize("family", FAMILIES)
def test_scores_of_whole_decisions_learn_from_what_enters_the_outer_matrix(family):
    """Their gradient is that of gates on its input, in plain autograd; what fell gets none in any inner matrix."""
    granularity = {"feed_forward": "neuron"} if family == "deberta-v2" else "hybrid"
    prune, model = pruned(family, granularity=granularity)
    run(model).square().sum().backward()

    plain = make_model(family)
    gates = {}
    for name, layer in prune.layers.items():
        gates[name] = layer.mask.open.float().requires_grad_()
        width = layer.in_features // len(gates[name])
        outer = plain.get_submodule(name)
        outer.register_forward_pre_hook(
            lambda _, inputs, gate=gates[name], width=width: (inputs[0] * gate.repeat_interleave(width),)
        )
    run(plain).square().sum().backward()
    for name, layer in prune.layers.items():
        torch.testing.assert_close(layer.mask_scores.grad, gates[name].grad, atol=1e-4, rtol=1e-4)
        for member, linear in prune.sites[name].inner.items():
            torch.testing.assert_close(linear.weight.grad, plain.get_submodule(member).weight.grad)
            weight = linear.weight.grad.t() if type(linear).__name__ == "Conv1D" else linear.weight.grad
            rows = weight.reshape(prune.sites[name].block[1].parts, len(gates[name]), -1)
            assert float(rows[:, ~layer.mask.open].abs().sum()) == 0


def test_heads_that_share_a_key_and_value_fall_together():
    """Of a Llama with 4 heads in 2 groups, half is one group in every layer: 2 heads, their key and their value."""
    prune, model = pruned("llama", granularity="head")
    assert [layer.mask_scores.shape for layer in prune.layers.values()] == [(2,)] * 3
    run(model)
    assert kept_of(prune, "attention") == [1, 1, 1]
    attention = layers_of(prune.fold(model))["model.layers.0"].self_attn
    assert [int((linear.weight != 0).any(1).sum()) for linear in (attention.q_proj, attention.k_proj)] == [16, 8]


def test_scores_by_magnitude_are_of_all_matrices():
    """A head whose queries alone are large is kept: the root mean square is over query, key, value and output."""
    prune = make_prune(granularity="head", pruning_method="magnitude", final_threshold=0.25)
    model = make_model()
    query = layers_of(model)["bert.encoder.layer.1"].attention.self.query
    with torch.no_grad():
        query.weight[8:16] = 3.0
    weights = torch.cat(
        [
            query.weight.view(4, -1),
            *(
                part.weight.view(4, -1)
                for part in (
                    layers_of(model)["bert.encoder.layer.1"].attention.self.key,
                    layers_of(model)["bert.encoder.layer.1"].attention.self.value,
                )
            ),
            layers_of(model)["bert.encoder.layer.1"].attention.output.dense.weight.t().reshape(4, -1),
        ],
        1,
    )
    model = prune.attach(model)
    prune.on_step(10)
    run(model)
    layer = prune.layers["bert.encoder.layer.1.attention.output.dense"]
    torch.testing.assert_close(layer.scores(), weights.square().mean(1).sqrt())
    assert layer.mask.open.tolist() == [False, True, False, False]


@pytest.mark.parametrize(
    ("family", "granularity"),
    chosen(product(["bert", "gpt2"], ["row", "column", "block", "2:4"]), lambda case: case[0] == "gpt2"),
)
def test_parts_of_a_matrix(family, granularity):
    """Rows are outputs and columns inputs, in a Conv1D too; the share kept is exact, and 2:4 keeps 2 of every 4."""
    prune, model = pruned(family, granularity=granularity, block_shape=[8, 16])
    with torch.no_grad():
        expected = run(model)
    folded = prune.fold(model)
    torch.testing.assert_close(run(folded), expected)
    for name in prune.layers:
        linear = folded.get_submodule(name)
        weight = (linear.weight.t() if family == "gpt2" else linear.weight) != 0
        parts = {
            "row": weight.any(1),
            "column": weight.any(0),
            "block": weight.unflatten(1, (-1, 16)).unflatten(0, (-1, 8)).any(3).any(1),
            "2:4": weight,
        }[granularity]
        assert int(parts.sum()) == parts.numel() // 2
        assert int(weight.sum()) == weight.numel() // 2
        if granularity == "2:4":
            assert bool((weight.unflatten(1, (-1, 4)).sum(2) == 2).all())


@pytest.mark.parametrize(
    ("method", "granularity"),
    chosen(product(METHODS[1:], ["row", "column", "block"]), lambda case: "block" in case or "l0" in case),
)
def test_parts_by_every_method(method, granularity):
    """Each is kept whole or dropped whole, some of both, and the folded model computes what the masked one does."""
    thresholds = {"threshold": 0.0, "sigmoied_threshold": 0.5, "magnitude": 0.5, "l0": 1.0}
    prune, model = pruned(
        granularity=granularity,
        block_shape=[8, 16],
        pruning_method=method,
        final_threshold=thresholds[method],
        mask_init="uniform",
        mask_scale=5.0,
    )
    with torch.no_grad():
        expected = run(model)
    folded = prune.fold(model)
    torch.testing.assert_close(run(folded), expected, atol=1e-6, rtol=1e-5)
    left = whole = 0
    for name in prune.layers:
        weight = folded.get_submodule(name).weight != 0
        shape = {"row": (1, weight.shape[1]), "column": (weight.shape[0], 1), "block": (8, 16)}[granularity]
        parts = weight.unflatten(1, (-1, shape[1])).unflatten(0, (-1, shape[0])).transpose(1, 2).flatten(2)
        assert torch.equal(parts.any(2), parts.all(2))
        left, whole = left + int(parts.any(2).sum()), whole + parts.shape[0] * parts.shape[1]
    assert 0 < left < whole


def test_two_of_four_comes_by_way_of_three():
    """With the share the kept of every four goes from 4 to 2: the share times four, rounded up."""
    prune = make_prune(granularity="2:4", schedule="linear")
    model = prune.attach(make_model())
    kept = []
    for step in (0, 4, 10):
        prune.on_step(step)
        run(model)
        kept.append(prune.readings()["prune/density"])
    assert kept == [1.0, 1.0, 0.5]
    prune.on_step(6)
    run(model)
    assert prune.readings()["prune/density"] == 0.75


def test_the_first_key_that_matches_decides():
    """Attention by blocks, one layer's feed-forward by rows, the others by neurons; nothing else is masked."""
    prune, _ = pruned(
        granularity={"attention": "block", "*.layer.0.*": "row", "*.output.dense": "column"}, block_shape=[16, 16]
    )
    found = {name.removeprefix("bert.encoder.layer."): site.granularity for name, site in prune.sites.items()}
    assert found["0.attention.output.dense"] == found["2.attention.self.key"] == "block"
    assert found["0.intermediate.dense"] == found["0.output.dense"] == "row"
    assert found["1.output.dense"] == "column"
    assert "1.intermediate.dense" not in found
    mixed, model = pruned(granularity={"attention": "block", "feed_forward": "neuron"}, block_shape=[16, 16])
    run(model)
    assert len(mixed.layers) == 3 * 5
    assert kept_of(mixed, "feed_forward") == [24] * 3


def test_modules_name_whole_blocks():
    """With heads and neurons, modules restrict to blocks of which they name all matrices; a part is refused."""
    prune, _ = pruned(modules=["*.layer.1.*", "*.layer.0.attention.*"])
    assert list(prune.layers) == [
        "bert.encoder.layer.0.attention.output.dense",
        "bert.encoder.layer.1.attention.output.dense",
        "bert.encoder.layer.1.output.dense",
    ]
    with pytest.raises(ValueError, match=r"takes bert\.encoder\.layer\.0\.attention\.self\.key, .* out"):
        pruned(granularity="head", modules=["*.query"])
    with pytest.raises(ValueError, match="head is of all matrices"):
        pruned(granularity={"*.query": "block", "attention": "head"})


@pytest.mark.parametrize(
    ("family", "spec", "told"),
    [
        (
            "deberta-v2",
            {"granularity": "hybrid"},
            '"attention" of Deberta.* cannot be pruned by head.*block, row, column or weight',
        ),
        ("bert", {"granularity": {"*.quary": "row"}}, r'"\*\.quary" decides nothing'),
        (
            "bert",
            {"granularity": {"*": "row", "attention": "head"}},
            '"attention" decides nothing: .* no earlier key',
        ),
        (
            "bert",
            {"granularity": NEURONS_ALONE, "modules": ["*.intermediate.dense", "*[0-9].output.dense"]},
            '"attention" decides nothing: .* modules names',
        ),
        ("bert", {"min_heads": 5}, "min_heads is 5, and bert.encoder.layer.0.attention has 4"),
        ("bert", {"granularity": "head", "target_flops": 0.1}, "target_flops is 0.1, and what must be kept is"),
        (
            "bert",
            {"granularity": "head", "min_heads": 4, "target_flops": 0.9},
            "target_flops is 0.9, and what must be kept is 1.000 of the encoder",
        ),
        ("bert", {"uniform": True, "modules": ["*.layer.0.*"]}, "uniform: attention is pruned in 1 of 3 layers"),
    ],
)
def test_what_cannot_be_done_on_a_model_is_told(family, spec, told):
    """With what was found and what can be chosen."""
    if "target_flops" in spec:
        spec = spec | {"final_threshold": spec["target_flops"]}
    with pytest.raises(ValueError, match=told):
        pruned(family, **spec)


def test_an_unknown_family_is_told_what_it_can_use():
    """Heads need known blocks; rows do not, and 2:4 needs inputs that are a multiple of four."""

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.mix = nn.Linear(6, 6)

    model = nn.Module()
    model.layers = nn.ModuleList([Layer(), Layer()])
    for granularity, told in (
        ("head", "cannot be pruned by head, since its blocks are of an unknown form .*block, row"),
        ({"attention": "row"}, '"attention" of Module cannot be pruned by row.* name patterns'),
        ("2:4", "layers.0.mix has 6 inputs, which are no multiple of 4"),
    ):
        with pytest.raises(ValueError, match=told):
            make_prune(granularity=granularity).attach(model)
    assert len(make_prune(granularity="row").attach(model).layers[0].mix.mask_scores) == 6


def test_numbers_that_hardware_likes():
    """At least min_heads in every block, and neurons in multiples, whatever the scores say."""
    prune, model = pruned(min_heads=3, multiple_of=16)
    run(model)
    assert kept_of(prune, "attention") == [3] * 3
    assert kept_of(prune, "feed_forward") == [32] * 3  # of 24, as near to 16 as to 32
    for threshold in (99.0, 0.0):
        prune, model = pruned(pruning_method="threshold", final_threshold=threshold, min_heads=1, multiple_of=8)
        run(model)
        assert min(kept_of(prune, "attention")) >= 1
        assert all(count % 8 == 0 for count in kept_of(prune, "feed_forward"))


@pytest.mark.parametrize("method", ["topK", "magnitude", "threshold", "sigmoied_threshold"])
def test_numbers_that_hardware_likes_are_the_same_in_every_layer(method):
    """uniform, min_heads and multiple_of together: nothing passes, everything passes, or about half."""
    shares = {"topK": (0.01, 0.4, 0.99), "magnitude": (0.01, 0.4, 0.99), "threshold": (9.0, 0.0, -9.0)}
    for threshold in shares.get(method, (0.9999, 0.5, 0.0001)):
        spec = {"mask_init": "uniform", "mask_scale": 5.0, "uniform": True, "min_heads": 2, "multiple_of": 8}
        prune, model = pruned(pruning_method=method, final_threshold=threshold, **spec)
        run(model)
        (heads,) = set(kept_of(prune, "attention"))
        (neurons,) = set(kept_of(prune, "feed_forward"))
        assert 2 <= heads <= 4
        assert neurons % 8 == 0


def test_the_numbers_follow_the_schedule():
    """Of 4 heads and 48 neurons, linearly from all to a quarter, in every layer; never up again."""
    prune, model = pruned(final_threshold=0.25, schedule="linear")
    counts = []
    for step in range(11):
        prune.on_step(step)
        run(model)
        share = prune.readings()["prune/threshold"]
        heads, neurons = (set(kept_of(prune, kind)) for kind in ("attention", "feed_forward"))
        assert (heads, neurons) == ({round(4 * share)}, {round(48 * share)})
        counts.append((*heads, *neurons))
    assert counts[0] == (4, 48)
    assert counts[-1] == (1, 12)
    assert counts == sorted(counts, reverse=True)
    assert len({*counts}) > 3


@pytest.mark.parametrize(("groups", "share"), [(1, 0.5), (2, 0.25), (4, 0.1)])
def test_a_share_of_few_heads_is_one_at_least(groups, share, monkeypatch):
    """Half of a single group of heads rounds to none, which nobody who asks for half means."""
    monkeypatch.setitem(FAMILIES, "llama", GROUPED | {"num_key_value_heads": groups})
    prune, model = pruned("llama", final_threshold=share)
    run(model)
    assert kept_of(prune, "attention") == [1] * 3


@pytest.mark.parametrize("method", ["threshold", "l0"])
def test_an_encoder_without_a_head_is_told(method, caplog):
    """Once, by the kind that is gone everywhere; a layer without any is no more than was asked for."""
    thresholds = {"threshold": 9.0, "l0": 1.0}
    prune, model = pruned(pruning_method=method, final_threshold=thresholds[method], mask_init="constant")
    with torch.no_grad():
        for name, layer in prune.layers.items():
            layer.mask_scores.fill_(-99.0 if "attention" in name else 99.0)
            layer.mask_scores[0] = 99.0
        first, *others = (layer for name, layer in prune.layers.items() if "attention" in name)
        for layer in others:
            layer.mask_scores.fill_(-99.0)
        for step in (9, 10):
            prune.on_step(step)
            run(model)
            prune.readings()
        assert "is left in any layer" not in caplog.text
        first.mask_scores.fill_(-99.0)
        for step in (9, 10):
            prune.on_step(step)
            run(model)
            prune.readings()
    advised = "lower final_threshold or final_lambda, or raise mask_scale"
    assert caplog.text.count(f"no head is left in any layer: {advised}") == 1
    by_share = PruneSpec(pruning_method="topK", global_topk=True)
    assert advice.of_none_left(by_share, "head").endswith(": raise final_threshold")
    assert "no neuron" not in caplog.text


@pytest.mark.parametrize("method", ["topK", "threshold"])
def test_uniform_keeps_the_same_in_every_layer(method):
    """With thresholds it is the mean over the layers, rounded; the heads and neurons of each are its own."""
    thresholds = {"threshold": 0.0, "topK": 0.5}
    spec = {"pruning_method": method, "final_threshold": thresholds[method], "mask_init": "uniform", "mask_scale": 1.0}
    alone, _ = pruned(**spec)
    passing = [int((layer.mask_scores > 0).sum()) for name, layer in alone.layers.items() if "attention" not in name]
    prune, model = pruned(uniform=True, **spec)
    run(model)
    (neurons,) = set(kept_of(prune, "feed_forward"))
    (heads,) = set(kept_of(prune, "attention"))
    assert neurons == (24 if method == "topK" else round(sum(passing) / 3))
    assert 0 < heads < 4
    assert len({tuple(layer.mask.open.tolist()) for layer in prune.layers.values()}) > 2


@pytest.mark.parametrize("multiple", [1, 8])
@pytest.mark.parametrize("family", ["bert", "llama", "gpt2"])
def test_a_share_of_the_flops_is_kept(family, multiple):
    """Within one decision: the readings', and those of a model of these sizes; layers differ."""
    spec = {"mask_init": "uniform", "mask_scale": 1.0, "target_flops": 0.4, "final_threshold": 0.4, "cost_tokens": 16}
    prune, model = pruned(family, multiple_of=multiple, **spec)
    run(model)
    whole = make_model(family)
    total = encoder_flops(whole, 16)
    costs = prune.budget.flops.each.values()
    largest = max(float(cost.max()) * (multiple if cost.numel() > 4 else 1) for cost in costs)
    assert abs(prune.readings()["prune/flops"] - 0.4) <= largest / total
    sizes = {"heads": kept_of(prune, "attention"), "neurons": kept_of(prune, "feed_forward")}
    assert multiple > 1 or len(set(sizes["neurons"])) > 1
    assert all(count % multiple == 0 for count in sizes["neurons"])
    resize(whole, sizes)
    assert encoder_flops(whole, 16) / total == pytest.approx(prune.readings()["prune/flops"])


def test_what_is_already_shrunk_is_pruned_further():
    """Emptied blocks have no decisions, the others those that they have left; folded and cut it computes the same."""
    model = make_model()
    model.config.shrunk = {"heads": [4, 0, 2], "neurons": [48, 24, 0]}
    resize(model, model.config.shrunk)
    prune = make_prune(granularity="hybrid", final_threshold=0.5, mask_init="kaiming")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.1)
    model = prune.attach(model)
    prune.on_step(10)
    with torch.no_grad():
        expected = run(model.eval())
        assert kept_of(prune, "prune") == [2, 24, 12, 1]
        folded = prune.fold(model)
        torch.testing.assert_close(run(folded), expected, atol=1e-6, rtol=1e-5)
        cut = shrink(folded)
        torch.testing.assert_close(run(cut), expected, atol=1e-6, rtol=1e-5)
    assert sizes_of(cut) == {"heads": [2, 0, 1], "neurons": [24, 12, 0]}


def test_static_pruning_trains_scores_of_decisions_alone():
    """With train_weights false all but the scores is frozen, and these learn."""
    prune, model = pruned(train_weights=False)
    assert [rule.params for rule in prune.parameter_rules(model)] == ["*.mask_scores", "*"]
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.endswith("mask_scores"))
    run(model).square().sum().backward()
    assert all(float(layer.mask_scores.grad.abs().sum()) > 0 for layer in prune.layers.values())
