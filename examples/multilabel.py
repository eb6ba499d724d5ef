"""Texts with any number of labels ("red|round"): a task of one's own, by `--plugin examples/multilabel.py`.

Labels of the files that the recipe does not list count as none.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from ds_trainer import Task
from ds_trainer.config.task_specs import TaskBase
from ds_trainer.models.classifiers import load_model
from ds_trainer.models.pretrained import CLASSIFIER
from ds_trainer.tasks.data import pack
from ds_trainer.tasks.records import FileRecords, file_of, in_data_dir
from ds_trainer.tasks.task import Batch, check_finite


class MultilabelSpec(TaskBase):
    greater_is_better = {"f1": True}  # noqa: RUF012
    labels: list[str]
    max_seq_length: int = 128


class MultilabelTask(Task):
    Spec, head = MultilabelSpec, CLASSIFIER

    def _read(self, split: str) -> FileRecords:
        return FileRecords(in_data_dir(self.spec, file_of(self.spec, split)), ["text", "labels"])

    def fingerprint(self, split: str) -> str:
        return self.cache_key("multilabel", split, self._read(split).fingerprint(), ["labels", "max_seq_length"])

    def tokenised(self, split: str) -> Any:
        rows = [row for _, row in self._read(split).parsed(_checked)][: self.limit(split)]
        ids = self.tokenizer([row["text"] for row in rows], truncation=True, max_length=self.spec.max_seq_length)
        labels = np.array([[name in row["labels"].split("|") for name in self.spec.labels] for row in rows], np.float32)
        return replace(pack([ids], {"input_ids": np.int32}), fields={"labels": labels})

    def build_model(self, folder: Any) -> Any:
        model: Any = load_model(folder, CLASSIFIER, self.spec.labels, self.pad_token_id)  # runs no code of it
        model.config.problem_type = "multi_label_classification"
        return model

    def collate(self, examples: Any, ids: Any, draw: int = 0) -> Batch:
        inputs, others = self.padded_inputs(examples, np.asarray(ids))
        return Batch(inputs, torch.tensor(examples.fields["labels"][ids]), torch.tensor(ids), others)

    def loss(self, out: Any, batch: Batch) -> torch.Tensor:
        return torch.nn.functional.binary_cross_entropy_with_logits(out.logits.float(), batch.labels)

    def logits(self, out: Any, batch: Batch) -> tuple[torch.Tensor, ...]:
        return (torch.stack([torch.zeros_like(out.logits), out.logits], -1).flatten(0, 1),)  # no or yes, by label

    def answers(self, out: Any, batch: Batch) -> dict[int, list[float]]:
        return dict(zip(batch.ids.tolist(), out.logits.tolist(), strict=True))

    def score(self, split: str, answers: Any) -> dict[str, float]:
        logits = np.array([answers[id] for id in sorted(answers)])
        check_finite(split, np.isfinite(logits).all(-1).tolist())
        gold, predicted = self.examples(split).fields["labels"] > 0, logits > 0
        return {"f1": float(2 * (gold & predicted).sum() / max(1, gold.sum() + predicted.sum()))}


def _checked(row: dict[str, Any]) -> dict[str, str]:
    """Refuse a record whose text or labels are no text; the error names its line."""
    if not all(isinstance(value, str) for value in row.values()):
        raise ValueError(f"text and labels must be text, and these are {row}")
    return row


TASKS = {"multilabel": MultilabelTask}
