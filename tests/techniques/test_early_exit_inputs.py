"""What a model that exits early can be given and made into: inputs that are refused, no rows, copies, 8 bits."""

import copy

import pytest
import torch
from support.exhaustive import chosen
from support.exit_models import (
    AT_ONCE,
    FAMILIES,
    LAYERS,
    NEVER,
    WIDTH,
    check_same,
    layers_of,
    left_at,
    made,
    pad_of,
    randomise,
    texts,
)

from ds_trainer.techniques.exits.early_exit import EarlyExitModel, EarlyExitOutput

CRITERIA = ("entropy", "confidence", "patience", "regression")


@pytest.mark.parametrize("family", chosen(FAMILIES, lambda family: family in ("bert", "deberta-conv", "modernbert")))
def test_a_copy_exits_by_itself(family):
    """As the original does, which the copy shares nothing with: neither asks the other's heads or policy."""
    model = made(family)
    ids, mask = texts(padding=pad_of(family))
    expected = model(ids, mask)
    copied = copy.deepcopy(model)
    assert type(copied) is EarlyExitModel
    assert not any(module.training for module in copied.modules())
    check_same(copied(ids, mask), expected)
    assert not {p.data_ptr() for p in copied.parameters()} & {p.data_ptr() for p in model.parameters()}
    assert [len(layer._forward_pre_hooks) for layer in layers_of(copied)] == [0, 1, 1, 1]
    model.policy = AT_ONCE
    randomise(model.exit_heads, 0.5)
    check_same(copied(ids, mask), expected)
    copied.policy = NEVER
    assert set(model(ids, mask).exit_layers.tolist()) == {1}
    assert set(copied(ids, mask).exit_layers.tolist()) == {LAYERS}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_a_model_that_exits_can_be_quantised():
    """torch's dynamic quantisation, on the CPU, gives one of 8 bits that leaves; the original is as it was."""
    model = made("bert")
    ids, mask = texts()
    expected = model(ids, mask)
    small = torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, dtype=torch.qint8)
    kinds = {type(module).__module__ for module in small.modules() if "Linear" in type(module).__name__}
    assert "torch.nn.modules.linear" not in kinds
    assert "torch.ao.nn.quantized.dynamic.modules.linear" in kinds
    out = small(ids, mask)
    assert len(set(out.exit_layers.tolist())) > 2
    assert (out.exit_layers == expected.exit_layers).float().mean() > 0.6
    assert not torch.equal(out.logits, expected.logits)
    check_same(model(ids, mask), expected)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("labels", torch.zeros(16, dtype=torch.int64)),
        ("output_hidden_states", True),
        ("inputs_embeds", torch.zeros(16, 12, WIDTH)),
    ],
)
def test_what_is_not_done_is_not_taken(name, value):
    """A loss, states, attentions or a tuple are not left out without a word: TypeError, with the name."""
    model = made("bert")
    ids, mask = texts()
    with pytest.raises(TypeError, match=name):
        model(ids, mask, **{name: value})


def test_positions_reach_the_model():
    """In a forward that leaves as in one of all heads."""
    model = made("bert")
    ids, mask = texts()
    positions = (torch.arange(12) + 20).expand_as(ids).contiguous()
    logits = model.all_logits(ids, mask, position_ids=positions)
    assert not torch.allclose(logits, model.all_logits(ids, mask), atol=1e-2)
    at = left_at(model.policy, logits)
    expected = EarlyExitOutput(logits=logits[at, torch.arange(len(at))], exit_layers=at + 1)
    check_same(model(ids, mask, position_ids=positions), expected)
