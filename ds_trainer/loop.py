"""The training loop, the only one: the same for every task and every combination of techniques."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ds_trainer.config.recipe import Phase, Techniques
from ds_trainer.config.schedules import interval, lr_multiplier
from ds_trainer.deploy.export import Change, as_it_is, cut_where_empty, export
from ds_trainer.engine import engine, memory
from ds_trainer.engine.checkpoint import Checkpoints, Position, precision_of
from ds_trainer.engine.engine_file import scheduler_mistakes
from ds_trainer.engine.histograms import Histograms
from ds_trainer.engine.numerics import StepWatch
from ds_trainer.engine.optim import Group, Hyperparameters, parameter_groups
from ds_trainer.files.redaction import redacted
from ds_trainer.files.writing import write_json
from ds_trainer.models.shrink import check_known
from ds_trainer.objective import Objective
from ds_trainer.ranks import distributed
from ds_trainer.ranks.failures import NonFiniteLossError, StoppedError, UserError
from ds_trainer.ranks.out_of_memory import told_if_out
from ds_trainer.ranks.stopping import StopRequests
from ds_trainer.report.log import Report
from ds_trainer.tasks.data import BatchPlan, Positions, shard
from ds_trainer.tasks.evaluation import Evaluation, evaluate
from ds_trainer.tasks.task import Batch, Forward, Task, Unit
from ds_trainer.techniques.registry import build_techniques
from ds_trainer.techniques.technique import Clock, Technique

SETTLE_EVERY = 100
"""Steps after which what waits on the device for a record is summed up and checked, however far the record is."""


@dataclass(frozen=True)
class PhaseModel:
    """What the model of a phase is built from, and how it is exported: to train it, or to read a checkpoint of it."""

    phase: Phase
    techniques: Techniques
    task: Task
    source: str
    clock: Clock

    @property
    def teacher(self) -> str | None:
        """The folder, or hub name, of the teacher."""
        return self.techniques.distill.teacher if self.techniques.distill else None

    @property
    def change(self) -> Change:
        """What is done to the folded model before it is saved."""
        return cut_where_empty if self.phase.shrink else as_it_is

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
        """The phase's model, its techniques in the states that they gave at some step; `states` has them by name."""
        model, techniques = self.build()
        for technique in techniques:
            technique.resume(states[technique.name])
        return model, techniques


@dataclass(frozen=True)
class PhasePlan(PhaseModel):
    """A phase with everything resolved: where it starts, how long it runs, what DeepSpeed is told, where it writes."""

    engine_config: Mapping[str, Any]
    base: Hyperparameters
    folder: Path
    resumed: tuple[Path, Position] | None = None
    """The checkpoint to go on from, and what it says of itself."""

    def identity(self, groups: Sequence[Group]) -> dict[str, Any]:
        """What a phase must have in common with one that goes on from its checkpoints, as JSON values; collective."""
        return {
            "the precision": precision_of(self.engine_config),
            "the seed": self.clock.seed,
            "the training data": self.task.key("train"),
            "the loss terms": sorted(self.phase.loss),
            "the techniques": sorted(name for name, spec in self.techniques if spec),
            "the parameter groups": [group.identity for group in groups],
        }

    def bytes_per_rank(self, model: nn.Module, groups: Sequence[Group]) -> dict[str, int]:
        """What a rank will hold of the model and its groups, as `engine.bytes_per_rank` has it."""
        trained = sum(group.size for group in groups)
        frozen = sum(p.numel() for p in model.parameters()) - trained
        return engine.bytes_per_rank(trained, frozen, self.engine_config, distributed.world_size())

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
            raise UserError("\n".join(mistakes))
        return groups


