"""One trial of `launch/tune.py`: a phase's own steps under one engine file, timed, with the memory that they take.

The steps are the loop's, with the phase's techniques, on its own examples: first the longest, then batches from evenly
spaced places in the order of their lengths, so that they stand for an epoch. They are numbered as steps in the middle
of the phase, where every technique is at work. Models of earlier phases are untrained.
"""

import os
from dataclasses import asdict
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import torch

from ds_trainer.engine import engine
from ds_trainer.files.writing import write_json
from ds_trainer.ranks import distributed, machine
from ds_trainer.ranks.joining import joined
from ds_trainer.ranks.machine import seconds
from ds_trainer.recipe.jobs import TrainJob, TrialRequest
from ds_trainer.recipe.recipe import Phase, task_of
from ds_trainer.report.log import RunLog
from ds_trainer.run.loop import train_step
from ds_trainer.run.phase import PhasePlan, plan_phase
from ds_trainer.run.rehearsal import batches_by_length, memory_of
from ds_trainer.run.starting_models import RehearsedModels
from ds_trainer.tasks.data import ExampleIds
from ds_trainer.tasks.registry import build_task


def run_trial(job: TrainJob, request: TrialRequest) -> None:
    """Measure a phase as the request says, and write the results on rank 0."""
    with joined(job.timeout):
        models = RehearsedModels(job.recipe, request.models)
        phase: Phase
        for phase in job.recipe.phases:
            if phase.name == request.phase:
                break
            models.add(phase.name, models.start(phase))
        plan = plan_phase(job, phase, models)
        results = _timed(plan, request) if request.seconds else _foundations(job, plan)
        distributed.on_main(partial(write_json, request.results, results))


def _foundations(job: TrainJob, plan: PhasePlan) -> dict[str, Any]:
    """Return what holds for all trials: memory, the data of all phases, the hardware and the versions."""
    recipe, task, gpus = job.recipe, plan.task, torch.cuda.device_count()
    tasks = [build_task(task_of(phase, recipe), plan.source, recipe.cache_dir) for phase in recipe.phases]
    return {
        "gpus": gpus,
        "bytes_of_a_gpu": torch.cuda.mem_get_info()[1] if gpus else 0,
        "hidden_size": task.hidden_size,
        "held_out": len(task.examples(task.held_out_split)) if getattr(task.spec, "held_out", 0) else 0,
        "memory": asdict(memory_of(plan)),
        "data": [each.key("train") for each in tasks],
        "machine": machine.session() | {"cores": len(os.sched_getaffinity(0))},
    }


def _timed(plan: PhasePlan, request: TrialRequest) -> dict[str, Any]:
    """Time the phase's steps under its engine file, without the monitors that the file may have."""
    model, groups, objective = plan.prepare()
    machine.peak_memory()  # the peak is from now on that of the training
    config = engine.without_monitors(plan.engine_config)
    ds_engine = engine.start_engine(model, groups, config, plan.base, plan.lr_factor)
    for technique in objective.techniques:
        technique.rehearse(ds_engine.device)
    lengths, folder = plan.task.examples("train").lengths, request.results.parent
    distributed.on_main(partial(folder.mkdir, parents=True, exist_ok=True))
    with RunLog(folder, plan.phase.name, plan.length.total, plan.phase.loss, False, len(lengths)) as log:
        log.open(0, 0)

        def take(batch: ExampleIds) -> float:
            """Return the seconds of a step, on every rank those of rank 0."""
            ds_engine.global_steps = plan.length.total // 2
            call = partial(train_step, objective, ds_engine, batch, log, plan.length.seed)
            return distributed.broadcast(seconds(call, ds_engine.device))

        longest, *typical = trial_batches(lengths, ds_engine.train_batch_size(), request.batches)
        for batch in (longest, typical[0]):  # the first steps allocate memory and build kernels
            take(batch)
        rounds: list[list[float]] = []
        while sum(map(sum, rounds)) < request.seconds:
            rounds.append([take(batch) for batch in typical])
        log.check_finite()
    peaks = machine.peak_memory()
    peak = max(each for (each,) in distributed.numbers_of_all([peaks.get("device", peaks["resident"])]))
    results = {
        "examples": ds_engine.train_batch_size(),
        "seconds": [median(times) for times in zip(*rounds, strict=True)],
        "rounds": len(rounds),
        "costs": {"MiB of a rank": peak / 2**20},
    }
    engine.stop_engine(ds_engine)
    return results


def trial_batches(lengths: np.ndarray[Any, Any], size: int, count: int) -> list[ExampleIds]:
    """Return the batch of the longest examples, then `batches_by_length`."""
    longest = np.resize(np.argsort(-lengths, kind="stable"), max(size, len(lengths)))[:size]
    return [longest, *batches_by_length(lengths, size, count)]
