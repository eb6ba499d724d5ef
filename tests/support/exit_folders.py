"""Model folders with exits and random weights, and their tasks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.exit_models import randomise
from transformers import BertConfig, BertForSequenceClassification, BertForTokenClassification

from ds_trainer.engine.engine_file import Hyperparameters
from ds_trainer.models.folders import train_tokenizer
from ds_trainer.recipe.exit_specs import ExitPolicy, SavedExits
from ds_trainer.recipe.recipe import parse_recipe
from ds_trainer.recipe.task_specs import TextSpec, TokenSpec
from ds_trainer.run.phase import PhasePlan
from ds_trainer.tasks.registry import build_task
from ds_trainer.tasks.task import Task
from ds_trainer.techniques.exits.early_exit import (
    EarlyExitModel,
    new_heads,
    read_exits,
    save_heads,
    with_exits,
    write_exits,
)
from ds_trainer.techniques.technique import PhaseLength

WORDS = ["apple", "pear", "plum", "fig", "hammer", "saw", "drill", "file", "wren", "crow", "finch", "owl", "the", "old"]
LAYERS = 4
CLASSES = ["fruit", "tool", "bird"]  # not in the task's order
TAGS = ["B-FRUIT", "O", "B-TOOL", "B-BIRD"]
ENTROPY = ExitPolicy(criterion="entropy", thresholds=[0.75] * 3)
LENGTH = PhaseLength(total=4, warmup=0, seed=0)


def make_folder(
    folder: Path, classes: list[str], policy: ExitPolicy | None, kind: Any = BertForSequenceClassification, **saved: Any
) -> Path:
    """A BERT of 4 layers; with a policy also random heads after 1, 2 and 3, which differ in what they answer."""
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
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    if classes:
        config.id2label = dict(enumerate(classes))
        config.label2id = {name: place for place, name in enumerate(classes)}
    model = kind(config).eval()
    heads = new_heads(model, range(1, LAYERS), None)
    for module in (model, heads):
        randomise(module, 0.35)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if policy is not None:
        fields = {"layers": [1, 2, 3], "pooling": heads["1"].pooling, "policy": policy, "held_out": 0.25} | saved
        save_heads(folder, heads, SavedExits(**fields))
    return folder


def with_key(folder: Path, task: Task) -> Path:
    """Write the key of the examples that the task holds out into the folder."""
    write_exits(folder, read_exits(folder).model_copy(update={"held_out_key": task.held_out_key()}))
    return folder


def make_classifier(folder: Path, csv_folder: Path, cache: Path) -> Path:
    """That model for the kinds of the CSV task."""
    make_folder(folder, CLASSES, ENTROPY)
    return with_key(folder, build_task(spec_of(csv_folder), folder, cache))


def make_tagger(folder: Path, csv_folder: Path, cache: Path) -> Path:
    """That model for the CoNLL files beside the CSV task, with a head at every token."""
    policy = ExitPolicy(criterion="entropy", thresholds=[1.1] * 3)
    make_folder(folder, TAGS, policy, BertForTokenClassification, special_tokens=[0, 2, 3, 4])
    return with_key(folder, build_task(tags_spec(csv_folder), folder, cache))


def tags_spec(csv_folder: Path) -> TokenSpec:
    files = {"train_file": "train.conll", "validation_file": "validation.conll", "max_seq_length": 32}
    return TokenSpec.model_validate({"name": "ner", "data_dir": str(csv_folder), "held_out": 0.25, **files})


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
    return with_exits(task.build_model(folder), folder, policy)


def run_early(model: EarlyExitModel, task: Task, split: str) -> dict[str, Any]:
    """The scores and the mean layers of a split under the model's policy, run in batches of 13 in its own order."""
    examples, answers, layers = task.examples(split), {}, []
    for start in range(0, len(examples), 13):
        batch = task.collate(examples, range(len(examples))[start : start + 13])
        out = model(**batch.inputs)
        answers |= task.answers(out, batch)
        layers += out.exit_layers.tolist()
    scores = {name: pytest.approx(value, abs=1e-4) for name, value in task.score(split, answers).items()}
    return {"scores": scores, "mean_layers": pytest.approx(sum(layers) / len(layers))}


def json_of(stdout: str) -> dict[str, Any]:
    """What a command prints, after what DeepSpeed says while it is loaded."""
    return json.loads(stdout[stdout.index("{") :])


def plan_for(spec: TextSpec, source: str | Path, cache: Path, **techniques: Any) -> PhasePlan:
    """A phase of these techniques that starts from a folder."""
    (phase,) = parse_recipe({"phases": [{"max_steps": 1, "techniques": techniques}]}).phases
    task = build_task(spec, source, cache)
    return PhasePlan(phase, phase.techniques, task, str(source), LENGTH, {}, Hyperparameters(1e-3), cache)
