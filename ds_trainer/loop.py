"""The training loop, the only one: the same for every task and every combination of techniques.

`train` reads from top to bottom. `train_step` is one optimizer step; everything that is done between two steps
(logging, evaluating, saving) is a method of `Training`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ds_trainer.deploy.export import export_trained
from ds_trainer.engine import engine, memory
from ds_trainer.engine.checkpoint import Checkpoints, CheckpointState
from ds_trainer.engine.histograms import Histograms
from ds_trainer.engine.numerics import StepWatch
from ds_trainer.files.redaction import redacted
from ds_trainer.files.writing import write_json
from ds_trainer.objective import Objective
from ds_trainer.phase import PhasePlan
from ds_trainer.ranks import distributed
from ds_trainer.ranks.failures import NonFiniteLossError, StoppedError, UserError
from ds_trainer.ranks.joining import out_of_memory_named
from ds_trainer.ranks.stopping import StopRequests
from ds_trainer.report.log import Report
from ds_trainer.tasks.data import BatchPlan, ExampleIds, shard
from ds_trainer.tasks.evaluation import Evaluation, evaluate
from ds_trainer.tasks.task import Batch, Forward, Task, Unit

SETTLE_EVERY = 100
"""Steps after which the loss terms that wait on the device are summed up, however far the next record is."""


def train(plan: PhasePlan, report: Report, checkpoints: Checkpoints, stop: StopRequests) -> dict[str, Any]:
    """Train one phase and export its model; returns the results of training, evaluation and export, on every rank.

    Raises StoppedError, once all that was trained is saved, where a rank was asked to stop.
    """
    training = Training(plan, report, checkpoints, stop)
    try:
        with training.explaining_memory(" in training", partial(memory.training_cure, plan.engine_config)):
            training.evaluate_if_due()  # a stop may have cut the evaluation of the resumed step short
            while training.progress.step < plan.clock.total:
                training.take_step()
                training.log_if_due()
                training.evaluate_if_due()
                training.save_if_due()
                stop.check()
            checkpoints.drop_oldest()
            step, evaluation = training.choose()
    except StoppedError as reason:
        raise training.stopped(reason) from None
    return training.finish(step, evaluation)


def train_step(objective: Objective, ds_engine: engine.Engine, batches: BatchPlan, report: Report, seed: int) -> int:
    """Take the engine's next optimizer step; returns how many steps it has now taken."""
    step = ds_engine.global_steps
    seed_step(seed, step)
    for technique in objective.techniques:
        technique.on_step(step)
    draw = 1 + (hash((seed, step)) & (2**62 - 1))  # 0 is evaluation's
    seen = ds_engine.global_samples
    indices = batches.between(seen, seen + ds_engine.train_batch_size())
    for batch, shares in micro_batches(objective.task, indices, ds_engine, draw):
        loss, terms = objective(Forward(batch, ds_engine(**batch.inputs), step, shares))
        ds_engine.backward(loss)  # the engine scales the loss and divides by the accumulation steps
        ds_engine.step()  # and updates on the last micro-batch only
        report.add(step, terms, batch)
    return int(ds_engine.global_steps)


def micro_batches(
    task: Task, indices: ExampleIds, ds_engine: engine.Engine, draw: int
) -> Iterator[tuple[Batch, dict[Unit, float]]]:
    """Yield this rank's micro-batches of one optimizer step, on its device, each with its `Forward.shares`.

    `indices` are the examples of the global batch; `draw` is as in `Task.collate`.
    """
    examples, world = task.examples("train"), distributed.world_size()
    accumulation = ds_engine.gradient_accumulation_steps()
    totals = task.counts(examples, indices)
    for rows in shard(indices, examples.lengths, distributed.rank(), world, accumulation):
        counts = task.counts(examples, rows).items()
        shares = {unit: count * world * accumulation / max(1, totals[unit]) for unit, count in counts}
        yield task.collate(examples, rows, draw).to(ds_engine.device), shares


def seed_step(seed: int, step: int) -> None:
    """Make the random state a function of run, step and rank, so that a resumed run draws what a whole one does."""
    torch.manual_seed(hash((seed, step, distributed.rank())) & (2**63 - 1))


@dataclass
class Progress:
    """How far a phase has come, in optimizer steps."""

    step: int = 0
    saved: int = 0
    """The step of the newest checkpoint."""
    evaluated: int = 0
    """The step of the last evaluation that was finished."""
    evaluation: Evaluation = field(default_factory=Evaluation)
    """The result of that evaluation. A resumed run has its scores alone, without the answers."""


