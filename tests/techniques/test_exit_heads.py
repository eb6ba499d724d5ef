"""Exit heads: shaped like the model's own on every architecture, copies of it, and whole in a folder or refused."""

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from support.exhaustive import chosen
from support.exit_models import FAMILIES, LAYERS, SMALL, WIDTH, classifier, randomise, texts
from transformers import AutoConfig, AutoModelForSequenceClassification

from ds_trainer.config.exit_specs import ExitPolicy, SavedExits
from ds_trainer.techniques.exits.heads import (
    EXITS_FILE,
    HEADS_FILE,
    ExitHead,
    LayerStates,
    has_exits,
    load_heads,
    model_head,
    new_heads,
    read_exits,
    save_heads,
)

POLICY = ExitPolicy(criterion="entropy", thresholds=[0.1, 0.2])


def saved_exits(**fields: Any) -> SavedExits:
    return SavedExits(**{"layers": [1, 3], "pooling": "first", "policy": POLICY} | fields)


@torch.no_grad()
def last_states(model: Any, ids: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What the last layer leaves, and the model's logits."""
    states = LayerStates(model, [LAYERS])
    logits = model(input_ids=ids, attention_mask=mask).logits
    states.remove()
    return states.take()[LAYERS], logits


@pytest.mark.parametrize(
    ("family", "num_labels"), chosen(product(FAMILIES, [1, 3]), lambda case: case[1] == 3 or case[0] == "bert")
)
def test_the_own_head_says_what_the_model_says(family, num_labels):
    """Of the last layer's states it gives the model's logits, for classes and for a score, whatever the padding."""
    model = classifier(family, num_labels=num_labels)
    ids, mask = texts(padding=FAMILIES[family][1].get("pad_token_id", 0))
    hidden, logits = last_states(model, ids, mask)
    assert logits.shape == (16, num_labels)
    assert logits.std(0).min() > 0.01
    torch.testing.assert_close(model_head(model)(hidden, mask), logits, atol=1e-5, rtol=1e-5)


PARTS = {
    "bert": ["Linear", "Tanh", "Dropout", "Linear"],
    "roberta": ["Linear", "Dropout", "Linear"],
    "distilbert": ["Linear", "ReLU", "Dropout", "Linear"],
    "electra": ["Linear", "GELUActivation", "Dropout", "Linear"],
    "deberta": ["Linear", "Dropout", "Dropout", "Linear"],
    "modernbert": ["LayerNorm", "Linear", "GELUActivation", "LayerNorm", "Dropout", "Linear"],
}


@pytest.mark.parametrize("family", PARTS)
def test_a_head_has_the_parts_of_the_models_own(family):
    """Pooler where the model has one, dropout, classifier: the same modules inside, of the same sizes."""
    model = classifier(family)
    (head,) = new_heads(model, [1], None).values()
    parts = [type(module).__name__ for module in head.modules() if not list(module.children())]
    assert parts == PARTS[family]
    assert [p.shape for p in head.parameters()] == [p.shape for p in model_head(model).parameters()]


def test_a_head_drops_out_while_training_alone():
    """Two passes of one head differ in training, and not in evaluation."""
    (head,) = new_heads(classifier("bert", hidden_dropout_prob=0.5), [1], None).values()
    hidden, mask = torch.randn(4, 5, WIDTH), torch.ones(4, 5)
    assert not torch.equal(head.train()(hidden, mask), head(hidden, mask))
    assert torch.equal(head.eval()(hidden, mask), head(hidden, mask))


@pytest.mark.parametrize("family", FAMILIES)
def test_new_heads_are_copies_that_share_nothing(family):
    """They start with the own head's values and live in memory of their own: training one changes no other."""
    model = classifier(family)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    heads = new_heads(model, [1, 2], None)
    own = model_head(model)
    for head in heads.values():
        assert all(torch.equal(a, b) for a, b in zip(head.parameters(), own.parameters(), strict=True))
    places = {p.data_ptr() for module in (model, *heads.values()) for p in module.parameters()}
    assert len(places) == sum(len(list(module.parameters())) for module in (model, *heads.values()))
    optimizer = torch.optim.SGD(heads["1"].parameters(), lr=1.0)
    heads["1"](torch.randn(4, 5, WIDTH), torch.ones(4, 5)).square().sum().backward()
    optimizer.step()
    assert all(p.grad is None for p in [*model.parameters(), *heads["2"].parameters()])
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert not all(torch.equal(a, b) for a, b in zip(heads["1"].parameters(), heads["2"].parameters(), strict=True))


@pytest.mark.parametrize("training", [True, False])
def test_looking_for_the_head_leaves_the_model_as_it_was(training):
    """Its mode, its hooks and its random state: a head is asked for while training too."""
    model = classifier("bert").train(training)
    state = torch.get_rng_state()
    new_heads(model, [1, 2], None)
    assert {module.training for module in model.modules()} == {training}
    assert torch.equal(torch.get_rng_state(), state)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("family", ["bert", "roberta", "distilbert", "modernbert"])
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
    head = ExitHead([], "mean", None, takes_tokens=False)
    hidden = torch.full((2, 310, 3), 300.0, dtype=dtype)
    hidden[:, 301:] = 7.0
    mask = torch.cat([torch.ones(2, 301), torch.zeros(2, 9)], dim=1).long()
    found = head(hidden, mask)
    assert found.dtype == dtype
    assert torch.equal(found, torch.full((2, 3), 300.0, dtype=dtype))


def test_pooling_is_the_models_own_or_the_one_asked_for():
    """First token for a BERT, mean for a ModernBERT of classifier_pooling mean; asked for, it is the other."""
    for family, own in (("bert", "first"), ("modernbert", "first"), ("modernbert-mean", "mean")):
        model = classifier(family)
        assert model_head(model).pooling == own
        for asked, expected in ((None, own), ("first", "first"), ("mean", "mean")):
            (head,) = new_heads(model, [2], asked).values()
            assert head.pooling == expected
    hidden, mask = torch.randn(2, 6, WIDTH), torch.ones(2, 6)
    head = model_head(classifier("modernbert-mean")).eval()
    mean = head.norm(hidden).mean(1)
    torch.testing.assert_close(head(hidden, mask), head.steps[-1](head.steps[0](mean)))
    changed = hidden.clone()
    changed[:, 1:] = 0
    first = model_head(classifier("bert")).eval()
    assert torch.equal(first(changed, mask), first(hidden, mask))


@pytest.mark.parametrize("kind", ["albert", "funnel", "gpt2", "xlnet"])
def test_a_head_of_a_form_that_is_not_known_is_refused(kind):
    """As a ValueError that names the model's class, not with heads that say something else."""
    small = {"vocab_size": 99, "num_labels": 3, "pad_token_id": 0}
    fields = {
        "albert": SMALL | {"embedding_size": 16},
        "funnel": {"d_model": 32, "n_head": 2, "d_head": 16, "d_inner": 32, "block_sizes": [2, 2]},
        "gpt2": {"n_embd": 32, "n_layer": 3, "n_head": 2, "n_positions": 16},
        "xlnet": {"d_model": 32, "n_layer": 2, "n_head": 2, "d_inner": 32},
    }[kind]
    model = AutoModelForSequenceClassification.from_config(AutoConfig.for_model(kind, **fields | small)).eval()
    with pytest.raises(ValueError, match=rf"exits: .*{type(model).__name__}"):
        model_head(model)


def test_states_are_those_that_transformers_gives():
    """What each layer leaves is the hidden state of that number, of the latest forward, and is forgotten once taken."""
    model = classifier("bert")
    ids, mask = texts()
    states = LayerStates(model, [1, 3, 4])
    with torch.no_grad():
        model(input_ids=ids[:3], attention_mask=mask[:3])
        hidden = model(input_ids=ids, attention_mask=mask, output_hidden_states=True).hidden_states
    found = states.take()
    assert found.keys() == {1, 3, 4}
    assert all(torch.equal(found[layer], hidden[layer]) for layer in found)
    assert states.take() == {}
    states.remove()
    model(input_ids=ids, attention_mask=mask)
    assert states.take() == {}


def test_states_of_deberta_are_those_behind_its_convolution():
    """What lies between a layer and the next counts as the layer's."""
    model = classifier("deberta-conv")
    ids, mask = texts()
    states = LayerStates(model, [1])
    with torch.no_grad():
        hidden = model(input_ids=ids, attention_mask=mask, output_hidden_states=True).hidden_states
    torch.testing.assert_close(states.take()[1], hidden[1])


@pytest.fixture(scope="module")
def bert() -> Any:
    return classifier("bert")


@pytest.fixture
def folder(bert, tmp_path) -> Path:
    """The files of random heads of a BERT, after its layers 1 and 3."""
    save_heads(tmp_path, randomise(new_heads(bert, [1, 3], None), 0.5), saved_exits())
    return tmp_path


@pytest.mark.parametrize("family", chosen(FAMILIES, lambda family: family in ("bert", "deberta", "modernbert-mean")))
def test_heads_come_back_from_a_folder_bit_for_bit(family, tmp_path):
    """Their values, layers, pooling and policy, in a model that is loaded anew."""
    model = classifier(family)
    model.save_pretrained(tmp_path)
    heads = randomise(new_heads(model, [1, 3], "mean"), 0.5)
    saved = saved_exits(pooling="mean", held_out=0.1, calibration={"speedup": 1.5})
    assert not has_exits(tmp_path)
    save_heads(tmp_path, heads, saved)
    assert has_exits(tmp_path)
    found, said = load_heads(AutoModelForSequenceClassification.from_pretrained(tmp_path), tmp_path)
    assert said == saved == read_exits(tmp_path)
    assert list(found) == ["1", "3"]
    assert {head.pooling for head in found.values()} == {"mean"}
    expected = heads.state_dict()
    assert found.state_dict().keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in found.state_dict().items())


