"""Classification and regression of one text or a pair: GLUE, any labelled text, the embedded docstrings.

Rows come from `text_data.py`, are tokenised once and cached as `Examples`, and are collated with numpy. Labels in the
cache are in the task's order. The model's order is that of the folder that the task is built for, where its trained
head has the same names in another order: a downloaded MNLI model keeps its class ids. The split "held_out" is a share
of the training rows, which "train" is then without. Models are loaded in `text_model.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ds_trainer.config.task_specs import TextSpec
from ds_trainer.models.pretrained import CLASSIFIER, check_fits, load_config
from ds_trainer.ranks import distributed
from ds_trainer.ranks.failures import UserError
from ds_trainer.tasks.data import Array, ExampleIds, Examples, hash_of, pack, spread
from ds_trainer.tasks.task import Batch, Task, check_finite
from ds_trainer.tasks.text import text_data, text_model
from ds_trainer.tasks.text.glue import evaluation_splits, is_regression, known_labels, metrics_of
from ds_trainer.tasks.text.metrics import score
from ds_trainer.tasks.text.text_data import TextRow, TextSplit

# token types also where the model takes none: a teacher of another family may
_DTYPES = {"input_ids": np.int32, "token_type_ids": np.uint8}
_CHUNK = 4096
HELD_OUT = Task.held_out_split


class TextTask(Task):
    """A labelled-text task. Labels are class indices (rows,) int64 in the model's order, or fp32 scores."""

    spec: TextSpec
    head = CLASSIFIER

    def __init__(self, spec: TextSpec, tokenizer: Any, source: str | Path, cache_dir: Path) -> None:
        super().__init__(spec, tokenizer, source, cache_dir)
        self.splits = evaluation_splits(spec)
        self.regression = is_regression(spec)
        head = text_model.trained_head(self.config)
        self._task_labels = () if self.regression else _task_labels(spec, head)
        self.label_names = text_model.label_order(self._task_labels, head)
        self._model_class = np.array([self.label_names.index(name) for name in self._task_labels], np.int64)
        self._task_class = np.argsort(self._model_class)

    def build_model(self, folder: str | Path) -> nn.Module:
        """Load a model with a head for this task's classes, in the order of `label_names`.

        A head of another number of classes is replaced by a new one, which is logged.
        """
        model = text_model.load_model(folder, self.label_names, self.pad_token_id)
        check_fits(model, self.tokenizer, self.spec.max_seq_length)
        return model

    def check_trained(self, folder: str | Path) -> None:
        head = text_model.trained_head(load_config(folder, CLASSIFIER))
        size = max(1, len(self.label_names))
        if head is None or len(head) != size:
            present = f"one of {len(head)} outputs" if head else "none"
            raise UserError(f"{folder} has no trained head of {size} outputs for {self.spec.name}, but {present}")

    def collate(self, examples: Examples, ids: Sequence[int] | ExampleIds, draw: int = 0) -> Batch:
        ids = np.asarray(ids, dtype=np.int64)
        inputs, others = self.padded_inputs(examples, ids)
        labels = examples.fields["labels"][ids]
        if self._task_labels:
            labels = self._model_class[labels]
        return Batch(inputs, torch.from_numpy(labels), torch.from_numpy(ids), others)

    def loss(self, out: Any, batch: Batch) -> Tensor:
        """Cross entropy, or squared error for regression."""
        logits = out.logits.float()
        if self._task_labels:
            return F.cross_entropy(logits, batch.labels)
        return F.mse_loss(logits.squeeze(-1), batch.labels)

    def logits(self, out: Any, batch: Batch) -> tuple[Tensor, ...]:
        return (out.logits,)

    def answers(self, out: Any, batch: Batch) -> dict[int, Any]:
        """Return the predicted class in the task's order, None where a logit is not finite; or the predicted score."""
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

    def limit(self, split: str) -> int | None:
        """Return how many examples to use at most: for "train", after the held-out ones are taken; all of those."""
        return None if split == HELD_OUT else super().limit(split)

    def fingerprint(self, split: str) -> str:
        fields = ["name", "text_columns", "label_column", "regression", "max_seq_length"]
        source_split = self._source_split(split)
        if self.spec.held_out and source_split == "train":
            fields.append("held_out")
        source = text_data.fingerprint(self.spec, source_split)
        return self.cache_key("text", split, source, fields, self._task_labels)

    def held_out_key(self) -> str:
        if not self.spec.held_out:
            return ""
        source = text_data.fingerprint(self.spec, "train")
        # without the cache's version: a model folder outlives it
        return hash_of([source, self.spec.name, self.spec.text_columns, self.spec.label_column, self.spec.held_out])

    def tokenised(self, split: str) -> Examples:
        source = self._part(split, text_data.read_split(self.spec, self._source_split(split)))
        source = replace(source, rows=[source.rows[index] for index in spread(len(source.rows), self.limit(split))])
        examples = pack(self._encoded(source.rows), _DTYPES, {"labels": self._labels(source)})
        empty = np.flatnonzero(examples.lengths == 0)
        if len(empty):
            place = source.place(source.rows[empty[0]])
            raise UserError(f"{place}: the text is empty, and the tokenizer adds nothing to it")
        skipped = source.records.skipped if source.records else 0
        distributed.info(
            f"{self.spec.name} {split}: {len(examples):,} examples, {examples.lengths.mean():.1f} tokens on average, "
            f"{int((examples.lengths >= self.spec.max_seq_length).sum()):,} at max_seq_length, {skipped:,} malformed "
            f"rows skipped"
        )
        return examples

    def _source_split(self, split: str) -> str:
        """Return the split of the source that has this split's rows."""
        if split != HELD_OUT:
            return split
        if not self.spec.held_out:
            raise UserError("no training examples are held out: set task.held_out to their share (e.g. 0.02)")
        return "train"

    def _part(self, split: str, source: TextSplit) -> TextSplit:
        """Return the training rows without the held-out ones, or these alone; other splits whole."""
        share, count = self.spec.held_out, len(source.rows)
        if not share or self._source_split(split) != "train":
            return source
        held_out, rest = held_out_and_rest(count, share)
        if not held_out or not rest:
            use, way_out = ("held out", f"to {1 / count:.2g} or more") if rest else ("left to train on", "lower")
            raise UserError(
                f"task.held_out is {share:g}, and of the {count:,} examples of {source.origin} none would be {use}: "
                f"set task.held_out {way_out} (0.02 suits some thousands of examples; 0 holds none out)"
            )
        return replace(source, rows=[source.rows[index] for index in (held_out if split == HELD_OUT else rest)])

    def _labels(self, source: TextSplit) -> Array:
        if self.regression:
            return np.array([row.label for row in source.rows], dtype=np.float32)
        index = {name: number for number, name in enumerate(self._task_labels)}
        for row in source.rows:
            if row.label not in index:
                allowed = ", ".join(map(repr, self._task_labels))
                raise UserError(f"{source.place(row)}: unknown label {row.label!r}: allowed are {allowed}")
        return np.array([index[str(row.label)] for row in source.rows], dtype=np.int64)

    def _encoded(self, rows: Sequence[TextRow]) -> Iterator[Mapping[str, list[list[int]]]]:
        for start in range(0, len(rows), _CHUNK):
            texts = zip(*(row.texts for row in rows[start : start + _CHUNK]), strict=True)
            yield self.tokenizer(
                *map(list, texts),
                truncation=True,
                max_length=self.spec.max_seq_length,
                return_attention_mask=False,
                return_token_type_ids=True,
            )


