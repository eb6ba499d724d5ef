"""Layers that are trained to give the dense model's states: on which inputs, towards which targets, and who decides."""

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import transformers
from support.calibrated import calibration
from support.launching import chosen
from support.weight_cuts import SMALL, dealt_calibration, spec_of
from support.weight_cuts import model_of as classifier_of
from support.zeroed import KIN, bare_of, randomised
from torch import Tensor

from ds_trainer.cuts.cut import cut_model
from ds_trainer.cuts.reconstruction import Kept, reconstruct
from ds_trainer.cuts.sizes import cut_sizes
from ds_trainer.cuts.weights import cut_weights
from ds_trainer.models.layers import encoder_layers, encoder_linears
from ds_trainer.recipe.cut_specs import CutSpec, ReconstructSpec

GIVEN = calibration(50)
HELD_OUT = range(9, 50, 10)
"""The batches of `GIVEN` that no layer is trained on."""
BRIEF = ReconstructSpec(steps=25, learning_rate=2e-3)


@torch.no_grad()
def states_after(model: Any, layer: int) -> Tensor:
    """What this layer of the whole model gives at the attended tokens of the batches that are held out."""
    outputs = list[Any]()
    handle = [*encoder_layers(model).values()][layer].register_forward_hook(lambda *call: outputs.append(call[-1]))
    for number in HELD_OUT:
        model(**GIVEN.inputs[number])
    handle.remove()
    states = [output[0] if isinstance(output, tuple) else output for output in outputs]
    return torch.cat([each[GIVEN.attended[number]] for each, number in zip(states, HELD_OUT, strict=True)]).double()


def errors_of(model: Any, dense: Any, goals: Sequence[int], channels: Any = slice(None)) -> list[float]:
    """Each layer's squared error as a share of the variance of the dense model's states after the layer `goals`."""
    errors = []
    for layer, goal in enumerate(goals):
        wanted = states_after(dense, goal)[:, channels]
        lost = (states_after(model, layer) - wanted).square().sum()
        errors.append(float(lost / (wanted - wanted.mean(0)).square().sum()))
    return errors


FAMILIES = ("bert", "distilbert", "deberta-v2", "modernbert", "gpt2", "llama", "gemma3_text")


@pytest.mark.parametrize("family", chosen([*KIN], FAMILIES.__contains__))
def test_every_family_comes_nearer_to_its_dense_model(family: str) -> None:
    """No layer loses, and the first one gains, on examples that it never saw; embeddings and last norms stay."""
    dense = bare_of(family)
    small, _ = cut_model(copy.deepcopy(dense), GIVEN, CutSpec(keep=0.5, uniform=True))
    before = {name: weight.clone() for name, weight in small.state_dict().items()}
    (first,) = errors_of(small, dense, [0])
    records = reconstruct(small, dense, Kept(range(3)), GIVEN, BRIEF)
    assert [record.name for record in records] == list(encoder_layers(small))
    assert all(record.after <= record.before for record in records)
    assert records[0].before == pytest.approx(first, rel=1e-3)
    assert [record.after for record in records] == pytest.approx(errors_of(small, dense, range(3)), rel=1e-3)
    assert records[0].after < first
    inside = tuple(f"{name}." for name in encoder_layers(small))
    assert all(
        torch.equal(before[name], weight) or name.startswith(inside) for name, weight in small.state_dict().items()
    )
    assert all(weight.grad is None for weight in small.parameters())


@pytest.mark.parametrize("fields", [{"layers": 2}, {"width": 16}], ids=str)
def test_the_targets_are_the_states_before_the_next_kept_layer_in_the_kept_channels(fields: dict[str, Any]) -> None:
    """The second of three layers does least and is dropped, or half of the width is; errors are the whole model's."""
    dense = bare_of("llama")
    for linear in encoder_linears(dense, ["layers.1.*"]).values():
        linear.weight.data.mul_(0.5)
    small, _, report, kept = cut_sizes(copy.deepcopy(dense), GIVEN, CutSpec(**fields))
    layers = report["sizes"]["layers"]
    assert layers == ([0, 2] if "layers" in fields else [0, 1, 2])
    channels = slice(None) if kept.channels is None else kept.channels
    records = reconstruct(small, dense, kept, GIVEN, BRIEF)
    assert all(record.after < record.before for record in records)
    goals = [layer - 1 for layer in (*layers[1:], 3)]
    assert [record.after for record in records] == pytest.approx(errors_of(small, dense, goals, channels), rel=1e-3)


