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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ds_trainer.config.task_specs import TextSpec
from ds_trainer.files.messages import listed
from ds_trainer.models import classifiers
from ds_trainer.models.pretrained import CLASSIFIER, check_fits, load_config
from ds_trainer.ranks import distributed
from ds_trainer.ranks.failures import UserError, raise_mistakes
from ds_trainer.ranks.progress import progress
from ds_trainer.tasks.data import Array, Chunk, ExampleIds, Examples, hash_of, pack, spread
from ds_trainer.tasks.held_out import HELD_OUT, hashed_fields, part_of, source_split
from ds_trainer.tasks.task import Batch, Task, Unit, check_finite
from ds_trainer.tasks.text import text_data
from ds_trainer.tasks.text.glue import (
    evaluation_splits,
    is_regression,
    known_labels,
    metric_mistakes,
    metrics_of,
    positive_class,
)
from ds_trainer.tasks.text.metrics import best_threshold, f1_scores, score
from ds_trainer.tasks.text.text_data import TextRow, TextSplit

# the token types are kept even if the model takes none, since a teacher of another family may take them
_DTYPES = {"input_ids": np.int32, "token_type_ids": np.uint8}
_CHUNK = 4096
_SEVERAL = "multi_label_classification"
"""What transformers calls a head whose classes do not exclude each other, as the `problem_type` of its config."""
_THRESHOLD = "multi_label_threshold"
"""The entry of a folder's config that holds the threshold which was picked on held-out examples."""


class ClassAnswer(int):
    """A predicted class in the task's order, with the logits (classes,) that chose it in the model's order."""

    logits: Array


