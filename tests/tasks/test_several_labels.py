"""Texts with any number of labels: read from lists, trained, scored, distilled and cut."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.csv_files import SENTENCES
from transformers import BertConfig, BertForSequenceClassification

from ds_trainer.cuts.calibration import calibration_of
from ds_trainer.models.folders import train_tokenizer
from ds_trainer.ranks.failures import UserError
from ds_trainer.recipe.exit_specs import ExitsSpec
from ds_trainer.recipe.task_specs import TextSpec
from ds_trainer.recipe.technique_specs import DistillSpec
from ds_trainer.tasks.evaluation import evaluate
from ds_trainer.tasks.losses import soft_target_loss
from ds_trainer.tasks.registry import build_task, check_data_files
from ds_trainer.tasks.task import Forward
from ds_trainer.techniques.distill.distill import Distill
from ds_trainer.techniques.exits.exits import Exits
from ds_trainer.techniques.technique import PhaseLength

LABELS = [["fear", "anger"], ["joy"], [], ["anger"], ["joy", "fear"], ["fear"]]
GOLD = np.array([[1, 1, 0], [0, 0, 1], [0, 0, 0], [1, 0, 0], [0, 1, 1], [0, 1, 0]], bool)
"""By anger, fear, joy."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose trained head has the classes in another order than the task."""
    folder, tokenizer = tmp_path_factory.mktemp("model"), train_tokenizer(SENTENCES * 5, 60, True)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    names = ("joy", "anger", "fear")
    labels = {"id2label": dict(enumerate(names)), "label2id": {name: index for index, name in enumerate(names)}}
    config = BertConfig(vocab_size=len(tokenizer), **sizes, **labels)
    torch.manual_seed(0)
    BertForSequenceClassification(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def spec_of(folder: Path, labels: list[Any] = LABELS, **fields: Any) -> TextSpec:
    rows = [json.dumps({"text": text, "labels": label}) for text, label in zip(SENTENCES, labels, strict=True)]
    (folder / "rows.jsonl").write_text("\n".join(rows), encoding="utf-8")
    files = {"data_dir": str(folder), "train_file": "rows.jsonl", "validation_file": "rows.jsonl"}
    settings = {"name": "text", "text_columns": ["text"], "label_column": "labels", "multi_label": True}
    return TextSpec(**settings | files | fields)


@pytest.fixture
def task(model: Path, tmp_path: Path) -> Any:
    return build_task(spec_of(tmp_path), model, tmp_path / "cache")


def test_lists_are_read_from_every_kind_of_file(model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """In JSON lines, and as JSON and pandas write them into CSV; the counts of every class are told."""
    caplog.set_level(logging.INFO, logger="ds_trainer")
    task = build_task(spec_of(tmp_path), model, tmp_path / "cache")
    assert task.label_names == ("joy", "anger", "fear")
    assert (task.examples("train").fields["labels"] == GOLD).all()
    assert "classes: 2 anger, 3 fear, 2 joy" in caplog.text
    assert task.build_model(model).config.problem_type == "multi_label_classification"
    cells = (repr(LABELS[0]), json.dumps(LABELS[1]), "[]", *map(repr, LABELS[3:]))
    rows = ['"' + cell.replace('"', '""') + '"' for cell in cells]
    text = "\n".join(f"{text},{row}" for text, row in zip(SENTENCES, rows, strict=True))
    (tmp_path / "rows.csv").write_text(f"text,labels\n{text}\n", encoding="utf-8")
    table = spec_of(tmp_path).model_copy(update={"train_file": "rows.csv", "validation_file": "rows.csv"})
    assert (build_task(table, model, tmp_path / "cache").examples("train").fields["labels"] == GOLD).all()


@pytest.mark.parametrize(
    ("labels", "fields", "message"),
    [
        ([[["fear"]], *LABELS[1:]], {}, r"rows\.jsonl, line 1: 'labels' has a list, .*where one label is expected"),
        ([*LABELS[:5], "fear"], {}, r"line 6: 'labels' is 'fear', where a list of labels is expected"),
        (["{'fear', 'anger'}", *LABELS[1:]], {}, "line 1: .*where a list of labels is expected"),
        (LABELS, {"multi_label": False}, "line 1: 'labels' has a list, .*: set multi_label to true"),
        (["['joy']", *LABELS[1:]], {"multi_label": False}, "line 1: 'labels' has text, .*: set multi_label to true"),
    ],
)
def test_labels_that_are_no_lists_throughout_are_refused(
    labels: list[Any], fields: dict[str, Any], message: str, model: Path, tmp_path: Path
) -> None:
    """Lists of lists, lists beside classes, each with its line; and what goes with one class only."""
    with pytest.raises(UserError, match=message):
        build_task(spec_of(tmp_path, labels, **fields), model, tmp_path / "cache").examples("train")
    several = spec_of(tmp_path, positive_class="joy", metrics=["f1"])
    regression = spec_of(tmp_path, regression=True, class_weights="balanced")
    mistakes = [mistake.split(":")[0] for spec in (several, regression) for mistake in check_data_files(spec)]
    assert mistakes == ["metrics", "positive_class", "multi_label", "class_weights"]


def test_loss_and_scores_are_those_of_each_class_alone(task: Any) -> None:
    """Binary cross entropy, in the head's order; micro and macro F1 by hand; weights of what is there."""
    batch = task.collate(task.examples("train"), range(6))
    assert (batch.labels[:, [1, 2, 0]].numpy() == GOLD).all()
    logits = torch.where(batch.labels > 0, 1.0, -1.0)
    logits[4, 0] = -0.5  # joy is not given to the fifth
    logits[2, 1] = 0.5  # anger is given to the third
    out = SimpleNamespace(logits=logits)
    by_hand = torch.nn.functional.softplus(torch.where(batch.labels > 0, -logits, logits)).mean()
    torch.testing.assert_close(task.loss(out, batch), by_hand)
    answers = task.answers(out, batch)
    assert task.score("validation", answers) == pytest.approx({"micro_f1": 12 / 14, "macro_f1": (0.8 + 1 + 2 / 3) / 3})
    more = {"macro_f1": (0.8 + 1 + 2 / 3) / 3, "f1/anger": 0.8, "f1/fear": 1, "f1/joy": 2 / 3}
    assert task.further_scores("validation", answers) == pytest.approx(more)
    right = dict(enumerate(np.where(GOLD[:, [2, 0, 1]], 1, -1).astype(np.float32)))  # by joy, anger, fear
    assert task.agreement("validation", answers, right) == pytest.approx(4 / 6)
    lines = task.artifacts("validation", answers)["predictions.csv"].splitlines()
    assert lines[0] == "line,label,answer,p(anger),p(fear),p(joy)"
    assert lines[5] == "5,fear|joy,fear,0.268941,0.731059,0.377541"
    balanced = task.spec.model_copy(update={"class_weights": "balanced"})
    weighted = build_task(balanced, task.config.name_or_path, task.cache_dir)
    factors = torch.where(batch.labels > 0, torch.tensor([2.0, 2.0, 1.0]), torch.tensor(1.0))
    by_hand = (factors * torch.nn.functional.softplus(torch.where(batch.labels > 0, -logits, logits))).mean()
    torch.testing.assert_close(weighted.loss(out, batch), by_hand)


def test_a_label_that_is_never_given_is_told(task: Any) -> None:
    """By its name, as a class is."""
    joyless = torch.tensor([-1.0, 1.0, 1.0])  # joy, anger, fear
    [warning] = evaluate(lambda batch: SimpleNamespace(logits=joyless.repeat(len(batch.ids), 1)), task, 4).warnings
    assert "never answers these classes, though validation has them: joy (2 times)." in warning


@pytest.mark.parametrize("kind", ["forward", "reverse", "js"])
def test_soft_targets_compare_every_class_alone(kind: Any, task: Any) -> None:
    """The divergence of two Bernoulli distributions at a temperature, mean over rows and classes, and its gradient."""
    generator = torch.Generator().manual_seed(0)
    student = torch.randn(5, 3, generator=generator, dtype=torch.float32).requires_grad_()
    teacher = torch.randn(5, 3, generator=generator, dtype=torch.float32)
    p, q = (torch.stack([s, 1 - s]) for s in ((teacher.double() / 2).sigmoid(), (student.double() / 2).sigmoid()))
    middle = (p + q) / 2
    by_hand = {
        "forward": (p * (p / q).log()).sum(0),
        "reverse": (q * (q / p).log()).sum(0),
        "js": ((p * (p / middle).log()).sum(0) + (q * (q / middle).log()).sum(0)) / 2,
    }[kind].mean() * 4
    (expected,) = torch.autograd.grad(by_hand, student)
    found = soft_target_loss(task, student, teacher.clone(), 2.0, kind)
    assert found.item() == pytest.approx(by_hand.item(), rel=1e-5)
    torch.testing.assert_close(torch.autograd.grad(found, student)[0], expected)


def test_distillation_and_cuts_follow_the_teachers_labels(task: Any, model: Path) -> None:
    """Agreement counts each class; the divergence that sizes a cut is 0 from itself; exits are refused."""
    student: Any = task.build_model(model).eval()
    distill = Distill(DistillSpec(teacher=str(model), terms=["logits"]), PhaseLength(4, 1, 0), task)
    distill.attach(student)
    distill.start(torch.device("cpu"))
    batch = task.collate(task.examples("train"), range(6))
    logits = student(**batch.inputs).logits.detach()
    for shared, sign in ((1.0, 1), (17 / 18, -1)):
        logits[0, 0] *= sign
        distill.terms(Forward(batch, SimpleNamespace(logits=logits, attentions=None), 0))
        assert distill.readings() == {"distill/agreement": pytest.approx(shared)}
    calibration = calibration_of(task, 6, 0)
    answers = calibration.answers(student)
    assert calibration.divergence(answers, answers) == pytest.approx(0, abs=1e-6)
    with pytest.raises(UserError, match="exits: a text with several labels has no point"):
        Exits(ExitsSpec(), PhaseLength(4, 1, 0), task)
