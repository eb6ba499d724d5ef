"""Evaluation: run a split once over all ranks, score it once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from ds_trainer import distributed
from ds_trainer.data import evaluation_shard
from ds_trainer.tasks.task import Task
from ds_trainer.techniques import Predict

Answers = dict[int, Any]
"""What a model says of each example, by id."""


@dataclass
class Evaluation:
    """`scores` by name, on every rank; `answers` by split, on rank 0."""

    scores: dict[str, float] = field(default_factory=dict)
    answers: dict[str, Answers] = field(default_factory=dict)

    def files(self, task: Task) -> dict[str, Any]:
        """What goes beside the scores as JSON, by name: predictions."""
        return {
            f"{_prefix(task, split)}{name}": value
            for split, answers in self.answers.items()
            for name, value in task.artifacts(split, answers).items()
        }


def evaluate(predict: Predict, task: Task, batch_size: int, views: Mapping[str, Predict] | None = None) -> Evaluation:
    """Score every split: `accuracy`, or beyond the first split `validation_mismatched/accuracy`.

    Each of `views` is scored too, as `teacher/accuracy`, and `teacher/agreement` is the share of answers it shares.
    """
    found = Evaluation()
    for split in task.splits:
        own = answers_of(predict, task, split, batch_size)
        others = {name: answers_of(view, task, split, batch_size) for name, view in (views or {}).items()}
        scores = distributed.on_main(partial(_scores, task, split, own, others))
        found.scores |= {f"{_prefix(task, split)}{name}": value for name, value in scores.items()}
        found.answers[split] = own
    return found


def _prefix(task: Task, split: str) -> str:
    return "" if split == task.splits[0] else f"{split}/"


def _scores(task: Task, split: str, own: Answers, others: Mapping[str, Answers]) -> dict[str, float]:
    scores = task.score(split, own)
    for name, other in others.items():
        scores |= {f"{name}/{metric}": value for metric, value in task.score(split, other).items()}
        scores[f"{name}/agreement"] = task.agreement(split, own, other)
    return scores


@torch.no_grad()
def answers_of(predict: Predict, task: Task, split: str, batch_size: int) -> Answers:
    """The answer to each example of the split on rank 0, however the shards are padded; elsewhere nothing."""
    examples = task.examples(split)
    device = distributed.device()
    answers: Answers = {}
    for positions in evaluation_shard(examples.lengths, distributed.rank(), distributed.world_size(), batch_size):
        batch = task.collate(examples, positions).to(device)
        answers |= task.answers(predict(batch), batch)
    distributed.give_back_freed_memory()
    merged = {key: value for shard in distributed.gather(answers) for key, value in shard.items()}
    assert not distributed.is_main() or len(merged) == len(examples), f"{len(merged)} of {len(examples)} answered"
    return merged