class TextTask(Task):
    """A labelled-text task.

    Labels are class indices (rows,) int64 in the model's order, fp32 scores or, where an example has several, fp32 of 0
    and 1 (rows, classes) in the model's order.
    """

    spec: TextSpec
    head = CLASSIFIER

    def __init__(self, spec: TextSpec, tokenizer: Any, source: str | Path, cache_dir: Path) -> None:
        super().__init__(spec, tokenizer, source, cache_dir)
        self.splits = (HELD_OUT,) if spec.score_held_out else evaluation_splits(spec)
        self.regression = is_regression(spec)
        head = classifiers.trained_head(self.config, CLASSIFIER)
        self._task_labels = known_labels(spec)
        if not (self._task_labels or self.regression):
            self.multi_label = self._has_several_labels()
            self._task_labels = classifiers.class_names(spec, head, partial(_labels_in, spec, self.multi_label))
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

    def build_model(self, folder: str | Path) -> nn.Module:
        """Load a model with a head for this task's classes, in the order of `label_names`."""
        model: Any = classifiers.load_model(folder, CLASSIFIER, self.label_names, self.pad_token_id)
        check_fits(model, self.tokenizer, self.spec.max_seq_length)
        if self.multi_label:
            model.config.problem_type = _SEVERAL
            if self._threshold is not None:
                model.config.update({_THRESHOLD: self._threshold})
        return model

    def check_trained(self, folder: str | Path) -> None:
        classifiers.check_trained(folder, CLASSIFIER, self.label_names, self.spec.name)
        kind = load_config(folder, CLASSIFIER).problem_type
        if kind and (kind == _SEVERAL) != self.multi_label:
            ours = "several labels" if self.multi_label else "one label or score"
            raise UserError(f"{folder} was trained for another kind of task ({kind}): an example here has {ours}")

    def collate(self, examples: Examples, ids: Sequence[int] | ExampleIds, draw: int = 0) -> Batch:
        ids = np.asarray(ids, dtype=np.int64)
        inputs, others = self.padded_inputs(examples, ids)
        labels = examples.fields["labels"][ids]
        if self.multi_label:
            labels = labels[:, self._task_class]
        elif self._task_labels:
            labels = self._model_class[labels]
        return Batch(inputs, torch.from_numpy(labels), torch.from_numpy(ids), others)

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

    def logits(self, out: Any, batch: Batch) -> tuple[Tensor, ...]:
        return (out.logits,)

    def answers(self, out: Any, batch: Batch) -> dict[int, Any]:
        """Return scores, `ClassAnswer`s, or the probabilities of several labels (classes,) in the task's order.

        A class is None if a logit is not finite.
        """
        ids, logits = batch.ids.tolist(), out.logits.detach().float().cpu()
        if self.regression:
            return dict(zip(ids, logits.squeeze(-1).tolist(), strict=True))
        if self.multi_label:
            return dict(zip(ids, logits[:, self._model_class].sigmoid().numpy(), strict=True))
        classes = self._task_class[logits.argmax(-1).numpy()].tolist()
        answers: dict[int, Any] = {}
        for id, predicted, row, finite in zip(ids, classes, logits.numpy(), logits.isfinite().all(-1), strict=True):
            answers[id] = ClassAnswer(predicted) if finite else None
            if finite:
                answers[id].logits = row
        return answers

    def score(self, split: str, answers: Mapping[int, Any]) -> dict[str, float]:
        labels = self.examples(split).fields["labels"]
        ordered = [answers[index] for index in range(len(labels))]
        if self.multi_label:
            check_finite(split, np.isfinite(np.stack(ordered)).all(1).tolist())
            scores = f1_scores(self._given(answers), labels > 0)
            return {name: scores[name] for name in self._metrics}
        check_finite(split, [answer is not None and math.isfinite(answer) for answer in ordered])
        gold = torch.from_numpy(np.array(labels))
        return score(self._metrics, torch.tensor(ordered), gold, len(self._task_labels), self._positive)

    def further_scores(self, split: str, answers: Mapping[int, Any]) -> dict[str, float]:
        """Return the mean of the classes' F1 and that of each, and the threshold of several labels."""
        if self.regression:
            return {}
        scores = f1_scores(self._given(answers), self._labelled(split), self._task_labels)
        del scores["micro_f1"]  # with one label for each example it is the accuracy
        return scores | ({"threshold": self.threshold} if self.multi_label else {})

    def agreement(self, split: str, answers: Mapping[int, Any], others: Mapping[int, Any]) -> float:
        if not self.multi_label:
            return super().agreement(split, answers, others)
        return float((self._given(answers) == self._given(others)).all(1).mean())

    def constant_answer(self, split: str, answers: Mapping[int, Any]) -> str | None:
        """Return the class; for regression a score, if all are within a hundredth of the range of the labels."""
        labels = self.examples(split).fields["labels"]
        if not self.regression:
            given = self._given(answers)
            constant = bool((given == given[0]).all() and (labels != labels[0]).any())
            return (self._names(given[0]) or "no label") if constant else None
        values, spread = list(answers.values()), np.ptp(labels)
        return f"{values[0]:.3g}" if spread and max(values) - min(values) <= 0.01 * spread else None

    def never_answered(self, split: str, answers: Mapping[int, Any]) -> dict[str, int]:
        if self.regression:
            return {}
        gold, given = self._counted(split).tolist(), self._given(answers).max(0).tolist()
        counted = zip(self._task_labels, gold, given, strict=True)
        return {name: count for name, count, is_given in counted if count and not is_given}

    @property
    def decided_on(self) -> str | None:
        return HELD_OUT if self.multi_label and self.spec.held_out and not self.spec.score_held_out else None

    def decide(self, answers: Mapping[int, Any]) -> None:
        """Pick the threshold with the best micro F1 on held-out examples; it goes into the folder's config."""
        probabilities = np.stack([answers[index] for index in range(len(answers))])
        check_finite(HELD_OUT, np.isfinite(probabilities).all(1).tolist())
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
        entry, places = self._places(split)
        writer.writerow([entry, "label", "answer", *(f"p({name})" for name in self._task_labels)])
        labels = self.examples(split).fields["labels"]
        if self.regression:
            writer.writerows([place, labels[index], answers[index]] for index, place in enumerate(places))
            return {"predictions.csv": file.getvalue()}
        for index, (place, gold, given) in enumerate(
            zip(places, self._labelled(split), self._given(answers), strict=True)
        ):
            shares = answers[index] if self.multi_label else _softmax(answers[index].logits)[self._model_class]
            writer.writerow([place, self._names(gold), self._names(given), *(f"{share:.6f}" for share in shares)])
        return {"predictions.csv": file.getvalue()}

    def class_counts(self, split: str) -> str:
        """Return in words how many examples of a split have each class, in the order of `class_weights`."""
        counts = zip(self._task_labels, self._counted(split).tolist(), strict=True)
        told = ", ".join(f"{count:,} {name}" for name, count in counts)
        if "f1" not in self._metrics:
            return told
        of = "the mean over the classes" if self._positive is None else f"that of {self._task_labels[self._positive]}"
        return f"{told}; f1 is {of}"

    def summary(self, split: str) -> str:
        counts = "" if self.regression else f"; classes: {self.class_counts(split)}"
        return super().summary(split) + counts

    def _has_several_labels(self) -> bool:
        """Return whether examples have lists of labels, as the spec or else the first row says; collective."""
        if self.spec.multi_label is not None or self.spec.name != "text":
            return bool(self.spec.multi_label)
        can_train = self.spec.train_file or self.spec.dataset
        return distributed.on_main(lambda: text_data.holds_lists(self.spec, "train" if can_train else "validation"))

    def _mistakes(self) -> list[str]:
        """Return the mistakes of the spec that show once the classes are known."""
        spec, classes = self.spec, f"the classes are {listed(self._task_labels)}"
        mistakes = metric_mistakes(spec, self.multi_label)
        positive = positive_class(spec)
        if positive is not None and positive not in self._task_labels:
            mistakes.append(f"task.positive_class is {positive!r}, and {classes}")
        if positive is None and "f1" in self._metrics and len(self._task_labels) == 2:
            either = "which of the two classes it is of, or write macro_f1 for the mean of both"
            mistakes.append(f'task.metrics has "f1": set task.positive_class to {either}; {classes}')
        if isinstance(spec.class_weights, list) and len(spec.class_weights) != len(self._task_labels):
            mistakes.append(f"task.class_weights has {len(spec.class_weights)} numbers, and {classes}: write one each")
        if self.multi_label and positive is not None:
            mistakes.append("task.positive_class goes with one class for each example, and here are several: drop it")
        return mistakes

    @cached_property
    def _class_weights(self) -> Tensor | None:
        """The weights of the classes in the loss, (classes,) fp32 in the model's order; None without."""
        if not self.spec.class_weights:
            return None
        weights = np.array(self.spec.class_weights)
        if self.spec.class_weights == "balanced":
            counts, total = np.maximum(self._counted("train"), 1), len(self.examples("train"))
            without = np.maximum(total - counts, 1)
            weights = without / counts if self.multi_label else total / (len(counts) * counts)
        return torch.tensor(weights[self._task_class], dtype=torch.float32)

    def _counted(self, split: str) -> Array:
        """Return how many examples of a split have each class, (classes,) in the task's order."""
        labels = self.examples(split).fields["labels"]
        return (labels > 0).sum(0) if self.multi_label else np.bincount(labels, minlength=len(self._task_labels))

    def _labelled(self, split: str) -> Array:
        """Return which classes the examples of a split have, (n, classes) bool in the task's order."""
        labels = self.examples(split).fields["labels"]
        return labels > 0 if self.multi_label else np.eye(len(self._task_labels), dtype=bool)[labels]

    def _given(self, answers: Mapping[int, Any]) -> Array:
        """Return which classes the answers to all examples of a split give, (n, classes) bool in the task's order."""
        ordered = [answers[index] for index in range(len(answers))]
        if self.multi_label:
            return np.stack(ordered) > self.threshold
        return np.eye(len(self._task_labels), dtype=bool)[ordered]

    def _names(self, given: Array) -> str:
        """Return the classes of one row of `_given` in words."""
        return "|".join(self._task_labels[index] for index in np.flatnonzero(given))

    def fingerprint(self, split: str) -> str:
        fields = ("name", "text_columns", "label_column", "regression", "max_seq_length")
        source = text_data.fingerprint(self.spec, source_split(self.spec, split))
        more = ["multi_label"] if self.multi_label else []
        return self.cache_key("text", split, source, hashed_fields(self.spec, split, fields), self._task_labels, *more)

    def origin(self, split: str) -> str:
        return text_data.origin(self.spec, source_split(self.spec, split))

    def held_out_key(self) -> str:
        if not self.spec.held_out:
            return ""
        source = text_data.fingerprint(self.spec, "train")
        # unlike a fingerprint this does not depend on CACHE_VERSION, since it is stored in model folders
        return hash_of([source, self.spec.name, self.spec.text_columns, self.spec.label_column, self.spec.held_out])

    def tokenised(self, split: str) -> Examples:
        source = self._read(split)
        labels = self._labels(source)
        examples = pack(self._encoded(source.rows), _DTYPES)
        empty = np.flatnonzero(examples.lengths == 0)
        if len(empty):
            place = source.place(source.rows[empty[0]])
            raise UserError(f"{place}: the text is empty, and the tokenizer adds nothing to it")
        told = f"{source.records.told()}; " if source.records else ""
        read = told + (
            f"{len(examples):,} examples, {examples.lengths.mean():.1f} tokens on average, "
            f"{int((examples.lengths >= self.spec.max_seq_length).sum()):,} at max_seq_length"
        )
        return replace(examples, fields={"labels": labels}, notes={"read": read})

    def _read(self, split: str) -> TextSplit:
        """Read the rows that are a split's examples."""
        source = text_data.read_split(self.spec, source_split(self.spec, split))
        rows = part_of(self.spec, split, source.rows, source.origin)
        return replace(source, rows=[rows[index] for index in spread(len(rows), self.limit(split))])

    def _places(self, split: str) -> tuple[str, list[int]]:
        """Return what a place in the source is called, and that of each example; without files it is its number."""
        source = self._read(split)
        if source.records is None:
            return "example", list(range(len(source.rows)))
        return source.records.entry, [row.place for row in source.rows]

    def _labels(self, source: TextSplit) -> Array:
        if self.regression:
            return np.array([row.label for row in source.rows], dtype=np.float32)
        index = {name: number for number, name in enumerate(self._task_labels)}
        classes: list[list[int]] = []
        for row in source.rows:
            labels = _labels_of(row, self.multi_label, source)
            for label in labels:
                if label not in index:
                    allowed = ", ".join(map(repr, self._task_labels))
                    raise UserError(f"{source.place(row)}: unknown label {label!r}: allowed are {allowed}")
            classes.append([index[label] for label in labels])
        if not self.multi_label:
            return np.array(classes, dtype=np.int64)[:, 0]
        one_hot = np.zeros((len(classes), len(index)), dtype=np.float32)
        for number, given in enumerate(classes):
            one_hot[number, given] = 1
        return one_hot

    def _encoded(self, rows: Sequence[TextRow]) -> Iterator[Chunk]:
        shown = progress(rows, "tokenising", "row")
        while chunk := list(islice(shown, _CHUNK)):
            texts = zip(*(row.texts for row in chunk), strict=True)
            yield self.tokenizer(
                *map(list, texts), truncation=True, max_length=self.spec.max_seq_length, return_token_type_ids=True
            )


