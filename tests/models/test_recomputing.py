"""Gradient checkpointing: what it keeps in memory, and the models that have none.

That losses and gradients stay the same, `tests/integration/test_zero.py` shows with masks, exits and a teacher.
"""

from __future__ import annotations

import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification

from ds_trainer.models.layers import encoder_linears, is_recomputing, set_recomputing, swap
from ds_trainer.ranks.failures import UserError
from ds_trainer.run.rehearsal import LiveMemory
from ds_trainer.techniques.prune.masked import HardMask, MaskedLinear, StepMask


@pytest.fixture
def model() -> BertForSequenceClassification:
    shape = {"hidden_size": 32, "num_hidden_layers": 6, "num_attention_heads": 2, "intermediate_size": 128}
    return BertForSequenceClassification(BertConfig(**shape, vocab_size=50)).train()


def kept_after_forward(model) -> int:
    """Bytes that a forward leaves for the backward."""
    with LiveMemory() as live:
        loss = model(input_ids=torch.full((8, 64), 5), labels=torch.zeros(8, dtype=torch.long)).loss
        kept = live.now
        loss.backward()
    return kept


def test_only_the_inputs_of_layers_are_kept(model):
    """Less than a third, and all of it again once it is off."""
    plain = kept_after_forward(model)
    set_recomputing(model, True)
    assert kept_after_forward(model) < plain / 3
    set_recomputing(model, False)
    assert kept_after_forward(model) == plain


def test_a_frozen_encoder_still_keeps_nothing(model):
    """transformers would have gradients run down to the embeddings, through layers in which nothing is trained."""
    for parameter in model.base_model.parameters():
        parameter.requires_grad_(False)
    plain = kept_after_forward(model)
    set_recomputing(model, True)
    assert kept_after_forward(model) <= plain


@pytest.mark.parametrize("penalty", [None, "l1"])
def test_masked_layers_keep_nothing_either(model, penalty):
    """The penalty on the scores is a part of the loss, and that of the second forward must not keep its graph alive."""
    linears = encoder_linears(model)
    swap(model, {name: MaskedLinear(layer, torch.rand_like(layer.weight), penalty) for name, layer in linears.items()})
    masked = [model.get_submodule(name) for name in linears]
    set_recomputing(model, True)
    for layer in masked:
        layer.step_mask = StepMask(mask=HardMask(0.5, 0, kept=0))
    with LiveMemory() as live:
        loss = model(input_ids=torch.full((8, 64), 5), labels=torch.zeros(8, dtype=torch.long)).loss
        kept = live.now
        (loss + sum(layer.penalty for layer in masked if penalty)).backward()
        model.zero_grad()
        del loss
        assert live.now < kept / 2


def test_the_second_forward_of_a_layer_knows_that_it_is_one(model):
    """Each layer runs twice, the second time in the backward."""
    seen = []
    model.bert.encoder.layer[2].intermediate.register_forward_hook(lambda *_: seen.append(is_recomputing()))
    set_recomputing(model, True)
    kept_after_forward(model)
    assert seen == [False, True]
    assert not is_recomputing()


def test_a_model_without_it_is_refused(model):
    model.supports_gradient_checkpointing = False
    with pytest.raises(UserError, match="BertForSequenceClassification of transformers does not have it"):
        set_recomputing(model, True)
    set_recomputing(model, False)