def train(plan: PhasePlan, report: Report, checkpoints: Checkpoints, stop: StopRequests) -> dict[str, Any]:
    """Train one phase and export its model; gives the results of training, evaluation and export, on every rank.

    Raises StoppedError, once all that was trained is saved, where a rank was asked to stop.
    """
    training = Training(plan, report, checkpoints, stop)
    try:
        with told_if_out(" in training", partial(training.out_of_memory, training.cure)):
            training.run()
            step, evaluation = training.finish()
    except StoppedError as reason:
        training.save()
        engine.stop_engine(training.engine)
        place = f"step {training.step} of {plan.clock.total} of phase {plan.phase.name}"
        lost = "" if training.saved == training.step else "; the steps since the last checkpoint are lost"
        raise StoppedError(f"stopped at {place}: {reason}{lost}") from None
    distributed.on_main(partial(_write_evaluation, evaluation, plan))
    results = {
        "train": report.totals() | {"steps": step},
        "eval": evaluation.scores,
        "trained_on": report.trained_on,
    }
    states = training.states()
    for technique in training.techniques:
        technique.stop()
    rebuild, folder = partial(plan.rebuild, states), plan.folder / "model"
    results |= export(training.engine, rebuild, plan.task, step, folder, plan.change)
    engine.stop_engine(training.engine)
    return results


def _write_evaluation(evaluation: Evaluation, plan: PhasePlan) -> None:
    for name, value in evaluation.files(plan.task).items():
        write_json(plan.folder / "eval" / name, value)


