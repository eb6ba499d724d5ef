"""SQuAD tasks, their files, and models for them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from support.squad_examples import SMALL, word_pieces
from transformers import BertConfig, BertModel

from ds_trainer.models.pretrained import load_tokenizer
from ds_trainer.recipe.task_specs import SquadSpec
from ds_trainer.tasks.data import evaluation_shard
from ds_trainer.tasks.squad.squad_file import GoldAnswer, Question
from ds_trainer.tasks.squad.squad_task import SquadTask, WindowAnswer


def write(folder: Path, questions: list[Question]) -> None:
    """A file of one article with a paragraph a question, for both splits of v1.1 and v2."""
    paragraphs = []
    for id, context, question, golds in questions:
        answers = [{"text": text, "answer_start": start} for text, start in golds]
        paragraphs.append({"context": context, "qas": [{"id": id, "question": question, "answers": answers}]})
    folder.mkdir(exist_ok=True)
    for name in ("train-v1.1.json", "dev-v1.1.json", "train-v2.0.json", "dev-v2.0.json"):
        text = json.dumps({"data": [{"title": "T", "paragraphs": paragraphs}]})
        (folder / name).write_text(text, encoding="utf-8")


def save(model: Any, tokenizer: Any, folder: Path) -> Path:
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def bert(tokenizer: Any) -> Any:
    return BertModel(BertConfig(vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id, **SMALL))


def squad(folder: Path, questions: list[Question], source: Path | None = None, **fields: Any) -> SquadTask:
    """The task over these questions, with small windows."""
    write(folder / "data", questions)
    if source is None:
        tokenizer = word_pieces()
        source = save(bert(tokenizer), tokenizer, folder / "bert")
    settings = {"max_seq_length": 40, "doc_stride": 11, "max_query_length": 16, **fields}
    spec = SquadSpec(data_dir=str(folder / "data"), **settings)
    return SquadTask(spec, load_tokenizer(source), source, folder / "cache")


YEAR = Question("q", "the year", "what?", (GoldAnswer("year", 4),))


def nothing_ahead(batch: Any) -> SimpleNamespace:
    """A perfect model's output, but for "no answer", which is ahead of every answer by 1.5."""
    out = perfect(batch)
    out.start_logits[:, 0], out.end_logits[:, 0] = 21.0, 20.5
    return out


def perfect(batch: Any) -> SimpleNamespace:
    """The output of a model that knows every window's labels."""
    rows, width = batch.inputs["input_ids"].shape
    generator = torch.Generator().manual_seed(0)
    start, end = torch.rand(2, rows, width, generator=generator)
    start[range(rows), batch.labels[:, 0]] = end[range(rows), batch.labels[:, 1]] = 20
    return SimpleNamespace(start_logits=start, end_logits=end)


def answered(task: SquadTask, predict: Callable[[Any], Any], size: int = 7) -> dict[int, WindowAnswer]:
    """What `predict` says to each window of the validation split, in batches by length."""
    examples = task.examples("validation")
    answers: dict[int, WindowAnswer] = {}
    for positions in evaluation_shard(examples.lengths, 0, 1, size):
        batch = task.collate(examples, positions)
        answers |= task.answers(predict(batch), batch)
    return answers
