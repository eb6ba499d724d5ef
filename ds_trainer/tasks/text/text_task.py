"""Classification and regression of one text or a pair: GLUE, any labelled text, the embedded docstrings.

`text_data.py` reads the rows, which are tokenised once and cached as `Examples`.

An example has one label or, where the files hold lists of them, any number (`multi_label`): each class is then a yes or
no, decided by a threshold on its probability.

Labels have two orders. The cache holds them in the task's order. A batch, the model and its answers have the model's
order, which differs if the trained head has the same class names in another order: so a downloaded MNLI model keeps its
class ids.
"""

import csv
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ds_trainer.files.messages import listed
from ds_trainer.models import classifiers
from ds_trainer.models.pretrained import CLASSIFIER, load_config
from ds_trainer.ranks import distributed
from ds_trainer.ranks.failures import UserError, raise_mistakes
from ds_trainer.recipe.task_specs import TextSpec
from ds_trainer.tasks.data import Array, ExampleIds, Examples
from ds_trainer.tasks.held_out import HELD_OUT, source_split
from ds_trainer.tasks.records import Records
from ds_trainer.tasks.task import Batch, Task, Unit
from ds_trainer.tasks.text import text_data
from ds_trainer.tasks.text.glue import is_regression, known_labels, label_mistakes, metrics_of, positive_class
from ds_trainer.tasks.text.metrics import best_threshold, f1_scores, score