def test_saving_again_replaces_the_heads(bert, folder):
    """Other heads in the same folder: nothing of the first is left, and no file beside."""
    names = {path.name for path in folder.iterdir()}
    policy = ExitPolicy(criterion="patience", patience=2)
    save_heads(folder, new_heads(bert, [2], None), saved_exits(layers=[2], policy=policy))
    heads, saved = load_heads(bert, folder)
    assert (list(heads), saved.policy) == (["2"], policy)
    assert {path.name for path in folder.iterdir()} == names


def broken(folder: Path, what: str) -> None:
    """Spoil one thing of the folder."""
    exits, heads = folder / EXITS_FILE, folder / HEADS_FILE
    data = json.loads(exits.read_text())
    changes: dict[str, dict[str, Any]] = {
        "layer": {"layers": [1, 4]},
        "order": {"layers": [3, 1]},
        "other layers": {"layers": [1, 2]},
        "thresholds": {"policy": {"criterion": "entropy", "thresholds": [0.1]}},
        "criterion": {"policy": {"criterion": "hope", "thresholds": [0.1, 0.1]}},
        "negative": {"policy": {"criterion": "entropy", "thresholds": [-0.1, 0.1]}},
        "version": {"version": 2},
        "key": {"laiers": [1]},
    }
    if what in changes:
        exits.write_text(json.dumps(data | changes[what]))
    elif what == "cut json":
        exits.write_text(exits.read_text()[:40])
    elif what == "cut heads":
        heads.write_bytes(heads.read_bytes()[:-100])
    elif what == "no heads":
        heads.unlink()
    elif what == "other shape":
        wide = classifier("bert", hidden_size=64)
        save_heads(folder, new_heads(wide, [1, 3], None), saved_exits())
    elif what == "other family":
        save_heads(folder, new_heads(classifier("roberta"), [1, 3], None), saved_exits())


