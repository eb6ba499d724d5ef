"""Tiny models of every architecture that exits are made for, with heads that disagree; folders of them, and tasks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    BertConfig,
    BertForSequenceClassification,
    BertForTokenClassification,
)

from ds_trainer.engine.engine_file import Hyperparameters
from ds_trainer.models.folders import train_tokenizer
from ds_trainer.models.layers import encoder_layers
from ds_trainer.recipe.exit_specs import ExitPolicy, SavedExits
from ds_trainer.recipe.recipe import parse_recipe
from ds_trainer.recipe.task_specs import TextSpec, TokenSpec
from ds_trainer.run.phase import PhasePlan
from ds_trainer.tasks.registry import build_task
from ds_trainer.tasks.task import Task
from ds_trainer.techniques.exits.early_exit import (
    EarlyExitModel,
    EarlyExitOutput,
    doubts_of_all,
    exit_at,
    new_heads,
    read_exits,
    save_heads,
    with_exits,
    write_exits,
)
from ds_trainer.techniques.technique import PhaseLength

WIDTH, LAYERS, BUCKETS = 32, 4, 8
SMALL = {
    "vocab_size": 99,
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
}
DEBERTA = SMALL | {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": BUCKETS}
MODERN = SMALL | {
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "cls_token_id": 1,
    "sep_token_id": 2,
    "global_attn_every_n_layers": 2,
    "local_attention": 8,
}
DISTIL = {"dim": WIDTH, "n_layers": LAYERS, "n_heads": 4, "hidden_dim": 48}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("bert", SMALL),
    "roberta": ("roberta", SMALL | {"pad_token_id": 1}),
    "distilbert": ("distilbert", DISTIL | {"vocab_size": 99, "max_position_embeddings": 64}),
    "electra": ("electra", SMALL | {"embedding_size": 16}),
    "deberta": ("deberta-v2", DEBERTA | {"norm_rel_ebd": "layer_norm", "share_att_key": True, "type_vocab_size": 0}),
    "deberta-conv": ("deberta-v2", DEBERTA | {"conv_kernel_size": 3, "position_biased_input": False}),
    "modernbert": ("modernbert", MODERN),
    "modernbert-mean": ("modernbert", MODERN | {"classifier_pooling": "mean"}),
}
NEVER = ExitPolicy(criterion="entropy", thresholds=[0.0] * 3)
AT_ONCE = ExitPolicy(criterion="entropy", thresholds=[9.0] * 3)
WORDS = ["apple", "pear", "plum", "fig", "hammer", "saw", "drill", "file", "wren", "crow", "finch", "owl", "the", "old"]
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


def classifier(family: str, num_labels: int = 3, auto: Any = AutoModelForSequenceClassification, **fields: Any) -> Any:
    """A model whose answers depend on every token: weights are large for its size."""
    kind, settings = FAMILIES[family]
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, num_labels=num_labels, **settings | fields)
    return randomise(auto.from_config(config), 0.25).eval()


def randomise(module: Any, width: float) -> Any:
    """Draw all its matrices anew."""
    for parameter in module.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=width)
    return module


def early_exit(model: Any, policy: ExitPolicy, layers: tuple[int, ...] = (1, 2, 3)) -> EarlyExitModel:
    """The model with heads after these layers that answer otherwise than its own."""
    torch.manual_seed(1)
    return EarlyExitModel(model, randomise(new_heads(model, layers, None), 0.5), policy).eval()


def made(family: str, criterion: str = "entropy", layers: tuple[int, ...] = (1, 2, 3), **fields: Any) -> EarlyExitModel:
    """That, with thresholds by which about a third of the texts leave at each head, none of them near one."""
    regression = criterion == "regression"
    model = early_exit(classifier(family, num_labels=1 if regression else 3, **fields), NEVER, layers)
    kind: Any = "patience" if regression else criterion
    limits: list[float] = []
    if criterion != "patience":
        doubts = doubts_of_all(kind, model.all_logits(*texts(padding=pad_of(family))), None)
        limits = [abs(between(values[values.isfinite()], 0.35)) for values in doubts]
    model.policy = ExitPolicy(criterion=kind, thresholds=limits, patience=1 if kind == "patience" else None)
    return model


def texts(rows: int = 16, length: int = 12, padding: int = 0) -> tuple[Tensor, Tensor]:
    """(rows, length) token ids, padded behind, and their mask: texts of 4 to `length` tokens."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(5, 99, (rows, length), generator=generator)
    sizes = 4 + torch.arange(rows) % (length - 3)
    mask = (torch.arange(length) < sizes[:, None]).long()
    return ids * mask + padding * (1 - mask), mask


def pad_of(family: str) -> int:
    return FAMILIES[family][1].get("pad_token_id", 0)


def left_at(policy: ExitPolicy, logits: Tensor, counted: Tensor | None = None) -> Tensor:
    """The index of the head at which each sample leaves, by the logits of all heads."""
    return exit_at(policy, doubts_of_all(policy.criterion, logits, counted))


def between(values: Tensor, share: float) -> float:
    """The middle of the widest gap near a quantile."""
    ordered = values.sort().values
    start = round(share * (len(ordered) - 1))
    near = ordered[max(0, start - 2) : start + 3]
    if len(near) < 2:
        return 0.0
    place = int(near.diff().argmax())
    return float((near[place] + near[place + 1]) / 2)


def check_same(out: EarlyExitOutput, expected: EarlyExitOutput, rows: Any = slice(None)) -> None:
    """Compare the layers and logits with those of these rows."""
    assert out.exit_layers.tolist() == expected.exit_layers[rows].tolist()
    torch.testing.assert_close(out.logits, expected.logits[rows], atol=1e-4, rtol=0)


def layers_of(model: EarlyExitModel) -> list[Any]:
    return list(encoder_layers(model.model).values())
