"""Language modelling from documents to a score: files, sequences, conversations, packed rows, batches, models; the law
of masks; and heads at chosen positions."""

from __future__ import annotations

import copy
import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.lm_files import CHATML, LINES, SMALL, chat, decoder_folder, lm_task
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    BartConfig,
    BertConfig,
    BloomConfig,
    DebertaV2Config,
    ElectraConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    OPTConfig,
    RobertaConfig,
    ViTConfig,
)

from ds_trainer.models.folders import train_tokenizer
from ds_trainer.models.pretrained import load_tokenizer
from ds_trainer.recipe.task_specs import LmSpec
from ds_trainer.tasks.data import Array, Examples
from ds_trainer.tasks.lm.head_positions import take_head_positions
from ds_trainer.tasks.lm.lm_task import LmAnswer, LmTask
from ds_trainer.tasks.lm.lm_text import records
from ds_trainer.tasks.lm.masking import TokenMasking, choose, mask_tokens, token_weights
from ds_trainer.tasks.lm.sequences import best_fit, packed
from ds_trainer.tasks.registry import check_data_files, training_texts


def spec_of(folder: Path, train: str = "train.txt", **fields: Any) -> LmSpec:
    return LmSpec(**{"name": "mlm", "data_dir": str(folder), "train_file": train, "validation_file": train} | fields)


def write(folder: Path, name: str, content: str) -> None:
    (folder / name).write_text(content, encoding="utf-8", newline="")


def read(spec: LmSpec, split: str = "train") -> list[str]:
    return [row.value for row in records(spec, split).rows()]


def test_a_line_a_file_or_a_record_is_a_document(tmp_path: Path) -> None:
    """Lines end at a newline, with or without a carriage return, and at nothing else; blank ones are no documents."""
    write(tmp_path, "train.txt", "one\u0085more\r\n\n  \n two \nthree")
    assert read(spec_of(tmp_path)) == training_texts(spec_of(tmp_path)) == ["one\u0085more", " two ", "three"]
    assert read(spec_of(tmp_path, line_by_line=False)) == ["one\u0085more\r\n\n  \n two \nthree"]
    rows = [{"body": "a\nb", "text": "no"}, {"body": " "}, {"body": None}, {"body": "c"}]
    write(tmp_path, "train.jsonl", "\n".join(map(json.dumps, rows)))
    assert read(spec_of(tmp_path, "train.jsonl", text_column="body")) == ["a\nb", "c"]
    write(tmp_path, "train.csv", 'body,text\n"a\nb",no\n,no\nc,no\n')
    assert read(spec_of(tmp_path, "train.csv", text_column="body")) == ["a\nb", "c"]


def test_a_file_may_give_nothing_where_another_gives_a_text(tmp_path: Path) -> None:
    """The summary says what was left out; a mistake names its file; where none gives a text, it is an error."""
    write(tmp_path, "a.txt", "")
    write(tmp_path, "b.jsonl", '{"text": ""}\n')
    spec = spec_of(tmp_path, "?.*")
    with pytest.raises(ValueError, match=r"a\.txt and 1 more files has no examples: 1 left out, whose 'text' is empty"):
        read(spec)
    write(tmp_path, "c.txt", "one\n\n \ntwo\n\n\n")
    assert check_data_files(spec) == []
    source = records(spec, "train")
    assert [row.value for row in source.rows()] == ["one", "two"]
    assert source.summary() == "2 documents kept; 5 left out, whose 'text' is empty (lines 1, 2, 3, ...)"
    write(tmp_path, "b.jsonl", '{"text": 5}\n')
    with pytest.raises(ValueError, match=r"b\.jsonl, line 1: 'text' is a whole number, and must be text"):
        read(spec)


def test_a_pattern_reads_its_files_by_name(tmp_path: Path) -> None:
    """Brackets in data_dir's own name are no pattern; an absolute pattern works too."""
    folder, plain = tmp_path / "data [v1]", tmp_path / "plain"
    for each in (folder, plain):
        each.mkdir()
    for name in "bac":
        write(folder, f"part-{name}.txt", f"{name}\n{name}{name}\n")
    assert read(spec_of(folder, "part-*.txt")) == ["a", "aa", "b", "bb", "c", "cc"]
    assert read(spec_of(folder, "part-[ab].txt", line_by_line=False)) == ["a\naa\n", "b\nbb\n"]
    write(plain, "part-1.txt", "x")
    assert read(spec_of(folder, str(plain / "part-*.txt"))) == ["x"]
    write(folder, "odd[1].txt", "its name is no pattern")
    assert read(spec_of(folder, "odd[1].txt")) == ["its name is no pattern"]


def test_missing_files_and_wrong_settings_are_listed_before_anything_is_loaded(tmp_path: Path) -> None:
    """For both splits at once; the tokens of the training file are counted before "mlm" can mask any split."""
    nowhere = tmp_path / "nowhere"
    assert f"data_dir {nowhere} does not exist" in check_data_files(spec_of(nowhere))[0]
    write(tmp_path, "dev.txt", "text\n")
    spec = spec_of(tmp_path, validation_file="dev.txt")
    [message] = check_data_files(spec, ["validation"])
    assert message == f"there is no file for the train split; looked for {tmp_path / 'train.txt'}"
    causal = spec.model_copy(update={"name": "clm"})
    assert check_data_files(causal, ["validation"]) == []
    for fields, words in (
        ({"train_file": None}, 'the task "clm" has no file for the train split: set train_file'),
        ({"dataset": "wikitext"}, "dataset (wikitext) and files (train.txt) are both set"),
        ({"validation_file": None}, "needs train_file and validation_file, or dataset"),
    ):
        assert words in check_data_files(causal.model_copy(update=fields))[0]


