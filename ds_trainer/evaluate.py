"""Evaluation: run the split once over all ranks, score it once."""

from __future__ import annotations

from typing import Any

import torch

from ds_trainer import distributed
from ds_trainer.data import evaluation_shard
from ds_trainer.tasks.task import Task
from ds_trainer.techniques import Predict


@torch.no_grad()
def evaluate(predict: Predict, task: Task, split: str, batch_size: int) -> dict[str, float]:
    """The task's metrics over the split, on every rank. Each example counts once, however the shards are padded."""
    examples = task.examples(split)
    device = distributed.device()
    answers: dict[int, Any] = {}
    for positions in evaluation_shard(examples.lengths, distributed.rank(), distributed.world_size(), batch_size):
        batch = task.collate(examples, positions).to(device)
        answers |= task.answers(predict(batch), batch)
    shards = distributed.gather(answers)
    if not distributed.is_main():
        return distributed.broadcast({})
    merged = {key: value for shard in shards for key, value in shard.items()}
    assert len(merged) == len(examples), f"{len(merged)} answers for {len(examples)} examples"
    return distributed.broadcast(task.score(split, merged))


def evaluate_splits(predict: Predict, task: Task, batch_size: int) -> dict[str, float]:
    """Every split's metrics, as `accuracy` or, beyond the first split, `validation_mismatched/accuracy`."""
    results: dict[str, float] = {}
    for split in task.splits:
        prefix = "" if split == task.splits[0] else f"{split}/"
        results |= {f"{prefix}{name}": value for name, value in evaluate(predict, task, split, batch_size).items()}
    return results
