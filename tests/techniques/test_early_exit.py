"""Who leaves where: the criteria in closed form, batches that leave as one by one on every architecture, and heads that
are shaped like the model's own, copies of it, and whole in a folder or refused."""

import copy
import json
import shutil
import threading
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.exit_folders import (
    AT_ONCE,
    BUCKETS,
    FAMILIES,
    LAYERS,
    NEVER,
    SMALL,
    WIDTH,
    between,
    check_same,
    classifier,
    early_exit,
    layers_of,
    left_at,
    made,
    pad_of,
    randomise,
    texts,
)
from support.launching import exhaustive
from torch import Tensor
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoModelForTokenClassification

from ds_trainer.models.layers import LayerStates
from ds_trainer.recipe.exit_specs import EXITS_FILE, ExitPolicy, SavedExits
from ds_trainer.techniques.exits.early_exit import (
    HEADS_FILE,
    EarlyExitModel,
    EarlyExitOutput,
    ExitHead,
    doubt,
    doubts_of_all,
    load_for_inference,
    load_heads,
    model_head,
    new_heads,
    save_heads,
    with_exits,
)

CRITERIA = ("entropy", "confidence", "patience", "regression")


def of_probabilities(*shares: float) -> Tensor:
    """(1, classes) logits."""
    return torch.tensor([shares]).log()


def test_half_precision_is_widened_before_it_is_summed():
    half = of_probabilities(0.5, 0.25, 0.25).bfloat16()
    for criterion in ("entropy", "confidence"):
        assert torch.equal(doubt(criterion, half, None, None), doubt(criterion, half.double(), None, None))


def test_a_doubt_about_a_sequence_is_that_of_the_least_certain_token_that_counts():
    """Whatever stands at other places, NaN too; a token of NaN that counts makes it NaN; by patience all must agree."""
    likeliest = torch.tensor([[0.9, 0.6, 0.5], [0.8, 0.7, 0.6]], dtype=torch.double)
    shares = torch.stack([likeliest, 1 - likeliest], -1)
    counted = torch.tensor([[True, True, False], [True, True, True]])
    broken = shares.log()
    broken[0, 2] = torch.nan
    assert doubt("confidence", broken, None, counted).tolist() == pytest.approx([-0.6, -0.6])
    broken[0, 0] = torch.nan
    assert doubt("confidence", broken, None, counted)[0].isnan()
    before = shares.clone()
    before[0, 2], before[1, 1] = torch.tensor([0.0, 1.0]), before[1, 1].flip(-1)
    assert doubt("patience", shares, before, counted).tolist() == [0.0, 1.0]


@pytest.mark.parametrize(("criterion", "never"), [("entropy", 0.0), ("confidence", 1.0)])
def test_a_sample_at_the_threshold_stays(criterion, never):
    """Below the entropy, above the confidence: equal is not enough, and nobody is surer than certain. Each head has its
    threshold."""
    logits, surer = of_probabilities(0.8, 0.1, 0.1), of_probabilities(0.81, 0.1, 0.09)
    at = abs(float(doubt(criterion, logits, None, None)))
    policy = ExitPolicy(criterion=criterion, thresholds=[never, at])
    assert left_at(policy, torch.cat([logits, surer]).expand(3, 2, 3)).tolist() == [2, 1]
    certain = torch.tensor([[[500.0, 0.0]], [[0.0, 500.0]], [[500.0, 0.0]]])
    assert left_at(ExitPolicy(criterion=criterion, thresholds=[never] * 2), certain).tolist() == [2]
    scores = torch.tensor([1.0, 1.5, 2.0, 2.0])[:, None, None]  # as far from the one before as the tolerance
    assert left_at(ExitPolicy(criterion="patience", patience=2, thresholds=[0.5] * 3), scores).tolist() == [3]


@st.composite
def cases(draw) -> tuple[ExitPolicy, Tensor]:
    """A policy, and all heads' logits."""
    heads, rows = draw(st.integers(2, 6)), draw(st.integers(1, 8))
    criterion = draw(st.sampled_from(["entropy", "confidence", "patience"]))
    regression = criterion == "patience" and draw(st.booleans())
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    logits = torch.randn(heads, rows, 1 if regression else 3, generator=generator) * draw(st.sampled_from([0.1, 1, 5]))
    limits = st.lists(st.floats(0, 1.0 if criterion == "confidence" else 1.2), min_size=heads - 1, max_size=heads - 1)
    thresholds = [] if criterion == "patience" and not regression else draw(limits)
    patience = draw(st.integers(1, 3)) if criterion == "patience" else None
    return ExitPolicy(criterion=criterion, thresholds=thresholds, patience=patience), logits


