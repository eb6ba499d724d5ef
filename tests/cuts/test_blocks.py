"""Heads and neurons that are cut, the weights that make up for them, and the smaller model that remains.

Then how many of them each layer keeps under a budget for all layers, and the inputs of linear layers, gathered with one
layer at a time.
"""

import copy
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from support.calibrated import answers_of, calibration, inputs_seen
from support.launching import chosen
from support.zeroed import FAMILIES, KIN, bare_of, empty, model_of, uneven

from ds_trainer.cuts import allocation, surgeon
from ds_trainer.cuts.allocation import Curve, Prices, allocate, cheapest_sizes
from ds_trainer.cuts.blocks import cut_blocks, cut_places, uniform_counts
from ds_trainer.cuts.cut import cut_model, outline
from ds_trainer.cuts.layerwise import grams_of_whole, resumed, with_grams
from ds_trainer.cuts.sizes import cut_sizes
from ds_trainer.models.costs import encoder_flops
from ds_trainer.models.layers import blocks_of, encoder_linears, layers_of, rows_of, sizes_of
from ds_trainer.models.shrink import shrink
from ds_trainer.ranks.failures import StoppedError, UserError
from ds_trainer.recipe.cut_specs import CutSpec

HALF = CutSpec(keep=0.5, uniform=True)
TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}
GIVEN = calibration()


