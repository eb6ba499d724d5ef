"""FLOPs counted by hand against those that torch counts while a model runs, and seconds of layers."""

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from ds_trainer.models.costs import decision_flops, encoder_flops, layer_seconds
from ds_trainer.models.layers import SIZES_OF, blocks_of, decisions_of, layers_of
from ds_trainer.models.shrunk_model import shrunk_class

SMALL = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": 64}
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}
DISENTANGLED = SMALL | {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "max_position_embeddings": 40}
FAMILIES: dict[str, dict[str, Any]] = {
    "bert": SMALL,
    "roberta": SMALL,
    "electra": SMALL | {"embedding_size": 16},
    "distilbert": {"dim": 32, "n_layers": 3, "n_heads": 4, "hidden_dim": 48, "vocab_size": 64},
    "deberta-v2": DISENTANGLED,
    "modernbert": SMALL | SPECIAL,
    "gpt2": {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 40, "vocab_size": 64} | SPECIAL,
    "llama": SMALL | {"num_key_value_heads": 2},
    "qwen3": SMALL | {"num_key_value_heads": 2, "head_dim": 16},
}
DECODERS = ("gpt2", "llama", "qwen3")
TOKENS = 9


def model_of(family: str, **fields: Any) -> Any:
    """A tiny model whose attention is written out, so that its products are counted."""
    auto = AutoModelForCausalLM if family in DECODERS else AutoModelForSequenceClassification
    return auto.from_config(AutoConfig.for_model(family, **FAMILIES[family] | fields), attn_implementation="eager")


def counted(model: Any) -> int:
    """What torch counts in the model's layers, for one example."""
    names, tokens = set(layers_of(model)), torch.arange(3, 3 + TOKENS)[None]
    with FlopCounterMode(display=False) as counter:
        model.eval()(input_ids=tokens, attention_mask=torch.ones_like(tokens))
    found = counter.get_flop_counts()
    return sum(sum(ops.values()) for module, ops in found.items() if module.partition(".")[2] in names)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_product_of_the_layers_is_counted(family):
    """As torch counts them, also with key-value groups, heads of a width of their own, and relative positions."""
    model = model_of(family)
    assert encoder_flops(model, TOKENS) == counted(model) > 0


@pytest.mark.parametrize("family", FAMILIES)
def test_of_a_shrunk_model_what_is_left_is_counted(family):
    """Layers that have lost heads, neurons, or a whole block."""
    whole = model_of(family)
    layer = next(iter(layers_of(whole).values()))
    heads = [decisions_of(block, layer, whole.config) for block in blocks_of(layer) if block.kind == "attention"]
    sizes = {"heads": [1, 0, heads[0]] if heads else [0, 0, 0], "neurons": [7, 48, 0]}
    whole.config.shrunk = sizes
    shrunk = shrunk_class(type(whole))(whole.config)
    assert encoder_flops(shrunk, TOKENS) == counted(shrunk) < encoder_flops(whole, TOKENS)


@pytest.mark.parametrize(
    "fields",
    [{"share_att_key": True}, {"pos_att_type": ["c2p"]}, {"position_buckets": 4}, {"relative_attention": False}],
)
def test_the_kinds_of_disentangled_attention_are_told_apart(fields):
    """Shared projections, one direction alone, buckets, none."""
    model = model_of("deberta-v2", **fields)
    assert encoder_flops(model, TOKENS) == counted(model)


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "deberta-v2"])
def test_decisions_share_out_the_layers(family):
    """All heads and neurons together cost what the layers cost."""
    model = model_of(family)
    total = sum(
        decision_flops(block, layer, model.config, TOKENS) * decisions_of(block, layer, model.config)
        for layer in layers_of(model).values()
        for block in blocks_of(layer)
    )
    assert total == pytest.approx(encoder_flops(model, TOKENS))
    assert {block.kind for layer in layers_of(model).values() for block in blocks_of(layer)} == SIZES_OF.keys()


@pytest.mark.parametrize("family", ["bert", "gpt2", "llama", "modernbert"])
def test_a_layer_is_measured_whole_and_by_its_decisions(family, monkeypatch):
    """By a clock of operations: what runs is one layer, and a decision takes what it computes.

    A config with the sizes of three layers is measured as one whole layer.
    """

    def operations(call, device):
        with FlopCounterMode(display=False) as counter:
            call()
        return float(counter.get_total_flops())

    monkeypatch.setattr("ds_trainer.models.costs.seconds", operations)
    monkeypatch.setattr("ds_trainer.models.costs._ROUNDS", 1)
    model, cpu = model_of(family), torch.device("cpu")
    measured = layer_seconds(type(model.base_model), model.config, 16, cpu)
    layer = next(iter(layers_of(model).values()))
    assert measured.count == {block.kind: decisions_of(block, layer, model.config) for block in blocks_of(layer)}
    assert measured.layer == pytest.approx(encoder_flops(model, 16) / 3, rel=0.02)
    for block in blocks_of(layer):
        assert measured.decision[block.kind] == pytest.approx(decision_flops(block, layer, model.config, 16))
    model.config.shrunk = {"heads": [1, 0, 2], "neurons": [48, 24, 0]}
    assert layer_seconds(shrunk_class(type(model.base_model)), model.config, 16, cpu) == measured
    assert model.config.shrunk["heads"] == [1, 0, 2]
