"""Training examples per second of this project over those of Hugging Face's Trainer.

Both train BERT of 6 layers x 384 (random weights, dropout on) on the same 6,400 sentences of SST-2 at their real
lengths (without ../shared: on the embedded docstrings), tokenised beforehand and in memory, 32 a step, by the engine
file ds_configs/zero2.json, with fused AdamW, in fp32, 2 threads, one rank. Each batch of the Trainer is padded to its
longest by DataCollatorWithPadding; it does not save or report. It is measured twice: with its
`train_sampling_strategy="group_by_length"`, which is the fair peer, and as it comes, in random order. Ours collates
batches of like lengths, and writes log and TensorBoard every 10 steps; the shares of padding are printed, for most of
the second difference is there. They take turns of a quarter of an epoch in one process, the first of which is not
counted: `python benchmarks/against_hf_trainer.py`.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from figures import ROOT, Figure, is_quick, report, use_threads
from loop_overhead import LOG_EVERY, Loop, batches_of, planned, started
from transformers import DataCollatorWithPadding, Trainer, TrainerCallback, TrainingArguments

from ds_trainer.engine.keys import precision_of
from ds_trainer.ranks import distributed
from ds_trainer.run.phase import PhasePlan

ENGINE_FILE = ROOT / "ds_configs/zero2.json"
STEPS = 2 if is_quick() else 50
"""Optimizer steps of a turn: a window of `BatchPlan`, so that each of our turns has short and long batches alike."""
ROUNDS, WARMUP = (1, 0) if is_quick() else (5, 1)


class Turns(TrainerCallback):
    """Let ours have a turn after every `STEPS` steps of the Trainer's, and time both.

    The Trainer's time is all that passes between two of our turns: fetching, collating and its own callbacks too.
    """

    def __init__(self, ours: Loop) -> None:
        self.loop = ours
        self.theirs: list[float] = []
        self.ours: list[float] = []
        self._since = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._since = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        if state.global_step % STEPS:
            return
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # what the Trainer has begun is its own; ours ends with a record, which waits
        start = time.perf_counter()
        self.theirs.append(start - self._since)
        for _ in range(STEPS // LOG_EVERY):
            self.loop.steps()
        self._since = time.perf_counter()
        self.ours.append(self._since - start)


@dataclass
class RecordingCollator(DataCollatorWithPadding):
    """Keeps the lengths of every batch it pads."""

    lengths: list[list[int]] = field(default_factory=list)

    def __call__(self, features: list[dict[str, Any]]) -> Any:
        self.lengths.append([len(row["input_ids"]) for row in features])
        return super().__call__(features)


def rows_of(plan: PhasePlan) -> list[dict[str, Any]]:
    """The phase's examples as the Trainer takes them, in memory, as lists of ints."""
    examples = plan.task.examples("train")
    labels, rows = examples.fields.get("labels"), []
    for position in range(len(examples)):
        ids = examples.row(position)["input_ids"].tolist()
        label = ids if labels is None else labels[position].item()  # a decoder learns the text itself
        rows.append(
            {"input_ids": ids, "token_type_ids": [0] * len(ids), "attention_mask": [1] * len(ids), "labels": label}
        )
    return rows


def trainer_of(plan: PhasePlan, order: str, collator: RecordingCollator, turns: Turns, engine_file: Path) -> Trainer:
    """Hugging Face's Trainer on the same model, examples and engine file, in that `train_sampling_strategy`."""
    arguments = TrainingArguments(
        output_dir=str(plan.folder / order),
        deepspeed=str(engine_file),
        use_cpu=not torch.cuda.is_available(),
        bf16=precision_of(plan.engine_config) == "bf16",
        per_device_train_batch_size=plan.engine_config["train_batch_size"],
        max_steps=(WARMUP + ROUNDS) * STEPS,
        train_sampling_strategy=order,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    model, _ = plan.build()
    return Trainer(model, arguments, data_collator=collator, train_dataset=rows_of(plan), callbacks=[turns])


def padding_share(batches: Iterable[Sequence[int]]) -> float:
    """Share of padding among the positions computed, from the lengths in each batch."""
    pairs = [(sum(lengths), len(lengths) * max(lengths)) for lengths in batches]
    return 1 - sum(tokens for tokens, _ in pairs) / sum(positions for _, positions in pairs)


def our_batches(plan: PhasePlan) -> list[list[int]]:
    lengths, batches = plan.task.examples("train").lengths, batches_of(plan)
    return [lengths[batches.indices(step)].tolist() for step in range((WARMUP + ROUNDS) * STEPS)]


def compared(order: str, plan: PhasePlan, engine_file: Path = ENGINE_FILE) -> float:
    """Our examples per second over those of the Trainer in that order, the median of turns."""
    with started(plan) as loop:
        turns = Turns(loop)
        collator = RecordingCollator(plan.task.tokenizer)
        trainer_of(plan, order, collator, turns, engine_file).train()
    for side, seconds, batches in (
        ("ours", turns.ours, our_batches(plan)),
        (f"Trainer ({order})", turns.theirs, collator.lengths),
    ):
        rate = STEPS * plan.engine_config["train_batch_size"] / statistics.median(seconds[WARMUP:])
        print(f"{side}: {rate:.1f} examples/s, {100 * padding_share(batches):.1f}% of the positions are padding")
    return statistics.median(a / b for a, b in zip(turns.theirs[WARMUP:], turns.ours[WARMUP:], strict=True))


def main() -> None:
    distributed.start_logging()
    distributed.start()
    use_threads(2)
    with tempfile.TemporaryDirectory() as name:
        plan = planned(ENGINE_FILE, Path(name))
        fair, default = (compared(order, plan) for order in ("group_by_length", "random"))
    report(
        Figure("against_hf_trainer/by_length", fair, 1.0, at_least=True),
        Figure("against_hf_trainer/at_random", default, 1.2, at_least=True),
    )


if __name__ == "__main__":
    main()
