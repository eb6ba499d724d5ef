"""The training loop, the only one: the same for every task and every combination of techniques."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ds_trainer import checkpoint, distributed, engine
from ds_trainer.data import BatchPlan, Positions, shard
from ds_trainer.engine_file import scheduler_mistakes
from ds_trainer.evaluate import Evaluation, evaluate
from ds_trainer.export import export
from ds_trainer.objective import Objective
from ds_trainer.optim import Group, Hyperparameters, parameter_groups
from ds_trainer.recipe import Phase, Techniques
from ds_trainer.report import Report, save_json
from ds_trainer.schedules import interval, lr_multiplier
from ds_trainer.tasks.task import Batch, Task
from ds_trainer.techniques import Clock, Forward, Technique, build_techniques


@dataclass(frozen=True)
class PhasePlan:
    """A phase with everything resolved: where it starts, how long it runs, what DeepSpeed is told, where it writes."""

    phase: Phase
    techniques: Techniques
    task: Task
    source: str
    clock: Clock
    engine_config: Mapping[str, Any]
    base: Hyperparameters
    folder: Path

    @property
    def teacher(self) -> str | None:
        """The folder, or hub name, of the teacher."""
        return self.techniques.distill.teacher if self.techniques.distill else None

    def build(self) -> tuple[nn.Module, list[Technique]]:
        """The phase's model as it starts, with its techniques attached; the same on every rank."""
        torch.manual_seed(self.clock.seed)
        techniques = build_techniques(self.techniques, self.clock, self.task)
        model = self.task.build_model(self.source)
        for technique in techniques:
            model = technique.attach(model)
        return model, techniques

    def prepare(self) -> tuple[nn.Module, list[Group], Objective]:
        """All of a phase that a user can get wrong, before the engine takes it. Raises ValueError."""
        model, techniques = self.build()
        return model, self.groups(model, techniques), Objective(self.task, techniques, self.phase.loss)

    def groups(self, model: nn.Module, techniques: Sequence[Technique]) -> list[Group]:
        """The model's parameter groups; freezes what the rules freeze.

        Raises ValueError where the engine file's scheduler would set one rate on groups of different ones.
        """
        rules = [rule for technique in techniques for rule in technique.parameter_rules(model)]
        rules.sort(key=lambda rule: rule.params == "*")  # one technique's "all the rest" is not another's
        groups = parameter_groups(model, self.phase.groups, rules, self.base)
        mistakes = scheduler_mistakes(dict(self.engine_config), [group.learning_rate for group in groups])
        if mistakes:
            raise ValueError("\n".join(mistakes))
        return groups


def train(plan: PhasePlan, report: Report, resume: bool) -> dict[str, Any]:
    """Train one phase and export its model; gives the results of training, evaluation and export, on every rank."""
    phase, clock, task = plan.phase, plan.clock, plan.task
    model, groups, objective = plan.prepare()
    techniques = objective.techniques
    lr_factor = lr_multiplier(phase.lr_scheduler_type, clock.warmup, clock.total)
    ds_engine = engine.start_engine(model, groups, plan.engine_config, plan.base, lr_factor)
    for technique in techniques:
        technique.start(ds_engine.device)
    step = checkpoint.resume(ds_engine, plan.folder) if resume else 0
    engine.set_rates(ds_engine, groups)
    batches = BatchPlan(task.examples("train").lengths, ds_engine.train_batch_size(), clock.seed)
    log_every, eval_every, save_every = (
        interval(every, clock.total) for every in (phase.logging_steps, phase.eval_steps, phase.save_steps)
    )

    def evaluate_now(viewed: Sequence[Technique]) -> Evaluation:
        for technique in techniques:
            technique.on_step(step)
        ds_engine.eval()
        views = [technique.views for technique in viewed]
        found = evaluate(lambda batch: ds_engine(**batch.inputs), task, phase.per_device_eval_batch_size, views)
        ds_engine.train()
        report.write_scores(step, found.scores)
        return found

    while step < clock.total:
        step = train_step(objective, ds_engine, batches, report, clock.seed)
        if due(step, log_every, clock.total):
            flush(report, techniques, ds_engine)
        if step < clock.total and due(step, eval_every):
            with report.paused():
                evaluate_now([t for t in techniques if t.cheap_views])
        if due(step, save_every):
            report.check_finite()  # before anything of such a step is kept
            with report.paused():
                checkpoint.save(ds_engine, plan.folder, phase.save_total_limit)
    checkpoint.drop_oldest(plan.folder, phase.save_total_limit)
    last = evaluate_now(techniques)
    distributed.on_main(lambda: save_json(last.files(task), plan.folder / "eval"))
    results = {"train": report.totals() | {"steps": step}, "eval": last.scores}
    for technique in techniques:
        technique.stop()
    results |= export(ds_engine, plan.build, task, step, plan.folder / "model")
    engine.stop_engine(ds_engine)
    return results


def train_step(objective: Objective, ds_engine: engine.Engine, batches: BatchPlan, report: Report, seed: int) -> int:
    """Take the engine's next optimizer step; gives the number of steps it has now taken."""
    step = ds_engine.global_steps
    seed_step(seed, step)
    for technique in objective.techniques:
        technique.on_step(step)
    draw = 1 + (hash((seed, step)) & (2**62 - 1))  # 0 is evaluation's
    for batch in micro_batches(objective.task, batches.indices(step), ds_engine, draw):
        loss, terms = objective(Forward(batch, ds_engine(**batch.inputs), step))
        ds_engine.backward(loss)  # the engine scales the loss and divides by the accumulation steps
        ds_engine.step()  # and updates on the last micro-batch only
        report.add(step, terms, batch)
    return int(ds_engine.global_steps)


def flush(report: Report, techniques: Sequence[Technique], ds_engine: engine.Engine) -> None:
    """Write a record of the steps since the last one, with what the engine and the techniques read now."""
    distributed.bound_freed_memory()
    readings = [engine.readings(ds_engine), *(technique.readings() for technique in techniques)]
    report.flush(ds_engine.global_steps, {name: value for found in readings for name, value in found.items()})


def micro_batches(task: Task, positions: Positions, ds_engine: engine.Engine, draw: int) -> Iterator[Batch]:
    """This rank's micro-batches of one optimizer step, on its device; `draw` as in `Task.collate`."""
    examples = task.examples("train")
    accumulation = ds_engine.gradient_accumulation_steps()
    for rows in shard(positions, examples.lengths, distributed.rank(), distributed.world_size(), accumulation):
        yield task.collate(examples, rows, draw).to(ds_engine.device)


def seed_step(seed: int, step: int) -> None:
    """Make the random state a function of run, step and rank: a resumed run draws what an uninterrupted one does."""
    torch.manual_seed(hash((seed, step, distributed.rank())) & (2**63 - 1))


def due(step: int, every: int, last: int | None = None) -> bool:
    """Whether something done every so many steps (0: never), and at the last, is to be done after `step` steps."""
    return (every > 0 and step % every == 0) or step == last
