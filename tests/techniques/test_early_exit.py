"""Batches that leave early: as one by one, in order, whatever the padding, on every architecture."""

import json
import threading
from itertools import product
from typing import Any

import pytest
import torch
from support.exhaustive import chosen
from support.exit_models import (
    AT_ONCE,
    BUCKETS,
    FAMILIES,
    LAYERS,
    NEVER,
    SMALL,
    WIDTH,
    check_same,
    classifier,
    early_exit,
    layers_of,
    left_at,
    made,
    pad_of,
    randomise,
    split_by,
    texts,
)
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForMaskedLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
)

from ds_trainer.config.exit_specs import ExitPolicy, SavedExits
from ds_trainer.techniques.exits.early_exit import EarlyExitModel, EarlyExitOutput, load_for_inference, with_exits
from ds_trainer.techniques.exits.heads import new_heads, save_heads

CRITERIA = ("entropy", "confidence", "patience", "regression")


def one_by_one(model: EarlyExitModel, ids: Tensor, mask: Tensor) -> EarlyExitOutput:
    """Each text by itself, without padding."""
    outs = [
        model(row[None, : int(there.sum())], there[None, : int(there.sum())])
        for row, there in zip(ids, mask, strict=True)
    ]
    return EarlyExitOutput(
        logits=torch.cat([out.logits for out in outs]), exit_layers=torch.cat([out.exit_layers for out in outs])
    )


def attentions(family: str) -> list[str]:
    return ["eager"] if FAMILIES[family][0] == "deberta-v2" else ["eager", "sdpa"]


EVERY = [(f, a, criterion) for f in FAMILIES for a in attentions(f) for criterion in CRITERIA]


