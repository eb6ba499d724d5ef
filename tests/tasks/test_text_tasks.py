"""Text tasks from rows to a score: batches, labels in the model's order, models, metrics, several labels."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import scipy.stats
import sklearn.metrics
import torch
from support.labelled_files import SENTENCES, write_csv
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    BertModel,
    GPT2Config,
    GPT2Model,
    RobertaConfig,
    RobertaModel,
)

from ds_trainer.models.classifiers import label_order
from ds_trainer.models.folders import train_tokenizer
from ds_trainer.ranks.failures import UserError
from ds_trainer.recipe.task_specs import TextSpec
from ds_trainer.run.loop import micro_batches
from ds_trainer.run.objective import Objective
from ds_trainer.tasks.registry import build_task, check_data_files, check_metric
from ds_trainer.tasks.scores import regression_scores
from ds_trainer.tasks.task import Forward
from ds_trainer.tasks.text.text_data import positive_class
from ds_trainer.tasks.text.text_task import TextTask, class_scores

MNLI = ("entailment", "neutral", "contradiction")
SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return train_tokenizer(SENTENCES * 5, 60, True)


@pytest.fixture
def saved(tokenizer: Any, tmp_path: Path) -> Any:
    """Save a model that is made with these sizes, with its tokenizer, in a folder."""

    def save(name: str, kind: Any = BertModel, config: Any = BertConfig, **sizes: Any) -> Path:
        torch.manual_seed(0)
        sizes = {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id, **SMALL, **sizes}
        kind(config(**sizes)).save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
        return tmp_path / name

    return save


@pytest.fixture
def classifier(saved: Any) -> Any:
    def save(*labels: str) -> Path:
        names = {"id2label": dict(enumerate(labels)), "label2id": {name: i for i, name in enumerate(labels)}}
        return saved("-".join(labels), BertForSequenceClassification, **names)

    return save


@pytest.fixture
def build(saved: Any, tmp_path: Path) -> Any:
    """The task of labels for some sentences, or of a spec with some fields changed."""

    def build(spec: TextSpec | list[Any], source: Path | None = None, **fields: Any) -> TextTask:
        spec = write_csv(tmp_path, spec) if isinstance(spec, list) else spec
        return build_task(TextSpec(**spec.model_dump() | fields), source or saved("encoder"), tmp_path / "cache")

    return build


@pytest.fixture
def mnli(tmp_path: Path) -> TextSpec:
    """Three rows a split, one of each class, in the task's order."""
    folder = tmp_path / "MNLI"
    folder.mkdir()
    pairs = [(SENTENCES[i], SENTENCES[i + 1]) for i in range(3)]
    rows = "".join(f"{a}\t{b}\t{label}\n" for (a, b), label in zip(pairs, MNLI, strict=True))
    for file in ("train", "dev_matched", "dev_mismatched"):
        (folder / f"{file}.tsv").write_text(f"sentence1\tsentence2\tgold_label\n{rows}", encoding="utf-8")
    return TextSpec(name="mnli", data_dir=str(tmp_path))


def logits_for(classes: int, *chosen: int) -> dict[int, Any]:
    """Answers that choose these classes."""
    return dict(enumerate(np.eye(classes, dtype=np.float32)[list(chosen)]))


def test_rows_become_padded_batches_of_pairs(mnli: TextSpec, build: Any) -> None:
    """A pair is told apart by token types; the width is that of the longest row, or the next multiple."""
    task = build(mnli)
    examples = task.examples("train")
    batch = task.collate(examples, [2, 0])
    assert batch.ids.tolist() == batch.labels.tolist() == [2, 0]
    pairs = [SENTENCES[2], SENTENCES[0]], [SENTENCES[3], SENTENCES[1]]
    for name, values in task.tokenizer(*pairs, padding=True, return_tensors="pt").items():
        assert torch.equal(batch.inputs[name], values), name
    batch = build(mnli, pad_to_multiple_of=8).collate(examples, range(3))
    assert batch.inputs["input_ids"].shape[1] % 8 == 0
    assert batch.mask.sum(1).tolist() == examples.lengths.tolist()


