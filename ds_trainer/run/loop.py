"""The training loop, the only one: the same for every task and every combination of techniques.

`train` reads from top to bottom: `start_training` says what happens before the first step, `train_step` is one
optimizer step, and whatever is done between two steps (logging, evaluating, saving) is a method of `Training`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from ds_trainer.deploy.export import export_trained
from ds_trainer.engine import engine
from ds_trainer.engine.checkpoint import Checkpoint, load, recipe_changes
from ds_trainer.engine.engine import Engine
from ds_trainer.engine.numerics import StepWatch
from ds_trainer.ranks import distributed
from ds_trainer.ranks.failures import NonFiniteLossError, StoppedError, UserError
from ds_trainer.ranks.joining import out_of_memory_named
from ds_trainer.ranks.stopping import StopRequests
from ds_trainer.report.log import RunLog
from ds_trainer.run.forwards import forwards
from ds_trainer.run.objective import Objective
from ds_trainer.run.phase import EVAL_CURE, TRAIN_CURE, PhasePlan
from ds_trainer.tasks.data import BatchPlan, ExampleIds, shard
from ds_trainer.tasks.evaluation import Evaluation, evaluate
from ds_trainer.tasks.task import Batch, Forward, Task, Unit

SETTLE_EVERY = 100
"""The steps after which the loss terms that wait on the device are summed up, however far the next record is."""


def train(plan: PhasePlan, log: RunLog, stop: StopRequests) -> dict[str, Any]:
    """Train one phase and export its model; return the results of training, evaluation and export, on every rank.

    When a rank is asked to stop, all ranks save what was trained so far and raise StoppedError.
    """
    training = start_training(plan, log, stop)
    try:
        with _explaining_memory(plan, training.progress, " in training", TRAIN_CURE):
            training.evaluate_if_due()  # a stop may have cut the evaluation of the resumed step short
            while not training.is_over:
                training.take_step()
                training.log_if_due()
                training.evaluate_if_due()
                if plan.is_to_save(training.progress.step):
                    training.save()
                stop.check()
            plan.checkpoints.drop_oldest()
            step, evaluation = training.choose()
    except StoppedError as reason:
        raise training.save_and_end(reason) from None
    return training.finish(step, evaluation)


def start_training(plan: PhasePlan, log: RunLog, stop: StopRequests) -> Training:
    """Bring a phase to where its next step begins: step 0, or the step of the checkpoint that it goes on from.

    The order matters. The engine takes the model with the techniques attached. The checkpoint is loaded before the
    techniques start, so that they find what an earlier session has measured and do not measure it again. `StepWatch`
    comes after it, since loading may replace the engine's loss scaler.
    """
    model, groups, objective = plan.prepare()
    resumed, progress = plan.resumed, Progress()
    if resumed:
        evaluation = Evaluation(dict(resumed.scores))  # the answers are not saved
        progress = Progress(resumed.step, resumed.step, resumed.evaluated, evaluation, resumed.curve)
    with _explaining_memory(plan, progress, " as training started", TRAIN_CURE):
        ds_engine = engine.start_engine(model, groups, plan.engine_config, plan.base, plan.lr_factor)
        if resumed:
            _resume(plan, resumed, ds_engine, objective)
        for technique in objective.techniques:
            technique.start(ds_engine.device)
    log.open(progress.step, progress.evaluated, resumed.report if resumed else None)
    order = resumed.order if resumed else ds_engine.train_batch_size()
    return Training(
        plan=plan,
        log=log,
        stop=stop,
        objective=objective,
        engine=ds_engine,
        batches=BatchPlan(plan.task.examples("train").lengths, order, plan.length.seed),
        watch=StepWatch(ds_engine, plan.phase.name, plan.phase.max_skipped_steps),
        identity=plan.identity(groups),
        progress=progress,
    )


def train_step(objective: Objective, ds_engine: Engine, indices: ExampleIds, log: RunLog, seed: int) -> int:
    """Take the engine's next optimizer step, on these examples; return how many steps it has now taken."""
    step = ds_engine.global_steps
    # the random state is a function of run, step and rank, so that a resumed run draws what a whole one does
    torch.manual_seed(hash((seed, step, distributed.rank())) & (2**63 - 1))
    for technique in objective.techniques:
        technique.on_step(step)
    draw = 1 + (hash((seed, step)) & (2**62 - 1))  # draw 0 is reserved for evaluation
    batches = micro_batches(objective.task, indices, ds_engine, draw)
    for batch, out, shares in forwards(objective.task, batches, indices, ds_engine, hash((seed, step))):
        loss, terms = objective(Forward(batch, out, step, shares))
        ds_engine.backward(loss)  # the engine scales the loss and divides by the accumulation steps
        ds_engine.step()  # and updates on the last micro-batch only
        log.add(step, terms, batch)
    return int(ds_engine.global_steps)