@pytest.mark.parametrize(
    ("family", "attention", "criterion"),
    chosen(EVERY, lambda case: case[2] == "entropy" or case[:2] == ("bert", "sdpa")),
)
def test_a_batch_leaves_as_its_texts_do_alone(family, attention, criterion):
    """The layer exactly and the logits to 1e-4, in the order of the rows: those of the head that decisions made
    afterwards, on all heads' logits, pick. Texts leave at more than one layer."""
    model = made(family, criterion, attn_implementation=attention)
    ids, mask = texts(padding=pad_of(family))
    out = model(ids, mask)
    assert len(set(out.exit_layers.tolist())) >= (2 if model.policy.patience else 3)
    check_same(out, one_by_one(model, ids, mask))
    logits = model.all_logits(ids, mask)
    at = left_at(model.policy, logits)
    expected = EarlyExitOutput(logits=logits[at, torch.arange(len(at))], exit_layers=torch.tensor(model.layers)[at])
    check_same(out, expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_padding_changes_no_decision(family):
    """The same texts with 1, 5 and 20 more places of padding, and without the longest ones, leave where they did."""
    model = made(family)
    ids, mask = texts(padding=pad_of(family))
    expected = model(ids, mask)
    for more in (1, 5, 20):
        padded = torch.nn.functional.pad(ids, (0, more), value=pad_of(family))
        check_same(model(padded, torch.nn.functional.pad(mask, (0, more))), expected)
    short = mask.sum(1) <= 6
    some = EarlyExitOutput(logits=expected.logits[short], exit_layers=expected.exit_layers[short])
    check_same(model(ids[short, :6], mask[short, :6]), some)


@pytest.mark.parametrize("family", FAMILIES)
def test_if_nobody_leaves_it_is_the_plain_model(family):
    """The logits are those of the model without exits, to 1e-5, and every text went through all layers."""
    plain = classifier(family)
    ids, mask = texts(padding=pad_of(family))
    with torch.no_grad():
        expected = plain(input_ids=ids, attention_mask=mask).logits
    out = early_exit(plain, NEVER)(ids, mask)
    torch.testing.assert_close(out.logits, expected, atol=1e-5, rtol=0)
    assert out.exit_layers.tolist() == [LAYERS] * len(ids)


def test_what_a_model_does_to_its_inputs_is_done():
    """A Longformer's classifier has the first token attend globally, and pads to its window: exits change neither."""
    torch.manual_seed(0)
    config = AutoConfig.for_model("longformer", num_labels=3, pad_token_id=0, attention_window=8, **SMALL)
    plain = randomise(AutoModelForSequenceClassification.from_config(config), 0.25).eval()
    ids, mask = texts()
    with torch.no_grad():
        expected = plain(input_ids=ids, attention_mask=mask).logits
    model = early_exit(plain, NEVER)
    torch.testing.assert_close(model(ids, mask).logits, expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(model.all_logits(ids, mask)[-1], expected, atol=1e-5, rtol=0)
    model = split_by(model, "entropy", ids, mask)
    check_same(model(ids, mask), one_by_one(model, ids, mask))


@pytest.mark.parametrize("family", FAMILIES)
def test_all_leave_at_the_first_head(family, monkeypatch):
    """The layers behind it do not run at all."""
    model = early_exit(classifier(family), AT_ONCE)
    ids, mask = texts(padding=pad_of(family))
    layers = layers_of(model)

    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("a layer behind the exit ran")

    for layer in layers[1:]:
        monkeypatch.setattr(layer, "forward", never)
    out = model(ids, mask)
    assert out.exit_layers.tolist() == [1] * len(ids)
    assert out.logits.shape == (len(ids), 3)


@pytest.mark.parametrize("family", ["bert", "distilbert", "deberta-conv", "modernbert"])
def test_layers_are_given_only_the_texts_that_are_still_there(family):
    """The rows that each layer computes are as many as have not left before it."""
    model = made(family)
    ids, mask = texts(padding=pad_of(family))
    rows = []

    def count(_: Any, args: Any, kwargs: Any) -> None:
        rows.append(len(args[0] if args else kwargs["hidden_states"]))

    for layer in layers_of(model):
        layer.register_forward_pre_hook(count, with_kwargs=True)
    left = model(ids, mask).exit_layers
    assert rows == [int((left >= number).sum()) for number in range(1, int(left.max()) + 1)]
    assert rows[0] == 16 > rows[1] > rows[2]


SOME_LAYERS = list(product(["bert", "deberta-conv", "modernbert-mean"], [(1,), (2,), (3,), (1, 3), (2, 3)]))


@pytest.mark.parametrize(("family", "layers"), chosen(SOME_LAYERS, lambda case: case[0] == "bert" or case[1] == (2, 3)))
def test_heads_may_be_after_some_layers_only(family, layers):
    """Texts leave there and at the end, and nowhere else; batched as one by one."""
    model = made(family, layers=layers)
    ids, mask = texts(padding=pad_of(family))
    out = model(ids, mask)
    assert set(out.exit_layers.tolist()) == {*layers, LAYERS}
    check_same(out, one_by_one(model, ids, mask))


@pytest.mark.parametrize("family", chosen(FAMILIES, lambda family: family in ("bert", "deberta-conv", "modernbert")))
def test_no_size_of_a_batch_is_taken_for_another(family):
    """As many texts as there are tokens, hidden units, positions or relative positions: as one by one all the same."""
    model = made(family)
    ids, mask = texts(64, padding=pad_of(family))
    expected = one_by_one(model, ids, mask)
    for rows in (1, 7, 12, 2 * BUCKETS, WIDTH, 64):
        some = EarlyExitOutput(logits=expected.logits[:rows], exit_layers=expected.exit_layers[:rows])
        check_same(model(ids[:rows], mask[:rows]), some)


@pytest.mark.parametrize("criterion", CRITERIA)
def test_the_order_of_the_rows_is_that_of_the_results(criterion):
    """A batch in another order gives the same results in that order."""
    model = made("bert", criterion)
    ids, mask = texts()
    expected = model(ids, mask)
    order = torch.randperm(len(ids), generator=torch.Generator().manual_seed(5))
    shuffled = EarlyExitOutput(logits=expected.logits[order], exit_layers=expected.exit_layers[order])
    check_same(model(ids[order], mask[order]), shuffled)


def test_no_mask_is_a_mask_of_ones():
    """Texts without padding need none."""
    model = made("bert")
    ids = texts(length=4)[0]
    check_same(model(ids), model(ids, torch.ones_like(ids)))


def test_token_types_reach_the_model():
    """What the model takes beside ids and mask is handed on, in a forward of all heads too."""
    model = made("bert", type_vocab_size=2)
    ids, mask = texts()
    types = (torch.arange(12) > 5).long().expand_as(ids).contiguous()
    with torch.no_grad():
        own = model.model(input_ids=ids, attention_mask=mask, token_type_ids=types).logits
    logits = model.all_logits(ids, mask, token_type_ids=types)
    torch.testing.assert_close(logits[-1], own, atol=1e-5, rtol=0)
    at = left_at(model.policy, logits)
    out = model(ids, mask, token_type_ids=types)
    assert out.exit_layers.tolist() == (at + 1).tolist() != model(ids, mask).exit_layers.tolist()


def test_threads_do_not_mix_their_texts():
    """One thread's batch goes through the whole model while another's is half way: each gets its own results."""
    model = made("bert")
    ids, mask = texts()
    expected = [model(ids[:7], mask[:7]), model(ids[7:], mask[7:])]
    half_way, done = threading.Event(), threading.Event()
    first = threading.get_ident()

    def wait(*_: Any) -> None:
        if threading.get_ident() == first and not done.is_set():
            half_way.set()
            assert done.wait(timeout=30)

    found: list[EarlyExitOutput] = []

    def other() -> None:
        assert half_way.wait(timeout=30)
        found.append(model(ids[7:], mask[7:]))
        done.set()

    layers_of(model)[1].register_forward_hook(wait)
    thread = threading.Thread(target=other)
    thread.start()
    out = model(ids[:7], mask[:7])
    thread.join()
    check_same(out, expected[0])
    check_same(found[0], expected[1])


@pytest.mark.parametrize("family", ["bert", "modernbert"])
def test_the_model_inside_is_whole_after_an_exit(family):
    """Run by itself it goes to the end, with all rows in all its hidden states."""
    model = early_exit(classifier(family), AT_ONCE)
    ids, mask = texts(padding=pad_of(family))
    with torch.no_grad():
        expected = classifier(family)(input_ids=ids, attention_mask=mask).logits
        model(ids, mask)
        out = model.model(input_ids=ids, attention_mask=mask, output_hidden_states=True)
    torch.testing.assert_close(out.logits, expected, atol=1e-5, rtol=0)
    assert {len(states) for states in out.hidden_states} == {len(ids)}


def test_an_error_inside_leaves_nothing_behind(monkeypatch):
    """After a forward that failed half way, the plain model gives all rows, and the next batch its own results."""
    model = made("bert")
    ids, mask = texts()
    expected = model(ids, mask)
    with monkeypatch.context() as context:
        context.setattr(layers_of(model)[2], "forward", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(ids, mask)
    with torch.no_grad():
        assert model.model(input_ids=ids, attention_mask=mask).logits.shape == (16, 3)
    check_same(model(ids, mask), expected)
    with pytest.raises(IndexError):
        model(ids + 1000, mask)
    check_same(model(ids, mask), expected)


def test_the_forward_of_all_heads_leaves_nothing_behind():
    """It adds no hook that stays, and a batch after it leaves as before."""
    model = made("bert")
    ids, mask = texts()
    expected = model(ids, mask)
    hooks = [(len(layer._forward_pre_hooks), len(layer._forward_hooks)) for layer in layers_of(model)]
    with pytest.raises(IndexError):
        model.all_logits(ids + 1000, mask)
    assert model.all_logits(ids, mask).shape == (4, 16, 3)
    assert [(len(layer._forward_pre_hooks), len(layer._forward_hooks)) for layer in layers_of(model)] == hooks
    check_same(model(ids, mask), expected)


def test_results_carry_no_gradient():
    """Also where the caller has not said so."""
    model = made("bert")
    ids, mask = texts()
    assert not model(ids, mask).logits.requires_grad
    assert not model.all_logits(ids, mask).requires_grad


def test_it_says_of_itself_what_the_model_does():
    """Config, device and dtype; its parameters are the model's and the heads', each once."""
    model = made("bert")
    assert (model.config, model.device, model.dtype) == (model.model.config, torch.device("cpu"), torch.float32)
    assert (model.layers, len(model.heads)) == ([1, 2, 3, 4], 4)
    names = {name.split(".")[0] for name, _ in model.named_parameters(remove_duplicate=False)}
    assert names == {"model", "exit_heads"}
    assert model.bfloat16()(*texts()).logits.dtype == model.dtype == torch.bfloat16


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A BERT with heads after layers 1 and 3 beside it."""
    path = tmp_path_factory.mktemp("exits") / "model"
    model = made("bert", layers=(1, 3))
    model.model.save_pretrained(path)
    saved = SavedExits(layers=[1, 3], pooling="first", policy=model.policy)
    save_heads(path, model.exit_heads, saved)
    return path, model


def test_a_folder_with_heads_loads_as_a_model_that_leaves(folder):
    """In evaluation mode, with the heads and the policy of the folder: the results are those from before."""
    path, model = folder
    loaded = load_for_inference(path)
    assert isinstance(loaded, EarlyExitModel)
    assert not any(module.training for module in loaded.modules())
    assert loaded.policy == model.policy
    ids, mask = texts()
    assert torch.equal(loaded(ids, mask).exit_layers, model(ids, mask).exit_layers)
    assert torch.equal(loaded(ids, mask).logits, model(ids, mask).logits)


def test_another_policy_than_the_folders_can_be_asked_for(folder):
    """The heads are the folder's all the same."""
    path, _ = folder
    never = ExitPolicy(criterion="confidence", thresholds=[1.0, 1.0])
    model = with_exits(AutoModelForSequenceClassification.from_pretrained(path).eval(), path, never).eval()
    assert set(model(*texts()).exit_layers.tolist()) == {LAYERS}


def test_transformers_alone_loads_the_folder(folder):
    """As an ordinary model: no key is missing or too many, and the logits are those of the model without exits."""
    path, model = folder
    plain, info = AutoModelForSequenceClassification.from_pretrained(path, output_loading_info=True)
    assert {name: list(found) for name, found in info.items() if found} == {}
    assert type(plain) is type(model.model)
    ids, mask = texts()
    with torch.no_grad():
        logits = plain.eval()(input_ids=ids, attention_mask=mask).logits
    torch.testing.assert_close(logits, model.all_logits(ids, mask)[-1], atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    "auto", [AutoModelForSequenceClassification, AutoModelForQuestionAnswering, AutoModelForMaskedLM]
)
def test_a_folder_without_heads_loads_as_it_is(auto, tmp_path):
    """A plain classifier, a model that answers questions, a language model: each in its own class, to evaluate."""
    model = auto.from_config(AutoConfig.for_model(FAMILIES["bert"][0], **FAMILIES["bert"][1]))
    model.save_pretrained(tmp_path)
    loaded = load_for_inference(tmp_path)
    assert type(loaded) is type(model)
    assert not loaded.training
    assert all(torch.equal(one, two) for one, two in zip(loaded.parameters(), model.parameters(), strict=True))


def test_a_folder_without_a_trained_model_is_refused(folder, tmp_path):
    """No folder, no config, an encoder without a head: each is told with its place."""
    with pytest.raises(ValueError, match="does not exist"):
        load_for_inference(tmp_path / "none" / "such" / "folder")
    with pytest.raises(ValueError, match=r"has no config\.json"):
        load_for_inference(tmp_path)
    classifier("bert").bert.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="holds no trained sequence classifier"):
        load_for_inference(tmp_path)


def test_heads_of_a_deeper_model_are_refused(folder, tmp_path):
    """A folder whose exits.json names a layer that its model has not is told, not half loaded."""
    path, _ = folder
    shallow = classifier("bert", num_hidden_layers=3)
    shallow.save_pretrained(tmp_path)
    for name in ("exits.json", "exit_heads.safetensors"):
        (tmp_path / name).write_bytes((path / name).read_bytes())
    with pytest.raises(ValueError, match="a head after layer 3, and the model has 3"):
        load_for_inference(tmp_path)
    assert json.loads((tmp_path / "exits.json").read_text())["layers"] == [1, 3]


def test_new_heads_are_asked_in_the_order_of_the_layers():
    """Ten layers and more: layer 10 comes after 9, not after 1."""
    model = classifier("bert", num_hidden_layers=11)
    heads = new_heads(model, range(1, 11), None)
    policy = ExitPolicy(criterion="entropy", thresholds=[0.0] * 9 + [9.0])
    found = EarlyExitModel(model, heads, policy).eval()
    assert found.layers == [*range(1, 12)]
    assert set(found(*texts()).exit_layers.tolist()) == {10}
