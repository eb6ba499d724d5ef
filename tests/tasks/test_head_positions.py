"""Heads at chosen positions: the same logits and gradients as the plain model's, for every architecture."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    BartConfig,
    BertConfig,
    DebertaV2Config,
    ElectraConfig,
    GPT2Config,
    OPTConfig,
)

from ds_trainer.tasks.lm.head_positions import take_head_positions

SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24, "vocab_size": 40}
RELATIVE = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "max_relative_positions": 8}
OWN_DECODER = {"vocab_size": 40, "max_position_embeddings": 32, "pad_token_id": 0, "dropout": 0.0}
LAYERS = {
    f"{side}_{what}": size
    for side in ("encoder", "decoder")
    for what, size in (("layers", 2), ("attention_heads", 2), ("ffn_dim", 24))
}
MASKED = {
    "bert": BertConfig(**SIZES),
    "electra": ElectraConfig(**SIZES, embedding_size=8),
    "deberta_v2": DebertaV2Config(**SIZES, **RELATIVE),
    "deberta_v2_new_head": DebertaV2Config(**SIZES, **RELATIVE, legacy=False),
}
CAUSAL = {
    "gpt2": GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=40),
    "opt": OPTConfig(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, ffn_dim=24, **OWN_DECODER),
    "bart": BartConfig(d_model=16, **LAYERS, **OWN_DECODER),
}
POSITIONS = torch.tensor([1, 5, 8, 13])
"""Places 1 and 5 of the first row of six, 2 of the second, 1 of the third."""


def build(name: str) -> Any:
    torch.manual_seed(0)
    auto, config = (AutoModelForMaskedLM, MASKED[name]) if name in MASKED else (AutoModelForCausalLM, CAUSAL[name])
    return auto.from_config(copy.deepcopy(config)).eval()


def inputs() -> dict[str, torch.Tensor]:
    ids = torch.randint(5, 40, (3, 6), generator=torch.Generator().manual_seed(0))
    attended = torch.tensor([[1] * 6, [1] * 6, [1, 1, 1, 0, 0, 0]])
    return {"input_ids": ids * attended, "attention_mask": attended}


@pytest.mark.parametrize("name", [*MASKED, *CAUSAL])
def test_logits_gradients_and_hidden_states_are_those_of_the_plain_model(name: str) -> None:
    """At the positions to 1e-6, as (1, n, vocabulary); hidden states keep the whole batch."""
    plain, model = build(name), take_head_positions(build(name))
    expected = plain(**inputs(), output_hidden_states=True)
    for _ in range(2):  # before and after a forward with positions
        assert torch.equal(model(**inputs()).logits, expected.logits)
        filled = model(**inputs(), head_positions=POSITIONS).get("past_key_values")
        assert filled is None, "a loss needs no cache"
    found = model(**inputs(), head_positions=POSITIONS, output_hidden_states=True)
    wanted = expected.logits.flatten(0, 1)[POSITIONS]
    assert found.logits.shape == (1, 4, 40)
    torch.testing.assert_close(found.logits[0], wanted, atol=1e-6, rtol=0)
    for one, other in zip(found.hidden_states, expected.hidden_states, strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=0)
    found.logits.square().sum().backward()
    wanted.square().sum().backward()
    for (name, parameter), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert (parameter.grad is None) == (other.grad is None), name
        if other.grad is not None:
            torch.testing.assert_close(parameter.grad, other.grad, atol=1e-5, rtol=1e-5, msg=name)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        wanted = plain(**inputs()).logits.flatten(0, 1)[POSITIONS]
        found = model(**inputs(), head_positions=POSITIONS).logits[0]
    assert found.dtype == wanted.dtype
    torch.testing.assert_close(found, wanted, atol=0.01, rtol=0.02)
    if plain.can_generate() and plain.config.model_type in CAUSAL:
        settings = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
        ids = inputs()["input_ids"][:2]
        assert torch.equal(model.generate(ids, **settings), plain.generate(ids, **settings))


@torch.no_grad()
@pytest.mark.parametrize("name", ["bert", "deberta_v2"])
def test_hooks_take_tuples_forget_after_an_error_and_are_a_copys_own(name: str) -> None:
    """A model that is asked for tuples gives its logits first. Neither it nor its encoder remembers positions."""
    model = take_head_positions(build(name))
    expected = model(**inputs()).logits.flatten(0, 1)[POSITIONS]
    twin = copy.deepcopy(model)
    assert len({id(next(iter(each._forward_pre_hooks.values())).__self__) for each in (model, twin)}) == 2
    with pytest.raises(IndexError):
        model(torch.full((1, 6), 999), head_positions=POSITIONS)
    assert model.base_model(**inputs()).last_hidden_state.shape == (3, 6, 16)
    assert model(**inputs()).logits.shape == (3, 6, 40)
    for each in (model, twin):
        logits = each(**inputs(), head_positions=POSITIONS, return_dict=False)[0]
        torch.testing.assert_close(logits[0], expected)


@pytest.mark.parametrize("name", ["bert", "gpt2", "bart"])
def test_recomputed_layers_give_the_same_gradients(name: str) -> None:
    """With gradient checkpointing, whose layers run again in the backward: the encoder's output is cut once."""
    found = []
    for checkpointing in (False, True):
        model = take_head_positions(build(name)).train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        torch.manual_seed(0)
        model(**inputs(), head_positions=POSITIONS).logits.square().sum().backward()
        found.append({key: each.grad for key, each in model.named_parameters() if each.grad is not None})
    assert found[0]
    torch.testing.assert_close(found[1], found[0])
