"""Classification and regression of one text or a pair: GLUE, any labelled text, the embedded docstrings.

`text_data.py` reads the rows, which are tokenised once and cached as `Examples`.

Labels have two orders. The cache holds them in the task's order. A batch, the model and its answers have the model's
order, which differs if the trained head has the same class names in another order: so a downloaded MNLI model keeps its
class ids.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ds_trainer.config.task_specs import TextSpec
from ds_trainer.models import classifiers
from ds_trainer.models.pretrained import CLASSIFIER, check_fits
from ds_trainer.ranks import distributed
from ds_trainer.ranks.failures import UserError
from ds_trainer.ranks.progress import progress
from ds_trainer.tasks.data import Array, Chunk, ExampleIds, Examples, hash_of, pack, spread
from ds_trainer.tasks.held_out import HELD_OUT, hashed_fields, part_of, source_split
from ds_trainer.tasks.task import Batch, Task, check_finite
from ds_trainer.tasks.text import text_data
from ds_trainer.tasks.text.glue import evaluation_splits, is_regression, known_labels, metrics_of
from ds_trainer.tasks.text.metrics import score
from ds_trainer.tasks.text.text_data import TextRow, TextSplit

# the token types are kept even if the model takes none, since a teacher of another family may take them
_DTYPES = {"input_ids": np.int32, "token_type_ids": np.uint8}
_CHUNK = 4096


class TextTask(Task):
    """A labelled-text task. Labels are class indices (rows,) int64 in the model's order, or fp32 scores."""

    spec: TextSpec
    head = CLASSIFIER

    def __init__(self, spec: TextSpec, tokenizer: Any, source: str | Path, cache_dir: Path) -> None:
        super().__init__(spec, tokenizer, source, cache_dir)
        self.splits = (HELD_OUT,) if spec.score_held_out else evaluation_splits(spec)
        self.regression = is_regression(spec)
        head = classifiers.trained_head(self.config, CLASSIFIER)
        self._task_labels = known_labels(spec)
        if not (self._task_labels or self.regression):
            self._task_labels = classifiers.class_names(spec, head, partial(_labels_in, spec))
        self.label_names = classifiers.label_order(self._task_labels, head)
        self._model_class = np.array([self.label_names.index(name) for name in self._task_labels], np.int64)
        self._task_class = np.argsort(self._model_class)

    def build_model(self, folder: str | Path) -> nn.Module:
        """Load a model with a head for this task's classes, in the order of `label_names`."""
        model = classifiers.load_model(folder, CLASSIFIER, self.label_names, self.pad_token_id)
        check_fits(model, self.tokenizer, self.spec.max_seq_length)
        return model

    def check_trained(self, folder: str | Path) -> None:
        classifiers.check_trained(folder, CLASSIFIER, self.label_names, self.spec.name)

    def collate(self, examples: Examples, ids: Sequence[int] | ExampleIds, draw: int = 0) -> Batch:
        ids = np.asarray(ids, dtype=np.int64)
        inputs, others = self.padded_inputs(examples, ids)
        labels = examples.fields["labels"][ids]
        if self._task_labels:
            labels = self._model_class[labels]
        return Batch(inputs, torch.from_numpy(labels), torch.from_numpy(ids), others)

    def loss(self, out: Any, batch: Batch) -> Tensor:
        """Return the cross entropy, or the squared error for regression."""
        logits = out.logits.float()
        if self._task_labels:
            return F.cross_entropy(logits, batch.labels)
        return F.mse_loss(logits.squeeze(-1), batch.labels)

    def logits(self, out: Any, batch: Batch) -> tuple[Tensor, ...]:
        return (out.logits,)

    def answers(self, out: Any, batch: Batch) -> dict[int, Any]:
        """Return the predicted classes in the task's order, or scores. A class is None if a logit is not finite."""
        if not self._task_labels:
            return dict(zip(batch.ids.tolist(), out.logits.float().squeeze(-1).tolist(), strict=True))
        classes = self._task_class[out.logits.argmax(-1).cpu().numpy()].tolist()
        finite = out.logits.isfinite().all(-1).tolist()
        rows = zip(batch.ids.tolist(), classes, finite, strict=True)
        return {id: predicted if is_finite else None for id, predicted, is_finite in rows}

    def score(self, split: str, answers: Mapping[int, Any]) -> dict[str, float]:
        labels = self.examples(split).fields["labels"]
        ordered = [answers[index] for index in range(len(labels))]
        check_finite(split, [answer is not None and math.isfinite(answer) for answer in ordered])
        gold = torch.from_numpy(np.array(labels))
        return score(metrics_of(self.spec), torch.tensor(ordered), gold, len(self._task_labels))

    def constant_answer(self, split: str, answers: Mapping[int, Any]) -> str | None:
        """Return the class; for regression a score, if all are within a hundredth of the range of the labels."""
        values, spread = list(answers.values()), np.ptp(self.examples(split).fields["labels"])
        if not spread or max(values) - min(values) > (0.01 * spread if self.regression else 0):
            return None
        return f"{values[0]:.3g}" if self.regression else self._task_labels[values[0]]

    def fingerprint(self, split: str) -> str:
        fields = ("name", "text_columns", "label_column", "regression", "max_seq_length")
        source = text_data.fingerprint(self.spec, source_split(self.spec, split))
        return self.cache_key("text", split, source, hashed_fields(self.spec, split, fields), self._task_labels)

    def held_out_key(self) -> str:
        if not self.spec.held_out:
            return ""
        source = text_data.fingerprint(self.spec, "train")
        # unlike a fingerprint this does not depend on CACHE_VERSION, since it is stored in model folders
        return hash_of([source, self.spec.name, self.spec.text_columns, self.spec.label_column, self.spec.held_out])

    def tokenised(self, split: str) -> Examples:
        source = text_data.read_split(self.spec, source_split(self.spec, split))
        rows = part_of(self.spec, split, source.rows, source.origin)
        source = replace(source, rows=[rows[index] for index in spread(len(rows), self.limit(split))])
        examples = replace(pack(self._encoded(source.rows), _DTYPES), fields={"labels": self._labels(source)})
        empty = np.flatnonzero(examples.lengths == 0)
        if len(empty):
            place = source.place(source.rows[empty[0]])
            raise UserError(f"{place}: the text is empty, and the tokenizer adds nothing to it")
        skipped = source.records.skipped if source.records else 0
        distributed.info(
            f"{self.spec.name} {split}: {len(examples):,} examples, {examples.lengths.mean():.1f} tokens on average, "
            f"{int((examples.lengths >= self.spec.max_seq_length).sum()):,} at max_seq_length, {skipped:,} rows skipped"
        )
        return examples

    def _labels(self, source: TextSplit) -> Array:
        if self.regression:
            return np.array([row.label for row in source.rows], dtype=np.float32)
        index = {name: number for number, name in enumerate(self._task_labels)}
        for row in source.rows:
            if row.label not in index:
                allowed = ", ".join(map(repr, self._task_labels))
                raise UserError(f"{source.place(row)}: unknown label {row.label!r}: allowed are {allowed}")
        return np.array([index[str(row.label)] for row in source.rows], dtype=np.int64)

    def _encoded(self, rows: Sequence[TextRow]) -> Iterator[Chunk]:
        shown = progress(rows, "tokenising", "row")
        while chunk := list(islice(shown, _CHUNK)):
            texts = zip(*(row.texts for row in chunk), strict=True)
            yield self.tokenizer(
                *map(list, texts), truncation=True, max_length=self.spec.max_seq_length, return_token_type_ids=True
            )


def _labels_in(spec: TextSpec, split: str) -> tuple[str, ...]:
    """Return the classes of a split's rows, sorted."""
    source = text_data.read_split(spec, split)
    names = tuple(sorted({str(row.label) for row in source.rows}, key=_numbers_first))
    if len(names) < 2:
        raise UserError(f"{source.origin} has only the label {names[0]!r}: a classifier needs at least two")
    return names


def _numbers_first(name: str) -> tuple[bool, int, str]:
    number = name.isascii() and name.isdigit()
    return not number, int(name) if number else 0, name