def counts_of(model: Any) -> dict[str, int]:
    """Sizes that differ: nothing of the first block, one of the second, then halves; all of the last."""
    places = cut_places(model, HALF)
    counts = {name: place.count // 2 for name, place in places.items()}
    first, second, *_, last = places
    return counts | {first: 0, second: 1, last: places[last].count}


def sizes_by_counts(model: Any, counts: dict[str, int]) -> dict[str, list[int]]:
    """The sizes of a model whose blocks keep so many."""
    sizes = sizes_of(model)
    for index, (name, layer) in enumerate(layers_of(model).items()):
        for block in blocks_of(layer):
            kind = {"attention": "heads", "feed_forward": "neurons"}[block.kind]
            sizes[kind][index] = counts.get(f"{name}.{block.outer}", sizes[kind][index])
    return sizes


OTHERS = ("gemma", "gemma3_text", "cohere", "gpt_bigcode", "seed_oss", "roformer", "luke")
"""Kin whose layers differ most from the families: sliding windows, parallel blocks, one key for all, rotations."""


@pytest.mark.parametrize("family", chosen([*KIN], (*FAMILIES, *OTHERS).__contains__))
def test_every_family_is_cut(family: str) -> None:
    """Grouped heads, gated feed-forwards, Conv1D, with and without biases: only outer layers are changed.

    Cut to uneven counts, then shrunk: sizes are as wanted, outputs as with zeros.
    """
    model = bare_of(family)
    before, counts = copy.deepcopy(model), counts_of(model)
    records = cut_blocks(model, cut_places(model, HALF), counts, GIVEN, HALF)
    *cut, _ = cut_places(before, HALF).values()
    assert [(record.name, record.count, record.kept) for record in records] == [
        (place.name, place.count, counts[place.name]) for place in cut
    ]
    assert all(0 <= record.error <= 1 + 1e-6 for record in records)
    small = shrink(model)
    assert sizes_of(small) == sizes_by_counts(before, counts)
    torch.testing.assert_close(answers_of(small, GIVEN.inputs), answers_of(model, GIVEN.inputs), **TOLERANCE)
    changed = {f"{record.name}.{kind}" for record in records for kind in ("weight", "bias")}
    weights = dict(model.named_parameters())
    assert all(name in changed or torch.equal(weights[name], weight) for name, weight in before.named_parameters())


@torch.no_grad()
@pytest.mark.parametrize("family", ["bert", "gpt2", "llama", "qwen2"])
def test_what_is_kept_is_fitted_to_the_data(family: str) -> None:
    """By least squares over the inputs that the cut model gives, with a column of ones for the bias; hardly damped."""
    model = model_of(family)
    counts, given = counts_of(model), calibration(16)
    dense = {name: copy.deepcopy(place.outer) for name, place in cut_places(model, HALF).items()}
    records = cut_blocks(model, cut_places(model, HALF), counts, given, HALF.model_copy(update={"damping": 1e-6}))
    for record in records[1:]:
        inputs, outer = inputs_seen(model, [record.name], given)[record.name], model.get_submodule(record.name)
        whole, cut = (rows_of(each.weight, type(each)).double() for each in (dense[record.name], outer))
        columns = (cut != 0).any(0)
        assert int(columns.sum()) * record.count == record.kept * len(columns)
        wanted, fitted = inputs @ whole.T, inputs @ cut.T
        regressors = inputs[:, columns]
        if outer.bias is not None:
            wanted, fitted = wanted + dense[record.name].bias, fitted + outer.bias
            regressors = torch.cat((regressors, inputs.new_ones(len(inputs), 1)), 1)
        best = regressors @ torch.linalg.lstsq(regressors, wanted).solution
        error, smallest = (float((each - wanted).square().sum()) for each in (fitted, best))
        assert smallest <= error <= smallest * 1.01 + 1e-6 * float(wanted.square().sum())
        spread = wanted - wanted.mean(0) if outer.bias is not None else wanted
        assert record.error == pytest.approx(error / float(spread.square().sum()), rel=0.02, abs=1e-6)


@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_the_surgeon_stays_nearer_to_the_dense_model_than_magnitude(family: str) -> None:
    """Its states are nearer than without updates, and its layers' errors smaller than magnitude's with updates."""
    dense = answers_of(bare_of(family), GIVEN.inputs)
    errors, distances = [], []
    for fields in ({}, {"method": "magnitude"}, {"method": "magnitude", "update_weights": False}):
        small, records = cut_model(bare_of(family), GIVEN, HALF.model_copy(update=fields))
        errors.append(sum(record.error for record in records))
        distances.append(float((answers_of(small, GIVEN.inputs) - dense).square().mean()))
    assert errors[0] < errors[1] < errors[2]
    assert distances[0] < distances[2]


def test_weights_that_may_not_be_updated_stay() -> None:
    """Kept columns are bit for bit those of before; the bias takes in the means of the others."""
    model, spec = model_of("bert"), HALF.model_copy(update={"update_weights": False})
    dense = {name: copy.deepcopy(place.outer) for name, place in cut_places(model, HALF).items()}
    places = cut_places(model, spec)
    for record in cut_blocks(model, places, uniform_counts(places, 0.5), GIVEN, spec):
        outer, before = model.get_submodule(record.name), dense[record.name]
        gone = (outer.weight == 0).all(0)
        assert int(gone.sum()) * 2 == len(gone)
        assert torch.equal(outer.weight[:, ~gone], before.weight[:, ~gone])
        mean = inputs_seen(model, [record.name], GIVEN)[record.name].mean(0).float()
        torch.testing.assert_close(outer.bias, before.bias + before.weight[:, gone] @ mean[gone], **TOLERANCE)


@pytest.mark.parametrize(
    ("fields", "heads", "neurons"),
    [
        ({"keep": 0.5, "granularity": "head"}, 2, 24),
        ({"keep": 0.5, "granularity": "neuron"}, 4, 12),
        ({"keep": 0.05, "min_heads": 3}, 3, 1),
    ],
)
def test_every_layer_keeps_the_share_or_what_must_stay(fields: dict[str, Any], heads: int, neurons: int) -> None:
    """Of the kind of block that is cut, at least one and the heads that must stay; an outline has the same sizes."""
    spec = CutSpec(uniform=True, **fields)
    for small in (cut_model(model_of("bert"), GIVEN, spec)[0], outline(model_of("bert"), spec)):
        assert sizes_of(small) == {"heads": [heads] * 3, "neurons": [neurons] * 3}


@pytest.mark.parametrize(("family", "first"), [("bert", "uneven"), ("llama", "uniform")])
def test_a_model_that_is_cut_already_is_cut_again(family: str, first: str) -> None:
    """Of what each layer has now; emptied blocks stay empty, and at least one head and neuron of the others remain."""
    model = model_of(family)
    model = cut_model(model, GIVEN, HALF)[0] if first == "uniform" else shrink(empty(model, uneven(model)))
    halved = {name: [max(bool(size), round(size / 2)) for size in sizes] for name, sizes in sizes_of(model).items()}
    small, _ = cut_model(model, GIVEN, HALF)
    assert sizes_of(small) == halved
    assert sizes_of(outline(small, CutSpec(keep=0.01, uniform=True)))["neurons"] == [
        min(1, size) for size in halved["neurons"]
    ]


SOME_CUTS = [
    {"keep": 0.5},
    {"keep": 0.5, "granularity": "weight", "method": "fisher"},
    {"keep": 0.5, "granularity": "weight", "uniform": True},
    {"width": 0.5},
]


def cut(model: Any, given: Any, spec: CutSpec) -> Any:
    return (cut_sizes if spec.sizes else cut_model)(model, given, spec)[0]


@pytest.mark.parametrize("fields", SOME_CUTS, ids=str)
def test_nothing_is_fitted_to_no_token_or_to_what_is_not_finite(fields: dict[str, Any]) -> None:
    """Weights that are not finite, examples that are all padding, and hidden states that overflow are errors."""
    spec, model = CutSpec(**fields), model_of("llama")
    nothing = replace(GIVEN, attended=[torch.zeros_like(attended) for attended in GIVEN.attended])
    with pytest.raises(UserError, match="the calibration examples have no token that is attended"):
        cut(model, nothing, spec)
    layers_of(model)["model.layers.0"].mlp.down_proj.weight.data.fill_(1e38)
    with pytest.raises(UserError, match=r"are not finite .* on the calibration .*, though all weights are finite"):
        cut(model, GIVEN, spec)
    model.get_parameter("model.norm.weight").data[0] = torch.nan
    with pytest.raises(UserError, match=r"cut: model\.norm\.weight holds values that are not finite"):
        cut(model, GIVEN, spec)


@pytest.mark.parametrize("fields", SOME_CUTS[::2], ids=str)
def test_a_cut_ends_while_weights_are_solved(fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Not only before the next batch: solving a large layer takes minutes."""

    def asked() -> None:
        raise StoppedError("SIGTERM")

    monkeypatch.setattr(surgeon, "stop_if_asked", asked)
    with pytest.raises(StoppedError):
        cut(model_of("llama"), GIVEN, CutSpec(**fields))


def test_a_choice_over_all_layers_has_an_outline_at_every_share() -> None:
    """Where the share of each layer would round to all of its heads, too; a block of one head loses it."""
    small, spec = model_of("llama"), CutSpec(keep=0.75, granularity="head")
    for heads in (6, 3, 0):
        assert sum(sizes_of(small)["heads"]) == heads
        small = outline(small, spec) if heads else small


@pytest.mark.parametrize(
    ("family", "fields", "message"),
    [
        ("bert", {"keep": 0.99, "uniform": True, "granularity": "head"}, r"a share of 0\.99 and min_heads leave all"),
        ("deberta-v2", {"keep": 0.5, "granularity": "head"}, "has nothing of the granularity head to cut"),
        (
            "bert",
            {"keep": 0.3, "min_heads": 9},
            r"keep is 0\.3, .* cost 72\.7%: raise it, or lower min_heads",
        ),
        ("deberta-v2", {"target_flops": 0.1}, r"target_flops is 0\.1, .*: raise it"),
    ],
)
def test_what_cannot_be_cut_is_refused(family: str, fields: dict[str, Any], message: str) -> None:
    """By the rehearsal, and by the cut itself: also a target below what must stay, or what no cut removes."""
    for made in (outline, lambda model, spec: cut(model, GIVEN, spec)):
        with pytest.raises(UserError, match=message):
            made(model_of(family), CutSpec(**fields))


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
def test_a_share_of_the_weights_or_operations_is_kept(family, monkeypatch):
    """At most the share, and within a few percent of it; layers differ. Each block is ordered once."""
    removals = []
    monkeypatch.setattr("ds_trainer.cuts.blocks.removal", lambda *given: removals.append(1) or surgeon.removal(*given))
    dense, target = model_of(family), 0.97 if family == "deberta-v2" else 0.7
    small, records = cut_model(copy.deepcopy(dense), GIVEN, CutSpec(keep=0.5))
    assert len(removals) == len(cut_places(dense, HALF))
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


def test_heads_that_must_stay_stay():
    """Three of four in every layer."""
    model = model_of("bert")
    small, _ = cut_model(model, GIVEN, CutSpec(keep=0.6, min_heads=3))
    assert min(sizes_of(small)["heads"]) >= 3


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
    ordered, counts = allocate(model, places, prices, GIVEN, spec)
    assert sum(prices.each[name] * count for name, count in counts.items()) <= 40
    assert all(sorted(place.order) == list(range(place.count)) for place in ordered.values())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def check_sums(model: Any, given: Any) -> None:
    """Compare the sums of each block with those of plain hooks, while nothing changes, and with changes in between."""
    outers = {name: place.outer for name, place in cut_places(model, HALF).items()}

    def check(name: str, gram: Any) -> None:
        inputs = inputs_seen(model, [name], given)[name]
        assert gram.tokens == len(inputs) == 15 * len(given.inputs)
        torch.testing.assert_close(gram.sums, inputs.sum(0), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(gram.products, inputs.T @ inputs, rtol=1e-4, atol=1e-4)

    whole = dict(grams_of_whole(model, outers, given, "testing"))
    assert whole.keys() == outers.keys()
    for name, gram in whole.items():
        check(name, gram)
    for name, gram in with_grams(model, outers, given, "testing"):
        check(name, gram)
        with torch.no_grad():
            outers[name].weight.mul_(0.5)
    assert not [name for name, module in model.named_modules() if "forward" in vars(module)]


@pytest.mark.parametrize("family", chosen([*KIN], (*FAMILIES, *OTHERS).__contains__))
def test_sums_are_those_of_the_whole_model(family: str) -> None:
    """At attended positions, after every change of an earlier block too; and no module's forward stays replaced."""
    check_sums(bare_of(family), calibration(3))


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("deberta-v2", {"conv_kernel_size": 3, "conv_act": "gelu", "position_buckets": 4}),
        ("modernbert", {"local_attention": 4, "global_attn_every_n_layers": 2}),
        ("gemma2", {"sliding_window": 3}),
        ("gemma3_text", {"sliding_window": 3, "layer_types": ["sliding_attention"] * 2 + ["full_attention"]}),
        ("distilbert", {"attn_implementation": "eager"}),
        ("gpt2", {"attn_implementation": "eager"}),
    ],
)
def test_what_the_model_does_between_its_layers_is_done(family: str, fields: dict[str, Any]) -> None:
    """A convolution after the first layer, masks that differ from layer to layer, and without fused attention."""
    check_sums(bare_of(family, **fields), calibration(3))


