"""Ratings, such as 1 to 5 stars, whose order counts: a task of one's own, by `--plugin examples/ratings.py`.

The model says for each star but the first whether the rating reaches it, and is scored by how many stars it is off.
"""

from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F

from ds_trainer import Task
from ds_trainer.models.pretrained import CLASSIFIER
from ds_trainer.recipe.task_specs import TaskBase


class RatingsSpec(TaskBase):
    greater_is_better: ClassVar[dict[str, bool]] = {"stars_off": False}
    stars: int = 5
    max_seq_length: int = 128


class RatingsTask(Task):
    Spec, head, columns = RatingsSpec, CLASSIFIER, ("text", "stars")
    multi_label = True  # a teacher is followed star by star

    def __init__(self, spec: Any, *arguments: Any) -> None:
        super().__init__(spec, *arguments)
        self.label_names = tuple(f"{star} or more" for star in range(2, spec.stars + 1))

    @staticmethod
    def parse(spec: Any, record: Any) -> tuple[tuple[str, ...], Any]:
        """Return the text, and which of the stars from the second on are reached; the error names its line."""
        text, stars = record["text"], int(record["stars"])
        if not isinstance(text, str) or not 1 <= stars <= spec.stars:
            raise ValueError(f"it must have a text, and 1 to {spec.stars} stars, and is {record}")
        return (text,), np.arange(2, spec.stars + 1, dtype=np.float32) <= stars

    def loss(self, out: Any, batch: Any) -> torch.Tensor:
        return F.binary_cross_entropy_with_logits(out.logits.float(), batch.labels.float())

    def score(self, split: str, answers: Any) -> dict[str, float]:
        given, stars = (self.stacked(split, answers) > 0).sum(1), self.examples(split).fields["labels"].sum(1)
        return {"stars_off": float(np.abs(given - stars).mean())}


TASKS = {"ratings": RatingsTask}