def test_what_is_held_out_and_padding_teach_nothing() -> None:
    """Other tokens in the last of six batches, and in the places that are not attended: the weights are the same."""
    dense, results = classifier_of("bert"), []
    for change in (False, True):
        given, small = dealt_calibration(), copy.deepcopy(dense)
        cut_weights(small, given, spec_of())
        if change:
            *_, last = given.inputs
            last["input_ids"] = last["input_ids"].flip(1).where(given.attended[-1], 7)
            for inputs, attended in zip(given.inputs, given.attended, strict=True):
                inputs["input_ids"] = inputs["input_ids"].where(attended, 5)
        records = reconstruct(small, dense, Kept(range(2)), given, BRIEF)
        assert all(record.after < record.before for record in records)
        results.append((records[0].before, small.state_dict()))
    (before, weights), (other, others) = results
    assert before != other
    for name, weight in weights.items():
        torch.testing.assert_close(others[name], weight)


@pytest.mark.parametrize(
    "fields", [{}, {"granularity": "block", "block_shape": [4, 4]}, {"granularity": "2:4", "keep": 0.5}]
)
def test_zeros_stay_zeros(fields: dict[str, Any]) -> None:
    """Of single weights, blocks, and two of every four; the weights that are kept change."""
    dense = classifier_of("bert")
    given, small = dealt_calibration(), copy.deepcopy(dense)
    cut_weights(small, given, spec_of(**fields))
    before = {name: linear.weight.detach().clone() for name, linear in encoder_linears(small).items()}
    reconstruct(small, dense, Kept(range(2)), given, BRIEF)
    for name, linear in encoder_linears(small).items():
        assert torch.equal(linear.weight == 0, before[name] == 0)
        assert not torch.equal(linear.weight, before[name])


def test_a_layer_that_does_not_gain_keeps_its_weights() -> None:
    """At a rate that ruins it, with the error that it had; so does a weight that is frozen at any rate."""
    dense = classifier_of("bert")
    given, small = dealt_calibration(), copy.deepcopy(dense)
    cut_weights(small, given, spec_of())
    ruined = copy.deepcopy(small)
    records = reconstruct(ruined, dense, Kept(range(2)), given, ReconstructSpec(steps=3, learning_rate=100))
    assert all(record.after == record.before > 0 for record in records)
    assert all(torch.equal(*pair) for pair in zip(ruined.parameters(), small.parameters(), strict=True))
    frozen = next(iter(encoder_linears(small).values())).weight.requires_grad_(False)
    before = frozen.clone()
    first, *_ = reconstruct(small, dense, Kept(range(2)), given, BRIEF)
    assert first.after < first.before
    assert torch.equal(frozen, before)


def test_states_are_compared_where_there_are_tokens_in_rows_that_a_model_pads() -> None:
    """Longformer pads rows of 9 tokens to 12."""
    config = transformers.LongformerConfig(**SMALL, attention_window=4, pad_token_id=0, max_position_embeddings=64)
    dense = randomised(transformers.LongformerForSequenceClassification(config))
    small = copy.deepcopy(dense)
    cut_weights(small, dealt_calibration(), spec_of())
    records = reconstruct(small, dense, Kept(range(2)), dealt_calibration(), BRIEF)
    assert all(record.after < record.before for record in records)


@pytest.mark.parametrize("fault", ["one batch", "constant"])
def test_nothing_to_learn_changes_nothing(fault: str) -> None:
    """One batch cannot be held out and trained on; a dense layer of equal outputs has no variance to explain."""
    dense = classifier_of("bert")
    given = calibration(1) if fault == "one batch" else dealt_calibration()
    if fault == "constant":
        norm = dense.bert.encoder.layer[1].output.LayerNorm
        norm.weight.data.zero_()
    small = copy.deepcopy(dense)
    records = reconstruct(small, dense, Kept(range(2)), given, BRIEF)
    assert [record.after for record in records] == ([] if fault == "one batch" else [0, 0])
    assert all(torch.equal(*pair) for pair in zip(small.parameters(), dense.parameters(), strict=True))
