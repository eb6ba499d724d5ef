"""One trial of `launch/tune.py`: a phase's own steps under one engine file, timed, with the memory that they take.

The steps are the loop's, with the phase's techniques, on its own examples: first the longest, then batches from evenly
spaced places in the order of their lengths, so that they stand for an epoch. Every second round is timed as the last
steps of the phase, when masks are at their final density. Models of earlier phases are untrained.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from statistics import fmean, median
from typing import Any

import numpy as np
import torch

from ds_trainer.config.jobs import TrainJob, TrialRequest
from ds_trainer.config.recipe import Phase, task_of
from ds_trainer.engine import engine
from ds_trainer.engine.rehearsal import without_monitors
from ds_trainer.files.writing import write_json
from ds_trainer.loop import train_step
from ds_trainer.phase import PhasePlan, plan_phase
from ds_trainer.ranks import distributed, machine
from ds_trainer.ranks.joining import joined
from ds_trainer.ranks.timing import seconds
from ds_trainer.rehearsal import batches_by_length, memory_of
from ds_trainer.report.log import RunLog
from ds_trainer.starting_models import RehearsedModels
from ds_trainer.tasks.data import ExampleIds
from ds_trainer.tasks.registry import build_task

_LEAST_ROUNDS = 2
_HOPELESS = 1.5
"""A trial stops after a round that took so many times the seconds of the best one."""


def run_trial(job: TrainJob, request: TrialRequest) -> None:
    """Measure a phase as the request says, and write the results on rank 0."""
    with joined(job.timeout):
        plan = _plan_of(job, request)
        results = _timed(plan, request) if request.measure == "steps" else _foundations(job, plan, request)
        distributed.on_main(partial(write_json, request.results, results))


def _plan_of(job: TrainJob, request: TrialRequest) -> PhasePlan:
    """Resolve the phase of a trial, with the models that it and those before it start from."""
    models = RehearsedModels(job.recipe, request.models)
    phase: Phase
    for phase in job.recipe.phases:
        if phase.name == request.phase:
            break
        models.add(phase.name, models.start(phase))
    return plan_phase(job, phase, models)


def _foundations(job: TrainJob, plan: PhasePlan, request: TrialRequest) -> dict[str, Any]:
    """Return what holds for all trials: the data of all phases, the hardware and the versions, and memory if wanted."""
    recipe = job.recipe
    tasks = [build_task(task_of(phase, recipe), plan.source, recipe.cache_dir) for phase in recipe.phases]
    task, gpus = plan.task, torch.cuda.device_count()
    facts = {
        "gpus": gpus,
        "data": [each.key("train") for each in tasks],
        "held_out": len(task.examples(task.held_out_split)) if getattr(task.spec, "held_out", 0) else 0,
        "machine": machine.session() | {"cores": len(os.sched_getaffinity(0))},
    }
    if request.measure == "facts":
        return facts
    return facts | {
        "memory": asdict(memory_of(plan)),
        "hidden_size": task.hidden_size,
        "bytes_of_a_gpu": torch.cuda.mem_get_info()[1] if gpus else 0,
    }


def _timed(plan: PhasePlan, request: TrialRequest) -> dict[str, Any]:
    """Time the phase's steps under its engine file, without the monitors that the file may have."""
    model, groups, objective = plan.prepare()
    machine.peak_memory()  # the peak is from now on that of the training
    config = without_monitors(plan.engine_config)
    ds_engine = engine.start_engine(model, groups, config, plan.base, plan.lr_factor)
    for technique in objective.techniques:
        technique.rehearse(ds_engine.device)
    lengths, folder = plan.task.examples("train").lengths, request.results.parent
    distributed.on_main(partial(folder.mkdir, parents=True, exist_ok=True))
    with RunLog(folder, plan.phase.name, plan.length.total, plan.phase.loss, False, len(lengths)) as log:
        log.open(0, 0)

        def take(batch: ExampleIds, step: int) -> float:
            ds_engine.global_steps = step
            call = partial(train_step, objective, ds_engine, batch, log, plan.length.seed)
            return seconds(call, ds_engine.device)

        longest, *typical = trial_batches(lengths, ds_engine.train_batch_size(), request.batches)
        for batch in (longest, *typical):
            take(batch, 0)
        first_steps = (0, max(0, plan.length.total - len(typical)))
        rounds = list(_rounds(take, typical, first_steps, request))
        log.check_finite()
    peaks = machine.peak_memory()
    rows = distributed.numbers_of_all(list(peaks.values()))
    halves = [half for half in (rounds[::2], rounds[1::2]) if half]  # early steps, and those at the final density
    medians = [[median(times) for times in zip(*half, strict=True)] for half in halves]
    results = {
        "examples": ds_engine.train_batch_size(),
        "seconds": [fmean(times) for times in zip(*medians, strict=True)],
        "rounds": len(rounds),
        "stopped_early": len(rounds) == 1,
        "peaks": {kind: max(column) for kind, column in zip(peaks, zip(*rows, strict=True), strict=True)},
    }
    engine.stop_engine(ds_engine)
    return results


def _rounds(
    take: Callable[[ExampleIds, int], float],
    batches: Sequence[ExampleIds],
    first_steps: Sequence[int],
    request: TrialRequest,
) -> Iterator[list[float]]:
    """Yield the seconds of each batch in one round after the other, on every rank those of rank 0.

    `take` takes a step, of a number, on a batch. Rounds begin with the numbers in `first_steps` in turn. A first round
    that is much slower than the best trial is the only one.
    """
    in_all, index = 0.0, 0
    while index < _LEAST_ROUNDS or in_all < request.seconds:
        first = first_steps[index % len(first_steps)]
        times = [distributed.broadcast(take(batch, first + place)) for place, batch in enumerate(batches)]
        yield times
        if not index and request.seconds_to_beat and sum(times) > _HOPELESS * request.seconds_to_beat:
            return
        in_all, index = in_all + sum(times), index + 1


def trial_batches(lengths: np.ndarray[Any, Any], size: int, count: int) -> list[ExampleIds]:
    """Return the batch of the longest examples, then `count` batches from evenly spaced places in their order.

    A place's batch has examples of like lengths, as training's batches have (`BatchPlan`). A training set that is
    smaller than a batch is repeated.
    """
    longest = np.resize(np.argsort(-lengths, kind="stable"), max(size, len(lengths)))[:size]
    return [longest, *batches_by_length(lengths, size, count)]