class Training:
    """A phase under way: its engine, its objective, and how far it has come.

    Every step is logged, then evaluated, then saved; only then does the phase look for a request to stop. An evaluation
    also looks, between its batches: a run that was stopped there begins with that evaluation when it is resumed.
    """

    def __init__(self, plan: PhasePlan, report: Report, checkpoints: Checkpoints, stop: StopRequests) -> None:
        self.plan, self.report, self.checkpoints, self.stop = plan, report, checkpoints, stop
        self.progress = Progress()
        model, groups, self.objective = plan.prepare()
        self.bytes_held = plan.bytes_per_rank(model, groups)
        with self.explaining_memory(" as training started", partial(memory.training_cure, plan.engine_config)):
            self.engine = engine.start_engine(model, groups, plan.engine_config, plan.base, plan.lr_factor)
        self.identity = plan.identity(groups)
        self.order = plan.resumed[1].order if plan.resumed else self.engine.train_batch_size()
        if plan.resumed:
            self._resume(*plan.resumed)
        for technique in self.objective.techniques:
            technique.start(self.engine.device)
        logged = plan.resumed[1].report if plan.resumed else None
        report.open(self.progress.step, self.progress.evaluated, logged)
        self.histograms = Histograms(self.engine, plan.is_to_log) if plan.phase.histograms else None
        self.watch = StepWatch(self.engine, plan.phase.name, plan.phase.max_skipped_steps)
        self.batches = BatchPlan(plan.task.examples("train").lengths, self.order, plan.clock.seed)

    def take_step(self) -> None:
        """Take a step, and note what became of it; a loss that is not finite ends the run where it shows."""
        seed = self.plan.clock.seed
        try:
            self.progress.step = train_step(self.objective, self.engine, self.batches, self.report, seed)
        except NonFiniteLossError:  # raised by a technique that looks at weights, which an earlier loss may have spoilt
            self.report.check_finite()
            raise
        if not self.engine.was_step_applied():
            self.report.check_finite()  # costs nothing: the engine has waited for the device, to know whether to skip
        self.watch.after_step()

    def log_if_due(self) -> None:
        """Write a record of the steps since the last one, or sum up what waits on the device for a record far away."""
        if self.plan.is_to_log(self.progress.step):
            self.check_finite()
            flush(self.report, self.objective, self.engine)
            if self.histograms:
                self.report.write_histograms(self.progress.step, self.histograms.take())
        elif self.progress.step % SETTLE_EVERY == 0:
            self.check_finite()

    def evaluate_if_due(self) -> None:
        """Score the model as it is now, and record the scores, unless an earlier session has done so."""
        progress = self.progress
        if progress.evaluated == progress.step or not self.plan.is_to_evaluate(progress.step):
            return
        self.check_finite()  # spoilt weights are not worth an evaluation
        evaluation = self.score(progress.step)
        metric, scores = self.plan.phase.metric_for_best_model, evaluation.scores
        if metric and metric not in scores:
            raise UserError(f'metric_for_best_model is "{metric}"; the scores are {", ".join(scores)}: write one')
        self.report.write_scores(progress.step, scores)
        # answers are large, and only those of the last step are written
        last = progress.step >= self.plan.clock.total
        progress.evaluated, progress.evaluation = progress.step, evaluation if last else Evaluation(scores)
        if progress.saved == progress.step:  # by a stop in the midst of this evaluation
            self.checkpoints.write_scores(progress.step, scores)

    def save_if_due(self) -> None:
        if self.plan.is_to_save(self.progress.step):
            self.save()

    def save(self) -> None:
        """Write a checkpoint of this step, unless there is one, or the engine has gone back to the best one."""
        self.check_finite()  # before anything of such a step is kept
        progress = self.progress
        if progress.saved == progress.step or progress.step != self.engine.global_steps:
            return
        position = CheckpointState(
            step=progress.step,
            examples=self.engine.global_samples,
            batch_size=self.engine.train_batch_size(),
            order=self.order,
            identity=self.identity,
            asked=self.plan.is_to_save(progress.step),
            evaluated=progress.evaluated,
            scores=progress.evaluation.scores,
            report=self.report.state(),
            techniques=self.states(),
            total=self.plan.clock.total,
            phase=redacted(self.plan.phase.model_dump()),
        )
        with self.report.paused():
            if self.checkpoints.save(self.engine, position):
                progress.saved = progress.step

    def score(self, step: int) -> Evaluation:
        """Evaluate the weights of a step; while training goes on, only with those views that cost little."""

        def predict(batch: Batch) -> Any:
            self.stop.check()
            return self.engine(**batch.inputs)

        phase, techniques = self.plan.phase, self.objective.techniques
        at_end = self.progress.step >= self.plan.clock.total or phase.load_best_model_at_end
        batch_size, config = phase.per_device_eval_batch_size, self.plan.engine_config
        cure = partial(memory.evaluation_cure, "per_device_eval_batch_size", batch_size, config)
        for technique in techniques:
            technique.on_step(step)
        self.engine.eval()
        views = [technique.views for technique in techniques if at_end or technique.cheap_views]
        with self.report.paused(), self.explaining_memory(" in an evaluation", cure):
            evaluation = evaluate(predict, self.plan.task, batch_size, views)
        self.engine.train()
        return evaluation

    def choose(self) -> tuple[int, Evaluation]:
        """The step whose weights are exported, the last or that of the best checkpoint, and its evaluation."""
        name, progress = self.plan.phase.name, self.progress
        if self.plan.phase.load_best_model_at_end:
            best = self.checkpoints.best_saved()
            if best:
                self._load(*best)
                distributed.info(f"{name}: the model of the best checkpoint, {best[0]}, is exported")
                return best[1].step, self.score(best[1].step)
            distributed.warn(f"{name}: no checkpoint has a score of its own step, so the last step is exported")
        # the answers are missing where an earlier session has recorded this evaluation
        return progress.step, progress.evaluation if progress.evaluation.answers else self.score(progress.step)

    def _write_evaluation(self, evaluation: Evaluation) -> None:
        for name, value in evaluation.files(self.plan.task).items():
            write_json(self.plan.folder / "eval" / name, value)

    def finish(self, step: int, evaluation: Evaluation) -> dict[str, Any]:
        """Export the model of a step, stop the engine, and return the results of the phase."""
        plan = self.plan
        distributed.on_main(partial(self._write_evaluation, evaluation))
        totals = self.report.totals() | {"steps": step}
        results = {"train": totals, "eval": evaluation.scores, "trained_on": self.report.trained_on}
        rebuild = partial(plan.rebuild, self.states())
        for technique in self.objective.techniques:
            technique.stop()
        results |= export_trained(self.engine, rebuild, plan.task, step, plan.folder / "model", plan.change)
        engine.stop_engine(self.engine)
        return results

    def stopped(self, reason: StoppedError) -> StoppedError:
        """Save what was trained, stop the engine, and return the error that says how far the run has come."""
        self.save()
        engine.stop_engine(self.engine)
        progress, lost = self.progress, ""
        if progress.saved != progress.step:
            lost = "; the steps since the last checkpoint are lost"
        place = f"step {progress.step} of {self.plan.clock.total} of phase {self.plan.phase.name}"
        return StoppedError(f"stopped at {place}: {reason}{lost}")

    def check_finite(self) -> None:
        """Raise NonFiniteLossError, on every rank, for the first step whose loss or, else, gradients are not finite."""
        self.report.check_finite(until=self.watch.spoilt_step())
        self.watch.check()

    def states(self) -> dict[str, dict[str, Any]]:
        """The techniques' states by name; collective."""
        return {technique.name: technique.state() for technique in self.objective.techniques}

    def explaining_memory(self, where: str, cure: Callable[[], str]) -> AbstractContextManager[None]:
        """Inside, an error for lack of memory says how far the phase had come, what it held, and what to change."""

        def explanation() -> str:
            held = memory.held(self.bytes_held, self.plan.engine_config)
            return f"That was after step {self.progress.step} of phase {self.plan.phase.name}. {held} {cure()}"

        return out_of_memory_named(where, explanation)

    def _resume(self, checkpoint: Path, position: CheckpointState) -> None:
        """Go on from a checkpoint, with the hyperparameters that the files have now."""
        settings = engine.OptimizerSettings(self.engine)
        self._load(checkpoint, position)
        evaluation = Evaluation(dict(position.scores))
        self.progress = Progress(position.step, position.step, position.evaluated, evaluation)
        name = self.plan.phase.name
        distributed.info(f"{name}: resumed from {checkpoint}, at step {position.step}")
        loaded = engine.OptimizerSettings(self.engine)
        settings.restore(self.engine)
        changes = engine.OptimizerSettings(self.engine).changes_since(loaded)
        if changes:
            distributed.info(f"{name}: this run's files differ from the checkpoint, and win: {changes}")

    def _load(self, checkpoint: Path, position: CheckpointState) -> None:
        """Bring the engine and the techniques to the state of a checkpoint."""
        self.checkpoints.load(self.engine, checkpoint, position)
        for technique in self.objective.techniques:
            technique.resume(position.techniques[technique.name])


def flush(report: Report, objective: Objective, ds_engine: engine.Engine) -> None:
    """Write a record of the steps since the last one, with what the engine and the techniques read now."""
    distributed.bound_freed_memory()
    readings = engine.readings(ds_engine)
    for technique in objective.techniques:
        readings |= technique.readings()
    report.flush(ds_engine.global_steps, readings)
