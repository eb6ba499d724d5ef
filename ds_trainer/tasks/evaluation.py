"""Evaluation: run a split once over all ranks, score it once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from ds_trainer.ranks import distributed
from ds_trainer.tasks.data import evaluation_shard
from ds_trainer.tasks.task import Batch, Forward, Predict, Task

Answers = dict[int, Any]
"""What a model says of each example, by id."""
Views = Callable[[Forward, Predict], dict[str, Any]]
"""Further outputs for a batch, by name, beside the model's own, which may be run once more for them."""
OWN = ""
"""The name of the model's own answers."""


@dataclass
class Evaluation:
    """`scores` by name, on every rank; `answers` by split, on rank 0."""

    scores: dict[str, float] = field(default_factory=dict)
    answers: dict[str, Answers] = field(default_factory=dict)

    def files(self, task: Task) -> dict[str, Any]:
        """What goes beside the scores as JSON, by name: predictions."""
        return {
            f"{split_prefix(task, split)}{name}": value
            for split, answers in self.answers.items()
            for name, value in task.artifacts(split, answers).items()
        }


def evaluate(predict: Predict, task: Task, batch_size: int, views: Sequence[Views] = ()) -> Evaluation:
    """Score every split: `accuracy`, or beyond the first split `validation_mismatched/accuracy`.

    What each of `views` gives is scored too, as `teacher/accuracy`, and `teacher/agreement` is the share of answers
    that it shares with the model. All come from one pass over the data.
    """
    found = Evaluation()
    for split in task.splits:
        answers = answers_of(predict, task, split, batch_size, views)
        scores = distributed.on_main(partial(_scores, task, split, answers))
        found.scores |= {f"{split_prefix(task, split)}{name}": value for name, value in scores.items()}
        found.answers[split] = answers.get(OWN, {})
    return found


def split_prefix(task: Task, split: str) -> str:
    """What goes before the names of a split's scores and files."""
    return "" if split == task.splits[0] else f"{split}/"


def _scores(task: Task, split: str, answers: Mapping[str, Answers]) -> dict[str, float]:
    own = answers[OWN]
    scores = task.score(split, own)
    for name, other in answers.items():
        if name == OWN:
            continue
        scores |= {f"{name}/{metric}": value for metric, value in task.score(split, other).items()}
        scores[f"{name}/agreement"] = task.agreement(split, own, other)
    return scores


@torch.no_grad()
def answers_of(
    predict: Predict, task: Task, split: str, batch_size: int, views: Sequence[Views] = ()
) -> dict[str, Answers]:
    """The model's answer to each example of the split, and those of its views, by name; on rank 0, elsewhere nothing.

    However the shards are padded, there is one for each example.
    """
    found: dict[str, Answers] = {}
    for batch in evaluation_batches(task, split, batch_size):
        out = predict(batch)
        outputs = {OWN: out}
        for view in views:
            outputs |= view(Forward(batch, out, step=0), predict)
        for name, output in outputs.items():
            found.setdefault(name, {}).update(task.answers(output, batch))
    distributed.give_back_freed_memory()
    return _merged(distributed.gather(found), len(task.examples(split)))


def evaluation_batches(task: Task, split: str, batch_size: int) -> Iterator[Batch]:
    """This rank's batches of a split, on its device; equally many on every rank."""
    examples = task.examples(split)
    for positions in evaluation_shard(examples.lengths, distributed.rank(), distributed.world_size(), batch_size):
        yield task.collate(examples, positions).to(distributed.device())


def _merged(shards: Sequence[dict[str, Answers]], examples: int) -> dict[str, Answers]:
    merged: dict[str, Answers] = {}
    for shard in shards:
        for name, answers in shard.items():
            merged.setdefault(name, {}).update(answers)
    for name, answers in merged.items():
        assert len(answers) == examples, f"{name or 'the model'}: {len(answers)} of {examples} answered"
    return merged
