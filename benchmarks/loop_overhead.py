"""What the loop costs: optimizer steps of `ds_trainer.run.loop` over the same steps of a bare DeepSpeed loop.

The loop collates its batches, seeds every step, asks objective and techniques, sums the terms, and writes `log.jsonl`
and TensorBoard every 10 steps. The bare loop has the same batches as tensors beforehand and does forward, cross
entropy, backward and step. Both have the same model, optimizer and engine file.

BERT of 6 layers x 384 (random weights, dropout on), 32 examples of SST-2's lengths (without ../shared: the embedded
docstrings), fp32, 2 threads, one rank, ZeRO 0, in one process: `python benchmarks/loop_overhead.py`.
"""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.nn.functional as F
from figures import ROOT, SHARED, Figure, bert_shape, is_quick, ratio, report, use_threads

from ds_trainer.engine import engine
from ds_trainer.engine.engine import as_torch
from ds_trainer.engine.numerics import StepWatch
from ds_trainer.files.reading import read_json
from ds_trainer.models.folders import create_folder, train_tokenizer
from ds_trainer.models.pretrained import load_tokenizer
from ds_trainer.ranks import distributed
from ds_trainer.ranks.stopping import StopRequests
from ds_trainer.recipe.jobs import TrainJob
from ds_trainer.recipe.recipe import parse_recipe
from ds_trainer.recipe.task_specs import TextSpec
from ds_trainer.report.log import RunLog
from ds_trainer.run.loop import flush, micro_batches, train_step
from ds_trainer.run.phase import PhasePlan, plan_phase
from ds_trainer.run.starting_models import StartingModels
from ds_trainer.tasks.data import BatchPlan
from ds_trainer.tasks.registry import training_texts
from ds_trainer.tasks.task import Batch

BERT: dict[str, Any] = {"model_type": "bert"} | bert_shape(384, layers=6, heads=12)
ROWS, EXAMPLES = 32, 320 if is_quick() else 6400
LOG_EVERY = 2 if is_quick() else 10
ROUNDS, WARMUP = 16, 2


class Loop:
    """The project's own loop, from what `ds_trainer.run.loop.train` is given."""

    def __init__(self, plan: PhasePlan, record: RunLog, stop: StopRequests) -> None:
        model, groups, self.objective = plan.prepare()
        self.engine = engine.start_engine(model, groups, plan.engine_config, plan.base, plan.lr_factor)
        self.engine.train()
        for technique in self.objective.techniques:
            technique.start(self.engine.device)
        self.batches, self.seed, self.report, self.stop = batches_of(plan), plan.length.seed, record, stop
        self.watch = StepWatch(self.engine, plan.phase.name, plan.phase.max_skipped_steps)

    def steps(self) -> None:
        """`LOG_EVERY` optimizer steps and the record of them."""
        self.between_records()
        self.watch.check()
        flush(self.report, self.objective, self.engine)

    def between_records(self, count: int = LOG_EVERY) -> None:
        """So many optimizer steps alone."""
        for _ in range(count):
            seen = self.engine.global_samples
            indices = self.batches.between(seen, seen + self.engine.train_batch_size())
            train_step(self.objective, self.engine, indices, self.report, self.seed)
            self.watch.after_step()
            self.stop.check()

    def close(self) -> None:
        """Stop the engine and free what it held; this object is of no more use."""
        for technique in self.objective.techniques:
            technique.stop()
        engine.stop_engine(self.engine)
        del self.engine, self.watch, self.objective
        gc.collect()  # DeepSpeed's objects know each other


class BareLoop:
    """What a user writes who knows DeepSpeed and wants nothing else."""

    def __init__(self, plan: PhasePlan) -> None:
        model, groups, _ = plan.prepare()
        optimizer = torch.optim.AdamW(as_torch(groups, plan.base), **asdict(plan.base), fused=True)
        self.engine: Any
        self.engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=dict(plan.engine_config))
        self.engine.train()
        self.batches = iter(self._collated(plan))

    def steps(self) -> None:
        for batch in islice(self.batches, LOG_EVERY):
            loss = F.cross_entropy(self.engine(**batch.inputs).logits, batch.labels)
            self.engine.backward(loss)
            self.engine.step()

    def _collated(self, plan: PhasePlan) -> list[Batch]:
        batches, steps = batches_of(plan), (WARMUP + ROUNDS) * LOG_EVERY
        return [
            batch
            for step in range(steps)
            for batch, _ in micro_batches(plan.task, batches.indices(step), self.engine, draw=1)
        ]


def batches_of(plan: PhasePlan) -> BatchPlan:
    return BatchPlan(plan.task.examples("train").lengths, plan.engine_config["train_batch_size"], plan.length.seed)


def planned(engine_file: Path, folder: Path, distill: dict[str, Any] | None = None, rows: int = ROWS) -> PhasePlan:
    """A phase of `BERT` on `EXAMPLES` examples that writes into `folder`, resolved as a run resolves it."""
    task: dict[str, Any] = {"max_train_samples": EXAMPLES}
    if SHARED.is_dir():
        task |= {"name": "sst2", "data_dir": str(SHARED / "data")}
        tokenizer = load_tokenizer(SHARED / "models/minilm-l6")
    else:
        tokenizer = train_tokenizer(training_texts(TextSpec()), vocab_size=8192, lowercase=True)
    distributed.on_main(partial(create_folder, BERT, tokenizer, folder / "initial_model", seed=0))
    phase: dict[str, Any] = {"max_steps": 10_000, "train_batch_size": rows, "learning_rate": 5e-5}
    phase |= {"logging_steps": LOG_EVERY, "techniques": {"distill": distill} if distill else {}}
    source = str(folder / "initial_model")
    return plan_of({"task": task, "phases": [phase]}, engine_file, folder, source)


def plan_of(words: dict[str, Any], engine_file: Path, folder: Path, source: str) -> PhasePlan:
    """The only phase of a recipe, which starts from the model folder `source` and writes into `folder`."""
    recipe = parse_recipe(words | {"cache_dir": str(folder / "cache"), "model": {"name_or_path": source}})
    fields: dict[str, Any] = {
        "recipe": recipe,
        "engine_config": read_json(str(engine_file), "the engine file"),
        "output": folder,
        "world": None,
    }
    return plan_phase(TrainJob.model_construct(**fields), recipe.phases[0], StartingModels(recipe, folder))


def record_of(plan: PhasePlan) -> RunLog:
    return RunLog(
        plan.folder, plan.phase.name, plan.length.total, plan.phase.loss, tensorboard=True, training_examples=EXAMPLES
    )


@contextmanager
def started(plan: PhasePlan) -> Iterator[Loop]:
    """Yield the loop of a phase, with its records, and close it at the end."""
    with record_of(plan) as record, StopRequests() as stop:
        record.open(0, 0)
        loop = Loop(plan, record, stop)
        yield loop
        loop.close()


def main() -> None:
    distributed.start_logging()
    distributed.start()
    use_threads(2)
    with tempfile.TemporaryDirectory() as folder:
        plan = planned(ROOT / "ds_configs/zero0.json", Path(folder))
        with started(plan) as loop:
            value, seconds, other = ratio(loop.steps, BareLoop(plan).steps, rounds=ROUNDS, warmup=WARMUP)
    print(f"loop {seconds / LOG_EVERY:.4f} s, bare {other / LOG_EVERY:.4f} s a step of {ROWS} examples")
    report(Figure("loop_overhead", value, 1.02))


if __name__ == "__main__":
    main()
