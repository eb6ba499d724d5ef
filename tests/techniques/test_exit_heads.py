"""Exit heads: shaped like the model's own on every architecture, copies of it, and whole in a folder or refused."""

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from support.exit_models import FAMILIES, LAYERS, SMALL, WIDTH, classifier, pad_of, randomise, texts
from support.launching import chosen
from transformers import AutoConfig, AutoModelForSequenceClassification

from ds_trainer.models.layers import LayerStates
from ds_trainer.recipe.exit_specs import EXITS_FILE, ExitPolicy, SavedExits
from ds_trainer.techniques.exits.early_exit import (
    HEADS_FILE,
    ExitHead,
    load_heads,
    model_head,
    new_heads,
    read_exits,
    save_heads,
)

POLICY = ExitPolicy(criterion="entropy", thresholds=[0.1, 0.2])
POLICY_OF_ONE = ExitPolicy(criterion="patience", patience=2)
PARTS = {
    "bert": ["Linear", "Tanh", "Dropout", "Linear"],
    "roberta": ["Linear", "Dropout", "Linear"],
    "distilbert": ["Linear", "ReLU", "Dropout", "Linear"],
    "electra": ["Linear", "GELUActivation", "Dropout", "Linear"],
    "deberta": ["Linear", "Dropout", "Dropout", "Linear"],
    "modernbert": ["LayerNorm", "Linear", "GELUActivation", "LayerNorm", "Dropout", "Linear"],
}


def saved_exits(**fields: Any) -> SavedExits:
    return SavedExits(**{"layers": [1, 3], "pooling": "first", "policy": POLICY} | fields)


@pytest.mark.parametrize(
    ("family", "num_labels"), chosen(product(FAMILIES, [1, 3]), lambda case: case[1] == 3 or case[0] == "bert")
)
def test_the_models_head_says_what_the_model_says(family, num_labels):
    """It turns the last layer's states into the model's logits, whatever the padding, and has the parts of its form.

    New heads are copies that share no memory, and looking for the head leaves the model's mode and hooks as they were.
    """
    model = classifier(family, num_labels=num_labels).train()
    states, before = torch.get_rng_state(), [len(module._forward_hooks) for module in model.modules()]
    head = model_head(model)
    heads = new_heads(model, [1, 2], None)
    assert {module.training for module in model.modules()} == {True}
    assert [len(module._forward_hooks) for module in model.modules()] == before
    assert torch.equal(torch.get_rng_state(), states)
    parts = [type(module).__name__ for module in heads["1"].modules() if not list(module.children())]
    assert parts == PARTS.get(family, parts)
    for copied in heads.values():
        assert all(torch.equal(a, b) for a, b in zip(copied.parameters(), head.parameters(), strict=True))
    places = {p.data_ptr() for module in (model, *heads.values()) for p in module.parameters()}
    assert len(places) == sum(len(list(module.parameters())) for module in (model, *heads.values()))
    states = LayerStates(model.eval(), [LAYERS])
    ids, mask = texts(padding=pad_of(family))
    with torch.no_grad():
        out = model(input_ids=ids, attention_mask=mask)
    assert out.logits.std(0).min() > 0.01
    torch.testing.assert_close(head(out.layer_states[LAYERS], mask), out.logits, atol=1e-5, rtol=1e-5)
    states.remove()


def test_a_head_drops_out_while_training_alone():
    """Two passes of one head differ in training, and not in evaluation."""
    (head,) = new_heads(classifier("bert", hidden_dropout_prob=0.5), [1], None).values()
    hidden, mask = torch.randn(4, 5, WIDTH), torch.ones(4, 5)
    assert not torch.equal(head.train()(hidden, mask), head(hidden, mask))
    assert torch.equal(head.eval()(hidden, mask), head(hidden, mask))