@pytest.mark.parametrize(
    ("what", "file", "words"),
    [
        ("layer", EXITS_FILE, "a head after layer 4, and the model has 4"),
        ("order", EXITS_FILE, "from first to last"),
        ("other layers", HEADS_FILE, "does not hold the heads of this model"),
        ("thresholds", EXITS_FILE, "1 thresholds for 2 heads"),
        ("criterion", EXITS_FILE, '"hope"'),
        ("negative", EXITS_FILE, "-0.1"),
        ("version", EXITS_FILE, "version"),
        ("key", EXITS_FILE, 'did you mean "layers"'),
        ("cut json", EXITS_FILE, ""),
        ("cut heads", HEADS_FILE, "does not hold the heads of this model"),
        ("no heads", HEADS_FILE, "does not hold the heads of this model"),
        ("other shape", HEADS_FILE, "size mismatch"),
        ("other family", HEADS_FILE, "does not hold the heads of this model"),
    ],
)
def test_heads_that_are_not_the_models_are_told(bert, folder, what, file, words):
    """One ValueError of one line, with the file and what is wrong with it."""
    broken(folder, what)
    with pytest.raises(ValueError) as caught:
        load_heads(bert, folder)
    message = str(caught.value)
    assert file in message
    assert words in message
    assert "\n" not in message
    assert len(message) < 500


def test_a_folder_without_heads_is_told(tmp_path):
    """By its name, with the file that it has not."""
    with pytest.raises(ValueError, match=r"has no exits\.json: it has no exit heads"):
        read_exits(tmp_path)
