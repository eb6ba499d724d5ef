"""What packing saves: tokens per second over padded batches in random order, and over batches grouped by length.

Llama and GPT-2 of 6 layers x 512 (random weights, no dropout), fp32, 2 threads, one process, forward, backward and
AdamW: causal language modelling on the lines of wikitext-2, each of at most 256 tokens: 8 of them a batch, or so many
packed rows that a step has about as many tokens. Only tokens of documents count, padding does not. The three sides take
turns of 3 steps: padded batches in random order, batches as `BatchPlan` groups them by length, and packed rows. The
speed of a side is all its tokens by all its seconds, since batches differ in length. The loss over documents of the
test file is compared as well. Needs ../shared:
`python benchmarks/packing.py`.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from figures import SHARED, Figure, is_quick, report, use_threads
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

from ds_trainer.models.pretrained import load_tokenizer
from ds_trainer.recipe.task_specs import LmSpec
from ds_trainer.tasks.data import BatchPlan, ExampleIds
from ds_trainer.tasks.lm.lm_task import LmTask

WIDTH, LAYERS, HEADS = (32, 2, 2) if is_quick() else (512, 6, 8)
ROWS, LENGTH = (2, 64) if is_quick() else (8, 256)
STEPS, TURNS = (1, 1) if is_quick() else (3, 6)
"""Optimizer steps of a turn, and turns of each side, after one that is not counted."""


class Side:
    """A model, the tokens of documents that it has learned from, and the seconds that this took."""

    def __init__(self, task: LmTask, folder: Path, turns: Iterator[list[ExampleIds]]) -> None:
        self.task, self.turns = task, turns
        self.model: Any = task.build_model(folder).train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-4)
        self.tokens = self.seconds = 0.0
        self.turn()
        self.tokens = self.seconds = 0.0

    def turn(self) -> None:
        examples, start = self.task.examples("train"), time.perf_counter()
        for ids in next(self.turns):
            batch = self.task.collate(examples, ids)
            self.task.loss(self.model(**batch.inputs), batch).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.tokens += self.task.counts(examples, ids)["token"]
        self.seconds += time.perf_counter() - start

    @property
    def speed(self) -> float:
        return self.tokens / self.seconds


def planned_turns(task: LmTask, rows: int) -> Iterator[list[ExampleIds]]:
    plan = BatchPlan(task.examples("train").lengths, rows, seed=1)
    for turn in count():
        yield [plan.indices(turn * STEPS + step) for step in range(STEPS)]


def random_turns(task: LmTask) -> Iterator[list[ExampleIds]]:
    """The examples of each grouped turn and of those behind it, dealt out at random."""
    plan, rng = BatchPlan(task.examples("train").lengths, ROWS, seed=1), np.random.default_rng(1)
    for turn in count():
        ids = plan.between(turn * STEPS * ROWS, (turn + 16) * STEPS * ROWS)
        yield list(rng.permutation(ids)[: STEPS * ROWS].reshape(STEPS, ROWS))


@torch.no_grad()
def loss_of(task: LmTask, folder: Path) -> float:
    model, examples = task.build_model(folder).eval(), task.examples("validation")
    batches = [task.collate(examples, ids) for ids in np.array_split(np.arange(len(examples)), 4)]
    answers = {id: answer for batch in batches for id, answer in task.answers(model(**batch.inputs), batch).items()}
    return task.score("validation", answers)["loss"]


def figures_of(name: str, config: Any, folder: Path) -> list[Figure]:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    files = {"data_dir": str(SHARED / "data/wikitext-2"), "train_file": "valid.txt", "validation_file": "test.txt"}
    few = {"max_train_samples": 100 if is_quick() else None, "max_eval_samples": 64}
    tasks = [
        LmTask(
            LmSpec(name="clm", **files, max_seq_length=LENGTH, **few, packing=packing),
            load_tokenizer(SHARED / "models/minilm-l6"),
            folder,
            folder.parent / "cache",
        )
        for packing in (False, True)
    ]
    plain, packed = tasks
    short, full = (task.examples("train").lengths.mean() for task in tasks)
    turns = {
        "padded": (plain, random_turns(plain)),
        "grouped": (plain, planned_turns(plain, ROWS)),
        "packed": (packed, planned_turns(packed, max(1, round(ROWS * short / full)))),
    }
    sides = {side: Side(task, folder, batches) for side, (task, batches) in turns.items()}
    for turn in range(TURNS):
        for side in sorted(sides, reverse=bool(turn % 2)):
            sides[side].turn()
    speeds = {side: sides[side].speed for side in sides}
    print(f"{name}, tokens/s:", {side: round(speed) for side, speed in speeds.items()}, flush=True)
    alone, together = (loss_of(task, folder) for task in tasks)
    return [
        Figure(
            f"packing/{name}/tokens_per_second_over_padded", speeds["packed"] / speeds["padded"], 1.3, at_least=True
        ),
        Figure(
            f"packing/{name}/tokens_per_second_over_grouped", speeds["packed"] / speeds["grouped"], 1.0, at_least=True
        ),
        Figure(f"packing/{name}/loss_difference", math.fabs(together / alone - 1), 1e-5),
    ]


def main() -> None:
    if not SHARED.is_dir():
        print(f"packing: skipped, {SHARED} is not there: it holds wikitext-2 and a tokenizer")
        return
    use_threads(2)
    size = len(load_tokenizer(SHARED / "models/minilm-l6"))
    special = {"vocab_size": size, "bos_token_id": None, "eos_token_id": None}
    sizes = {"hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS}
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    llama = LlamaConfig(**sizes, intermediate_size=WIDTH * 8 // 3, max_position_embeddings=LENGTH, **special)
    configs = {"llama": llama, "gpt2": GPT2Config(**sizes, n_positions=LENGTH, **dropout, **special)}
    if is_quick():
        del configs["llama"]
    with tempfile.TemporaryDirectory() as folder:
        report(*(f for name, config in configs.items() for f in figures_of(name, config, Path(folder) / name)))


if __name__ == "__main__":
    main()
