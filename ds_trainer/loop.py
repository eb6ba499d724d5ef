"""The training loop, the only one: the same for every task and every combination of techniques."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ds_trainer import distributed, engine, memory
from ds_trainer.checkpoint import Checkpoints, Position, precision_of
from ds_trainer.data import BatchPlan, Positions, shard
from ds_trainer.engine_file import scheduler_mistakes
from ds_trainer.evaluate import Evaluation, evaluate
from ds_trainer.export import as_it_is, cut_where_empty, export
from ds_trainer.failures import NonFiniteLossError, StoppedError
from ds_trainer.histograms import Histograms
from ds_trainer.numerics import StepWatch
from ds_trainer.objective import Objective
from ds_trainer.optim import Group, Hyperparameters, parameter_groups
from ds_trainer.recipe import Phase, Techniques
from ds_trainer.report import Report, save_json
from ds_trainer.schedules import interval, lr_multiplier
from ds_trainer.shrink import check_known
from ds_trainer.stopping import StopRequests
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
    resumed: tuple[Path, Position] | None = None
    """The checkpoint to go on from, and what it says of itself."""

    def identity(self) -> dict[str, Any]:
        """What a phase must have in common with one that goes on from its checkpoints, as JSON values; collective."""
        return {
            "the precision": precision_of(self.engine_config),
            "the seed": self.clock.seed,
            "the training data": self.task.key("train"),
            "the loss terms": sorted(self.phase.loss),
            "the techniques": sorted(name for name, spec in self.techniques if spec),
        }

    @property
    def teacher(self) -> str | None:
        """The folder, or hub name, of the teacher."""
        return self.techniques.distill.teacher if self.techniques.distill else None

    def build(self) -> tuple[nn.Module, list[Technique]]:
        """The phase's model as it starts, with its techniques attached; the same on every rank."""
        torch.manual_seed(self.clock.seed)
        techniques = build_techniques(self.techniques, self.clock, self.task)
        model = self.task.build_model(self.source)
        if self.phase.shrink:
            check_known(model)
        for technique in techniques:
            model = technique.attach(model)
        return model, techniques

    def rebuild(self, states: Mapping[str, Mapping[str, Any]]) -> tuple[nn.Module, list[Technique]]:
        """The same with the techniques as they were, by name, when they gave their states."""
        model, techniques = self.build()
        for technique in techniques:
            technique.resume(states[technique.name])
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


def train(plan: PhasePlan, report: Report, checkpoints: Checkpoints, stop: StopRequests) -> dict[str, Any]:
    """Train one phase and export its model; gives the results of training, evaluation and export, on every rank.

    StoppedError, once all that was trained is saved, where a rank was asked to stop.
    """
    training = Training(plan, report, checkpoints, stop)
    try:
        with memory.told_if_out(" in training", partial(training.out_of_memory, training.cure)):
            training.run()
            last = training.finish()
    except StoppedError as reason:
        training.save()
        engine.stop_engine(training.engine)
        place = f"step {training.step} of {plan.clock.total} of phase {plan.phase.name}"
        lost = "" if training.saved == training.step else "; the steps since the last checkpoint are lost"
        raise StoppedError(f"stopped at {place}: {reason}{lost}") from None
    distributed.on_main(lambda: save_json(last.files(plan.task), plan.folder / "eval"))
    results = {
        "train": report.totals() | {"steps": training.step},
        "eval": last.scores,
        "trained_on": report.trained_on,
    }
    states = training.states()
    for technique in training.techniques:
        technique.stop()
    change, rebuild = cut_where_empty if plan.phase.shrink else as_it_is, partial(plan.rebuild, states)
    results |= export(training.engine, rebuild, plan.task, training.step, plan.folder / "model", change)
    engine.stop_engine(training.engine)
    return results