def by_the_paper(policy: ExitPolicy, logits: Tensor) -> int:
    """The first head whose answer is sure, or the own one, of one row in plain Python."""
    agreed = 0
    for head in range(len(logits) - 1):
        shares = logits[head].double().softmax(-1)
        if policy.criterion == "entropy" and -float((shares * shares.log()).sum()) < policy.thresholds[head]:
            return head
        if policy.criterion == "confidence" and float(shares.max()) > policy.thresholds[head]:
            return head
        if policy.criterion == "patience" and head:
            one, two = logits[head - 1], logits[head]
            near = abs(two - one) < policy.thresholds[head] if logits.shape[-1] == 1 else one.argmax() == two.argmax()
            agreed = agreed + 1 if near else 0
            if agreed >= policy.patience:
                return head
    return len(logits) - 1


@given(cases())
@settings(max_examples=300 if exhaustive() else 75, deadline=None)
def test_decisions_are_those_of_the_papers_words(case):
    """Each row leaves where one row at a time in plain Python does."""
    policy, logits = case
    expected = [by_the_paper(policy, logits[:, row]) for row in range(logits.shape[1])]
    assert left_at(policy, logits).tolist() == expected


def one_by_one(model: EarlyExitModel, ids: Tensor, mask: Tensor) -> EarlyExitOutput:
    """Each text by itself, without padding."""
    outs = [model(row[None, :length]) for row, length in zip(ids, mask.sum(1).tolist(), strict=True)]
    return EarlyExitOutput(
        logits=torch.cat([out.logits for out in outs]), exit_layers=torch.cat([out.exit_layers for out in outs])
    )


@pytest.mark.parametrize(
    ("family", "attention", "criterion"),
    [*((family, "eager", "entropy") for family in FAMILIES), *(("bert", "sdpa", criterion) for criterion in CRITERIA)],
)
def test_a_batch_leaves_as_its_texts_do_alone(family, attention, criterion):
    """The layer exactly and the logits to 1e-4, in any order and padding: those of the head that decisions made
    afterwards, on all heads' logits, pick. Texts leave at more than one layer. Only those that stay are computed."""
    model = made(family, criterion, attn_implementation=attention)
    ids, mask = texts(padding=pad_of(family))
    rows = []
    for layer in layers_of(model):
        layer.register_forward_pre_hook(
            lambda _, args, kwargs: rows.append(len(args[0] if args else kwargs["hidden_states"])), with_kwargs=True
        )
    out = model(ids, mask)
    left = out.exit_layers
    assert rows == [int((left >= number).sum()) for number in range(1, int(left.max()) + 1)]
    assert len(set(left.tolist())) >= (2 if model.policy.patience else 3)
    check_same(out, one_by_one(model, ids, mask))
    logits = model.all_logits(ids, mask)
    at = left_at(model.policy, logits)
    expected = EarlyExitOutput(logits=logits[at, torch.arange(len(at))], exit_layers=torch.tensor(model.layers)[at])
    check_same(out, expected)
    assert not out.logits.is_inference()
    for more in (1, 20):
        wide = torch.nn.functional.pad(ids, (0, more), value=pad_of(family))
        check_same(model(wide, torch.nn.functional.pad(mask, (0, more))), expected)
    order = torch.randperm(len(ids), generator=torch.Generator().manual_seed(5))
    check_same(model(ids[order], mask[order]), expected, order)


@pytest.mark.parametrize("family", ["bert", "deberta", "modernbert"])
def test_a_batch_leaves_as_its_sequences_of_tokens_do_alone(family):
    """The layer exactly, the logits of every token to 1e-4, by the tokens that are of the text. Where none is, as in a
    sentence that is `[SEP]`, all that is attended counts."""
    special = (5, 11, 23)  # ids that are in many of the texts
    plain = classifier(family, auto=AutoModelForTokenClassification)
    model = EarlyExitModel(plain, early_exit(plain, NEVER).exit_heads, NEVER, special).eval()
    ids, mask = texts(padding=pad_of(family))
    logits, counted = model.all_logits(ids, mask), model.counted(ids, mask)
    assert torch.equal(counted, mask.bool() & (ids[..., None] != torch.tensor(special)).all(-1))
    doubts = doubts_of_all("entropy", logits, counted)
    model.policy = ExitPolicy(criterion="entropy", thresholds=[abs(between(values, 0.35)) for values in doubts])
    out = model(ids, mask)
    assert len(set(out.exit_layers.tolist())) >= 3
    assert (out.exit_layers - 1).tolist() == left_at(model.policy, logits, counted).tolist()
    for row, length in enumerate(mask.sum(1).tolist()):
        alone = model(ids[row : row + 1, :length])
        assert alone.exit_layers[0] == out.exit_layers[row]
        torch.testing.assert_close(out.logits[row, :length], alone.logits[0], atol=1e-4, rtol=0)
    none = torch.tensor([[5, 5, 5], [5, 7, 8]])
    assert model.counted(none, torch.tensor([[1, 1, 0]] * 2)).tolist() == [[True, True, False], [False, True, False]]