def micro_batches(
    task: Task, indices: ExampleIds, ds_engine: Engine, draw: int
) -> Iterator[tuple[Batch, dict[Unit, float]]]:
    """Yield this rank's micro-batches of one optimizer step, on its device, each with its `Forward.shares`.

    `indices` are the examples of the global batch; `draw` is as in `Task.collate`.
    """
    examples, world = task.examples("train"), distributed.world_size()
    accumulation = ds_engine.gradient_accumulation_steps()
    totals = task.counts(examples, indices)
    for rows in shard(indices, examples.lengths, distributed.rank(), world, accumulation):
        counts = task.counts(examples, rows).items()
        shares = {unit: count * world * accumulation / (totals[unit] or 1) for unit, count in counts}
        yield task.collate(examples, rows, draw).to(ds_engine.device), shares


@dataclass
class Progress:
    """How far a phase has come, in optimizer steps."""

    step: int = 0
    saved: int = 0
    """The step of the newest checkpoint."""
    evaluated: int = 0
    """The step of the last evaluation that was finished."""
    evaluation: Evaluation = field(default_factory=Evaluation)
    """The result of that evaluation. After a resume it has the scores alone, without the answers."""
    curve: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """As in `Checkpoint`."""


@dataclass
class Training:
    """A phase under way: its engine, its objective, and how far it has come. `start_training` makes it.

    Every step is logged, then evaluated, then saved; only then does the phase look for a request to stop. An evaluation
    also looks for one, between its batches. A run that was stopped there begins with that evaluation when it resumes.
    """

    plan: PhasePlan
    log: RunLog
    stop: StopRequests
    objective: Objective
    engine: Engine
    batches: BatchPlan
    watch: StepWatch
    identity: Mapping[str, Any]
    """What a run that goes on from this one's checkpoints must have in common with it."""
    progress: Progress

    @property
    def is_over(self) -> bool:
        return self.plan.is_over(self.progress.step, self.progress.curve)

    def take_step(self) -> None:
        """Take a step, and note what became of it; a loss that is not finite ends the run where it shows."""
        seed, seen = self.plan.length.seed, self.engine.global_samples
        indices = self.batches.between(seen, seen + self.engine.train_batch_size())
        try:
            self.progress.step = train_step(self.objective, self.engine, indices, self.log, seed)
        except NonFiniteLossError:  # raised by a technique that looks at weights, which an earlier loss may have spoilt
            self.log.check_finite()
            raise
        if not self.engine.was_step_applied():
            self.log.check_finite()  # costs nothing: the engine has waited for the device, to know whether to skip
        self.watch.after_step()

    def log_if_due(self) -> None:
        """Write a log record if one is due; else, every SETTLE_EVERY steps, sum up the terms that are on the device."""
        if self.plan.is_to_log(self.progress.step):
            self.check_finite()
            flush(self.log, self.objective, self.engine)
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
            self.save()  # the corrected recipe goes on from here
            raise UserError(f'metric_for_best_model is "{metric}"; the scores are {", ".join(scores)}: write one')
        self.log.write_scores(progress.step, scores)
        # answers are large, and only those of the last step are written
        last = progress.step >= self.plan.length.total
        progress.evaluated, progress.evaluation = progress.step, evaluation if last else Evaluation(scores)
        if metric:
            progress.curve = {metric: [*progress.curve.get(metric, ()), scores[metric]]}
        if self.is_over and not last:
            self.log.write(progress.step, {"train/stopped_early": 1})
            distributed.info(
                f"{self.plan.phase.name}: ends early at step {progress.step} of {self.plan.length.total}: {metric} was "
                f"best {self.plan.phase.early_stopping_patience} evaluations before"
            )
        if progress.saved == progress.step:  # a stop during this evaluation has saved the checkpoint without its scores
            self.plan.checkpoints.write_scores(progress.step, scores, progress.curve)

    def save(self) -> None:
        """Write a checkpoint of this step, unless there is one, or the engine has gone back to the best one."""
        self.check_finite()  # before anything of such a step is kept
        progress = self.progress
        if progress.saved == progress.step or progress.step != self.engine.global_steps:
            return
        position = {
            "examples": self.engine.global_samples,
            "batch_size": self.engine.train_batch_size(),
            "order": self.batches.batch_size,
            "identity": self.identity,
            "asked": self.plan.is_to_save(progress.step),
            "evaluated": progress.evaluated,
            "scores": progress.evaluation.scores,
            "curve": progress.curve,
            "report": self.log.state(),
            "techniques": self.technique_states(),
            "total": self.plan.length.total,
            "phase": self.plan.written,
        }
        with self.log.paused():
            if self.plan.checkpoints.save(self.engine, progress.step, position):
                progress.saved = progress.step

    def score(self, step: int) -> Evaluation:
        """Evaluate the weights of a step; while training goes on, only with those views that cost little."""

        def predict(batch: Batch) -> Any:
            self.stop.check()
            return self.engine(**batch.inputs)

        phase, techniques = self.plan.phase, self.objective.techniques
        at_end = self.is_over or phase.load_best_model_at_end
        batch_size = phase.per_device_eval_batch_size
        for technique in techniques:
            technique.on_step(step)
        self.engine.eval()
        views = [technique.views for technique in techniques if at_end or technique.cheap_views]
        with self.log.paused(), _explaining_memory(self.plan, self.progress, " in an evaluation", EVAL_CURE):
            evaluation = evaluate(predict, self.plan.task, batch_size, views)
        self.engine.train()
        return evaluation

    def choose(self) -> tuple[int, Evaluation]:
        """Return the step whose weights are exported, the last or that of the best checkpoint, and its evaluation."""
        name, progress = self.plan.phase.name, self.progress
        if self.plan.phase.load_best_model_at_end:
            best = self.plan.checkpoints.best_saved()
            if best:
                _load(best, self.engine, self.objective)
                distributed.info(f"{name}: the model of the best checkpoint, {best.path}, is exported")
                return best.step, self.score(best.step)
            distributed.warn(f"{name}: no checkpoint has a score of its own step, so the last step is exported")
        # the answers are missing where an earlier session has recorded this evaluation
        return progress.step, progress.evaluation if progress.evaluation.answers else self.score(progress.step)

    def finish(self, step: int, evaluation: Evaluation) -> dict[str, Any]:
        """Export the model of a step, stop the engine, and return the results of the phase."""
        plan = self.plan
        evaluation.write(plan.task, plan.folder / "eval")
        totals = self.log.totals() | {"steps": step}
        if self.progress.step < plan.length.total:
            totals["stopped_early_at"] = self.progress.step
        results: dict[str, Any] = {"train": totals, "eval": evaluation.scores, "warnings": evaluation.warnings}
        results["trained_on"] = self.log.trained_on
        rebuild = partial(plan.rebuild, self.technique_states())
        for technique in self.objective.techniques:
            technique.stop()
        results |= export_trained(self.engine, rebuild, plan.task, step, plan.folder / "model", plan.phase.shrink)
        engine.stop_engine(self.engine)
        return results

    def save_and_end(self, reason: StoppedError) -> StoppedError:
        """Save what was trained, stop the engine, and return the error that says how far the run has come."""
        self.save()
        engine.stop_engine(self.engine)
        progress = self.progress
        lost = "" if progress.saved == progress.step else "; the steps since the last checkpoint are lost"
        place = f"step {progress.step} of {self.plan.length.total} of phase {self.plan.phase.name}"
        return StoppedError(f"stopped at {place}: {reason}{lost}")

    def check_finite(self) -> None:
        """Raise NonFiniteLossError on every rank if the loss or the gradients of a step were not finite.

        The error names the first such step, and its loss if that is not finite, since it is the cause then.
        """
        self.log.check_finite(until=self.watch.spoilt_step())
        self.watch.check()

    def technique_states(self) -> dict[str, dict[str, Any]]:
        """Return what a checkpoint holds of each technique, by its name; collective."""
        return {technique.name: technique.state() for technique in self.objective.techniques}


