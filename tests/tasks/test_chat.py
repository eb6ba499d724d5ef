"""Conversations: rendered by the tokenizer's template, with labels on the assistant's turns alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.lm_files import CHATML, SMALL, chat, decoder_folder, lm_task
from transformers import GPT2Config, LlamaConfig

from ds_trainer.recipe.task_specs import LmSpec
from ds_trainer.tasks.registry import check_data_files, training_texts

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
def build(tmp_path: Path) -> Any:
    def build(conversations: list[Any], template: str | None = CHATML, **fields: Any) -> Any:
        llama = fields.pop("llama", False)
        config: Any = LlamaConfig(**SMALL) if llama else GPT2Config(n_embd=32, n_layer=1, n_head=2)
        return lm_task(tmp_path, decoder_folder(tmp_path / "model", config, template), conversations, **fields)

    return build


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
def test_only_what_the_assistant_writes_is_learned(template: str, packing: bool, build: Any) -> None:
    """All its turns, each to the token that ends it, whether the template marks them or not."""
    task = build([TWO_TURNS], template, packing=packing)
    assert learned(task) == ["it rains.<end>sat on the mat<end>"]
    text = task.tokenizer.decode(task.examples("train").row(0)["input_ids"])
    assert text.startswith("<|system|>be brief<end>\n<|user|>why is it wet?<end>\n<|assistant|>it rains.<end>\n")
    # a greeting answers nothing, and padding, which is the end of text here, takes no label away
    greeting = {"role": "assistant", "content": "good morning"}
    task = build([TWO_TURNS, [greeting, *chat("is it wet?", "yes")]], template)
    assert task.pad_token_id == task.tokenizer.eos_token_id
    labels = task.collate(task.examples("train"), [0, 1]).labels
    first = "good morning<end>" if template == MARKED else ""
    assert task.tokenizer.decode(labels) == f"it rains.<end>sat on the mat<end>{first}yes<end>"


@pytest.mark.parametrize("begins", [False, True])
def test_the_template_alone_writes_the_beginning_of_a_text(begins: bool, build: Any) -> None:
    """Llama's tokenizer puts one before each document; before a conversation it is there once, or not at all."""
    template = ("{{ bos_token }}" if begins else "") + CHATML
    for conversations, count in (([TWO_TURNS], int(begins)), (["it is wet", "it is dry"], 1)):
        task = build(conversations, template, llama=True)
        examples = task.examples("train")
        rows = [examples.row(index)["input_ids"].tolist() for index in range(len(examples))]
        assert [row.count(task.tokenizer.bos_token_id) for row in rows] == [count] * len(rows)
        assert all(row[0] == task.tokenizer.bos_token_id for row in rows if count)


def test_long_conversations_are_cut_and_those_without_a_label_go(build: Any, caplog: pytest.LogCaptureFixture) -> None:
    """With counts of both; `max_seq_length` falls into the second turn, or before the first one."""
    caplog.set_level("INFO", logger="ds_trainer")
    task = build([TWO_TURNS])
    (whole,), room = learned(task), int(task.examples("train").lengths[0]) - 4
    long = chat("the cat sat on the mat and the dog lay by the door of the old house " * 3, "ok")
    task = build([TWO_TURNS, long, chat("a question that nobody answers")], max_seq_length=room)
    (found,) = learned(task)
    assert whole.startswith(found)
    assert len("it rains.<end>") < len(found) < len(whole)
    assert f"3 conversations (2 cut at max_seq_length) give 1 examples of {room} tokens; 0 parts" in caplog.text
    assert "and 2 without a turn of the assistant are dropped" in caplog.text
    with pytest.raises(ValueError, match="see whether a role is called assistant"):
        build([long], max_seq_length=room).examples("train")


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
    conversations: list[Any], template: str | None, message: str, build: Any
) -> None:
    """With its place and the way out; an unstable template is taken where the assistant speaks last."""
    with pytest.raises(ValueError, match=message):
        build(conversations, template).examples("train")
    if template == LAST:
        assert learned(build([TWO_TURNS[1:3]], template)) == ["it rains.<end>"]


def test_files_are_checked_before_anything_is_loaded(tmp_path: Path) -> None:
    """Their ending and their first conversation; the texts that a tokenizer or a smaller vocabulary is made of have
    the roles."""
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": "hello"}))
    spec = LmSpec(name="clm", data_dir=str(tmp_path), messages_column="messages", validation_file="a.txt")
    (ending,) = check_data_files(spec, ["validation"])
    assert "the ending '.txt' is unknown: messages_column is read from .jsonl" in ending
    (kind,) = check_data_files(spec.model_copy(update={"validation_file": "a.jsonl"}), ["validation"])
    assert "line 1: 'messages' is text, and must be a list of messages" in kind
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": chat("hello", "you")}))
    assert training_texts(spec.model_copy(update={"train_file": "a.jsonl"})) == ["user\nhello\nassistant\nyou"]
