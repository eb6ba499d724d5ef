"""Evaluation: run a split once over all ranks, then score it once."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ds_trainer.files.messages import cut
from ds_trainer.files.writing import write_artifacts
from ds_trainer.ranks import distributed
from ds_trainer.tasks.data import evaluation_shard
from ds_trainer.tasks.task import Batch, Forward, Predict, Task

Answers = dict[int, Any]
"""A model's answers to the examples of a split, by example id."""
Views = Callable[[Forward, Predict], dict[str, Any]]
"""Compute further outputs for a batch, by name, from the model's output; the model may be run again for them."""
_MODEL = ""
"""The name under which the answers of the model itself are kept, beside those of its views."""


@dataclass
class Evaluation:
    """The scores by name and the warnings, on every rank, and the answers of the model itself by split, on rank 0."""

    scores: dict[str, float] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    answers: dict[str, Answers] = field(default_factory=dict)

    def files(self, task: Task) -> dict[str, Any]:
        """Return the files that are written beside the scores, such as predictions, by name: text or JSON values."""
        return {
            f"{split_prefix(task, split)}{name}": value
            for split, answers in self.answers.items()
            for name, value in task.artifacts(split, answers).items()
        }

    def write(self, task: Task, folder: Path) -> None:
        """Write these files into a folder, on rank 0; collective."""
        distributed.on_main(lambda: write_artifacts(folder, self.files(task)))


def evaluate(predict: Predict, task: Task, batch_size: int, views: Sequence[Views] = ()) -> Evaluation:
    """Score every split, in one pass over its data.

    Scores of the first split have no prefix (`accuracy`), those of others the split's name as theirs
    (`validation_mismatched/accuracy`). The outputs of `views` are scored, too: as `teacher/accuracy`, and as
    `teacher/agreement`, which is the share of the examples to which the view and the model give the same answer.
    """
    evaluation = Evaluation()
    for split in task.splits:
        answers = answers_of(predict, task, split, batch_size, views)
        scores, warnings = distributed.on_main(partial(_scores_and_warnings, task, split, answers))
        evaluation.scores |= {f"{split_prefix(task, split)}{name}": value for name, value in scores.items()}
        evaluation.answers[split] = answers.get(_MODEL, {})
        evaluation.warnings += warnings
    return evaluation


def score_folder(task: Task, folder: str | Path, batch_size: int) -> Evaluation:
    """Score the model of a folder on every split, over all ranks, as `evaluate` does.

    Raises UserError where the model has no trained head for the task.
    """
    task.check_trained(folder)
    model = load_on_device(task, folder)
    return evaluate(forward_of(model), task, batch_size)


def forward_of(model: Any) -> Predict:
    """Return the way to run a model on a batch: all of its inputs, and nothing else."""
    return lambda batch: model(**batch.inputs)


def load_on_device(task: Task, folder: str | Path) -> Any:
    """Load the model of a folder for evaluation, in fp32, onto the device of this rank."""
    return task.build_model(folder).to(distributed.device()).eval()


def split_prefix(task: Task, split: str) -> str:
    """Return the prefix of the names of a split's scores and files."""
    return "" if split == task.splits[0] else f"{split}/"


@torch.no_grad()
def answers_of(
    predict: Predict, task: Task, split: str, batch_size: int, views: Sequence[Views] = ()
) -> dict[str, Answers]:
    """Return the answers of the model and of its views, by name, on rank 0; an empty dict on other ranks.

    Each has exactly one answer for every example of the split, although the ranks' shards may repeat an example.
    """
    shard: dict[str, Answers] = {}
    for batch in evaluation_batches(task, split, batch_size):
        out = predict(batch)
        outputs = {_MODEL: out}
        for view in views:
            outputs |= view(Forward(batch, out, step=0), predict)
        for name, output in outputs.items():
            shard.setdefault(name, {}).update(task.answers(output, batch))
    distributed.give_back_freed_memory()
    merged: dict[str, Answers] = {}
    for part in distributed.gather(shard):
        for name, answers in part.items():
            merged.setdefault(name, {}).update(answers)
    for name, answers in merged.items():
        assert len(answers) == len(task.examples(split)), f"{name or 'the model'} answered {len(answers)} examples"
    return merged


def evaluation_batches(task: Task, split: str, batch_size: int) -> Iterator[Batch]:
    """Yield this rank's batches of a split, on its device; every rank has the same number."""
    examples = task.examples(split)
    for ids in evaluation_shard(examples.lengths, distributed.rank(), distributed.world_size(), batch_size):
        yield replace(task.collate(examples, ids), split=split).to(distributed.device())


def _scores_and_warnings(task: Task, split: str, answers: Mapping[str, Answers]) -> tuple[dict[str, float], list[str]]:
    ours = answers[_MODEL]
    scores = task.score(split, ours) | task.further_scores(split, ours)
    for name, others in answers.items():
        if name != _MODEL:
            scores |= {f"{name}/{metric}": value for metric, value in task.score(split, others).items()}
            scores[f"{name}/agreement"] = task.agreement(split, ours, others)
    missing = task.never_answered(split, ours)
    if not missing:
        return scores, []
    classes = cut(", ".join(f"{name} ({count:,} times)" for name, count in missing.items()), 500)
    weights = '"class_weights": "balanced", ' if getattr(task.spec, "class_weights", "none") is None else ""
    return scores, [
        f"the model never answers these classes, though {split} has them: {classes}. Try {weights}longer training, "
        f"another learning_rate, or to prune or cut less"
    ]
