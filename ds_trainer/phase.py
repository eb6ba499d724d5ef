"""A phase resolved: its model, task and techniques, its steps, its parameter groups, and what DeepSpeed is given."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ds_trainer.config.jobs import TrainJob
from ds_trainer.config.recipe import Phase, Techniques, task_of
from ds_trainer.config.schedules import interval, lr_multiplier, steps_of
from ds_trainer.deploy.export import Change, as_it_is, cut_where_empty
from ds_trainer.engine import engine
from ds_trainer.engine.checkpoint import Best, Checkpoints, CheckpointState, check_fits
from ds_trainer.engine.engine_file import resolve_engine_file, scheduler_mistakes, settled_numbers
from ds_trainer.engine.keys import precision_of
from ds_trainer.engine.optim import Group, Hyperparameters, parameter_groups
from ds_trainer.models.shrink import check_known
from ds_trainer.objective import Objective
from ds_trainer.ranks import distributed
from ds_trainer.ranks.failures import UserError
from ds_trainer.tasks.data import steps_for
from ds_trainer.tasks.registry import build_task
from ds_trainer.tasks.task import Task
from ds_trainer.techniques.registry import build_techniques
from ds_trainer.techniques.technique import Clock, Technique

_MIXING_OPTIMIZERS = {"muon", "onebitadam", "onebitlamb", "zerooneadam"}
"""Optimizers, in lower case as DeepSpeed reads them, that move a weight by the gradients of other weights."""


@dataclass(frozen=True)
class PhaseModel:
    """What the model of a phase is built from, to train it or to read a checkpoint of it, and how it is exported."""

    phase: Phase
    techniques: Techniques
    task: Task
    source: str
    """The model folder, or hub name, that the phase starts from."""
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
        """Build the model as it starts, with its techniques attached; the same on every rank."""
        torch.manual_seed(self.clock.seed)
        techniques = build_techniques(self.techniques, self.clock, self.task)
        model = self.task.build_model(self.source)
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


@dataclass(frozen=True)
class PhasePlan(PhaseModel):
    """A phase with everything resolved that its training needs: what DeepSpeed is given, and where results go."""

    engine_config: Mapping[str, Any]
    base: Hyperparameters
    folder: Path
    resumed: tuple[Path, CheckpointState] | None = None
    """The checkpoint to go on from, and its contents."""

    def prepare(self) -> tuple[nn.Module, list[Group], Objective]:
        """Build all of the phase that a user can get wrong, before the engine takes it. Raises UserError."""
        model, techniques = self.build()
        return model, self.groups(model, techniques), Objective(self.task, techniques, self.phase.loss)

    def groups(self, model: nn.Module, techniques: Sequence[Technique]) -> list[Group]:
        """Group the model's parameters, and freeze those that the rules freeze.

        Raises UserError where the engine file's scheduler would set one rate on groups of different ones.
        """
        rules = [rule for technique in techniques for rule in technique.parameter_rules(model)]
        rules.sort(key=lambda rule: rule.params == "*")  # one technique's "all the rest" must not win over another's
        groups = parameter_groups(model, self.phase.groups, rules, self.base)
        mistakes = scheduler_mistakes(dict(self.engine_config), [group.learning_rate for group in groups])
        if mistakes:
            raise UserError("\n".join(mistakes))
        return groups

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
        """What a rank will hold of the model and its groups, as `engine.bytes_per_rank` counts it."""
        trained = sum(group.size for group in groups)
        frozen = sum(p.numel() for p in model.parameters()) - trained
        return engine.bytes_per_rank(trained, frozen, self.engine_config, distributed.world_size())

    @property
    def lr_factor(self) -> Callable[[int], float]:
        """The factor on every group's rate, by optimizer step."""
        return lr_multiplier(self.phase.lr_scheduler_type, self.clock.warmup, self.clock.total)

    def is_to_log(self, step: int) -> bool:
        return self._due(self.phase.logging_steps, step) or step >= self.clock.total

    def is_to_evaluate(self, step: int) -> bool:
        return self._due(self.phase.eval_steps, step) or step >= self.clock.total

    def is_to_save(self, step: int) -> bool:
        """Whether the recipe wants a checkpoint of this step: by `save_steps`, or to compare the last with the best."""
        last = self.phase.load_best_model_at_end and step >= self.clock.total
        return self._due(self.phase.save_steps, step) or last

    def _due(self, every: float | None, step: int) -> bool:
        steps = interval(every, self.clock.total)
        return steps > 0 and step % steps == 0


def plan_phase(
    job: TrainJob,
    phase: Phase,
    source: str,
    teacher: str | None = None,
    resumed: tuple[Path, CheckpointState] | None = None,
) -> PhasePlan:
    """Resolve a phase that starts from the model folder `source`: its task, its steps, its engine file.

    A phase that goes on from a checkpoint takes the remaining epochs, at the batch size of this run. Raises UserError.
    """
    recipe, world = job.recipe, distributed.world_size()
    task = build_task(task_of(phase, recipe), source, recipe.cache_dir)
    numbers = settled_numbers(job.engine_config, phase, world)
    total = phase.max_steps or _steps_of_epochs(phase, len(task.examples("train")), numbers.train_batch_size, resumed)
    clock = Clock(total, steps_of(phase.warmup_steps, total), recipe.seed)
    config = resolve_engine_file(
        job.engine_config,
        phase,
        world,
        hidden_size=task.hidden_size(source),
        total_steps=total,
        warmup_steps=clock.warmup,
    )
    if phase.techniques.keep_zeros:
        _check_is_elementwise(config.get("optimizer", {}).get("type", ""))
    techniques = phase.techniques.taught_by(teacher)
    plan = PhasePlan(phase, techniques, task, source, clock, config, numbers.optimizer, folder_of(phase, job), resumed)
    if resumed:
        check_fits(*resumed, plan.identity(plan.prepare()[1]))
        before, now = resumed[1].batch_size, numbers.train_batch_size
        if before != now:
            distributed.warn(
                f"{phase.name}: train_batch_size was {before} up to step {resumed[1].step} and is now {now}: the phase "
                f"ends at step {total}, and its schedules follow"
            )
    return plan


def folder_of(phase: Phase, job: TrainJob) -> Path:
    """Where a phase writes: the last one into the output folder itself, the others into a folder of their name."""
    return job.output if phase is job.recipe.phases[-1] else job.output / phase.name


def checkpoints_of(phase: Phase, job: TrainJob) -> Checkpoints:
    best = Best(phase.metric_for_best_model, phase.greater_is_better) if phase.metric_for_best_model else None
    return Checkpoints(folder_of(phase, job), phase.save_total_limit, best)


def _steps_of_epochs(phase: Phase, examples: int, batch_size: int, resumed: tuple[Path, CheckpointState] | None) -> int:
    """The steps of the whole phase, of which those up to the checkpoint may have had another batch size."""
    step, seen = (resumed[1].step, resumed[1].examples) if resumed else (0, 0)
    return step + max(0, steps_for(phase.num_train_epochs or 0, examples, batch_size, seen))


def _check_is_elementwise(optimizer: str) -> None:
    """Refuse optimizers that move a weight whose own gradient is zero."""
    if optimizer.lower() in _MIXING_OPTIMIZERS:
        raise UserError(
            f"keep_zeros: optimizer.type is {optimizer}, whose steps are not made weight by weight, so zeros would not "
            f"stay: use AdamW, Adam, Adagrad or SGD"
        )