@pytest.mark.parametrize("family", ["roberta", "modernbert"])
def test_mean_pooling_ignores_padding(family):
    """What stands at masked places changes no logit; what stands at the others does, at every one of them."""
    (head,) = new_heads(classifier(family), [1], "mean").values()
    head.eval()
    hidden, mask = torch.randn(2, 6, WIDTH), torch.tensor([[1, 1, 1, 1, 0, 0], [1] * 6])
    expected = head(hidden, mask)
    noisy = hidden.clone()
    noisy[0, 4:] = 100.0
    torch.testing.assert_close(head(noisy, mask), expected)
    torch.testing.assert_close(head(hidden[:1, :4], mask[:1, :4]), expected[:1])
    torch.testing.assert_close(head(hidden[1:], None), expected[1:])
    for place in range(4):
        other = hidden.clone()
        other[0, place] += torch.randn(WIDTH)
        assert not torch.allclose(head(other, mask)[0], expected[0], atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_mean_pooling_in_16_bits_is_that_of_fp32(dtype):
    """A sum over 301 tokens of 300 is beyond fp16, and 301 is no number of bf16: neither is rounded before the end."""
    hidden = torch.full((2, 310, 3), 300.0, dtype=dtype)
    hidden[:, 301:] = 7.0
    mask = torch.cat([torch.ones(2, 301), torch.zeros(2, 9)], dim=1).long()
    pooled = ExitHead([], "mean", None, takes_tokens=False)(hidden, mask)
    assert pooled.dtype == dtype
    assert torch.equal(pooled, torch.full((2, 3), 300.0, dtype=dtype))


def test_pooling_is_the_models_own_or_the_one_asked_for():
    """First token for a BERT, mean for a ModernBERT of classifier_pooling mean, after its norm."""
    for family, own in (("bert", "first"), ("modernbert", "first"), ("modernbert-mean", "mean")):
        model = classifier(family)
        for asked, expected in ((None, own), ("first", "first"), ("mean", "mean")):
            (head,) = new_heads(model, [2], asked).values()
            assert head.pooling == expected
    hidden, mask = torch.randn(2, 6, WIDTH), torch.ones(2, 6)
    head = model_head(classifier("modernbert-mean")).eval()
    torch.testing.assert_close(head(hidden, mask), head.steps[-1](head.steps[0](head.norm(hidden).mean(1))))
    changed = hidden.clone()
    changed[:, 1:] = 0
    first = model_head(classifier("bert")).eval()
    assert torch.equal(first(changed, mask), first(hidden, mask))


@pytest.mark.parametrize("kind", ["albert", "gpt2"])
def test_a_head_of_a_form_that_is_not_known_is_refused(kind):
    """As a ValueError that names the model's class, not with heads that say something else."""
    small = {"vocab_size": 99, "num_labels": 3, "pad_token_id": 0}
    fields = {
        "albert": SMALL | {"embedding_size": 16},
        "gpt2": {"n_embd": 32, "n_layer": 3, "n_head": 2, "n_positions": 16},
    }[kind]
    model = AutoModelForSequenceClassification.from_config(AutoConfig.for_model(kind, **fields | small)).eval()
    with pytest.raises(ValueError, match=rf"exits: .*{type(model).__name__}"):
        model_head(model)


@pytest.mark.parametrize("family", ["bert", "deberta-conv"])
def test_states_are_those_that_transformers_gives_and_travel_with_the_output(family):
    """What each layer leaves is the hidden state of that number, also where a convolution lies behind it; a later
    forward of the model replaces nothing."""
    model = classifier(family)
    ids, mask = texts()
    states = LayerStates(model, [1, 3])
    with torch.no_grad():
        out = model(input_ids=ids, attention_mask=mask, output_hidden_states=True)
        model(input_ids=ids[:3], attention_mask=mask[:3])
    assert out.layer_states.keys() == {1, 3}
    for layer, hidden in out.layer_states.items():
        torch.testing.assert_close(hidden, out.hidden_states[layer])
    states.remove()
    assert not hasattr(model(input_ids=ids, attention_mask=mask), "layer_states")


@pytest.fixture(scope="module")
def bert() -> Any:
    return classifier("bert")


@pytest.fixture
def folder(bert, tmp_path) -> Path:
    """The files of random heads of a BERT, after its layers 1 and 3."""
    save_heads(tmp_path, randomise(new_heads(bert, [1, 3], None), 0.5), saved_exits())
    return tmp_path


def test_heads_come_back_from_a_folder_bit_for_bit(bert, tmp_path):
    """Their values, layers, pooling and policy; saving again replaces them, and leaves no file beside."""
    with pytest.raises(ValueError, match=r"has no exits\.json: it has no exit heads"):
        read_exits(tmp_path)
    save_heads(tmp_path, new_heads(bert, [2], None), saved_exits(layers=[2], policy=POLICY_OF_ONE))
    names = {path.name for path in tmp_path.iterdir()}
    heads = randomise(new_heads(bert, [1, 3], "mean"), 0.5)
    saved = saved_exits(pooling="mean", held_out=0.1, calibration={"speedup": 1.5})
    save_heads(tmp_path, heads, saved)
    loaded, read = load_heads(classifier("bert"), tmp_path)
    assert read == saved == read_exits(tmp_path)
    assert {head.pooling for head in loaded.values()} == {"mean"}
    expected = heads.state_dict()
    assert loaded.state_dict().keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in loaded.state_dict().items())
    assert {path.name for path in tmp_path.iterdir()} == names


@pytest.mark.parametrize(
    ("change", "file", "words"),
    [
        ({"layers": [1, 4]}, EXITS_FILE, "a head after layer 4, and the model has 4"),
        ({"layers": [1, 2]}, HEADS_FILE, "does not hold the heads of this model"),
        ({"policy": {"criterion": "entropy", "thresholds": [0.1]}}, EXITS_FILE, "1 thresholds for 2 heads"),
        ({"laiers": [1]}, EXITS_FILE, 'did you mean "layers"'),
        ("cut json", EXITS_FILE, ""),
        ("cut heads", HEADS_FILE, "does not hold the heads of this model"),
        ("other shape", HEADS_FILE, "size mismatch"),
        ("other family", HEADS_FILE, "does not hold the heads of this model"),
    ],
)
def test_heads_that_are_not_the_models_are_told(bert, folder, change, file, words):
    """One ValueError of one line, with the file and what is wrong with it."""
    exits, heads = folder / EXITS_FILE, folder / HEADS_FILE
    if isinstance(change, dict):
        exits.write_text(json.dumps(json.loads(exits.read_text()) | change))
    elif change == "cut json":
        exits.write_text(exits.read_text()[:40])
    elif change == "cut heads":
        heads.write_bytes(heads.read_bytes()[:-100])
    else:
        other = classifier("bert", hidden_size=64) if change == "other shape" else classifier("roberta")
        save_heads(folder, new_heads(other, [1, 3], None), saved_exits())
    with pytest.raises(ValueError) as caught:
        load_heads(bert, folder)
    message = str(caught.value)
    assert [word for word in (file, words) if word not in message] == []
    assert "\n" not in message
    assert len(message) < 500
