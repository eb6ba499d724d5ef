"""FLOPs counted by hand against those that torch counts while a model runs, and seconds of layers."""

from typing import Any

import pytest
import torch
from support.zeroed import FAMILIES, bare_of, empty, model_of, uneven
from torch.utils.flop_counter import FlopCounterMode

from ds_trainer.models.costs import decision_flops, encoder_flops, measured_seconds
from ds_trainer.models.layers import SIZES_OF, blocks_of, decisions_of, layers_of
from ds_trainer.models.shrink import shrink

TOKENS = 9
DISENTANGLED = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "max_position_embeddings": 40}
KNOWN = [family for family in FAMILIES if family != "olmo2"]
"""Those whose attention products are counted."""


def eager(family: str, **fields: Any) -> Any:
    """A tiny model whose attention is written out, so that its products are counted."""
    return model_of(family, attn_implementation="eager", **fields)


def counted(model: Any) -> int:
    """What torch counts in the model's layers, for one example."""
    names, tokens = set(layers_of(model)), torch.arange(3, 3 + TOKENS)[None]
    with FlopCounterMode(display=False) as counter:
        model(input_ids=tokens, attention_mask=torch.ones_like(tokens))
    counts = counter.get_flop_counts()
    return sum(sum(ops.values()) for module, ops in counts.items() if module.partition(".")[2] in names)


@pytest.mark.parametrize("family", KNOWN)
def test_every_product_of_the_layers_is_counted(family: str) -> None:
    """As torch counts them, also with key-value groups, heads of a width of their own, and relative positions.

    So are those of a model whose layers have lost heads, neurons, or a whole block. All heads and neurons together cost
    what the layers cost.
    """
    model = eager(family)
    shrunk = shrink(empty(eager(family), uneven(model)))
    shrunk.set_attn_implementation("eager")
    assert encoder_flops(model, TOKENS) == counted(model)
    assert 0 < encoder_flops(shrunk, TOKENS) == counted(shrunk) < encoder_flops(model, TOKENS)
    blocks = [(block, layer) for layer in layers_of(model).values() for block in blocks_of(layer)]
    costs = [
        decision_flops(block, layer, model.config, TOKENS) * decisions_of(block, layer, model.config)
        for block, layer in blocks
    ]
    if family != "deberta-v2":  # whose heads no cut knows
        assert sum(costs) == pytest.approx(encoder_flops(model, TOKENS))
        assert {block.kind for block, _ in blocks} == SIZES_OF.keys()


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("deberta-v2", {"share_att_key": True}),
        ("deberta-v2", {"pos_att_type": ["c2p"]}),
        ("deberta-v2", {"position_buckets": 4}),
        ("deberta-v2", {"relative_attention": False}),
        ("deberta", {}),
        ("deberta", {"pos_att_type": ["p2c"], "max_relative_positions": 5}),
    ],
)
def test_the_kinds_of_disentangled_attention_are_told_apart(family: str, fields: dict[str, Any]) -> None:
    """Shared projections, one direction alone, buckets, none; and those of the first DeBERTa."""
    model = bare_of(family, **DISENTANGLED | fields)
    assert encoder_flops(model, TOKENS) == counted(model)


@pytest.mark.parametrize("family", ["bert", "gpt2", "llama", "modernbert"])
def test_a_layer_is_measured_whole_and_by_its_decisions(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock of operations: a decision takes what it computes, and the encoder what its layers do.

    Of a model with the sizes of three layers a whole layer is measured, too.
    """

    def operations(call: Any, device: torch.device) -> float:
        with FlopCounterMode(display=False) as counter:
            call()
        return float(counter.get_total_flops())

    monkeypatch.setattr("ds_trainer.models.costs.seconds", operations)
    monkeypatch.setattr("ds_trainer.models.costs._ROUNDS", 1)
    model, cpu = eager(family), torch.device("cpu")
    decision, total = measured_seconds(model, 16, cpu)
    layer = next(iter(layers_of(model).values()))
    assert total == pytest.approx(encoder_flops(model, 16), rel=0.02)
    for block in blocks_of(layer):
        assert decision[block.kind] == pytest.approx(decision_flops(block, layer, model.config, 16))
    shrunk = shrink(empty(eager(family), uneven(model)))
    shrunk.set_attn_implementation("eager")
    assert measured_seconds(shrunk, 16, cpu) == (decision, pytest.approx(encoder_flops(shrunk, 16), rel=0.05))
