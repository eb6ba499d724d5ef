"""Model folders with exits and random weights, the task that they are for, and what is asked of them."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import torch
from transformers import BertConfig, BertForSequenceClassification, BertForTokenClassification

from ds_trainer.config.exit_specs import ExitPolicy, SavedExits
from ds_trainer.config.recipe import TextSpec
from ds_trainer.config.task_specs import TokenSpec
from ds_trainer.models.folders import train_tokenizer
from ds_trainer.tasks.registry import build_task
from ds_trainer.tasks.task import Task
from ds_trainer.techniques.exits.early_exit import EarlyExitModel, with_exits
from ds_trainer.techniques.exits.heads import new_heads, read_exits, save_heads, write_exits

WORDS = ["apple", "pear", "plum", "fig", "hammer", "saw", "drill", "file", "wren", "crow", "finch", "owl", "the", "old"]
LAYERS = 4
CLASSES = ["fruit", "tool", "bird"]  # not in the task's order
TAGS = ["B-FRUIT", "O", "I-FRUIT", "B-TOOL", "I-TOOL"]
ENTROPY = ExitPolicy(criterion="entropy", thresholds=[0.75] * 3)


def make_folder(
    folder: Path, classes: list[str], policy: ExitPolicy, kind: Any = BertForSequenceClassification, **saved: Any
) -> Path:
    """A BERT of 4 layers with random heads after 1, 2 and 3, which differ in what they say and how sure they are."""
    torch.manual_seed(0)
    tokenizer = train_tokenizer(WORDS * 5, 90, True)
    config = BertConfig(
        vocab_size=len(tokenizer),
        pad_token_id=tokenizer.pad_token_id,
        hidden_size=16,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=128,
        num_labels=max(1, len(classes)),
    )
    if classes:
        config.id2label = dict(enumerate(classes))
        config.label2id = {name: place for place, name in enumerate(classes)}
    model = kind(config).eval()
    heads = new_heads(model, range(1, LAYERS), None)
    for module in (model, heads):
        for parameter in module.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.35)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    fields = {"layers": [1, 2, 3], "pooling": heads["1"].pooling, "policy": policy, "held_out": 0.25} | saved
    save_heads(folder, heads, SavedExits(**fields))
    return folder


def make_classifier(folder: Path, csv_folder: Path, cache: Path) -> Path:
    """That model for the kinds of the CSV task, with the key of the examples that the task holds out."""
    make_folder(folder, CLASSES, ENTROPY)
    key = build_task(spec_of(csv_folder), folder, cache).held_out_key()
    write_exits(folder, read_exits(folder).model_copy(update={"held_out_key": key}))
    return folder


def make_regressor(folder: Path) -> Path:
    return make_folder(folder, [], ExitPolicy(criterion="patience", thresholds=[0.3] * 3, patience=1))


def make_tagger(folder: Path, cache: Path) -> Path:
    """That model with a head at every token, and the files of its task beside it."""
    rng = random.Random(0)
    for name, count in (("train", 160), ("dev", 50)):
        sentences = [rng.choices(WORDS, k=rng.randint(1, 12)) for _ in range(count)]
        lines = [[f"{word}\t{tag_of(word, before)}" for before, word in pairs(words)] for words in sentences]
        (folder / f"{name}.conll").write_text("\n\n".join(map("\n".join, lines)) + "\n")
    make_folder(folder, TAGS, ENTROPY, BertForTokenClassification, special_tokens=[0, 2, 3, 4])
    key = build_task(tags_spec(folder), folder, cache).held_out_key()
    write_exits(folder, read_exits(folder).model_copy(update={"held_out_key": key}))
    return folder


def pairs(words: list[str]) -> list[tuple[str, str]]:
    """Each word after the one before it."""
    return list(zip(["", *words], words, strict=False))


def tag_of(word: str, before: str) -> str:
    kinds = [0 if each in WORDS[:4] else 1 if each in WORDS[4:8] else None for each in (before, word)]
    name = (None, "FRUIT", "TOOL")[0 if kinds[1] is None else kinds[1] + 1]
    return "O" if name is None else f"{'I' if kinds[0] == kinds[1] else 'B'}-{name}"


def tags_spec(folder: Path, **fields: Any) -> TokenSpec:
    files = {"data_dir": str(folder), "train_file": "train.conll", "validation_file": "dev.conll"}
    return TokenSpec.model_validate({"name": "ner", "max_seq_length": 24, "held_out": 0.25} | files | fields)


def spec_of(csv_folder: Path, **fields: Any) -> TextSpec:
    values = {
        "name": "text",
        "data_dir": str(csv_folder),
        "train_file": "train.csv",
        "validation_file": "validation.csv",
        "text_columns": ["text"],
        "label_column": "kind",
        "max_seq_length": 24,
        "held_out": 0.25,
    }
    return TextSpec.model_validate(values | fields)


def exiting(task: Task, folder: Path, policy: ExitPolicy | None = None) -> EarlyExitModel:
    return with_exits(task.build_model(folder).eval(), folder, policy).eval()


def json_of(stdout: str) -> dict[str, Any]:
    """What a command prints, after what DeepSpeed says while it is loaded."""
    return json.loads(stdout[stdout.index("{") :])
