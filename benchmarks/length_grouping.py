"""What grouping by length saves: padding, and training examples per second, over batches in random order.

BERT of 4 layers x 256 (random weights, dropout on), fp32, 2 threads, one process, forward, backward and AdamW: a
classifier on the sentences of SST-2, 32 a batch, and a masked language model on the lines of wikitext-2, 16 a batch,
each batch padded to its longest. Padding is counted over an epoch. Speed is that of turns of 20 steps: the one side has
the batches of `BatchPlan`, the other the same examples dealt out at random. Needs ../shared:
`python benchmarks/length_grouping.py`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from figures import SHARED, Figure, bert_shape, is_quick, ratio, report, use_threads
from transformers import BertConfig, BertForMaskedLM, BertForSequenceClassification

from ds_trainer.models.pretrained import load_tokenizer
from ds_trainer.recipe.task_specs import LmSpec, TextSpec
from ds_trainer.tasks.data import Array, BatchPlan, ExampleIds
from ds_trainer.tasks.lm.lm_task import LmTask
from ds_trainer.tasks.task import Task
from ds_trainer.tasks.text.text_task import TextTask

BERT = bert_shape(256, layers=4, heads=4)
STEPS = 3 if is_quick() else 20
"""Optimizer steps of a turn."""
ROWS = {"sst2": 32, "wikitext2": 16}


@dataclass(frozen=True)
class Bars:
    """The most of the padding that may stay, and the least rise in examples per second."""

    padding: float
    speed: float


BARS = {"sst2": Bars(0.25, 1.3), "wikitext2": Bars(0.5, 1.1)}


class Side:
    """A model, and how it takes turns on the batches of one side."""

    def __init__(self, task: Task, folder: Path, turns: Iterator[list[ExampleIds]]) -> None:
        self.task, self.turns = task, turns
        self.model: Any = task.build_model(folder).train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-4)
        self.step = 0

    def turn(self) -> None:
        examples = self.task.examples("train")
        for positions in next(self.turns):
            batch = self.task.collate(examples, positions, self.step)
            self.task.loss(self.model(**batch.inputs), batch).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.step += 1


def grouped_turns(plan: BatchPlan, steps: int) -> Iterator[list[ExampleIds]]:
    for turn in count():
        yield [plan.indices(turn * steps + step) for step in range(steps)]


def random_turns(plan: BatchPlan, steps: int) -> Iterator[list[ExampleIds]]:
    """The examples of each grouped turn, dealt out at random."""
    rng = np.random.default_rng(1)
    for batches in grouped_turns(plan, steps):
        yield list(rng.permutation(np.concatenate(batches)).reshape(steps, -1))


def padding_share(lengths: Array, batches: list[ExampleIds]) -> float:
    """Share of padding among the positions that the batches compute."""
    found = [lengths[batch] for batch in batches]
    return 1 - sum(int(b.sum()) for b in found) / sum(len(b) * int(b.max()) for b in found)


def figures_of(name: str, task: Task, folder: Path) -> list[Figure]:
    lengths, rows, bars = task.examples("train").lengths, ROWS[name], BARS[name]
    plan, epoch = BatchPlan(lengths, rows, seed=1), len(lengths) // rows
    sides = {"grouped": grouped_turns, "random": random_turns}
    shares = {side: padding_share(lengths, next(turns(plan, epoch))) for side, turns in sides.items()}
    first, second = (Side(task, folder, sides[side](plan, STEPS)) for side in ("random", "grouped"))
    speed, *seconds = ratio(first.turn, second.turn, rounds=5, warmup=1)
    for side, taken in zip(("random", "grouped"), seconds, strict=True):
        print(f"{name} {side}: {100 * shares[side]:.1f}% padding, {rows * STEPS / taken:.1f} examples/s")
    return [
        Figure(f"length_grouping/{name}/padding", shares["grouped"] / shares["random"], bars.padding),
        Figure(f"length_grouping/{name}/examples_per_second", speed, bars.speed, at_least=True),
    ]


def tasks_of(folder: Path) -> dict[str, Task]:
    """The two tasks, and in `folder` an untrained model for each, by name."""
    torch.manual_seed(0)
    tokenizer = load_tokenizer(SHARED / "models/minilm-l6")
    config = BertConfig(vocab_size=len(tokenizer), **BERT)
    BertForSequenceClassification(config).save_pretrained(folder / "sst2")
    BertForMaskedLM(config).save_pretrained(folder / "wikitext2")
    few: dict[str, Any] = {"max_train_samples": 200 if is_quick() else None}
    wikitext2 = LmSpec(
        name="mlm", data_dir=str(SHARED / "data/wikitext-2"), train_file="valid.txt", validation_file="test.txt", **few
    )
    return {
        "sst2": TextTask(
            TextSpec(name="sst2", data_dir=str(SHARED / "data"), **few), tokenizer, folder / "sst2", folder / "cache"
        ),
        "wikitext2": LmTask(wikitext2, tokenizer, folder / "wikitext2", folder / "cache"),
    }


def main() -> None:
    if not SHARED.is_dir():
        print(f"length_grouping: skipped, {SHARED} is not there: it holds SST-2, wikitext-2 and a tokenizer")
        return
    use_threads(2)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tasks = tasks_of(folder)
        report(*(f for name, task in tasks.items() for f in figures_of(name, task, folder / name)))


if __name__ == "__main__":
    main()