def _labels_in(spec: TextSpec, multi_label: bool, split: str) -> tuple[str, ...]:
    """Return the classes of a split's rows, sorted."""
    source = text_data.read_split(spec, split)
    labels = {label for row in source.rows for label in _labels_of(row, multi_label, source)}
    names = tuple(sorted(labels, key=_numbers_first))
    if len(names) < 2:
        only = f"only the label {names[0]!r}" if names else "no label"
        raise UserError(f"{source.origin} has {only}: a classifier needs at least two")
    return names


def _labels_of(row: TextRow, multi_label: bool, source: TextSplit) -> tuple[str, ...]:
    """Return the classes of a row; UserError where it has a list of them and should have one, or the reverse."""
    if isinstance(row.label, tuple) == multi_label:
        return row.label if isinstance(row.label, tuple) else (str(row.label),)
    if multi_label:
        raise UserError(f'{source.place(row)}: the label is {row.label!r}, where a list is expected, as ["a", "b"]')
    raise UserError(f"{source.place(row)}: the label is a list, and the first one is not: write lists throughout")


def _numbers_first(name: str) -> tuple[bool, float, str]:
    try:
        number = float(name)
    except ValueError:
        number = math.nan
    return not math.isfinite(number), number if math.isfinite(number) else 0.0, name


def _softmax(logits: Array) -> Array:
    powers = np.exp(logits - logits.max())
    return powers / powers.sum()