class Training:
    """A phase under way: the engine with its model, how far it has come, and what is due when."""

    def __init__(self, plan: PhasePlan, report: Report, checkpoints: Checkpoints, stop: StopRequests) -> None:
        phase, clock = plan.phase, plan.clock
        model, groups, self.objective = plan.prepare()
        self.plan, self.report, self.checkpoints, self.stop = plan, report, checkpoints, stop
        self.techniques = self.objective.techniques
        lr_factor = lr_multiplier(phase.lr_scheduler_type, clock.warmup, clock.total)
        self.step, frozen = 0, sum(p.numel() for p in model.parameters() if not p.requires_grad)
        trained, world = sum(group.size for group in groups), distributed.world_size()
        self.bytes = engine.bytes_per_rank(trained, frozen, plan.engine_config, world)
        self.cure = partial(memory.training_cure, plan.engine_config)
        with memory.told_if_out(" as training started", partial(self.out_of_memory, self.cure)):
            self.engine = engine.start_engine(model, groups, plan.engine_config, plan.base, lr_factor)
        self.log_every, self.eval_every, self.save_every = (
            interval(every, clock.total) for every in (phase.logging_steps, phase.eval_steps, phase.save_steps)
        )
        self.saved, self.evaluated, self.scores = 0, 0, dict[str, float]()
        self.last: Evaluation | None = None
        self.identity = plan.identity()
        if plan.resumed:
            self.restore(*plan.resumed)
        for technique in self.techniques:
            technique.start(self.engine.device)
        self._go_on(plan.resumed)
        engine.set_rates(self.engine, groups)
        at_records = partial(due, every=self.log_every, last=clock.total)
        self.histograms = Histograms(self.engine, at_records) if phase.histograms else None
        self.watch = StepWatch(self.engine, phase.name, phase.max_skipped_steps)
        self.order = plan.resumed[1].order if plan.resumed else self.engine.train_batch_size()
        self.batches = BatchPlan(plan.task.examples("train").lengths, self.order, clock.seed)

    def run(self) -> None:
        """Take the steps that are left; what is due after one is done before the next, and a request to stop last."""
        total = self.plan.clock.total
        while self.step < total:
            self.step = train_step(self.objective, self.engine, self.batches, self.report, self.plan.clock.seed)
            self.watch_step()
            if due(self.step, self.log_every, total):
                self.check_finite()
                flush(self.report, self.techniques, self.engine)
                if self.histograms:
                    self.report.write_histograms(self.step, self.histograms.take())
            if due(self.step, self.eval_every, total):
                self.evaluate()
            if due(self.step, self.save_every):
                self.save()
            self.stop.check()
        self.checkpoints.drop_oldest()

    def finish(self) -> Evaluation:
        """The scores of what is exported: the last step, or the best checkpoint where that is asked for."""
        if self.plan.phase.load_best_model_at_end and self.go_back_to_best():
            return self.score()
        if self.last is None and self.evaluated == self.step:  # by a run that ended after its last checkpoint
            return self.score()
        return self.last or self.evaluate()

    def go_back_to_best(self) -> bool:
        """Load the checkpoint of the best score; with none, say so and stay."""
        found = self.checkpoints.best_saved()
        if found is None:
            distributed.warn(
                f"{self.plan.phase.name}: no checkpoint was scored at its own step: the last step is taken"
            )
            return False
        self.restore(*found)
        distributed.info(f"{self.plan.phase.name}: the best checkpoint is {found[0]}: it is what is exported")
        return True

    def restore(self, checkpoint: Path, position: Position) -> None:
        """Make the engine and the techniques what they were at a checkpoint."""
        self.checkpoints.load(self.engine, checkpoint, position)
        self.step = self.saved = position.step
        for technique in self.techniques:
            technique.resume(position.techniques[technique.name])

    def watch_step(self) -> None:
        """Note what became of the step; where that ends the run, a loss that is not finite is the better reason."""
        try:
            self.watch.after_step()
        except NonFiniteLossError:
            self.report.check_finite()
            raise

    def check_finite(self) -> None:
        """Raise NonFiniteLossError, on every rank, for the first step whose loss or, else, gradients are not finite."""
        self.report.check_finite(until=self.watch.spoilt_step())
        self.watch.check()

    def evaluate(self) -> Evaluation:
        """Score the model as it is now, and record it."""
        found = self.score()
        metric = self.plan.phase.metric_for_best_model
        if metric and metric not in found.scores:
            raise ValueError(
                f'metric_for_best_model is "{metric}"; the scores are {", ".join(found.scores)}: write one'
            )
        self.report.write_scores(self.step, found.scores)
        self.evaluated, self.scores = self.step, found.scores
        self.last = found if self.step == self.plan.clock.total else None
        return found

    def score(self) -> Evaluation:
        """Evaluate, with what techniques have to show beside the model; while training, only what costs little."""

        def predict(batch: Batch) -> Any:
            self.stop.check()
            return self.engine(**batch.inputs)

        at_end = self.step == self.plan.clock.total or self.plan.phase.load_best_model_at_end
        for technique in self.techniques:
            technique.on_step(self.step)
        self.engine.eval()
        views = [technique.views for technique in self.techniques if at_end or technique.cheap_views]
        batch_size = self.plan.phase.per_device_eval_batch_size
        cure = partial(memory.evaluation_cure, "per_device_eval_batch_size", batch_size, self.plan.engine_config)
        with self.report.paused(), memory.told_if_out(" in an evaluation", partial(self.out_of_memory, cure)):
            found = evaluate(predict, self.plan.task, batch_size, views)
        self.engine.train()
        return found

    def save(self) -> None:
        """Write a checkpoint of this step, unless that is done."""
        self.check_finite()  # before anything of such a step is kept
        if self.saved == self.step:
            return
        position = Position(
            step=self.step,
            examples=self.engine.global_samples,
            batch_size=self.engine.train_batch_size(),
            order=self.order,
            identity=self.identity,
            evaluated=self.evaluated,
            scores=self.scores,
            report=self.report.state(),
            techniques=self.states(),
        )
        with self.report.paused():
            if self.checkpoints.save(self.engine, position):
                self.saved = self.step

    def out_of_memory(self, cure: Callable[[], str]) -> str:
        """What a rank that runs out of memory says: how far it had come, what it held, and what to change."""
        held = memory.held(self.bytes, self.plan.engine_config)
        return f"That was after step {self.step} of phase {self.plan.phase.name}. {held} {cure()}"

    def states(self) -> dict[str, dict[str, Any]]:
        """Of the techniques, by name; collective."""
        return {technique.name: technique.state() for technique in self.techniques}

    def _go_on(self, found: tuple[Path, Position] | None) -> None:
        """Open the report, where a checkpoint says if there is one; make up for an evaluation that was cut short."""
        if found is None:
            self.report.open(0, 0)
            return
        checkpoint, position = found
        self.evaluated, self.scores = position.evaluated, dict(position.scores)
        self.report.open(self.step, self.evaluated, position.report)
        distributed.info(f"{self.plan.phase.name}: resumed from {checkpoint}, at step {self.step}")
        if self.evaluated < self.step < self.plan.clock.total and due(self.step, self.eval_every):
            self.evaluate()


def train_step(objective: Objective, ds_engine: engine.Engine, batches: BatchPlan, report: Report, seed: int) -> int:
    """Take the engine's next optimizer step; gives the number of steps it has now taken."""
    step = ds_engine.global_steps
    seed_step(seed, step)
    for technique in objective.techniques:
        technique.on_step(step)
    draw = 1 + (hash((seed, step)) & (2**62 - 1))  # 0 is evaluation's
    seen = ds_engine.global_samples
    places = batches.between(seen, seen + ds_engine.train_batch_size())
    for batch in micro_batches(objective.task, places, ds_engine, draw):
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