class Training:
    """A phase under way: the engine with its model, how far it has come, and what is due when.

    Every step is recorded, then evaluated, then saved; only then does the phase look for a request to stop. An
    evaluation also looks, between its batches: a run that was stopped there begins with that evaluation when it is
    resumed.
    """

    def __init__(self, plan: PhasePlan, report: Report, checkpoints: Checkpoints, stop: StopRequests) -> None:
        phase, clock = plan.phase, plan.clock
        model, groups, self.objective = plan.prepare()
        self.plan, self.report, self.checkpoints, self.stop = plan, report, checkpoints, stop
        self.techniques = self.objective.techniques
        lr_factor = lr_multiplier(phase.lr_scheduler_type, clock.warmup, clock.total)
        self.step, self.bytes = 0, plan.bytes_per_rank(model, groups)
        self.cure = partial(memory.training_cure, plan.engine_config)
        with told_if_out(" as training started", partial(self.out_of_memory, self.cure)):
            self.engine = engine.start_engine(model, groups, plan.engine_config, plan.base, lr_factor)
        self.log_every, self.eval_every, self.save_every = (
            interval(every, clock.total) for every in (phase.logging_steps, phase.eval_steps, phase.save_steps)
        )
        self.saved, self.evaluated, self.order = 0, 0, self.engine.train_batch_size()
        self.evaluation = Evaluation()  # of the step `evaluated`; the answers are kept at the last step only
        self.identity = plan.identity(groups)
        if plan.resumed:
            self._resume(*plan.resumed)
        for technique in self.techniques:
            technique.start(self.engine.device)
        report.open(self.step, self.evaluated, plan.resumed[1].report if plan.resumed else None)
        at_records = partial(due, every=self.log_every, last=clock.total)
        self.histograms = Histograms(self.engine, at_records) if phase.histograms else None
        self.watch = StepWatch(self.engine, phase.name, phase.max_skipped_steps)
        self.batches = BatchPlan(plan.task.examples("train").lengths, self.order, clock.seed)

    def run(self) -> None:
        """Take the steps that are left; what is due after one is done before the next, and a request to stop last."""
        total = self.plan.clock.total
        self.evaluate_if_due()  # a stop may have cut this evaluation short
        while self.step < total:
            self.take_step()
            if due(self.step, self.log_every, total):
                self.check_finite()
                flush(self.report, self.techniques, self.engine)
                if self.histograms:
                    self.report.write_histograms(self.step, self.histograms.take())
            elif due(self.step, SETTLE_EVERY):
                self.check_finite()
            self.evaluate_if_due()
            if self.is_to_save():
                self.save()
            self.stop.check()
        self.checkpoints.drop_oldest()

    def finish(self) -> tuple[int, Evaluation]:
        """The step of what is exported, the last or that of the best checkpoint, and its evaluation."""
        if self.plan.phase.load_best_model_at_end:
            best = self.checkpoints.best_saved()
            if best:
                self._load(*best)
                distributed.info(f"{self.plan.phase.name}: the best checkpoint is {best[0]}: it is what is exported")
                return best[1].step, self.score(best[1].step)
            distributed.warn(
                f"{self.plan.phase.name}: no checkpoint was scored at its own step: the last step is taken"
            )
        # the answers are missing where an earlier run has recorded this evaluation
        return self.step, self.evaluation if self.evaluation.answers else self.score(self.step)

    def take_step(self) -> None:
        """Take a step, and note what became of it; a loss that is not finite ends the run where it shows."""
        try:
            self.step = train_step(self.objective, self.engine, self.batches, self.report, self.plan.clock.seed)
        except NonFiniteLossError:  # of a technique, which looks at weights that an earlier loss may have spoilt
            self.report.check_finite()
            raise
        if not self.engine.was_step_applied():
            self.report.check_finite()  # the engine has waited for the device already, to know whether to skip
        self.watch.after_step()

    def check_finite(self) -> None:
        """Raise NonFiniteLossError, on every rank, for the first step whose loss or, else, gradients are not finite."""
        self.report.check_finite(until=self.watch.spoilt_step())
        self.watch.check()

    def evaluate_if_due(self) -> None:
        """Score the model as it is now, record it, and tell a checkpoint of this step, unless that is done."""
        if self.evaluated == self.step or not due(self.step, self.eval_every, self.plan.clock.total):
            return
        self.check_finite()  # spoilt weights are not worth an evaluation
        evaluation = self.score(self.step)
        metric, scores = self.plan.phase.metric_for_best_model, evaluation.scores
        if metric and metric not in scores:
            raise UserError(f'metric_for_best_model is "{metric}"; the scores are {", ".join(scores)}: write one')
        self.report.write_scores(self.step, scores)
        self.evaluated = self.step
        self.evaluation = evaluation if self.step >= self.plan.clock.total else Evaluation(scores)
        if self.saved == self.step:  # by a stop in the midst of this evaluation
            self.checkpoints.write_scores(self.step, scores)

    def score(self, step: int) -> Evaluation:
        """Evaluate the weights of a step, with what techniques have to show beside the model.

        While training goes on, that is only what costs little.
        """

        def predict(batch: Batch) -> Any:
            self.stop.check()
            return self.engine(**batch.inputs)

        at_end = self.step >= self.plan.clock.total or self.plan.phase.load_best_model_at_end
        for technique in self.techniques:
            technique.on_step(step)
        self.engine.eval()
        views = [technique.views for technique in self.techniques if at_end or technique.cheap_views]
        batch_size = self.plan.phase.per_device_eval_batch_size
        cure = partial(memory.evaluation_cure, "per_device_eval_batch_size", batch_size, self.plan.engine_config)
        with self.report.paused(), told_if_out(" in an evaluation", partial(self.out_of_memory, cure)):
            evaluation = evaluate(predict, self.plan.task, batch_size, views)
        self.engine.train()
        return evaluation

    def is_to_save(self) -> bool:
        """Whether a checkpoint of this step is asked for: by `save_steps`, or for the last to compare with the best."""
        last = self.plan.clock.total if self.plan.phase.load_best_model_at_end else None
        return due(self.step, self.save_every, last)

    def save(self) -> None:
        """Write a checkpoint of this step, unless that is done, or the engine has gone back to the best one."""
        self.check_finite()  # before anything of such a step is kept
        if self.saved == self.step or self.step != self.engine.global_steps:
            return
        position = Position(
            step=self.step,
            examples=self.engine.global_samples,
            batch_size=self.engine.train_batch_size(),
            order=self.order,
            identity=self.identity,
            asked=self.is_to_save(),
            evaluated=self.evaluated,
            scores=self.evaluation.scores,
            report=self.report.state(),
            techniques=self.states(),
            total=self.plan.clock.total,
            phase=redacted(self.plan.phase.model_dump()),
        )
        with self.report.paused():
            if self.checkpoints.save(self.engine, position):
                self.saved = self.step

    def out_of_memory(self, cure: Callable[[], str]) -> str:
        """What a rank that runs out of memory says: how far it had come, what it held, and what to change."""
        held = memory.held(self.bytes, self.plan.engine_config)
        return f"That was after step {self.step} of phase {self.plan.phase.name}. {held} {cure()}"

    def states(self) -> dict[str, dict[str, Any]]:
        """The techniques' states by name; collective."""
        return {technique.name: technique.state() for technique in self.techniques}

    def _resume(self, checkpoint: Path, position: Position) -> None:
        """Go on from a checkpoint, with the hyperparameters that the files have now."""
        asked = engine.OptimizerSettings(self.engine)
        self._load(checkpoint, position)
        self.step = self.saved = position.step
        self.evaluated, self.order = position.evaluated, position.order
        self.evaluation = Evaluation(dict(position.scores))
        name = self.plan.phase.name
        distributed.info(f"{name}: resumed from {checkpoint}, at step {self.step}")
        changes = asked.put_back(self.engine)
        if changes:
            distributed.info(f"{name}: not as in the checkpoint, but as this run's files have it: {changes}")

    def _load(self, checkpoint: Path, position: Position) -> None:
        """Make the engine and the techniques what they were at a checkpoint."""
        self.checkpoints.load(self.engine, checkpoint, position)
        for technique in self.techniques:
            technique.resume(position.techniques[technique.name])


