"""Classification and regression of one text or a pair: GLUE, any labelled text, the embedded docstrings.

`text_data.py` reads the rows, which are tokenised once and cached as `Examples`. The metrics are functions at the end.

An example has one label or, with `multi_label`, any number: each class is then a yes or no, which is a yes if its
probability is above a half.

Labels have two orders. The cache holds them in the task's order. A batch, the model and its answers have the model's
order, which differs if the trained head has the same class names in another order: so a downloaded MNLI model keeps its
class ids.
"""

import csv
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ds_trainer.files.messages import listed
from ds_trainer.models import classifiers
from ds_trainer.models.pretrained import CLASSIFIER
from ds_trainer.ranks.failures import UserError, raise_mistakes
from ds_trainer.recipe.task_specs import TextSpec
from ds_trainer.tasks.data import Array, ExampleIds, Examples, source_split
from ds_trainer.tasks.records import Records
from ds_trainer.tasks.scores import correlation, regression_scores
from ds_trainer.tasks.task import Batch, Task, Unit
from ds_trainer.tasks.text import text_data
from ds_trainer.tasks.text.text_data import is_regression, known_labels, metrics_of, positive_class


class TextTask(Task):
    """A labelled-text task.

    Labels are class indices (rows,) int64 in the model's order, fp32 scores or, where an example has several, fp32 of 0
    and 1 (rows, classes) in the model's order.
    """

    spec: TextSpec
    head = CLASSIFIER
    family = "text"
    hashed_fields = ("name", "text_columns", "label_column", "regression", "max_seq_length")
    row_fields = ("name", "text_columns", "label_column")
    data: ClassVar[Any] = text_data

    def __init__(self, spec: TextSpec, tokenizer: Any, source: str | Path, cache_dir: Path) -> None:
        super().__init__(spec, tokenizer, source, cache_dir)
        self.regression, self.multi_label = is_regression(spec), spec.multi_label
        head = classifiers.trained_head(self.config, CLASSIFIER)
        self._task_labels = known_labels(spec)
        if not (self._task_labels or self.regression):
            self._task_labels = classifiers.class_names(spec, head, partial(_labels_in, spec))
        self.label_names = classifiers.label_order(self._task_labels, head)
        self._model_class = np.array([self.label_names.index(name) for name in self._task_labels], np.int64)
        self._task_class = np.argsort(self._model_class)
        self._metrics = metrics_of(spec)
        raise_mistakes(self._mistakes())
        positive = positive_class(spec)
        self._positive = None if positive is None else self._task_labels.index(positive)
        self.loss_unit: Unit = "weight" if spec.class_weights and not self.multi_label else "example"

    def source(self, split: str) -> Records[Any]:
        return text_data.records(self.spec, source_split(self.spec, split), self._task_labels)

    def hashed_values(self) -> list[Any]:
        return [self._task_labels, *(["multi_label"] if self.multi_label else [])]

    def label_array(self, labels: Sequence[Any]) -> Array:
        if self.regression:
            return np.array(labels, np.float32)
        if not self.multi_label:
            return np.array([self._task_labels.index(label) for label in labels], np.int64)
        return np.array([[name in given for name in self._task_labels] for given in labels], np.float32)

    def collate(self, examples: Examples, ids: Sequence[int] | ExampleIds, draw: int = 0) -> Batch:
        batch = super().collate(examples, ids, draw)
        if self.regression:
            return batch
        labels = batch.labels.numpy()
        return replace(
            batch,
            labels=torch.from_numpy(labels[:, self._task_class] if self.multi_label else self._model_class[labels]),
        )

    def loss(self, out: Any, batch: Batch) -> Tensor:
        """Return the cross entropy, weighted by `class_weights`, or the squared error for regression.

        Of several labels it is the binary cross entropy, mean over examples and classes, in which the weights are those
        of a label that is there.
        """
        logits = out.logits.float()
        if self.regression:
            return F.mse_loss(logits.squeeze(-1), batch.labels)
        weights = None if self._class_weights is None else self._class_weights.to(logits.device)
        if self.multi_label:
            return F.binary_cross_entropy_with_logits(logits, batch.labels, pos_weight=weights)
        return F.cross_entropy(logits, batch.labels, weights)

    def counts(self, examples: Examples, ids: ExampleIds) -> dict[Unit, float]:
        counts = super().counts(examples, ids)
        if self.loss_unit != "weight":
            return counts
        assert self._class_weights is not None
        labels = self._model_class[examples.fields["labels"][ids]]
        return counts | {"weight": float(self._class_weights[labels].double().sum())}

    def score(self, split: str, answers: Mapping[int, Any]) -> dict[str, float]:
        if self.regression:
            labels = self.examples(split).fields["labels"]
            scores = regression_scores(self.stacked(split, answers)[:, 0], labels)
        else:
            scores = class_scores(self._given(split, answers), self._labelled(split), self._positive)
        return {name: scores[name] for name in self._metrics}

    def further_scores(self, split: str, answers: Mapping[int, Any]) -> dict[str, float]:
        """Return the mean of the classes' F1 and that of each."""
        if self.regression:
            return {}
        scores = f1_scores(self._given(split, answers), self._labelled(split), self._task_labels)
        del scores["micro_f1"]  # with one label for each example it is the accuracy
        return scores

    def never_answered(self, split: str, answers: Mapping[int, Any]) -> dict[str, int]:
        if self.regression:
            return {}
        gold, given = self._labelled(split).sum(0).tolist(), self._given(split, answers).max(0).tolist()
        counted = zip(self._task_labels, gold, given, strict=True)
        return {name: count for name, count, is_given in counted if count and not is_given}

    def artifacts(self, split: str, answers: Mapping[int, Any]) -> dict[str, Any]:
        """Return `predictions.csv`: each example's place in its file, label, answer, and probability of every class."""
        file = io.StringIO()
        writer = csv.writer(file, lineterminator="\n")
        records, rows = self.read(split)
        writer.writerow([records.entry, "label", "answer", *(f"p({name})" for name in self._task_labels)])
        if self.regression:
            labels = self.examples(split).fields["labels"]
            writer.writerows([row.place, labels[row.number], answers[row.number][0]] for row in rows)
            return {"predictions.csv": file.getvalue()}
        logits = torch.from_numpy(self.stacked(split, answers)[:, self._model_class])
        shares = (logits.sigmoid() if self.multi_label else logits.softmax(1)).tolist()
        for row, gold, given in zip(rows, self._labelled(split), self._given(split, answers), strict=True):
            written = (f"{share:.6f}" for share in shares[row.number])
            writer.writerow([row.place, self._names(gold), self._names(given), *written])
        return {"predictions.csv": file.getvalue()}

    def summary(self, split: str) -> str:
        """Add how many examples have each class, in the order of `class_weights`, and what f1 is of."""
        if self.regression:
            return super().summary(split)
        counts = zip(self._labelled(split).sum(0).tolist(), self._task_labels, strict=True)
        words = f"{super().summary(split)}; classes: {', '.join(f'{count:,} {name}' for count, name in counts)}"
        if "f1" not in self._metrics:
            return words
        of = "the mean over the classes" if self._positive is None else f"that of {self._task_labels[self._positive]}"
        return f"{words}; f1 is {of}"

    def _mistakes(self) -> list[str]:
        """Return the mistakes of the spec that show once the classes are known."""
        spec, classes = self.spec, f"the classes are {listed(self._task_labels)}"
        mistakes, positive = list[str](), positive_class(spec)
        if positive is not None and positive not in self._task_labels:
            mistakes.append(f"task.positive_class is {positive!r}, and {classes}")
        if positive is None and "f1" in self._metrics and len(self._task_labels) == 2:
            either = "which of the two classes it is of, or write macro_f1 for the mean of both"
            mistakes.append(f'task.metrics has "f1": set task.positive_class to {either}; {classes}')
        if isinstance(spec.class_weights, list) and len(spec.class_weights) != len(self._task_labels):
            mistakes.append(f"task.class_weights has {len(spec.class_weights)} numbers, and {classes}: write one each")
        return mistakes

    @cached_property
    def _class_weights(self) -> Tensor | None:
        """The weights of the classes in the loss, (classes,) fp32 in the model's order; None without."""
        if not self.spec.class_weights:
            return None
        weights = np.array(self.spec.class_weights)
        if self.spec.class_weights == "balanced":
            counts, total = np.maximum(self._labelled("train").sum(0), 1), len(self.examples("train"))
            without = np.maximum(total - counts, 1)
            weights = without / counts if self.multi_label else total / (len(counts) * counts)
        return torch.tensor(weights[self._task_class], dtype=torch.float32)

    def _labelled(self, split: str) -> Array:
        """Return which labels the examples of a split have, (n, classes) bool in the task's order."""
        labels = self.examples(split).fields["labels"]
        return labels > 0 if self.multi_label else np.eye(len(self._task_labels), dtype=bool)[labels]

    def _given(self, split: str, answers: Mapping[int, Any]) -> Array:
        """Return which labels the answers to all examples of a split give, (n, classes) bool in the task's order."""
        logits = self.stacked(split, answers)[:, self._model_class]
        return logits > 0 if self.multi_label else np.eye(len(self._task_labels), dtype=bool)[logits.argmax(1)]

    def _names(self, given: Array) -> str:
        """Return the classes of one example, a row of `_labelled` or `_given`, in words."""
        return "|".join(self._task_labels[index] for index in np.flatnonzero(given))