def test_the_fingerprint_follows_the_content(tmp_path: Path) -> None:
    """Moving the folder does not change it; nor can text move between files unseen."""
    hashes = []
    for folder, a, b in (("one", "a", "b"), ("moved", "a", "b"), ("edited", "cb", "b"), ("shifted", "c", "bb")):
        (tmp_path / folder).mkdir()
        write(tmp_path / folder, "a.txt", a)
        write(tmp_path / folder, "b.txt", b)
        hashes.append(records(spec_of(tmp_path / folder, "?.txt"), "train").fingerprint())
    assert hashes[0] == hashes[1]
    assert len(set(hashes)) == 3


def test_a_hub_data_set_gives_its_column(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blank rows are left out, and a check leaves the hub alone."""
    spec = LmSpec(name="clm", dataset="owner/name/part")
    monkeypatch.setattr(datasets, "load_dataset", None)
    assert check_data_files(spec) == []
    hub = datasets.Dataset.from_dict({"text": ["", "a", "b\nc"], "number": [1, 2, 3]})
    monkeypatch.setattr(datasets, "load_dataset", lambda *names, split: hub)
    assert read(spec) == ["a", "b\nc"]
    assert records(spec, "train").fingerprint() == hub._fingerprint


# Conversations

MARKED = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}<end>{% endgeneration %}{% else %}{{ m.content }}<end>{% endif %}"
    "{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""CHATML, which says itself what the assistant writes."""
LAST = CHATML.replace("{{ m.content }}", "{{ m.content if loop.last or m.role == 'user' else m.content | upper }}")
"""It writes what the assistant says in another way where others follow, as Qwen3's does."""
THINKING = CHATML.replace("{% if add_generation_prompt %}", "{% if add_generation_prompt %}<think>")
"""Its prompt begins an answer with what it does not keep."""
TWO_TURNS = chat("why is it wet?", "it rains.", "and the cat?", "sat on the mat", system="be brief")


@pytest.fixture
def talk(tmp_path: Path) -> Any:
    def talk(conversations: list[Any], template: str | None = CHATML, **fields: Any) -> Any:
        llama = fields.pop("llama", False)
        config: Any = LlamaConfig(**SMALL) if llama else GPT2Config(n_embd=32, n_layer=1, n_head=2)
        return lm_task(tmp_path, decoder_folder(tmp_path / "model", config, template), conversations, **fields)

    return talk


def learned(task: Any) -> list[str]:
    """What is labelled in each example, as text; each label is the token behind its place."""
    examples, found = task.examples("train"), []
    for index in range(len(examples)):
        batch = task.collate(examples, [index])
        ids = batch.inputs["input_ids"][0]
        assert ids[batch.inputs["head_positions"] + 1].tolist() == batch.labels.tolist()
        assert len(batch.labels) == task.counts(examples, [index])["label"]
        found.append(task.tokenizer.decode(batch.labels))
    return found


@pytest.mark.parametrize("template", [CHATML, MARKED])
@pytest.mark.parametrize("packing", [False, True])
def test_only_what_the_assistant_writes_is_learned(template: str, packing: bool, talk: Any) -> None:
    """All its turns, each to the token that ends it, whether the template marks them or not."""
    task = talk([TWO_TURNS], template, packing=packing)
    assert learned(task) == ["it rains.<end>sat on the mat<end>"]
    text = task.tokenizer.decode(task.examples("train").row(0)["input_ids"])
    assert text.startswith("<|system|>be brief<end>\n<|user|>why is it wet?<end>\n<|assistant|>it rains.<end>\n")
    # a greeting answers nothing, and padding, which is the end of text here, takes no label away
    greeting = {"role": "assistant", "content": "good morning"}
    task = talk([TWO_TURNS, [greeting, *chat("is it wet?", "yes")]], template)
    assert task.pad_token_id == task.tokenizer.eos_token_id
    labels = task.collate(task.examples("train"), [0, 1]).labels
    first = "good morning<end>" if template == MARKED else ""
    assert task.tokenizer.decode(labels) == f"it rains.<end>sat on the mat<end>{first}yes<end>"


@pytest.mark.parametrize("begins", [False, True])
def test_the_template_alone_writes_the_beginning_of_a_text(begins: bool, talk: Any) -> None:
    """Llama's tokenizer puts one before each document; before a conversation it is there once, or not at all."""
    template = ("{{ bos_token }}" if begins else "") + CHATML
    for conversations, count in (([TWO_TURNS], int(begins)), (["it is wet", "it is dry"], 1)):
        task = talk(conversations, template, llama=True)
        examples = task.examples("train")
        rows = [examples.row(index)["input_ids"].tolist() for index in range(len(examples))]
        assert [row.count(task.tokenizer.bos_token_id) for row in rows] == [count] * len(rows)
        assert all(row[0] == task.tokenizer.bos_token_id for row in rows if count)


def test_long_conversations_are_cut_and_those_without_a_label_go(talk: Any, caplog: pytest.LogCaptureFixture) -> None:
    """With counts of both; `max_seq_length` falls into the second turn, or before the first one."""
    caplog.set_level("INFO", logger="ds_trainer")
    task = talk([TWO_TURNS])
    (whole,), room = learned(task), int(task.examples("train").lengths[0]) - 4
    long = chat("the cat sat on the mat and the dog lay by the door of the old house " * 3, "ok")
    task = talk([TWO_TURNS, long, chat("a question that nobody answers")], max_seq_length=room)
    (found,) = learned(task)
    assert whole.startswith(found)
    assert len("it rains.<end>") < len(found) < len(whole)
    assert f"3 conversations (2 cut at max_seq_length) give 1 examples of {room} tokens; 0 parts" in caplog.text
    assert "and 2 without a turn of the assistant are dropped" in caplog.text
    with pytest.raises(ValueError, match="see whether a role is called assistant"):
        talk([long], max_seq_length=room).examples("train")


REFUSED = [
    ([TWO_TURNS], None, "has no chat template, which messages_column needs"),
    ([TWO_TURNS], LAST, r"chat\.jsonl, line 1: the chat template writes message 3 in another way where others follow"),
    ([TWO_TURNS], THINKING, r"writes message 3 in another way behind the prompt for an answer, .* mark the turns"),
    ([chat("a"), TWO_TURNS], "{{ raise_exception('no system') }}", r"line 1: the chat template refuses .* no system"),
    ([[{"role": "user"}]], CHATML, r'line 1: message 1 must have a "role" and a "content"'),
    ([chat("a"), []], CHATML, r"line 2: 'messages' is a list, and must be a list of messages"),
]


@pytest.mark.parametrize(("conversations", "template", "message"), REFUSED)
def test_what_cannot_be_learned_from_is_refused(
    conversations: list[Any], template: str | None, message: str, talk: Any
) -> None:
    """With its place and the way out; an unstable template is taken where the assistant speaks last."""
    with pytest.raises(ValueError, match=message):
        talk(conversations, template).examples("train")
    if template == LAST:
        assert learned(talk([TWO_TURNS[1:3]], template)) == ["it rains.<end>"]


def test_files_are_checked_before_anything_is_loaded(tmp_path: Path) -> None:
    """Their first conversation; a tokenizer's texts have the roles."""
    spec = LmSpec(name="clm", data_dir=str(tmp_path), messages_column="messages", train_file="a.jsonl")
    for file in ("a.txt", "a.jsonl"):
        (tmp_path / file).write_text(json.dumps({"messages": "hello"}))
        (mistake,) = check_data_files(spec.model_copy(update={"validation_file": file}), ["validation"])
        assert "line 1: 'messages' is text, and must be a list of messages" in mistake
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": chat("hello", "you")}))
    assert training_texts(spec) == ["user\nhello\nassistant\nyou"]


# Packing

_GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 128, "attn_pdrop": 0.0, "resid_pdrop": 0.0}
_ROPE = SMALL | {"num_hidden_layers": 2, "max_position_embeddings": 128, "num_key_value_heads": 1}
APART = {
    "gpt2": GPT2Config(**_GPT2, embd_pdrop=0.0),
    "mistral": MistralConfig(**_ROPE, sliding_window=8),
}
TOGETHER = {"bloom": BloomConfig(hidden_size=32, n_layer=1, n_head=2), "bert": BertConfig(**SMALL, is_decoder=True)}
CONVERSATIONS = [
    chat("why is it wet?", "it rains in the hills.", "and the cat?", "by the door"),
    chat("no", "why"),
    chat("the old house", "by the river and the wide valley, where a bird is"),
]


