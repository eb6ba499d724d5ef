"""Classification and regression of one text or a pair: GLUE, any labelled text, the embedded docstrings.

Rows come from `readers.py` or `docstrings.py`, are tokenised once and cached as `Examples`, and are collated with
numpy. Labels in the cache are in the task's order. The model's order is that of the folder the task is built for,
where its trained head has the same names in another order: a downloaded MNLI model keeps its class ids.
The split "held_out" is a share of the training rows, which "train" is then without.
Models are loaded in `text_model.py`, metrics are in `metrics.py`.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ds_trainer.config.recipe import TextSpec
from ds_trainer.models.pretrained import CLASSIFIER, check_fits, input_names, load_config, pad_token_id, tokenizer_state
from ds_trainer.ranks import distributed
from ds_trainer.ranks.failures import UserError
from ds_trainer.tasks.data import Examples, Positions, fingerprint, pack, spread
from ds_trainer.tasks.task import Batch, Task, check_finite, model_inputs
from ds_trainer.tasks.text import text_model
from ds_trainer.tasks.text.docstrings import DocstringSource
from ds_trainer.tasks.text.metrics import score
from ds_trainer.tasks.text.readers import (
    RowSource,
    TextRow,
    TextRows,
    evaluation_splits,
    is_regression,
    known_labels,
    metrics_of,
    row_source,
)

# token types also where the model takes none: a teacher of another family may
_DTYPES = {"input_ids": np.int32, "token_type_ids": np.uint8}
_CHUNK = 4096
HELD_OUT = Task.held_out_split


class TextTask(Task):
    """A text task for the model folder `source` (or hub name), whose tokenizer it takes.

    Every rank must build it and ask for its splits. A tokenizer without a padding token is given the end of text
    for one, in place.
    """

    spec: TextSpec

    def __init__(
        self, spec: TextSpec, tokenizer: Any, source: str | Path, cache_dir: Path, rows: RowSource | None = None
    ) -> None:
        super().__init__(tokenizer, CLASSIFIER, cache_dir)
        self.spec = spec
        self.splits = evaluation_splits(spec)
        self.regression = is_regression(spec)
        self._rows = rows or _rows_of(spec)
        self._pad_token_id = pad_token_id(tokenizer)
        config = load_config(source, CLASSIFIER)
        head = text_model.trained_head(config)
        self._task_labels = () if self.regression else _task_labels(spec, self._rows, head)
        self.label_names = text_model.label_order(self._task_labels, head)
        self._model_class = np.array([self.label_names.index(name) for name in self._task_labels], np.int64)
        self._task_class = np.argsort(self._model_class)
        self._inputs = input_names(config, CLASSIFIER)

    def build_model(self, folder: str | Path) -> nn.Module:
        """Load `folder`'s model with a head for this task's classes, in `label_names`' order, in fp32, on the CPU.

        A head of other classes is replaced by a new one, which is logged.
        """
        model = text_model.load_model(folder, self.label_names, self._pad_token_id)
        check_fits(model, self.tokenizer, self.spec.max_seq_length)
        return model

    def check_trained(self, folder: str | Path) -> None:
        head = text_model.trained_head(load_config(folder, CLASSIFIER))
        size = max(1, len(self.label_names))
        if head is None or len(head) != size:
            found = f"one of {len(head)} outputs" if head else "none"
            raise UserError(f"{folder} has no trained head of {size} outputs for {self.spec.name}, but {found}")

    def collate(self, examples: Examples, positions: Sequence[int] | Positions, draw: int = 0) -> Batch:
        ids = np.asarray(positions, dtype=np.int64)
        padded = examples.padded(ids, {"input_ids": self._pad_token_id}, self.spec.pad_to_multiple_of)
        inputs, others = model_inputs(padded, self._inputs)
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
        """The predicted class in the task's own order, None where a logit is not finite; or the predicted score."""
        if self._task_labels:
            classes = self._task_class[out.logits.argmax(-1).cpu().numpy()].tolist()
            finite = out.logits.isfinite().all(-1).tolist()
            found = [one if sound else None for one, sound in zip(classes, finite, strict=True)]
        else:
            found = out.logits.float().squeeze(-1).tolist()
        return dict(zip(batch.ids.tolist(), found, strict=True))

    def score(self, split: str, answers: Mapping[int, Any]) -> dict[str, float]:
        labels = self.examples(split).fields["labels"]
        found = [answers[position] for position in range(len(labels))]
        check_finite(split, [answer is not None and math.isfinite(answer) for answer in found])
        predictions = torch.tensor(found)
        gold = torch.from_numpy(np.array(labels))
        return score(metrics_of(self.spec), predictions, gold, len(self._task_labels))

    def limit(self, split: str) -> int | None:
        """How many examples to use at most: of "train", after the held-out ones are taken; of those, all."""
        return None if split == HELD_OUT else super().limit(split)

    def fingerprint(self, split: str) -> str:
        fields = ("name", "text_columns", "label_column", "regression", "max_seq_length")
        settings = {name: getattr(self.spec, name) for name in fields}
        source_split = self._source_split(split)
        if self.spec.held_out and source_split == "train":
            settings["held_out"] = self.spec.held_out
        source = self._rows.fingerprint(source_split)
        tokenizer = tokenizer_state(self.tokenizer)
        return fingerprint("text", split, source, settings, self.limit(split), self._task_labels, tokenizer)

    def held_out_key(self) -> str:
        if not self.spec.held_out:
            return ""
        rows = [self.spec.name, self.spec.text_columns, self.spec.label_column]
        # not `fingerprint`: a model folder outlives the cache's version
        identity = [self._rows.fingerprint("train"), *rows, self.spec.held_out]
        return hashlib.blake2b(json.dumps(identity).encode(), digest_size=16).hexdigest()

    def tokenised(self, split: str) -> Examples:
        started = time.monotonic()
        found = self._of_split(split, self._rows.rows(self._source_split(split)))
        rows = [found.rows[position] for position in spread(len(found.rows), self.limit(split))]
        found = replace(found, rows=rows)
        labels = _class_indices(found, self._task_labels) if self._task_labels else _scores(found)
        examples = pack(self._encoded(rows), _DTYPES, {"labels": labels})
        _check_not_empty(examples, found)
        full = int((examples.lengths >= self.spec.max_seq_length).sum())
        skipped = f", {found.skipped} malformed rows passed over" if found.skipped else ""
        distributed.info(
            f"{self.spec.name} {split}: {len(rows):,} examples, {examples.lengths.mean():.1f} tokens on average, "
            f"{full:,} at max_seq_length{skipped} ({time.monotonic() - started:.1f} s)"
        )
        return examples

    def _source_split(self, split: str) -> str:
        """The split of the source that has this one's rows."""
        if split != HELD_OUT:
            return split
        if not self.spec.held_out:
            raise UserError("no training examples are held out: set task.held_out to their share (e.g. 0.02)")
        return "train"

    def _of_split(self, split: str, found: TextRows) -> TextRows:
        """The training rows without the held-out ones, or these alone; the rows of another split as they are."""
        share, count = self.spec.held_out, len(found.rows)
        if not share or self._source_split(split) != "train":
            return found
        held_out, left = held_out_and_left(count, share)
        if not held_out or not left:
            part, way_out = ("held out", f"to {1 / count:.2g} or more") if left else ("left to train on", "lower")
            raise UserError(
                f"task.held_out is {share:g}, and of the {count:,} examples of {found.origin} none would be {part}: "
                f"set task.held_out {way_out} (0.02 suits some thousands of examples; 0 holds none out)"
            )
        return replace(found, rows=[found.rows[position] for position in (held_out if split == HELD_OUT else left)])

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


