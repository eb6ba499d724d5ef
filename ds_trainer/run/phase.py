"""A phase resolved: its model, task and techniques, its steps, its parameter groups, and what DeepSpeed is given.

`Phase` is what the user wrote. `PhaseModel` adds what its model is built from, which is all that reading a checkpoint
needs; `PhasePlan` adds what training needs; `PreparedPhase` has the model built.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from ds_trainer.engine.checkpoint import PARAMETER_GROUPS, TRAINING_DATA, Best, Checkpoint, Checkpoints, check_fits
from ds_trainer.engine.engine import Group, parameter_groups
from ds_trainer.engine.engine_file import Hyperparameters, resolve_engine_file, settled_numbers, settled_schedule
from ds_trainer.engine.keys import precision_of
from ds_trainer.files.redaction import redacted
from ds_trainer.files.run_folder import phase_folder
from ds_trainer.models.layers import set_dropout, set_recomputing
from ds_trainer.models.shrink import check_known
from ds_trainer.ranks import distributed
from ds_trainer.recipe.jobs import TrainJob
from ds_trainer.recipe.recipe import Phase, task_of
from ds_trainer.recipe.schedules import interval, lr_multiplier, steps_of
from ds_trainer.recipe.technique_specs import Techniques
from ds_trainer.run.objective import Objective
from ds_trainer.run.starting_models import StartingModels
from ds_trainer.tasks.data import steps_for
from ds_trainer.tasks.registry import build_task
from ds_trainer.tasks.task import Task
from ds_trainer.techniques.registry import build_techniques
from ds_trainer.techniques.technique import PhaseLength, Technique

EVAL_CURE = "Lower per_device_eval_batch_size or the task's max_seq_length."
TRAIN_CURE = (
    "Lower per_device_train_batch_size and raise gradient_accumulation_steps as much, set gradient_checkpointing in "
    "the phase, raise zero_optimization.stage, or lower the task's max_seq_length."
)
"""What to change where memory does not suffice."""


@dataclass(frozen=True)
class PhaseModel:
    """What the model of a phase is built from, to train it or to read a checkpoint of it, and how it is exported."""

    phase: Phase
    techniques: Techniques
    task: Task
    source: str
    """The model folder, or hub name, that the phase starts from."""
    length: PhaseLength

    def build(self) -> tuple[nn.Module, list[Technique]]:
        """Build the model as it starts, with its techniques attached; the same on every rank."""
        torch.manual_seed(self.length.seed)
        techniques = build_techniques(self.techniques, self.length, self.task)
        model = self.task.build_model(self.source)
        if self.phase.dropout is not None:
            set_dropout(model, self.phase.dropout)
        set_recomputing(model, self.phase.gradient_checkpointing)
        if self.phase.shrink:
            check_known(model)
        for technique in techniques:
            model = technique.attach(model)
        return model, techniques

    def rebuild(self, states: Mapping[str, Mapping[str, Any]]) -> tuple[nn.Module, list[Technique]]:
        """Rebuild the phase's model with the technique states of a checkpoint, given by the technique's name."""
        model, techniques = self.build()
        for technique in techniques:
            technique.resume(states[technique.name])
        return model, techniques


class PreparedPhase(NamedTuple):
    """The model of a phase with its techniques, its parameter groups and its loss, as the engine is to take them."""

    model: nn.Module
    groups: list[Group]
    objective: Objective


@dataclass(frozen=True)
class PhasePlan(PhaseModel):
    """A phase with all that its training needs: what DeepSpeed is given, where results go, and where it goes on."""

    engine_config: Mapping[str, Any]
    base: Hyperparameters
    folder: Path
    resumed: Checkpoint | None = None
    """The checkpoint to go on from."""

    def prepare(self) -> PreparedPhase:
        """Build all of the phase that needs no engine; the parameters that the rules freeze are frozen.

        Raises UserError for what does not go together.
        """
        model, techniques = self.build()
        rules = [rule for technique in techniques for rule in technique.parameter_rules(model)]
        rules.sort(key=lambda rule: rule.params == "*")  # one technique's "all the rest" must not win over another's
        groups = parameter_groups(model, self.phase.groups, rules, self.base)
        return PreparedPhase(model, groups, Objective(self.task, techniques, self.phase.loss))

    def identity(self, groups: Sequence[Group]) -> dict[str, Any]:
        """Return what a run must have in common with an earlier one to go on from its checkpoint; collective.

        The values are JSON values, and their keys are the words by which an error message names a difference.
        """
        return {
            **_starting_identity(self.phase),
            "the precision": precision_of(self.engine_config),
            "the seed": self.length.seed,
            TRAINING_DATA: self.task.key("train"),
            "the loss terms": sorted(self.phase.loss),
            "the techniques": sorted(name for name, spec in self.techniques if spec),
            PARAMETER_GROUPS: [group.identity for group in groups],
        }

    @property
    def written(self) -> dict[str, Any]:
        """The phase as the recipe has it, with its task, for the files of a run."""
        fields: dict[str, Any] = redacted(self.phase.model_dump() | {"task": self.task.spec.model_dump()})
        return fields

    @property
    def checkpoints(self) -> Checkpoints:
        """The phase's checkpoints in its folder, which may not exist yet; the best one is kept by its metric."""
        metric = self.phase.metric_for_best_model
        best = Best(metric, self.phase.prefers_more(metric, self.task.spec)) if metric else None
        return Checkpoints(self.folder, self.phase.save_total_limit, best)

    @property
    def lr_factor(self) -> Callable[[int], float]:
        """The function from the optimizer step to the factor on every group's rate."""
        kind, warmup = self.phase.lr_scheduler_type or "linear", self.phase.warmup_steps or 0
        return lr_multiplier(kind, warmup, self.length.total)

    @property
    def travel(self) -> float:
        """The sum of the learning rates of all steps: about the farthest that Adam moves a weight."""
        return self.base.lr * sum(map(self.lr_factor, range(self.length.total)))

    def is_to_log(self, step: int) -> bool:
        """Whether a record is due: also before every evaluation at which the phase may end early."""
        may_end = self.phase.early_stopping_patience is not None and self.is_to_evaluate(step)
        return self._due(self.phase.logging_steps, step) or may_end or step >= self.length.total

    def is_over(self, step: int, curve: Mapping[str, Sequence[float]]) -> bool:
        """Whether the phase has had all its steps, or its patience is at an end, by the scores of its evaluations."""
        patience, is_last = self.phase.early_stopping_patience, step >= self.length.total
        if is_last or patience is None:
            return is_last
        best = self.checkpoints.best
        return best is not None and best.waited(curve) >= patience

    def is_to_evaluate(self, step: int) -> bool:
        return self._due(self.phase.eval_steps, step) or step >= self.length.total

    def is_to_save(self, step: int) -> bool:
        """Whether the recipe wants a checkpoint of this step: by `save_steps`, or to compare the last with the best."""
        last = self.phase.load_best_model_at_end and step >= self.length.total
        return self._due(self.phase.save_steps, step) or last

    def _due(self, every: float | None, step: int) -> bool:
        steps = interval(every, self.length.total)
        return steps > 0 and step % steps == 0