@pytest.mark.parametrize(("lengths", "rows"), [([5, 3, 2, 6, 4], 3), ([8, 8], 2), ([1] * 9, 2), ([7, 7, 2], 3)])
def test_documents_are_dealt_out_whole(lengths: list[int], rows: int) -> None:
    """Each is in one row, none of which has more than 8; and a document goes where it leaves the least space."""
    dealt = best_fit(np.array(lengths), 8)
    assert sorted(index for row in dealt for index in row) == list(range(len(lengths)))
    assert max(sum(lengths[i] for i in row) for row in dealt) <= 8
    assert len(dealt) == rows


def test_rows_are_mixed() -> None:
    """Of documents as long as sentences a row's are from the whole file."""
    lengths = np.random.default_rng(1).geometric(1 / 30, 3000).clip(2, 128)
    several = [row for row in best_fit(lengths, 128) if len(row) > 3]
    assert np.mean([abs(np.mean(row) - 1500) > 1400 for row in several]) < 0.02


def test_a_row_says_where_its_documents_begin() -> None:
    """By position ids, and labels that leave out the first token of each, and those that were left out before."""
    tokens = {"input_ids": np.array([5, 6, 7, 8, 9], np.int32), "labelled": np.array([0, 1, 0, 1, 1], np.uint8)}
    row = packed(Examples(np.array([0, 3, 5]), tokens), 6).row(0)
    assert {name: values.tolist() for name, values in row.items()} == {
        "input_ids": [5, 6, 7, 8, 9],
        "position_ids": [0, 1, 2, 0, 1],
        "labelled": [0, 1, 0, 0, 1],
    }


