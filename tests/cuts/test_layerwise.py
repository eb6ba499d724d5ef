"""The inputs of linear layers, gathered with one layer at a time, are those of the whole model."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from support.calibrated import calibration, inputs_seen
from support.launching import chosen
from support.zeroed import FAMILIES, KIN, bare_of, model_of

from ds_trainer.cuts.blocks import cut_places
from ds_trainer.cuts.layerwise import with_grams
from ds_trainer.models.layers import encoder_linears, layers_of
from ds_trainer.recipe.cut_specs import CutSpec

SPEC = CutSpec(keep=0.5)
OTHERS = ("gemma3_text", "cohere", "gpt_bigcode", "roformer", "luke")
"""Kin whose layers differ most from the families: sliding windows, parallel blocks, one key for all, rotations."""


def check(model: Any, given: Any) -> None:
    """Compare the sums of each block with those of plain hooks, where each layer is changed once it was seen."""
    places = cut_places(model, SPEC)
    outers = {name: place.outer for name, place in places.items()}
    for name, gram in with_grams(model, outers, given, "testing"):
        inputs = inputs_seen(model, [name], given)[name]
        assert gram.tokens == len(inputs) == 15 * len(given.inputs)
        torch.testing.assert_close(gram.sums, inputs.sum(0), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(gram.products, inputs.T @ inputs, rtol=1e-4, atol=1e-4)
        with torch.no_grad():
            outers[name].weight.mul_(0.5)
    assert not [name for name, module in model.named_modules() if "forward" in vars(module)]


@pytest.mark.parametrize("family", chosen([*KIN], (*FAMILIES, *OTHERS).__contains__))
def test_sums_are_those_of_the_whole_model(family: str) -> None:
    """At attended positions, after every change of an earlier block too; and no module's forward stays replaced."""
    check(bare_of(family), calibration(3))


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
    check(bare_of(family, **fields), calibration(3))


def test_one_layer_at_a_time_is_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each layer goes there before the next one does and comes back first; no other parameter of the model moves."""
    model, moves = model_of("bert"), []
    there = torch.device("cpu", 0)
    names = {layer: name for name, layer in layers_of(model).items()}
    monkeypatch.setattr(torch.nn.Module, "to", lambda module, *to: moves.append((names.get(module), *to)) or module)
    monkeypatch.setattr(torch.nn.Module, "cpu", lambda module: moves.append((names.get(module), "back")) or module)
    outers = {name: place.outer for name, place in cut_places(model, SPEC).items()}
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