@pytest.mark.parametrize("family", chosen([*KIN], (*FAMILIES, *OTHERS).__contains__))
@torch.no_grad()
def test_layers_before_a_changed_one_return_what_they_gave(family: str) -> None:
    """The answers are those of the whole model, though nothing computes before the changed layer; at the end all do."""
    model = bare_of(family)
    whole, layers, computed = copy.deepcopy(model), [*layers_of(model).values()], set[Any]()
    changed = [cut_places(each, HALF) for each in (model, whole)]
    for place in changed[0].values():
        place.outer.register_forward_pre_hook(lambda *_, place=place: computed.add(place.layer))
    for index, layer in enumerate(resumed(model, lambda: GIVEN.answers(model))):
        here = [name for name, place in changed[0].items() if place.layer is layer]
        outers = [places[name].outer for places in changed for name in here]
        for outer in outers:
            outer.weight.mul_(0.5)
        computed.clear()
        torch.testing.assert_close(GIVEN.answers(model), GIVEN.answers(whole), **TOLERANCE)
        assert computed == {*layers[index:]}
        for outer in outers:
            outer.weight.mul_(2)
    assert not [name for name, module in model.named_modules() if "forward" in vars(module)]


def test_a_given_order_stays() -> None:
    """The heads and neurons that go are its first ones, and the others are refitted."""
    model = model_of("bert")
    places = {
        name: replace(place, order=torch.randperm(place.count).tolist())
        for name, place in cut_places(model, HALF).items()
    }
    counts = uniform_counts(places, 0.5)
    dense = copy.deepcopy(model)
    cut_blocks(model, places, counts, GIVEN, HALF)
    for name, place in places.items():
        columns, before = (
            outer.weight.detach().T.reshape(place.count, -1) for outer in (place.outer, dense.get_submodule(name))
        )
        gone, kept = place.order[: -counts[name]], place.order[-counts[name] :]
        assert not columns[gone].any()
        assert (columns[kept] != before[kept]).any(1).all()


