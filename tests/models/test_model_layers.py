"""Layers of models of transformers: their dropout, their recomputing, which of their weights are counted; their costs.

FLOPs counted by hand are compared with those that torch counts while a model runs.
"""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from support.zeroed import FAMILIES, bare_of, empty, inputs_of, model_of, uneven
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from ds_trainer.models.costs import decision_flops, encoder_flops, measured_seconds
from ds_trainer.models.layers import (
    SIZES_OF,
    blocks_of,
    count_weights,
    decisions_of,
    encoder_linears,
    is_recomputing,
    layers_of,
    set_dropout,
    set_recomputing,
    swap,
    whole_totals,
)
from ds_trainer.models.shrink import shrink
from ds_trainer.ranks.failures import UserError
from ds_trainer.recipe.recipe import parse_recipe
from ds_trainer.run.phase import PhaseModel
from ds_trainer.run.rehearsal import LiveMemory
from ds_trainer.techniques.prune.masked import HardMask, MaskedLinear, StepMask
from ds_trainer.techniques.technique import PhaseLength


@pytest.mark.parametrize("family", [*FAMILIES, "gpt_bigcode", "seed_oss"])
@torch.no_grad()
def test_nothing_is_dropped_in_training_where_the_probability_is_0(family: str) -> None:
    """Outputs of the training mode are those of the evaluation mode, though the config's rates are a half."""
    config = bare_of(family).config.to_dict()
    rates = {name: 0.5 for name, value in config.items() if "drop" in name and isinstance(value, float)}
    model = bare_of(family, **rates)
    expected = model(**inputs_of())[0]
    model.train()
    if rates:
        assert not torch.equal(model(**inputs_of())[0], expected), (
            "the model has no dropout, and the test shows nothing"
        )
    set_dropout(model, 0.0)
    torch.testing.assert_close(model(**inputs_of())[0], expected, rtol=0, atol=0)


@pytest.mark.parametrize(("fields", "expected"), [({}, 0.1), ({"dropout": 0.3}, 0.3)])
def test_a_phase_has_the_dropout_of_its_recipe_or_of_the_config(fields: dict[str, Any], expected: float) -> None:
    """The config, which is exported, stays as it was."""
    spec = parse_recipe({"phases": [{"max_steps": 1, **fields}]}).phases[0]
    task: Any = SimpleNamespace(build_model=lambda _: model_of("bert"))
    model, _ = PhaseModel(spec, spec.techniques, task, "", PhaseLength(1, 0, 0)).build()
    assert {module.p for module in model.modules() if isinstance(module, nn.Dropout)} == {expected}
    assert model.config.hidden_dropout_prob == 0.1


@pytest.fixture
def model() -> Any:
    """A BERT of six layers, in training, whose activations are most of its memory."""
    shape = {"hidden_size": 32, "num_hidden_layers": 6, "num_attention_heads": 2, "intermediate_size": 128}
    return transformers.BertForSequenceClassification(transformers.BertConfig(**shape, vocab_size=50)).train()


def kept_after_forward(model: Any) -> int:
    """Bytes that a forward leaves for the backward."""
    with LiveMemory() as live:
        loss = model(input_ids=torch.full((8, 64), 5), labels=torch.zeros(8, dtype=torch.long)).loss
        kept = live.now
        loss.backward()
    return kept


def test_only_the_inputs_of_layers_are_kept_and_each_layer_runs_twice(model: Any) -> None:
    """Less than a third is kept, and all of it again once it is off; the second forward knows that it is one."""
    plain, seen = kept_after_forward(model), list[bool]()
    set_recomputing(model, True)
    hook = model.bert.encoder.layer[2].intermediate.register_forward_hook(lambda *_: seen.append(is_recomputing()))
    assert kept_after_forward(model) < plain / 3
    hook.remove()
    assert seen == [False, True]
    assert not is_recomputing()
    set_recomputing(model, False)
    assert kept_after_forward(model) == plain


def test_a_frozen_encoder_still_keeps_nothing(model: Any) -> None:
    """transformers would have gradients run down to the embeddings, through layers in which nothing is trained."""
    for parameter in model.base_model.parameters():
        parameter.requires_grad_(False)
    plain = kept_after_forward(model)
    set_recomputing(model, True)
    assert kept_after_forward(model) <= plain


def test_masked_layers_keep_nothing_either(model: Any) -> None:
    """The penalty on the scores is a part of the loss, and that of the second forward must not keep its graph alive."""
    linears: Any = encoder_linears(model)
    swap(model, {name: MaskedLinear(layer, torch.rand_like(layer.weight), "l1") for name, layer in linears.items()})
    masked = [model.get_submodule(name) for name in linears]
    set_recomputing(model, True)
    for layer in masked:
        layer.step_mask = StepMask(mask=HardMask(0.5, 0, kept=0))
    with LiveMemory() as live:
        loss = model(input_ids=torch.full((8, 64), 5), labels=torch.zeros(8, dtype=torch.long)).loss
        kept = live.now
        (loss + sum(layer.penalty for layer in masked)).backward()
        model.zero_grad()
        del loss
        assert live.now < kept / 2


def test_a_model_without_recomputing_is_refused(model: Any) -> None:
    """One that transformers cannot recompute is not trained as if it could; to leave it off is no mistake."""
    model.supports_gradient_checkpointing = False
    with pytest.raises(UserError, match="BertForSequenceClassification of transformers does not have it"):
        set_recomputing(model, True)
    set_recomputing(model, False)


def test_matrices_outside_of_linear_layers_are_counted_and_never_silently_left_whole() -> None:
    """Those of a mixture's experts are among the encoder's weights; all linear layers are refused, unless patterns
    choose some."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 8, "vocab_size": 40}
    sizes |= {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 24}
    model = transformers.AutoModel.from_config(transformers.AutoConfig.for_model("qwen3_moe", **sizes))
    matrices = {
        name: weight
        for name, weight in model.named_parameters()
        if weight.dim() > 1 and ".layer" in f".{name}" and min(weight.shape) > 1
    }
    counted = count_weights(model)["encoder"]["total"]
    assert counted == whole_totals(model)["encoder"] == sum(weight.numel() for weight in matrices.values())
    with pytest.raises(UserError, match=r"are in no linear layer, such as .*name linear layers in its modules"):
        encoder_linears(model)
    assert encoder_linears(model, ["*.1.*"])


def test_a_few_weights_outside_of_linear_layers_are_told(caplog: pytest.LogCaptureFixture) -> None:
    """ConvBERT's kernels stay whole, and the warning says what share of the weights they are."""
    with caplog.at_level(logging.WARNING, "ds_trainer"):
        encoder_linears(bare_of("convbert", intermediate_size=96, conv_kernel_size=3))
    assert "% of the weights in the matrices of ConvBertModel's layers are in no linear layer" in caplog.text


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
