"""Ratings, such as 1 to 5 stars, whose order counts: a task of one's own, by `--plugin examples/ratings.py`.

The model says for each star but the first whether the rating reaches it, and is scored by how many stars it is off.
"""

from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import torch

from ds_trainer import Task
from ds_trainer.config.task_specs import TaskBase
from ds_trainer.models.classifiers import load_model
from ds_trainer.models.pretrained import CLASSIFIER
from ds_trainer.tasks.data import pack
from ds_trainer.tasks.records import FileRecords, file_of, in_data_dir
from ds_trainer.tasks.task import Batch, check_finite


class RatingsSpec(TaskBase):
    greater_is_better: ClassVar[dict[str, bool]] = {"stars_off": False}
    stars: int = 5
    max_seq_length: int = 128


class RatingsTask(Task):
    Spec, head, multi_label = RatingsSpec, CLASSIFIER, True  # a teacher is followed star by star

    def _read(self, split: str) -> FileRecords:
        return FileRecords(in_data_dir(self.spec, file_of(self.spec, split)), ["text", "stars"])

    def fingerprint(self, split: str) -> str:
        return self.cache_key("ratings", split, self._read(split).fingerprint(), ["stars", "max_seq_length"])

    def tokenised(self, split: str) -> Any:
        rows = [row for _, row in self._read(split).parsed(self._text_and_stars)][: self.limit(split)]
        ids = self.tokenizer([text for text, _ in rows], truncation=True, max_length=self.spec.max_seq_length)
        stars = np.array([stars for _, stars in rows])
        return replace(pack([ids], {"input_ids": np.int32}), fields={"stars": stars})

    def build_model(self, folder: Any) -> Any:
        names = [f"{star} or more" for star in range(2, self.spec.stars + 1)]
        model: Any = load_model(folder, CLASSIFIER, names, self.pad_token_id)  # runs no code of it
        model.config.problem_type = "multi_label_classification"
        return model

    def collate(self, examples: Any, ids: Any, draw: int = 0) -> Batch:
        inputs, others = self.padded_inputs(examples, np.asarray(ids))
        reached = examples.fields["stars"][ids, None] >= np.arange(2, self.spec.stars + 1)
        return Batch(inputs, torch.tensor(reached, dtype=torch.float32), torch.tensor(ids), others)

    def loss(self, out: Any, batch: Batch) -> torch.Tensor:
        return torch.nn.functional.binary_cross_entropy_with_logits(out.logits.float(), batch.labels)

    def logits(self, out: Any, batch: Batch) -> tuple[torch.Tensor, ...]:
        return (out.logits,)

    def answers(self, out: Any, batch: Batch) -> dict[int, list[float]]:
        return dict(zip(batch.ids.tolist(), out.logits.tolist(), strict=True))

    def score(self, split: str, answers: Any) -> dict[str, float]:
        logits = np.array([answers[id] for id in sorted(answers)])
        check_finite(split, np.isfinite(logits).all(-1).tolist())
        given = 1 + (logits > 0).sum(-1)
        return {"stars_off": float(np.abs(given - self.examples(split).fields["stars"]).mean())}

    def _text_and_stars(self, row: dict[str, Any]) -> tuple[str, int]:
        """Refuse a record without a text or a number of stars; the error names its line."""
        text, stars = row["text"], int(row["stars"] or 0)
        if not isinstance(text, str) or not 1 <= stars <= self.spec.stars:
            raise ValueError(f"it must have a text, and 1 to {self.spec.stars} stars, and is {row}")
        return text, stars


TASKS = {"ratings": RatingsTask}