def test_one_layer_at_a_time_is_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each layer goes there before the next one does and comes back first; no other parameter of the model moves."""
    model, moves = model_of("bert"), []
    there = torch.device("cpu", 0)
    names = {layer: name for name, layer in layers_of(model).items()}
    monkeypatch.setattr(torch.nn.Module, "to", lambda module, *to: moves.append((names.get(module), *to)) or module)
    monkeypatch.setattr(torch.nn.Module, "cpu", lambda module: moves.append((names.get(module), "back")) or module)
    outers = {name: place.outer for name, place in cut_places(model, HALF).items()}
    assert len([*with_grams(model, outers, replace(calibration(2), device=there), "testing")]) == 6
    assert moves == [(name, where) for name in layers_of(model) for where in (there, "back")]


def test_padding_does_not_count_where_a_model_flattens_its_tokens() -> None:
    """OPT's feed-forward gets (rows * length, width): 15 tokens of each batch, as its attention."""
    config = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "ffn_dim": 24, "vocab_size": 64}
    model = transformers.OPTModel(transformers.OPTConfig(**config, word_embed_proj_dim=16)).eval()
    given = calibration(3)
    linears = encoder_linears(model)
    inputs = inputs_seen(model, linears, given)
    for name, gram in with_grams(model, linears, given, "testing"):
        assert gram.tokens == 45
        torch.testing.assert_close(gram.products, inputs[name].T @ inputs[name], rtol=1e-4, atol=1e-4)