_SEVERAL = "multi_label_classification"
"""What transformers calls a head whose classes do not exclude each other, as the `problem_type` of its config."""
_THRESHOLD = "multi_label_threshold"
"""The entry of a folder's config that holds the threshold which was picked on held-out examples."""


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
        self.regression = is_regression(spec)
        head = classifiers.trained_head(self.config, CLASSIFIER)
        self._task_labels = known_labels(spec)
        if not (self._task_labels or self.regression):
            self.multi_label = self._has_several_labels()
            self._task_labels = classifiers.class_names(spec, head, self._labels_in)
        self.label_names = classifiers.label_order(self._task_labels, head)
        self._model_class = np.array([self.label_names.index(name) for name in self._task_labels], np.int64)
        self._task_class = np.argsort(self._model_class)
        self._metrics = metrics_of(spec, self.multi_label)
        raise_mistakes(self._mistakes())
        positive = positive_class(spec)
        self._positive = None if positive is None else self._task_labels.index(positive)
        self._threshold: float | None = getattr(self.config, _THRESHOLD, None)
        self.loss_unit: Unit = "weight" if spec.class_weights and not self.multi_label else "example"
        if self.multi_label:
            distributed.info_once(
                f"{spec.name}: an example has any number of labels, and those with a probability above "
                f"{self.threshold:.3g} are given; a training with held_out picks that threshold anew"
            )

    def source(self, split: str) -> Records[Any]:
        several = None if self.regression else self.multi_label
        return text_data.records(self.spec, source_split(self.spec, split), several, self._task_labels)

    def hashed_values(self) -> list[Any]:
        return [self._task_labels, *(["multi_label"] if self.multi_label else [])]

    def label_array(self, labels: Sequence[Any]) -> Array:
        if self.regression:
            return np.array(labels, np.float32)
        if not self.multi_label:
            return np.array([self._task_labels.index(label) for label in labels], np.int64)
        return np.array([[name in given for name in self._task_labels] for given in labels], np.float32)

    def build_model(self, folder: str | Path) -> nn.Module:
        model: Any = super().build_model(folder)
        if self.multi_label and self._threshold is not None:
            model.config.update({_THRESHOLD: self._threshold})
        return model

    def check_trained(self, folder: str | Path) -> None:
        super().check_trained(folder)
        kind = load_config(folder, CLASSIFIER).problem_type
        if kind and (kind == _SEVERAL) != self.multi_label:
            ours = "several labels" if self.multi_label else "one label or score"
            raise UserError(f"{folder} was trained for another kind of task ({kind}): an example here has {ours}")

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

    def decisions(self, answer: Any) -> Sequence[Any]:
        if self.multi_label:
            return [tuple(torch.from_numpy(answer).sigmoid().numpy() > self.threshold)]
        return answer.tolist() if self.regression else [answer.argmax()]

    def score(self, split: str, answers: Mapping[int, Any]) -> dict[str, float]:
        labels = np.array(self.examples(split).fields["labels"])
        if self.regression:
            values = torch.from_numpy(self.stacked(split, answers)[:, 0])
            return score(self._metrics, values, torch.from_numpy(labels), 0)
        given = self._given(split, answers)
        if self.multi_label:
            scores = f1_scores(given, labels > 0)
            return {name: scores[name] for name in self._metrics}
        predicted = torch.from_numpy(given.argmax(1))
        return score(self._metrics, predicted, torch.from_numpy(labels), len(self._task_labels), self._positive)

    def further_scores(self, split: str, answers: Mapping[int, Any]) -> dict[str, float]:
        """Return the mean of the classes' F1 and that of each, and the threshold of several labels."""
        if self.regression:
            return {}
        scores = f1_scores(self._given(split, answers), self._labelled(split), self._task_labels)
        del scores["micro_f1"]  # with one label for each example it is the accuracy
        return scores | ({"threshold": self.threshold} if self.multi_label else {})

    def constant_answer(self, split: str, answers: Mapping[int, Any]) -> str | None:
        """Return the class; for regression a score, if all are within a hundredth of the range of the labels."""
        labels = self.examples(split).fields["labels"]
        if self.regression:
            values, spread = self.stacked(split, answers)[:, 0], np.ptp(labels)
            return f"{values[0]:.3g}" if spread and np.ptp(values) <= 0.01 * spread else None
        given = self._given(split, answers)
        constant = bool((given == given[0]).all() and (labels != labels[0]).any())
        return (self._names(given[0]) or "no label") if constant else None

    def never_answered(self, split: str, answers: Mapping[int, Any]) -> dict[str, int]:
        if self.regression:
            return {}
        gold, given = self._labelled(split).sum(0).tolist(), self._given(split, answers).max(0).tolist()
        counted = zip(self._task_labels, gold, given, strict=True)
        return {name: count for name, count, is_given in counted if count and not is_given}

    @property
    def decided_on(self) -> str | None:
        return HELD_OUT if self.multi_label and self.spec.held_out and not self.spec.score_held_out else None

    def decide(self, answers: Mapping[int, Any]) -> None:
        """Pick the threshold with the best micro F1 on held-out examples; it goes into the folder's config."""
        probabilities = self._logits_of_all(HELD_OUT, answers).sigmoid().numpy()
        self._threshold = best_threshold(probabilities, self._labelled(HELD_OUT))
        distributed.info(
            f"{self.spec.name}: on held-out examples labels above {self.threshold:.3f} have the best micro F1"
        )

    def restore(self, scores: Mapping[str, float]) -> None:
        self._threshold = scores.get("threshold", self._threshold)

    @property
    def threshold(self) -> float:
        """The probability above which one of several labels is given."""
        return 0.5 if self._threshold is None else self._threshold

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
        logits = self._logits_of_all(split, answers)
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

    def _has_several_labels(self) -> bool:
        """Return whether examples have lists of labels, as the spec or else the first row says; collective."""
        if self.spec.multi_label is not None or self.spec.name != "text":
            return bool(self.spec.multi_label)
        split = "train" if self.spec.train_file or self.spec.dataset else "validation"
        first = lambda: next(text_data.records(self.spec, split).rows(most_mistakes=1))  # noqa: E731
        return distributed.on_main(lambda: isinstance(first().value.label, tuple))

    def _labels_in(self, split: str) -> tuple[str, ...]:
        """Return the classes of a split's rows, sorted, numbers by their values."""
        records = text_data.records(self.spec, split, self.multi_label)
        given = [row.value.label for row in records.rows()]
        labels = {name for label in given for name in (label if isinstance(label, tuple) else [str(label)])}
        if len(labels) < 2:
            only = f"only the label {next(iter(labels))!r}" if labels else "no label"
            raise UserError(f"{records.origin} has {only}: a classifier needs at least two")
        return tuple(sorted(labels, key=_numbers_first))

    def _mistakes(self) -> list[str]:
        """Return the mistakes of the spec that show once the classes are known."""
        spec, classes = self.spec, f"the classes are {listed(self._task_labels)}"
        mistakes = label_mistakes(spec, self.multi_label)
        positive = positive_class(spec)
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
        logits = self._logits_of_all(split, answers)
        if self.multi_label:
            return np.asarray(logits.sigmoid().numpy() > self.threshold)
        return np.eye(len(self._task_labels), dtype=bool)[logits.argmax(1).numpy()]

    def _logits_of_all(self, split: str, answers: Mapping[int, Any]) -> Tensor:
        """Return (n, classes) in the task's order; UserError where a logit is not finite."""
        return torch.from_numpy(self.stacked(split, answers)[:, self._model_class])

    def _names(self, given: Array) -> str:
        """Return the classes of one example, a row of `_labelled` or `_given`, in words."""
        return "|".join(self._task_labels[index] for index in np.flatnonzero(given))


def _numbers_first(name: str) -> tuple[bool, float, str]:
    try:
        number = float(name)
    except ValueError:
        number = math.nan
    return not math.isfinite(number), number if math.isfinite(number) else 0.0, name
