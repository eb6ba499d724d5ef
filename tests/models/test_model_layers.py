"""Layers of models of transformers: their dropout, their recomputing, and which of their weights are counted."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from support.zeroed import FAMILIES, bare_of, inputs_of, model_of
from torch import nn

from ds_trainer.models.layers import (
    count_weights,
    encoder_linears,
    is_recomputing,
    set_dropout,
    set_recomputing,
    swap,
    whole_totals,
)
from ds_trainer.ranks.failures import UserError
from ds_trainer.recipe.recipe import parse_recipe
from ds_trainer.run.phase import PhaseModel
from ds_trainer.run.rehearsal import LiveMemory
from ds_trainer.techniques.prune.masked import HardMask, MaskedLinear, StepMask
from ds_trainer.techniques.technique import PhaseLength

SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24, "vocab_size": 40}


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


ELSEWHERE = {
    "qwen3_moe": SMALL | {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 24, "head_dim": 8},
    "xlnet": {"d_model": 16, "n_layer": 2, "n_head": 2, "d_inner": 24, "vocab_size": 40},
}
"""Experts of a mixture, and the attention of XLNet: parameters of three dimensions."""


@pytest.mark.parametrize("family", ELSEWHERE)
def test_matrices_outside_of_linear_layers_are_counted_and_never_silently_left_whole(family: str) -> None:
    """They are among the encoder's weights; all linear layers are refused, unless patterns choose some."""
    model = transformers.AutoModel.from_config(transformers.AutoConfig.for_model(family, **ELSEWHERE[family]))
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