def held_out_and_rest(count: int, share: float) -> tuple[list[int], list[int]]:
    """Part `count` indices in two ascending lists: round(share * count) of them, and all others.

    They are drawn at random, the same every time: evenly spaced ones would all be of one class in a file whose classes
    take turns.
    """
    order = np.random.default_rng(0).permutation(count)
    cut = round(share * count)
    return sorted(order[:cut].tolist()), sorted(order[cut:].tolist())


def _task_labels(spec: TextSpec, head: Sequence[str] | None) -> tuple[str, ...]:
    """Return the classes in the task's own order: known ones, or those of the training rows, sorted; collective.

    Where there are only rows to evaluate on, which may lack a class, a model that names its classes decides.
    """
    names = known_labels(spec)
    if names:
        return names
    can_train = bool(spec.train_file or spec.dataset)
    if not can_train and head and not text_model.unnamed(head):
        return tuple(head)
    return distributed.on_main(lambda: _labels_in(text_data.read_split(spec, "train" if can_train else "validation")))


def _labels_in(source: TextSplit) -> tuple[str, ...]:
    names = tuple(sorted({str(row.label) for row in source.rows}, key=_numbers_first))
    if len(names) < 2:
        raise UserError(f"{source.origin} has the one label {names[0]!r}: there is nothing to tell apart")
    return names


def _numbers_first(name: str) -> tuple[bool, int, str]:
    number = name.isascii() and name.isdigit()
    return not number, int(name) if number else 0, name