def held_out_and_left(count: int, share: float) -> tuple[Sequence[int], Sequence[int]]:
    """Part `count` positions in two, both ascending: round(share * count) of them, and all others.

    Drawn at random, the same every time: evenly spaced ones would all be of one class in a file that alternates.
    """
    order = np.random.default_rng(0).permutation(count)
    cut = round(share * count)
    return sorted(order[:cut].tolist()), sorted(order[cut:].tolist())


def training_texts(spec: TextSpec) -> list[str]:
    """Every text of the training set, held out or not, for training a tokenizer.

    Not collective: one rank can call it alone.
    """
    return [text for row in _rows_of(spec).rows("train").rows for text in row.texts]


def _rows_of(spec: TextSpec) -> RowSource:
    return DocstringSource() if spec.name == "docstrings" else row_source(spec)


def _task_labels(spec: TextSpec, rows: RowSource, head: Sequence[str] | None) -> tuple[str, ...]:
    """The classes in the task's own order: known, or those of the training rows, sorted, numbers by value.

    Where there are only rows to evaluate on, which may lack a class, those of a model that names them.
    """
    names = known_labels(spec)
    if names:
        return names
    can_train = bool(spec.train_file or spec.dataset)
    if not can_train and head and not text_model.unnamed(head):
        return tuple(head)
    return distributed.on_main(lambda: _labels_found(rows.rows("train" if can_train else "validation")))


def _labels_found(found: TextRows) -> tuple[str, ...]:
    names = tuple(sorted({str(row.label) for row in found.rows}, key=_numbers_first))
    if len(names) < 2:
        raise UserError(f"{found.origin} has the one label {names[0]!r}: there is nothing to tell apart")
    return names


def _numbers_first(name: str) -> tuple[bool, int, str]:
    number = name.isascii() and name.isdigit()
    return not number, int(name) if number else 0, name


def _class_indices(found: TextRows, names: Sequence[str]) -> np.ndarray:
    places = {name: index for index, name in enumerate(names)}
    for row in found.rows:
        if row.label not in places:
            allowed = ", ".join(map(repr, names))
            raise UserError(f"{found.place(row)}: unknown label {row.label!r}: allowed are {allowed}")
    return np.array([places[str(row.label)] for row in found.rows], dtype=np.int64)


def _scores(found: TextRows) -> np.ndarray:
    return np.array([row.label for row in found.rows], dtype=np.float32)


def _check_not_empty(examples: Examples, found: TextRows) -> None:
    empty = np.flatnonzero(examples.lengths == 0)
    if len(empty):
        raise UserError(f"{found.place(found.rows[empty[0]])}: the text is empty, and the tokenizer adds nothing to it")