def flush(log: RunLog, objective: Objective, ds_engine: Engine) -> None:
    """Write a record of the steps since the last one, with what the engine and the techniques read now."""
    distributed.bound_freed_memory()
    readings = engine.readings(ds_engine)
    for technique in objective.techniques:
        readings |= technique.readings()
    log.flush(ds_engine.global_steps, readings)


def _resume(plan: PhasePlan, checkpoint: Checkpoint, ds_engine: Engine, objective: Objective) -> None:
    """Load a checkpoint, and put back the hyperparameters of this run's files, which loading has overwritten."""
    of_files = engine.OptimizerSettings(ds_engine)
    _load(checkpoint, ds_engine, objective)
    of_files.restore(ds_engine)
    distributed.info(f"{plan.phase.name}: resumed from {checkpoint.path}, at step {checkpoint.step}")
    if changes := recipe_changes(checkpoint, plan.written):
        distributed.info(f"{plan.phase.name}: the recipe differs from the checkpoint's, and wins: {changes}")


def _load(checkpoint: Checkpoint, ds_engine: Engine, objective: Objective) -> None:
    """Bring the engine and the techniques to the state of a checkpoint."""
    load(ds_engine, checkpoint)
    for technique in objective.techniques:
        technique.resume(checkpoint.techniques[technique.name])


def _explaining_memory(plan: PhasePlan, progress: Progress, where: str, cure: str) -> AbstractContextManager[None]:
    """Let an error for lack of memory inside say how far the phase had come, and what to change."""
    return out_of_memory_named(where, lambda: f"That was after step {progress.step} of phase {plan.phase.name}. {cure}")