def test_a_trained_head_with_the_labels_in_another_order_scores_the_same(
    mnli: TextSpec, build: Any, classifier: Any
) -> None:
    """A downloaded model keeps its class ids, labels and answers follow; as a teacher it is turned to the student's."""
    order = (2, 0, 1)
    folder = classifier(*(MNLI[i].upper() for i in order))
    task = build(mnli, folder)
    assert task.label_names == tuple(MNLI[i] for i in order)
    batch = task.collate(task.examples("validation"), range(3))
    assert [task.label_names[label] for label in batch.labels] == list(MNLI)
    out = task.build_model(folder).eval()(**batch.inputs)
    original = BertForSequenceClassification.from_pretrained(folder).eval()(**batch.inputs).logits
    torch.testing.assert_close(out.logits, original)
    right = [task.label_names[int(row.argmax())] == label for row, label in zip(out.logits, MNLI, strict=True)]
    assert task.score("validation", task.answers(out, batch))["accuracy"] == pytest.approx(np.mean(right))
    teacher = build(mnli).build_model(folder).eval()
    torch.testing.assert_close(teacher(**batch.inputs).logits, original[:, [order.index(i) for i in range(3)]])
    assert tuple(teacher.config.id2label.values()) == MNLI


def test_heads_that_do_not_fit_are_replaced_or_taken_in_order_with_a_word(
    mnli: TextSpec, build: Any, classifier: Any, saved: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Two classes do not fit three: the head is new, in fp32, and the encoder is kept; unnamed classes are taken."""
    caplog.set_level("INFO", logger="ds_trainer")
    folder = classifier("negative", "positive")
    model = build(mnli, folder).build_model(folder)
    assert model.classifier.out_features == 3
    assert "has a head of 2 classes (negative, positive), so it gets a new one of 3 outputs" in caplog.text
    old = BertForSequenceClassification.from_pretrained(folder)
    torch.testing.assert_close(model.bert.state_dict(), old.bert.state_dict())
    folder = classifier("LABEL_0", "LABEL_1", "LABEL_2")
    model = build(mnli, folder).build_model(folder)
    assert "are unnamed; they are taken for entailment, neutral, contradiction" in caplog.text
    own = BertForSequenceClassification.from_pretrained(folder).classifier.weight
    torch.testing.assert_close(model.classifier.weight, own)
    bare = saved("bare", lambda config: BertForMaskedLM(config).bfloat16())  # it has no pooler
    assert {each.dtype for each in build(mnli, bare).build_model(bare).parameters()} == {torch.float32}
    # version 0.2 sorted the numbers of a table that pandas had written as text
    assert label_order(("1", "2", "10"), ("1.0", "10.0", "2.0")) == ("1", "10", "2")
    # tags that differ in case alone stay apart, while names that differ in case everywhere are the same ones
    assert label_order(("O", "B-x", "b-x"), ("b-x", "O", "B-x")) == ("b-x", "O", "B-x")
    assert label_order(("O", "B-x"), ("b-x", "o")) == ("B-x", "O")


def test_a_head_with_a_class_in_the_place_of_another_is_refused(mnli: TextSpec, build: Any, classifier: Any) -> None:
    """Taken in order it would be read as another class: as a teacher (before it is loaded), to score, and to start."""
    task = build(mnli)
    for use in (task.check_trained, task.build_model):
        with pytest.raises(UserError, match="entailment is class 2 of the head and 0 of the"):
            use(classifier("con", "neutral", "Entailment"))
    for kept in [("neg", "neutral", "pos"), ("LABEL_0", "LABEL_1", "LABEL_2")]:
        task.check_trained(classifier(*kept))


def test_a_model_without_room_for_the_texts_is_refused(mnli: TextSpec, build: Any, saved: Any) -> None:
    """RoBERTa's table holds two rows more than it has positions, and the limit is exact."""
    for positions in (64, 63):
        sizes = {"pad_token_id": 1, "max_position_embeddings": positions + 2}
        folder = saved(f"roberta{positions}", RobertaModel, RobertaConfig, **sizes)
        task = build(mnli, folder, max_seq_length=64)
        if positions == 64:
            assert task.build_model(folder)
    with pytest.raises(ValueError, match="max_seq_length is 64, and the model has 63 positions"):
        task.build_model(folder)


def test_gpt2_pads_with_its_end_of_text(mnli: TextSpec, build: Any, tmp_path: Path) -> None:
    """A tokenizer and model without padding get one, and a padded row's logits equal the row's alone."""
    bare = train_tokenizer(SENTENCES * 5, 60, True)
    bare.pad_token, bare.eos_token = None, "[SEP]"
    bare.save_pretrained(tmp_path / "gpt2")
    config = GPT2Config(vocab_size=len(bare), n_embd=16, n_layer=1, n_head=2, n_positions=128)
    GPT2Model(config).save_pretrained(tmp_path / "gpt2")
    task = build(mnli, tmp_path / "gpt2")
    model = task.build_model(tmp_path / "gpt2").eval()
    assert model.config.pad_token_id == task.tokenizer.eos_token_id
    examples = task.examples("train")
    batch = task.collate(examples, range(3))
    assert set(batch.inputs) == {"input_ids", "attention_mask"}
    alone = [model(**task.collate(examples, [i]).inputs).logits for i in range(3)]
    torch.testing.assert_close(model(**batch.inputs).logits, torch.cat(alone))


def test_the_classes_are_those_of_training(build: Any, classifier: Any, tmp_path: Path) -> None:
    """Sorted, numbers by value; an evaluation file brings no new ones; without a training file those of the model."""
    task = build([10, 9, 2, 10, 9, 2])
    assert task.label_names == ("2", "9", "10")
    assert task.examples("train").fields["labels"].tolist() == [2, 1, 0, 2, 1, 0]
    task = build(["a", "a", "a", "b", "b", "b"])
    (tmp_path / "dev.csv").write_text("text,label\nno,a\nno,c\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"dev\.csv, line 3: unknown label 'c': allowed are 'a', 'b'"):
        task.examples("validation")
    with pytest.raises(ValueError, match=r"train\.csv has only the label 'a'"):
        build(["a"] * 6)
    task = build(["dry", "wet", "dry"], classifier("wet", "dry", "warm"), train_file=None)
    assert task.examples("validation").fields["labels"].tolist() == [1, 0, 1]


def test_a_regression_has_scores_as_answers(build: Any) -> None:
    """One output, a mean squared error, correlations, and the line of every text in the predictions."""
    task = build([1.5, 2, 3, 0, -1, 4], regression=True)
    batch = task.collate(task.examples("train"), range(6))
    assert task.build_model(task.config.name_or_path)(**batch.inputs).logits.shape == (6, 1)
    out = SimpleNamespace(logits=torch.tensor([[2.0], [3.0], [4.0], [1.0], [0.0], [5.0]], dtype=torch.bfloat16))
    torch.testing.assert_close(task.loss(out, batch), torch.tensor((0.5**2 + 5) / 6))
    answers = task.answers(out, batch)
    assert task.score("train", answers)["spearman"] == pytest.approx(1.0)
    text = task.artifacts("validation", answers)["predictions.csv"]
    assert text.splitlines()[:3] == ["line,label,answer", "2,1.5,2.0", "3,2.0,3.0"]


def test_metrics_are_known_before_there_is_a_score() -> None:
    """Those of the task, the mean of the classes' F1, and all that have the prefix of a class, a view or a split."""
    several = {"name": "text", "multi_label": True}
    good = ({"name": "cola"}, "matthews"), ({"name": "sst2"}, "macro_f1"), ({"name": "stsb"}, "pearson")
    good += (several, "micro_f1"), ({"name": "sst2"}, "exit_2/f1"), ({"name": "sst2"}, "f1/positive")
    assert [check_metric(TextSpec(**spec), metric) for spec, metric in good] == [[]] * len(good)
    bad = ({"name": "sst2"}, "f1"), ({"name": "stsb"}, "macro_f1"), ({"name": "sst2", "metrics": ["f1"]}, "accuracy")
    assert [len(check_metric(TextSpec(**spec), metric)) for spec, metric in bad] == [1, 1, 1]


def test_logits_that_are_not_finite_have_no_score(build: Any) -> None:
    """NaN has a likeliest class, too: the split is refused, with the number of examples."""
    for regression, value in ((False, math.nan), (True, math.inf)):
        task = build([1, 2, 1, 2, 2, 1], regression=regression)
        batch = task.collate(task.examples("validation"), range(6))
        out = SimpleNamespace(logits=torch.rand(6, 1 if regression else 2))
        out.logits[[1, 4], 0] = value
        with pytest.raises(ValueError, match=r"validation: the model gives logits that are not finite .* for 2 of 6 "):
            task.score("validation", task.answers(out, batch))


def test_predictions_name_the_line_of_every_text(build: Any, classifier: Any) -> None:
    """With label, answer and probabilities by class, though the head has them in another order; and models agree by
    their answers."""
    task = build(["a", "b", "a", "b", "b", "a"], classifier("b", "a"), max_eval_samples=2)
    batch = task.collate(task.examples("validation"), [1, 0])
    answers = task.answers(SimpleNamespace(logits=torch.tensor([[3.0, 1.0], [1.0, 4.0]]).log()), batch)
    [(name, text)] = task.artifacts("validation", answers).items()
    assert name == "predictions.csv"
    assert text == "line,label,answer,p(a),p(b)\n2,a,a,0.800000,0.200000\n5,b,b,0.250000,0.750000\n"
    assert task.agreement("validation", answers, logits_for(2, 1, 1)) == 0.5


def test_f1_is_that_of_the_positive_class(build: Any, caplog: pytest.LogCaptureFixture) -> None:
    """It stands beside F1 of every class, whose numbers sort as numbers; the log says which one it is."""
    caplog.set_level("INFO", logger="ds_trainer")
    for labels, positive, expected in ((["yes", "no"], "no", 0.8), (["1", "-1.5"], -1.5, 0.8), (["1", "-1"], 1, 2 / 3)):
        task = build(labels * 2, positive_class=positive)
        first, second = task.label_names
        assert first in ("-1.5", "-1", "no")
        answers = logits_for(2, 1, 0, 0, 0)
        assert task.score("validation", answers) == {"accuracy": 0.75, "f1": pytest.approx(expected)}
        more = {"macro_f1": (0.8 + 2 / 3) / 2, f"f1/{first}": 0.8, f"f1/{second}": 2 / 3}
        assert task.further_scores("validation", answers) == pytest.approx(more)
        assert f"classes: 2 {first}, 2 {second}; f1 is that of {positive}" in caplog.text


def test_an_f1_of_two_classes_that_could_be_either_is_refused(build: Any) -> None:
    """Without a positive class, and with one that is no class; GLUE's tasks have their own."""
    for fields, words in (
        ({"metrics": ["f1"]}, r"set task\.positive_class to which of the two .*; the classes are 'a', 'b'"),
        ({"positive_class": "c"}, r"task\.positive_class is 'c', and the classes are 'a', 'b'"),
        ({"class_weights": [1.0]}, r"task\.class_weights has 1 numbers, and the classes are 'a', 'b'"),
    ):
        with pytest.raises(UserError, match=words):
            build(["b", "a"] * 3, **fields)
    assert positive_class(TextSpec(name="mrpc")) == "equivalent"
    assert positive_class(TextSpec(name="qqp")) == "duplicate"


@pytest.mark.parametrize("classes", [2, 4])
def test_metrics_are_those_of_scikit_learn_and_scipy(classes: int) -> None:
    """Over draws with ties, and with classes that do not occur; a correlation with a constant is 0, not NaN."""
    draw = np.random.default_rng(0)
    for _ in range(30):
        given, gold = draw.integers(0, classes, (2, 9))
        expected = {
            "accuracy": sklearn.metrics.accuracy_score(gold, given),
            "matthews": sklearn.metrics.matthews_corrcoef(gold, given),
            "macro_f1": sklearn.metrics.f1_score(gold, given, average="macro"),
            "micro_f1": sklearn.metrics.f1_score(gold, given, average="micro"),
        }
        for name in range(classes + 1):
            expected[f"f1/{name}"] = sklearn.metrics.f1_score(gold == name, given == name, zero_division=0)
        one_hot = (np.eye(classes + 1, dtype=bool)[each] for each in (given, gold))
        assert class_scores(*one_hot, positive=1) == pytest.approx(expected | {"f1": expected["f1/1"]})
        values, labels = draw.integers(0, 5, (2, 9)).astype(np.float64)
        assert regression_scores(values, labels) == {
            "pearson": pytest.approx(scipy.stats.pearsonr(values, labels)[0]),
            "spearman": pytest.approx(scipy.stats.spearmanr(values, labels)[0]),
        }
    assert regression_scores(np.full(3, 0.1), np.arange(3.0)) == {"pearson": 0.0, "spearman": 0.0}


def test_a_weighted_loss_is_the_mean_over_the_global_batch(build: Any, classifier: Any) -> None:
    """However it is cut into micro-batches, whose weights differ; "balanced" is inverse to the classes' counts."""
    folder = classifier("b", "a")  # the head has another order than the task
    logits = torch.randn(6, 2, generator=torch.Generator().manual_seed(0))
    for weights in ("balanced", [0.06, 0.3]):
        task = build(["a", "a", "a", "a", "b", "a"], folder, class_weights=weights)
        labels = task.collate(task.examples("train"), range(6)).labels
        whole = torch.nn.functional.cross_entropy(logits, labels, torch.tensor([0.3, 0.06]))
        engine: Any = SimpleNamespace(gradient_accumulation_steps=lambda: 3, device=torch.device("cpu"))
        objective, total = Objective(task, [], {"task": 1.0}), 0.0
        for batch, shares in micro_batches(task, np.arange(6), engine, 1):
            out = SimpleNamespace(logits=logits[batch.ids])
            total += float(objective(Forward(batch, out, 0, shares))[0]) / 3
        assert total == pytest.approx(float(whole), rel=1e-6)


LABELS = [["fear", "anger"], ["joy"], [], ["anger"], ["joy", "fear"], ["fear"]]
GOLD = np.array([[1, 1, 0], [0, 0, 1], [0, 0, 0], [1, 0, 0], [0, 1, 1], [0, 1, 0]], bool)
"""By anger, fear, joy."""


def several(folder: Path, labels: list[Any] = LABELS, **fields: Any) -> TextSpec:
    """A spec of JSON lines with these labels."""
    rows = [json.dumps({"text": text, "labels": label}) for text, label in zip(SENTENCES, labels, strict=True)]
    (folder / "rows.jsonl").write_text("\n".join(rows), encoding="utf-8")
    files = {"data_dir": str(folder), "train_file": "rows.jsonl", "validation_file": "rows.jsonl", "multi_label": True}
    return TextSpec(**{"name": "text", "text_columns": ["text"], "label_column": "labels"} | files | fields)


def test_several_labels_are_read_from_lists(build: Any, classifier: Any, tmp_path: Path, caplog: Any) -> None:
    """In JSON lines, and as JSON and pandas write them into CSV; the counts of every class are told."""
    caplog.set_level("INFO", logger="ds_trainer")
    folder, spec = classifier("joy", "anger", "fear"), several(tmp_path)
    task = build(spec, folder)
    assert task.label_names == ("joy", "anger", "fear")
    assert (task.examples("train").fields["labels"] == GOLD).all()
    assert "classes: 2 anger, 3 fear, 2 joy" in caplog.text
    assert task.build_model(folder).config.problem_type == "multi_label_classification"
    cells = (repr(LABELS[0]), json.dumps(LABELS[1]), "[]", *map(repr, LABELS[3:]))
    rows = ['"' + cell.replace('"', '""') + '"' for cell in cells]
    text = "\n".join(f"{text},{row}" for text, row in zip(SENTENCES, rows, strict=True))
    (tmp_path / "rows.csv").write_text(f"text,labels\n{text}\n", encoding="utf-8")
    assert (build(spec, folder, train_file="rows.csv").examples("train").fields["labels"] == GOLD).all()


@pytest.mark.parametrize(
    ("labels", "fields", "message"),
    [
        ([[["fear"]], *LABELS[1:]], {}, r"rows\.jsonl, line 1: 'labels' has a list, .*where one label is expected"),
        (["{'fear', 'anger'}", *LABELS[1:]], {}, "line 1: .*where a list of labels is expected"),
        (LABELS, {"multi_label": False}, "line 1: 'labels' has a list, .*: set multi_label to true"),
        (["['joy']", *LABELS[1:]], {"multi_label": False}, "line 1: 'labels' has text, .*: set multi_label to true"),
    ],
)
def test_labels_that_are_no_lists_throughout_are_refused(
    labels: list[Any], fields: dict[str, Any], message: str, build: Any, tmp_path: Path
) -> None:
    """Lists of lists, lists beside classes, each with its line; and what goes with one class only."""
    with pytest.raises(UserError, match=message):
        build(several(tmp_path, labels, **fields)).examples("train")
    specs = several(tmp_path, positive_class="joy", metrics=["f1"]), several(tmp_path, regression=True)
    mistakes = [mistake.split(":")[0] for spec in specs for mistake in check_data_files(spec)]
    assert mistakes == ["metrics", "positive_class", "multi_label"]


def test_loss_and_scores_of_several_labels_are_those_of_each_class_alone(
    build: Any, classifier: Any, tmp_path: Path
) -> None:
    """Binary cross entropy, in the head's order; micro and macro F1 by hand; weights of what is there."""
    folder = classifier("joy", "anger", "fear")
    task = build(several(tmp_path), folder)
    batch = task.collate(task.examples("train"), range(6))
    assert (batch.labels[:, [1, 2, 0]].numpy() == GOLD).all()
    logits = torch.where(batch.labels > 0, 1.0, -1.0)
    logits[4, 0] = -0.5  # joy is not given to the fifth
    logits[2, 1] = 0.5  # anger is given to the third
    out = SimpleNamespace(logits=logits)
    terms = torch.nn.functional.softplus(torch.where(batch.labels > 0, -logits, logits))
    torch.testing.assert_close(task.loss(out, batch), terms.mean())
    answers = task.answers(out, batch)
    assert task.score("validation", answers) == pytest.approx({"micro_f1": 12 / 14, "macro_f1": (0.8 + 1 + 2 / 3) / 3})
    more = {"macro_f1": (0.8 + 1 + 2 / 3) / 3, "f1/anger": 0.8, "f1/fear": 1, "f1/joy": 2 / 3}
    assert task.further_scores("validation", answers) == pytest.approx(more)
    right = dict(enumerate(np.where(GOLD[:, [2, 0, 1]], 1, -1).astype(np.float32)))  # by joy, anger, fear
    assert task.agreement("validation", answers, right) == pytest.approx(4 / 6)
    lines = task.artifacts("validation", answers)["predictions.csv"].splitlines()
    assert lines[0] == "line,label,answer,p(anger),p(fear),p(joy)"
    assert lines[5] == "5,fear|joy,fear,0.268941,0.731059,0.377541"
    joyless = dict.fromkeys(range(6), np.float32([-1, 1, 1]))
    assert task.never_answered("validation", joyless) == {"joy": 2}
    weighted = build(several(tmp_path), folder, class_weights="balanced")
    factors = torch.where(batch.labels > 0, torch.tensor([2.0, 2.0, 1.0]), torch.tensor(1.0))
    torch.testing.assert_close(weighted.loss(out, batch), (factors * terms).mean())