def class_scores(given: Array, gold: Array, positive: int | None = None) -> dict[str, float]:
    """Return all metrics of classes, over all examples at once; both arrays are (n, classes) bool.

    "f1" is that of the class `positive`; where that is None, it is the mean over the classes.
    """
    f1 = f1_scores(given, gold)
    return f1 | {
        "accuracy": float((given == gold).all(1).mean()),
        "f1": f1["macro_f1"] if positive is None else f1[f"f1/{positive}"],
        "matthews": correlation(given, gold),
    }


def f1_scores(predicted: Array, gold: Array, names: Sequence[str] = ()) -> dict[str, float]:
    """Return `micro_f1`, `macro_f1`, and `f1/NAME` of every class; both arrays are (n, classes) bool.

    A class that is neither a label nor an answer of any example has F1 0, and no part in the mean, as in scikit-learn.
    """
    hits, counts = 2 * (predicted & gold).sum(0), predicted.sum(0) + gold.sum(0)
    by_class, occurs = hits / np.maximum(counts, 1), counts > 0
    named = zip(names or range(len(by_class)), by_class.tolist(), strict=True)
    return {
        "micro_f1": float(hits.sum() / max(1, counts.sum())),
        "macro_f1": float(by_class[occurs].mean()) if occurs.any() else 0.0,
        **{f"f1/{name}": value for name, value in named},
    }


def _labels_in(spec: TextSpec, split: str) -> tuple[str, ...]:
    """Return the classes of a split's rows, sorted, numbers by their values."""
    records = text_data.records(spec, split)
    given = [row.value.label for row in records.rows()]
    labels = {name for label in given for name in (label if isinstance(label, tuple) else [str(label)])}
    if len(labels) < 2:
        only = f"only the label {next(iter(labels))!r}" if labels else "no label"
        raise UserError(f"{records.origin} has {only}: a classifier needs at least two")
    return tuple(sorted(labels, key=_numbers_first))


def _numbers_first(name: str) -> tuple[bool, float, str]:
    try:
        number = float(name)
    except ValueError:
        number = math.nan
    return not math.isfinite(number), number if math.isfinite(number) else 0.0, name