def plan_phase(job: TrainJob, phase: Phase, models: StartingModels, resumed: Checkpoint | None = None) -> PhasePlan:
    """Resolve a phase: the models that it starts from and learns from, its task, its steps, its engine file.

    A phase that goes on from a checkpoint takes the remaining epochs, at the batch size of this run. Raises UserError.
    """
    if resumed:  # before the model that the checkpoint goes on from is replaced by another
        check_fits(resumed, _starting_identity(phase))
    source, techniques = models.start(phase), models.techniques(phase)
    recipe, world = job.recipe, job.world or distributed.world_size()
    task = build_task(task_of(phase, recipe), source, recipe.cache_dir)
    numbers = settled_numbers(job.engine_config, phase, world)
    taken, seen = (resumed.step, resumed.examples) if resumed else (0, 0)
    remaining = steps_for(phase.num_train_epochs or 0, len(task.examples("train")), numbers.train_batch_size, seen)
    total = phase.max_steps or taken + max(0, remaining)
    folder = folder_of(phase, job)
    phase = phase.model_copy(update=settled_schedule(job.engine_config, phase))
    length = PhaseLength(total, steps_of(phase.warmup_steps or 0, total), recipe.seed)
    sizes = {"hidden_size": task.hidden_size, "total_steps": total, "warmup_steps": length.warmup}
    config = resolve_engine_file(job.engine_config, phase, world, **sizes)
    plan = PhasePlan(phase, techniques, task, source, length, config, numbers.optimizer, folder, resumed)
    if resumed:
        check_fits(resumed, plan.identity(plan.prepare().groups), plan.written)
        before, now = resumed.batch_size, numbers.train_batch_size
        if before != now:
            distributed.warn(
                f"{phase.name}: train_batch_size was {before} up to step {resumed.step} and is now {now}: the "
                f"phase ends at step {total}, and its schedules follow"
            )
    return plan


def _starting_identity(phase: Phase) -> dict[str, Any]:
    """Return the part of `PhasePlan.identity` that says how the model is made that the phase starts from."""
    specs = {"the student": phase.student, "the cut": phase.cut}
    return {name: spec and spec.model_dump() for name, spec in specs.items()}


def folder_of(phase: Phase, job: TrainJob) -> Path:
    """Return where a phase writes."""
    return phase_folder(job.output, [each.name for each in job.recipe.phases], phase.name)