@pytest.mark.parametrize("family", ["bert", "deberta-conv", "modernbert"])
def test_no_size_of_a_batch_is_taken_for_another(family):
    """As many texts as there are tokens, hidden units, positions or relative positions: as one by one all the same."""
    model = made(family)
    ids, mask = texts(64, padding=pad_of(family))
    expected = one_by_one(model, ids, mask)
    for rows in (1, 7, 12, 2 * BUCKETS, WIDTH, 64):
        check_same(model(ids[:rows], mask[:rows]), expected, slice(rows))


def test_token_types_and_positions_reach_the_model():
    """What the model takes beside ids and mask is handed on, in a forward of all heads too; the rest is refused."""
    model = made("bert", type_vocab_size=2)
    ids, mask = texts()
    types = (torch.arange(12) > 5).long().expand_as(ids).contiguous()
    positions = (torch.arange(12) + 20).expand_as(ids).contiguous()
    before = model.all_logits(ids, mask)
    for inputs in ({"token_type_ids": types}, {"position_ids": positions}):
        with torch.no_grad():
            own = model.model(input_ids=ids, attention_mask=mask, **inputs).logits
        logits = model.all_logits(ids, mask, **inputs)
        torch.testing.assert_close(logits[-1], own, atol=1e-5, rtol=0)
        assert not torch.allclose(logits, before, atol=1e-2)
        assert model(ids, mask, **inputs).exit_layers.tolist() == (left_at(model.policy, logits) + 1).tolist()
    for refused in ({"labels": ids[:, 0]}, {"output_hidden_states": True}, {"inputs_embeds": torch.zeros(16, 12, 32)}):
        with pytest.raises(TypeError, match=next(iter(refused))):
            model(ids, mask, **refused)


def test_threads_do_not_mix_their_texts():
    """One thread's batch goes through the whole model while another's is half way: each gets its own results."""
    model = made("bert")
    ids, mask = texts()
    expected = model(ids, mask)
    half_way, done = threading.Event(), threading.Event()
    first, outs = threading.get_ident(), []

    def wait(*_: Any) -> None:
        if threading.get_ident() == first and not done.is_set():
            half_way.set()
            assert done.wait(timeout=30)

    def other() -> None:
        assert half_way.wait(timeout=30)
        outs.append(model(ids[7:], mask[7:]))
        done.set()

    layers_of(model)[1].register_forward_hook(wait)
    thread = threading.Thread(target=other)
    thread.start()
    out = model(ids[:7], mask[:7])
    thread.join()
    check_same(out, expected, slice(7))
    check_same(outs[0], expected, slice(7, None))


def test_an_error_inside_leaves_nothing_behind(monkeypatch):
    """After a forward that failed half way, the next batch gets its own results, and no hook is there that was not."""
    model = made("bert")
    ids, mask = texts()
    expected = model(ids, mask)
    hooks = [(len(layer._forward_pre_hooks), len(layer._forward_hooks)) for layer in layers_of(model)]
    with monkeypatch.context() as context:
        context.setattr(layers_of(model)[2], "forward", lambda *_, **__: 1 / 0)
        for run in (model, model.all_logits):
            with pytest.raises(ZeroDivisionError):
                run(ids, mask)
    assert [(len(layer._forward_pre_hooks), len(layer._forward_hooks)) for layer in layers_of(model)] == hooks
    check_same(model(ids, mask), expected)


def test_a_copy_exits_by_itself():
    """As the original does, which the copy shares nothing with: neither asks the other's heads or policy."""
    model = made("bert")
    ids, mask = texts()
    expected = model(ids, mask)
    copied = copy.deepcopy(model)
    assert not {p.data_ptr() for p in copied.parameters()} & {p.data_ptr() for p in model.parameters()}
    model.policy = AT_ONCE
    randomise(model.exit_heads, 0.5)
    check_same(copied(ids, mask), expected)
    assert set(model(ids, mask).exit_layers.tolist()) == {1}
    assert (copied.config, copied.device) == (copied.model.config, torch.device("cpu"))
    assert copied.bfloat16()(ids, mask).logits.dtype == copied.dtype == torch.bfloat16


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A BERT with heads after layers 1 and 3 beside it."""
    path = tmp_path_factory.mktemp("exits") / "model"
    model = made("bert", layers=(1, 3))
    model.model.save_pretrained(path)
    save_heads(path, model.exit_heads, SavedExits(layers=[1, 3], pooling="first", policy=model.policy))
    return path, model


def test_a_folder_with_heads_loads_as_a_model_that_leaves(folder):
    """In evaluation mode, with the folder's policy or another."""
    path, model = folder
    loaded = load_for_inference(path)
    assert isinstance(loaded, EarlyExitModel)
    assert not any(module.training for module in loaded.modules())
    ids, mask = texts()
    check_same(loaded(ids, mask), model(ids, mask))
    plain = AutoModelForSequenceClassification.from_pretrained(path)
    never = ExitPolicy(criterion="confidence", thresholds=[1.0, 1.0])
    assert set(with_exits(plain, path, never)(ids, mask).exit_layers.tolist()) == {LAYERS}
    with pytest.raises(ValueError, match="3 thresholds for 2 heads"):
        with_exits(plain, path, NEVER)