def totals(task: Any, model: Any, size: int) -> tuple[dict[str, float], dict[str, torch.Tensor], dict[str, int]]:
    """The score, the gradient of the summed loss and the counts of all examples, in batches of a size."""
    examples, answers = task.examples("validation"), {}
    model.zero_grad()
    for ids in np.array_split(np.arange(len(examples)), -(-len(examples) // size)):
        batch = task.collate(examples, ids)
        out = model(**batch.inputs)
        answers |= task.answers(out, batch)
        (task.loss(out, batch) * task.counts(examples, ids)["label"]).backward()
        assert len(batch.labels) == task.counts(examples, ids)["label"]
        assert batch.mask.sum() == task.counts(examples, ids)["token"]
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    return task.score("validation", answers), gradients, task.counts(examples, np.arange(len(examples)))


@pytest.mark.parametrize("name", APART)
@pytest.mark.parametrize("documents", [LINES, CONVERSATIONS], ids=["lines", "chat"])
def test_the_loss_is_that_of_the_documents_alone(name: str, documents: list[Any], tmp_path: Path) -> None:
    """So are score and gradients, to 1e-5 of the largest, and the counts of labels and tokens; padding is small."""
    source = decoder_folder(tmp_path / "model", APART[name], CHATML)
    one, two = (lm_task(tmp_path, source, documents, max_seq_length=128, packing=p) for p in (False, True))
    model = two.build_model(source).eval()
    (score, gradients, counts), (other, others, same) = totals(one, model, 2), totals(two, model, 2)
    assert len(two.examples("train")) < len(one.examples("train"))
    batch = two.collate(two.examples("train"), [0])
    # with a mask a teacher would not see where documents begin; what reads the mask still has it
    assert set(two.inputs_for(model, batch)) == {"input_ids", "position_ids", "head_positions"}
    assert batch.mask.shape == batch.inputs["input_ids"].shape
    # a limit counts documents: packed or not, the same ones are used
    limited = (lm_task(tmp_path, source, documents, max_train_samples=2, packing=p) for p in (False, True))
    few, packed_few = (np.sort(task.examples("train").tokens["input_ids"]) for task in limited)
    assert np.array_equal(few, packed_few)
    assert other == pytest.approx(score, rel=1e-5)
    assert [same[unit] for unit in ("label", "token")] == [counts[unit] for unit in ("label", "token")]
    for key, value in gradients.items():
        torch.testing.assert_close(others[key], value, rtol=0, atol=1e-5 * float(value.abs().max()), msg=key)


@pytest.mark.parametrize("name", TOGETHER)
def test_a_model_whose_documents_see_each_other_is_refused(name: str, tmp_path: Path) -> None:
    """By its architecture's name; without packing it is taken."""
    source = decoder_folder(tmp_path / "model", TOGETHER[name])
    one, two = (lm_task(tmp_path, source, LINES, max_seq_length=32, packing=p) for p in (False, True))
    one.build_model(source)
    with pytest.raises(
        ValueError, match=f"is a {name} model, which gives a document other logits in a row with others"
    ):
        two.build_model(source)


# Batches, losses and scores

KINDS = ("bert", "gpt2")


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tiny model with its tokenizer of each kind."""
    found = {kind: tmp_path_factory.mktemp(kind) for kind in KINDS}
    tokenizer = train_tokenizer(LINES * 5, 150, True)
    torch.manual_seed(0)
    bert = BertConfig(vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id, **SMALL)
    AutoModelForMaskedLM.from_config(bert).save_pretrained(found["bert"])
    tokenizer.save_pretrained(found["bert"])
    decoder_folder(found["gpt2"], GPT2Config(n_embd=32, n_layer=1, n_head=2, n_positions=128))
    return found


@pytest.fixture
def build(folders: dict[str, Path], tmp_path: Path) -> Any:
    """Build the task of a kind of model over some lines, with what is asked for in its spec."""

    def build(kind: str, lines: list[str] | None = None, cache: str = "cache", **fields: Any) -> LmTask:
        (tmp_path / "text.txt").write_text("\n".join(lines or LINES), encoding="utf-8")
        settings = {"train_file": "text.txt", "validation_file": "text.txt", "min_seq_length": 4} | fields
        spec = LmSpec(name="mlm" if kind == "bert" else "clm", data_dir=str(tmp_path), **settings)
        return LmTask(spec, load_tokenizer(folders[kind]), folders[kind], tmp_path / cache)

    return build


def rows_of(task: LmTask, split: str = "train") -> list[list[int]]:
    examples = task.examples(split)
    return [examples.row(position)["input_ids"].tolist() for position in range(len(examples))]


@pytest.mark.parametrize("kind", KINDS)
def test_long_documents_are_split_and_lose_nothing(kind: str, build: Any) -> None:
    """The parts of a document, special tokens taken off, are its tokens in order; each part has the specials.

    But for a last part of one token, of which nothing can be predicted.
    """
    length = 8  # at which the last part of one of the lines has one token, as GPT-2 has them
    task = build(kind, min_seq_length=0, max_seq_length=length)
    tokenizer, rows = task.tokenizer, rows_of(task)
    assert max(map(len, rows)) <= length
    before, after = ([tokenizer.cls_token_id], [tokenizer.sep_token_id]) if kind == "bert" else ([], [])
    end = [tokenizer.eos_token_id] if kind == "gpt2" else []
    found, expected = [], []
    for row in rows:
        assert row[: len(before)] == before
        assert row[len(row) - len(after) :] == after
        found += row[len(before) : len(row) - len(after)]
    for line in LINES:
        tokens = [*tokenizer(line, add_special_tokens=False)["input_ids"], *end]
        alone = not (before or after) and len(tokens) % length == 1
        expected += tokens[: len(tokens) - alone]
    assert found == expected


def test_what_is_dropped_is_counted_and_told(build: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Short and unknown examples go, in one log line with all counts."""
    caplog.set_level("INFO", logger="ds_trainer")
    task = build("bert", ["no", "no no", "", *LINES[3:], "ж ж ж ж ж ж no", "ж no no no it is"], min_seq_length=6)
    examples = task.examples("train")
    tokens = int(examples.lengths.sum())
    assert (
        f"text.txt: 6 documents kept; 1 left out, whose 'text' is empty (line 3); "
        f"6 documents (0 split) give 3 examples of {tokens} tokens; 2 parts shorter than min_seq_length (6) "
        f"and 1 of unknown tokens (max_unknown 0.5) are dropped"
    ) in caplog.text
    with pytest.raises(ValueError, match=r"text\.txt has no examples: 1 left out, whose 'text' is empty \(line 1\)"):
        build("bert", [" ", ""]).examples("train")
    with pytest.raises(ValueError, match=r"mlm train has no example: 5 documents .* 5 parts shorter than min_seq_len"):
        build("bert", min_seq_length=100).examples("train")
    # GPT-2's unknown token is its end of text, which closes each document and is not unknown
    assert [row[-1] for row in rows_of(build("gpt2", max_unknown=0.0))] == [0] * 4
    # a limit is spread over the examples
    whole, limited = rows_of(build("bert")), build("bert", max_train_samples=2, max_eval_samples=3)
    assert rows_of(limited) == [whole[0], whole[2]]
    assert len(limited.examples("validation")) == 3


@pytest.mark.parametrize(("max_unknown", "kept"), [(0.0, 0), (0.5, 1), (0.6, 2), (1.0, 2)])
def test_the_limit_of_unknown_tokens_is_exact(max_unknown: float, kept: int, build: Any) -> None:
    """A share at the limit is dropped; 0 drops what has any; text that is nothing but unknown always goes."""
    lines = ["ж ж no no", "ж no no no", "ж ж ж ж"]
    if kept:
        assert len(build("bert", lines, max_unknown=max_unknown).examples("train")) == kept
        return
    with pytest.raises(ValueError, match=r"has no example: 3 documents .*; 0 parts shorter .* and 3 of unknown tokens"):
        build("bert", lines, max_unknown=max_unknown).examples("train")


def test_masked_labels_are_the_tokens_at_the_heads(build: Any) -> None:
    """Heads are at the chosen tokens alone, the label is what stood there, everything else is as in the example."""
    task = build("bert", word_mask=1.0, word_keep=0.0, word_rand=0.0, mlm_mask_prop=0.3)
    examples = task.examples("train")
    batch = task.collate(examples, [2, 0], draw=5)
    assert set(batch.inputs) == {"input_ids", "attention_mask", "head_positions"}
    padded = examples.padded([2, 0], {"input_ids": task.tokenizer.pad_token_id})
    ids, heads = batch.inputs["input_ids"].flatten(), batch.inputs["head_positions"]
    assert heads.dtype == batch.labels.dtype == torch.int64
    assert (ids[heads] == task.tokenizer.mask_token_id).all()
    ids[heads] = batch.labels
    assert ids.tolist() == padded["input_ids"].ravel().tolist()
    assert not set(batch.labels.tolist()) & set(task.tokenizer.all_special_ids)
    per_row = torch.bincount(heads // batch.inputs["input_ids"].shape[1]).tolist()
    assert per_row == [max(1, round(0.3 * (length - 2))) for length in examples.lengths[[2, 0]]]
    assert batch.ids.tolist() == [2, 0]
    assert task.inputs_vary


def test_rare_tokens_are_those_of_the_training_split(build: Any, tmp_path: Path) -> None:
    """The validation split is masked by the training counts; without a training file, by its own."""
    (tmp_path / "dev.txt").write_text("\n".join(["cat " * 20, *LINES]), encoding="utf-8")
    task = build("bert", validation_file="dev.txt")
    task.examples("validation")
    ids = np.concatenate([np.array(row) for row in rows_of(task)])
    the, cat = (task.tokenizer.convert_tokens_to_ids(word) for word in ("the", "cat"))
    weights = task._masking.weights
    assert weights[the] == pytest.approx(float((ids == the).sum()) ** -0.7)
    alone = build("bert", train_file=None, validation_file="dev.txt")
    alone.examples("validation")
    dev = np.concatenate([np.array(row) for row in rows_of(alone, "validation")])
    assert alone._masking.weights[cat] == pytest.approx(float((dev == cat).sum()) ** -0.7)
    assert alone._masking.weights[cat] < weights[cat]


def test_all_positions_give_the_same_loss_and_answers_as_the_labels_alone(
    build: Any, folders: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With head_positions "all" there are logits at every token, and a loss where there was one."""
    few, all_ = build("bert", mlm_mask_prop=0.3), build("bert", head_positions="all", mlm_mask_prop=0.3)
    model = few.build_model(folders["bert"]).eval()
    batches = [task.collate(task.examples("train"), range(4), 1) for task in (few, all_)]
    outs = [model(**batch.inputs) for batch in batches]
    assert len(batches[1].labels) == batches[1].inputs["attention_mask"].sum()
    torch.testing.assert_close(few.loss(outs[0], batches[0]), all_.loss(outs[1], batches[1]))
    answers = [task.answers(out, batch) for task, out, batch in zip((few, all_), outs, batches, strict=True)]
    assert few.score("train", answers[0]) == pytest.approx(all_.score("train", answers[1]))
    assert all_.logits(outs[1], batches[1])[0].shape == (len(batches[1].labels), len(few.tokenizer))
    # bf16 logits are read as fp32, a chunk of one row gives what one of all gives, and no score is made of NaN
    out = SimpleNamespace(logits=torch.randn(1, len(batches[1].labels), len(few.tokenizer)).bfloat16())
    whole = all_.answers(out, batches[1])
    monkeypatch.setattr("ds_trainer.tasks.lm.lm_task._CHUNK_VALUES", 1)
    assert all_.answers(out, batches[1]) == whole
    nll = F.cross_entropy(out.logits[0].float(), batches[1].labels, reduction="sum")
    assert sum(answer.nll for answer in whole.values()) == pytest.approx(float(nll), rel=1e-5)
    assert all_.loss(out, batches[1]).dtype == torch.float32
    labelled = (batches[1].labels >= 0).nonzero()[:, 0]
    out.logits[0, labelled[[0, -1]], 7] = math.nan
    with pytest.raises(ValueError, match=r"train: the model gives logits that are not finite .* for 2 of 4 examples"):
        all_.score("train", all_.answers(out, batches[1]))


def test_causal_labels_are_the_next_tokens(build: Any, folders: Any) -> None:
    """A head at each token but a row's last; the loss is that of transformers, which shifts by itself."""
    task = build("gpt2")
    examples = task.examples("train")
    batch = task.collate(examples, range(3))
    ids, attended = batch.inputs["input_ids"], batch.inputs["attention_mask"]
    expected = [i for row in rows_of(task)[:3] for i in row[1:]]
    assert batch.labels.tolist() == expected
    assert ids.flatten()[batch.inputs["head_positions"] + 1].tolist() == expected
    wide = build("gpt2", pad_to_multiple_of=64).collate(examples, range(3))
    assert (wide.mask.shape, wide.labels.tolist()) == ((3, 64), expected)
    assert not task.inputs_vary
    model = task.build_model(folders["gpt2"]).eval()
    theirs = model(input_ids=ids, attention_mask=attended, labels=ids.masked_fill(attended == 0, -100)).loss
    torch.testing.assert_close(task.loss(model(**batch.inputs), batch), theirs)


def test_score_and_agreement_by_hand(build: Any) -> None:
    """Every token weighs the same, however many an example has; an absurd loss has the largest perplexity there is."""
    task = build("bert")
    answers = {0: LmAnswer(2.0, 1, [5, 6, 7]), 1: LmAnswer(1.0, 1, [8])}
    assert task.score("train", answers) == {"perplexity": pytest.approx(math.exp(0.75)), "loss": 0.75, "accuracy": 0.5}
    others = {0: LmAnswer(0.0, 0, [5, 9, 7]), 1: LmAnswer(0.0, 0, [9])}
    assert task.agreement("train", answers, others) == 0.5
    assert task.agreement("train", answers, answers) == 1.0
    for loss in (709.8, 1e6, 1e300):
        largest = task.score("train", {0: LmAnswer(loss, 0, [1])})["perplexity"]
        assert largest == pytest.approx(sys.float_info.max)
        assert json.loads(json.dumps(largest, allow_nan=False)) == largest


def test_what_cannot_work_is_refused(build: Any, folders: dict[str, Path], tmp_path: Path) -> None:
    """No mask token, no such head, and a model that has no trained head."""
    task = build("bert")
    encoder = tmp_path / "encoder"
    BertConfig.from_pretrained(folders["bert"], architectures=["BertModel"]).save_pretrained(encoder)
    with pytest.raises(ValueError, match="is no trained masked language model"):
        task.check_trained(encoder)
    with pytest.raises(ValueError, match="has no mask token"):
        LmTask(task.spec, load_tokenizer(folders["gpt2"]), folders["bert"], tmp_path)
    ViTConfig().save_pretrained(tmp_path / "vit")
    with pytest.raises(ValueError, match="is a vit model: transformers has no masked language model for it"):
        LmTask(task.spec, task.tokenizer, tmp_path / "vit", tmp_path)


def test_models_that_see_later_tokens_are_refused_until_they_are_causal(build: Any, tmp_path: Path) -> None:
    """A forward tells. The settings that the message names help."""
    task = build("gpt2")
    for is_decoder in (False, True):
        config = RobertaConfig(vocab_size=300, is_decoder=is_decoder, **SMALL)
        AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / str(is_decoder))
    with pytest.raises(ValueError, match="is a roberta model whose tokens see those after them"):
        task.build_model(tmp_path / "False")
    assert task.build_model(tmp_path / "True")


# Masks

MASK, VOCABULARY, SPECIAL = 2, 50, np.array([0, 1, 2])


def rule_of(counts: Array | None = None, smoothing: float = 0.0, **fields: Any) -> TokenMasking:
    counts = np.ones(VOCABULARY, np.int64) if counts is None else counts
    shares = {"word_mask": 0.8, "word_rand": 0.1} | fields
    spec = LmSpec(name="mlm", word_keep=max(0.0, 1 - shares["word_mask"] - shares["word_rand"]), **shares)
    ordinary = np.setdiff1d(np.arange(VOCABULARY), SPECIAL)
    return TokenMasking(spec, token_weights(counts, smoothing, SPECIAL), ordinary, MASK)


def token_rows(rows: int, width: int, seed: int = 0) -> tuple[Array, Array, Array]:
    """Rows of ordinary tokens within special ones at both ends."""
    tokens = np.random.default_rng(seed).integers(3, VOCABULARY, (rows, width))
    tokens[:, 0], tokens[:, -1] = 0, 1
    return tokens, np.ones_like(tokens), np.arange(rows)


def within(count: int, trials: int, chance: float) -> bool:
    """Whether a binomial count is within five standard deviations."""
    return abs(count - trials * chance) <= 5 * math.sqrt(trials * chance * (1 - chance))


@pytest.mark.parametrize(("width", "share", "chosen"), [(102, 0.15, 15), (22, 0.15, 3), (5, 0.15, 1), (12, 1.0, 10)])
def test_exactly_the_share_of_each_row_is_chosen(width: int, share: float, chosen: int) -> None:
    """The number is not random: max(1, round(share * n)) of n tokens that are not special."""
    _, found = mask_tokens(rule_of(mlm_mask_prop=share), *token_rows(20, width), draw=1)
    assert found.sum(axis=1).tolist() == [chosen] * 20
    assert not found[:, [0, -1]].any()


def test_chosen_tokens_are_masked_kept_and_replaced_in_their_shares() -> None:
    """80, 10 and 10% of 30,000 choices; random tokens are ordinary and all turn up; the rest is as it was."""
    tokens, attended, ids = token_rows(2000, 102)
    seen, chosen = mask_tokens(rule_of(), tokens, attended, ids, 3)
    assert (seen == tokens)[~chosen].all()
    trials = int(chosen.sum())
    assert trials == 30_000
    masked = chosen & (seen == MASK)
    changed = chosen & (seen != tokens) & ~masked
    assert within(int(masked.sum()), trials, 0.8)
    assert within(int(changed.sum()), trials, 0.1 * (1 - 1 / 47))  # one in 47 random tokens is the token itself
    assert set(seen[changed].tolist()) == set(range(3, VOCABULARY)), "no special ones"


@pytest.mark.parametrize("smoothing", [0.0, 0.7])
def test_rare_tokens_are_chosen_by_the_law(smoothing: float) -> None:
    """One of four tokens of counts 1 to 1,000 is drawn in proportion to count ** -smoothing; unseen counts as once."""
    counts = np.zeros(VOCABULARY, np.int64)
    counts[3:7] = [0, 10, 100, 1000]
    rows = 20_000
    tokens = np.tile([0, 3, 4, 5, 6, 1], (rows, 1))
    _, chosen = mask_tokens(rule_of(counts, smoothing), tokens, np.ones_like(tokens), np.arange(rows), 0)
    weights = np.array([1.0, 10.0, 100.0, 1000.0]) ** -smoothing
    for found, chance in zip(chosen.sum(axis=0)[1:5], weights / weights.sum(), strict=True):
        assert within(int(found), rows, chance)


def test_two_are_drawn_one_after_the_other() -> None:
    """Without replacement: a pair's chance is that of either order, each draw in proportion to what is left."""
    weights, rows = np.array([1.0, 2.0, 5.0]), 20_000
    uniform = np.random.default_rng(0).random((rows, 3))
    chosen = choose(np.tile(weights, (rows, 1)), 2 / 3, uniform)
    shares = weights / 8
    pairs = {(0, 1): 0.0, (0, 2): 0.0, (1, 2): 0.0}
    for a, b in pairs:
        chance = shares[a] * shares[b] / (1 - shares[a]) + shares[b] * shares[a] / (1 - shares[b])
        assert within(int((chosen[:, a] & chosen[:, b]).sum()), rows, chance)
    assert (chosen.sum(axis=1) == 2).all()


def test_a_mask_does_not_depend_on_the_batch() -> None:
    """An example is masked the same alone, in another order, and padded to any width."""
    tokens, attended, ids = token_rows(6, 40)
    tokens[3, 20:], attended[3, 20:] = 0, 0
    seen, _ = mask_tokens(rule_of(), tokens, attended, ids, 7)
    order = np.array([5, 3, 0])
    assert (mask_tokens(rule_of(), tokens[order], attended[order], ids[order], 7)[0] == seen[order]).all()
    alone, _ = mask_tokens(rule_of(), tokens[3:4, :20], attended[3:4, :20], ids[3:4], 7)
    assert (alone == seen[3:4, :20]).all()


def test_each_draw_and_each_example_has_a_mask_of_its_own() -> None:
    """The same draw gives the same masks; the next gives others; equal texts are masked differently."""
    tokens, attended, ids = token_rows(50, 40)
    tokens[:] = tokens[0]
    drawn = [mask_tokens(rule_of(), tokens, attended, ids, draw)[1] for draw in (0, 0, 1, 2**64 - 1, -3)]
    assert (drawn[0] == drawn[1]).all()
    for first, second in ((0, 2), (2, 3), (3, 4)):
        assert (drawn[first] != drawn[second]).any(axis=1).mean() > 0.9
    assert len({row.tobytes() for row in drawn[0]}) > 45


# Heads at chosen positions

SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24, "vocab_size": 40}
RELATIVE = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "max_relative_positions": 8}
OWN_DECODER = {"vocab_size": 40, "max_position_embeddings": 32, "pad_token_id": 0, "dropout": 0.0}
BOTH_SIDES = {
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
    "bart": BartConfig(d_model=16, **BOTH_SIDES, **OWN_DECODER),
}
POSITIONS = torch.tensor([1, 5, 8, 13])
"""Places 1 and 5 of the first row of six, 2 of the second, 1 of the third."""


def headed(name: str) -> Any:
    torch.manual_seed(0)
    auto, config = (AutoModelForMaskedLM, MASKED[name]) if name in MASKED else (AutoModelForCausalLM, CAUSAL[name])
    return auto.from_config(copy.deepcopy(config)).eval()


def attended_ids() -> dict[str, torch.Tensor]:
    ids = torch.randint(5, 40, (3, 6), generator=torch.Generator().manual_seed(0))
    attended = torch.tensor([[1] * 6, [1] * 6, [1, 1, 1, 0, 0, 0]])
    return {"input_ids": ids * attended, "attention_mask": attended}


@pytest.mark.parametrize("name", [*MASKED, *CAUSAL])
def test_logits_gradients_and_hidden_states_are_those_of_the_plain_model(name: str) -> None:
    """At the positions to 1e-6, as (1, n, vocabulary); hidden states keep the whole batch."""
    plain, model = headed(name), take_head_positions(headed(name))
    expected = plain(**attended_ids(), output_hidden_states=True)
    for _ in range(2):  # before and after a forward with positions
        assert torch.equal(model(**attended_ids()).logits, expected.logits)
        filled = model(**attended_ids(), head_positions=POSITIONS).get("past_key_values")
        assert filled is None, "a loss needs no cache"
    found = model(**attended_ids(), head_positions=POSITIONS, output_hidden_states=True)
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
        wanted = plain(**attended_ids()).logits.flatten(0, 1)[POSITIONS]
        found = model(**attended_ids(), head_positions=POSITIONS).logits[0]
    assert found.dtype == wanted.dtype
    torch.testing.assert_close(found, wanted, atol=0.01, rtol=0.02)
    if plain.can_generate() and plain.config.model_type in CAUSAL:
        settings = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
        ids = attended_ids()["input_ids"][:2]
        assert torch.equal(model.generate(ids, **settings), plain.generate(ids, **settings))


@torch.no_grad()
@pytest.mark.parametrize("name", ["bert", "deberta_v2"])
def test_hooks_take_tuples_forget_after_an_error_and_are_a_copys_own(name: str) -> None:
    """A model that is asked for tuples gives its logits first. Neither it nor its encoder remembers positions."""
    model = take_head_positions(headed(name))
    expected = model(**attended_ids()).logits.flatten(0, 1)[POSITIONS]
    twin = copy.deepcopy(model)
    assert len({id(next(iter(each._forward_pre_hooks.values())).__self__) for each in (model, twin)}) == 2
    with pytest.raises(IndexError):
        model(torch.full((1, 6), 999), head_positions=POSITIONS)
    assert model.base_model(**attended_ids()).last_hidden_state.shape == (3, 6, 16)
    assert model(**attended_ids()).logits.shape == (3, 6, 40)
    for each in (model, twin):
        logits = each(**attended_ids(), head_positions=POSITIONS, return_dict=False)[0]
        torch.testing.assert_close(logits[0], expected)


@pytest.mark.parametrize("name", ["bert", "gpt2", "bart"])
def test_recomputed_layers_give_the_same_gradients(name: str) -> None:
    """With gradient checkpointing, whose layers run again in the backward: the encoder's output is cut once."""
    found = []
    for checkpointing in (False, True):
        model = take_head_positions(headed(name)).train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        torch.manual_seed(0)
        model(**attended_ids(), head_positions=POSITIONS).logits.square().sum().backward()
        found.append({key: each.grad for key, each in model.named_parameters() if each.grad is not None})
    assert found[0]
    torch.testing.assert_close(found[1], found[0])
