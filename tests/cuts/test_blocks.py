"""Heads and neurons that are cut, the weights that make up for them, and the smaller model that remains."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.calibrated import answers_of, calibration, inputs_seen
from support.launching import chosen
from support.zeroed import FAMILIES, KIN, bare_of, empty, model_of, uneven

from ds_trainer.cuts import surgeon
from ds_trainer.cuts.blocks import cut_blocks, cut_places, uniform_counts
from ds_trainer.cuts.cut import cut_model, outline
from ds_trainer.cuts.sizes import cut_sizes
from ds_trainer.models.layers import blocks_of, layers_of, rows_of, sizes_of
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


def check_cut(model: Any) -> None:
    """Cut to uneven counts, then shrink: sizes as wanted, outputs as with zeros, other weights as they were."""
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


OTHERS = ("gemma", "cohere", "gpt_bigcode", "seed_oss")


@pytest.mark.parametrize("family", chosen([*KIN], (*FAMILIES, *OTHERS).__contains__))
def test_every_family_is_cut(family: str) -> None:
    """Grouped heads, gated feed-forwards, Conv1D, with and without biases: only outer layers are changed."""
    check_cut(bare_of(family))


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
    ],
)
def test_what_cannot_be_cut_is_refused(family: str, fields: dict[str, Any], message: str) -> None:
    """By the rehearsal, and by the cut itself."""
    for made in (outline, lambda model, spec: cut(model, GIVEN, spec)):
        with pytest.raises(UserError, match=message):
            made(model_of(family), CutSpec(**fields))