def test_heads_are_asked_in_the_order_of_the_layers():
    """Ten layers and more: layer 10 comes after 9, not after 1."""
    model = classifier("bert", num_hidden_layers=11)
    policy = ExitPolicy(criterion="entropy", thresholds=[0.0] * 9 + [9.0])
    early = EarlyExitModel(model, new_heads(model, range(1, 11), None), policy).eval()
    assert early.layers == [*range(1, 12)]
    assert set(early(*texts()).exit_layers.tolist()) == {10}


def test_looking_for_the_head_leaves_the_mode_and_the_hooks_of_a_model():
    model = classifier("bert", num_labels=1).train()
    model_head(model)
    assert {module.training for module in model.modules()} == {True}
    assert not any(module._forward_hooks for module in model.modules())


def test_a_head_drops_out_while_training_alone():
    """Two passes of one head differ in training, and not in evaluation."""
    (head,) = new_heads(classifier("bert", hidden_dropout_prob=0.5), [1], None).values()
    hidden, mask = torch.randn(4, 5, WIDTH), torch.ones(4, 5)
    assert not torch.equal(head.train()(hidden, mask), head(hidden, mask))
    assert torch.equal(head.eval()(hidden, mask), head(hidden, mask))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_mean_pooling_in_16_bits_is_that_of_fp32(dtype):
    """A sum over 301 tokens of 300 is beyond fp16, and 301 is no number of bf16: neither is rounded before the end."""
    hidden = torch.full((2, 310, 3), 300.0, dtype=dtype)
    hidden[:, 301:] = 7.0
    mask = torch.cat([torch.ones(2, 301), torch.zeros(2, 9)], dim=1).long()
    pooled = ExitHead([], "mean", None, takes_tokens=False)(hidden, mask)
    assert pooled.dtype == dtype
    assert torch.equal(pooled, torch.full((2, 3), 300.0, dtype=dtype))


@pytest.mark.parametrize(("kind", "fields"), [("albert", {"embedding_size": 16}), ("gpt2", {"pad_token_id": 0})])
def test_a_head_of_a_form_that_is_not_known_is_refused(kind, fields):
    """As a ValueError that names the model's class, not with heads that say something else."""
    model = AutoModelForSequenceClassification.from_config(AutoConfig.for_model(kind, **SMALL | fields)).eval()
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


@pytest.mark.parametrize(
    ("change", "file", "words"),
    [
        ({"layers": [1, 4]}, EXITS_FILE, "a head after layer 4, and the model has 4"),
        ({"layers": [1, 2]}, HEADS_FILE, "does not hold the heads of this model"),
        ({"policy": {"criterion": "entropy", "thresholds": [0.1]}}, EXITS_FILE, "1 thresholds for 2 heads"),
        ({"laiers": [1]}, EXITS_FILE, 'did you mean "layers"'),
        ("cut json", EXITS_FILE, ""),
        ("cut heads", HEADS_FILE, "does not hold the heads of this model"),
    ],
)
def test_heads_that_are_not_the_models_are_told(folder, tmp_path, change, file, words):
    """One ValueError of one line, with the file and what is wrong with it."""
    path, model = shutil.copytree(folder[0], tmp_path / "model"), folder[1].model
    exits, heads = path / EXITS_FILE, path / HEADS_FILE
    if isinstance(change, dict):
        exits.write_text(json.dumps(json.loads(exits.read_text()) | change))
    elif change == "cut json":
        exits.write_text(exits.read_text()[:40])
    else:
        heads.write_bytes(heads.read_bytes()[:-100])
    with pytest.raises(ValueError) as caught:
        load_heads(model, path)
    message = str(caught.value)
    assert [word for word in (file, words) if word not in message] == []
    assert "\n" not in message
    assert len(message) < 500