def train_step(objective: Objective, ds_engine: engine.Engine, batches: BatchPlan, report: Report, seed: int) -> int:
    """Take the engine's next optimizer step; gives the number of steps it has now taken."""
    step = ds_engine.global_steps
    seed_step(seed, step)
    for technique in objective.techniques:
        technique.on_step(step)
    draw = 1 + (hash((seed, step)) & (2**62 - 1))  # 0 is evaluation's
    seen = ds_engine.global_samples
    places = batches.between(seen, seen + ds_engine.train_batch_size())
    for batch, shares in micro_batches(objective.task, places, ds_engine, draw):
        loss, terms = objective(Forward(batch, ds_engine(**batch.inputs), step, shares))
        ds_engine.backward(loss)  # the engine scales the loss and divides by the accumulation steps
        ds_engine.step()  # and updates on the last micro-batch only
        report.add(step, terms, batch)
    return int(ds_engine.global_steps)


def flush(report: Report, techniques: Sequence[Technique], ds_engine: engine.Engine) -> None:
    """Write a record of the steps since the last one, with what the engine and the techniques read now."""
    distributed.bound_freed_memory()
    readings = [engine.readings(ds_engine), *(technique.readings() for technique in techniques)]
    report.flush(ds_engine.global_steps, {name: value for found in readings for name, value in found.items()})


def micro_batches(
    task: Task, positions: Positions, ds_engine: engine.Engine, draw: int
) -> Iterator[tuple[Batch, dict[Unit, float]]]:
    """This rank's micro-batches of one optimizer step, on its device, with `Forward.shares`.

    `positions` are those of the global batch; `draw` is as in `Task.collate`.
    """
    examples, world = task.examples("train"), distributed.world_size()
    accumulation = ds_engine.gradient_accumulation_steps()
    totals = task.counts(examples, positions)
    for rows in shard(positions, examples.lengths, distributed.rank(), world, accumulation):
        counts = task.counts(examples, rows).items()
        shares = {unit: count * world * accumulation / max(1, totals[unit]) for unit, count in counts}
        yield task.collate(examples, rows, draw).to(ds_engine.device), shares


def seed_step(seed: int, step: int) -> None:
    """Make the random state a function of run, step and rank: a resumed run draws what an uninterrupted one does."""
    torch.manual_seed(hash((seed, step, distributed.rank())) & (2**63 - 1))


def due(step: int, every: int, last: int | None = None) -> bool:
    """Whether something done every so many steps (0: never), and at the last, is to be done after `step` steps."""
    return (every > 0 and step % every == 0) or (last is not None and step >= last)
