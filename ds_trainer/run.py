"""A run: the phases of a recipe in order, each from a model folder to a model folder, and the results of all.

The last phase writes into the output folder itself, the ones before it into a folder of their name.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from ds_trainer.config.exit_specs import EXITS_FILE, ExitsSpec
from ds_trainer.config.jobs import TrainJob
from ds_trainer.config.recipe import Phase, task_of
from ds_trainer.deploy.latency import TimedModel, compare
from ds_trainer.engine import memory
from ds_trainer.engine.checkpoint import CheckpointState
from ds_trainer.engine.rehearsal import rehearse
from ds_trainer.files.redaction import redacted
from ds_trainer.files.run_folder import RunFolder
from ds_trainer.files.writing import write_json
from ds_trainer.loop import train
from ds_trainer.phase import PhasePlan, checkpoints_of, folder_of, plan_phase
from ds_trainer.ranks import distributed
from ds_trainer.ranks.joining import joined, print_json, told_if_out
from ds_trainer.ranks.stopping import StopRequests
from ds_trainer.report.log import Report, results_table
from ds_trainer.report.page import write_report
from ds_trainer.report.status import RunStatus
from ds_trainer.run_state import checkpoint_to_go_back_to, go_back, open_run, write_results
from ds_trainer.starting_models import MADE, StartingModels
from ds_trainer.tasks.registry import build_task
from ds_trainer.techniques.exits.early_exit import with_exits
from ds_trainer.techniques.exits.exit_evaluation import calibrate_folder, evaluate_exits, flat_scores, without_curves


def run(job: TrainJob) -> dict[str, Any]:
    """Train every phase of the recipe, and return the results by phase; the last phase's model is `output/model`."""
    status = RunStatus(job.output)
    with StopRequests() as stop, status.recorded(), joined(job.timeout):
        for plan in _rehearsed(job):
            plan.prepare()
        folder = RunFolder(job.output)
        distributed.on_main(folder.lock)
        named = checkpoint_to_go_back_to(folder, job)
        results: dict[str, Any] = distributed.on_main(partial(open_run, folder, job))
        status.begin()
        models = StartingModels(job.recipe, job.output / MADE)
        for phase in job.recipe.phases:
            stop.check()
            if phase.name not in results:
                plan = _plan_and_claim(job, phase, folder, models, named)
                status.phase(phase.name, plan.folder)
                results[phase.name] = _run_phase(job, plan, stop)
                distributed.on_main(partial(write_results, folder, results))
                checkpoints_of(phase, job).drop_passing()
            models.left[phase.name] = str(folder_of(phase, job) / "model")
        if job.recipe.report:
            _add_costs(job, results)
            distributed.on_main(partial(write_results, folder, results))
            distributed.on_main(lambda: write_report(job.output))
        distributed.info("\n" + results_table(results) + "\n")
        status.finished(job.output / "model")
    return results


def dry_run(job: TrainJob) -> None:
    """Print both files resolved, the steps, the parameter groups, and what each rank will hold; train nothing."""
    with joined():
        print_json(redacted({"recipe": job.recipe.model_dump()}))
        for plan in _rehearsed(job):
            print_json(redacted({"phase": plan.phase.name, **_description(plan)}))


def _rehearsed(job: TrainJob) -> Iterator[PhasePlan]:
    """Yield the plan of every phase before any is run, so that a mistake in the last one is found now.

    A phase that starts from the model of an earlier one is planned from that phase's own start.
    """
    aside = Path(distributed.on_main(tempfile.mkdtemp))
    try:
        models = StartingModels(job.recipe, aside)
        for phase in job.recipe.phases:
            plan = plan_phase(job, phase, models.start(phase), models.teacher(phase))
            rehearse(plan.engine_config, plan.base)
            for split in plan.task.splits:  # a mistake in one would otherwise show after the training
                plan.task.examples(split)
            if plan.teacher and not models.teacher_is_to_come(phase):
                plan.task.check_trained(plan.teacher)
            models.left[phase.name] = plan.source
            yield plan
        distributed.barrier()  # all ranks of a host share its folder
    finally:
        if distributed.local_rank() == 0:
            shutil.rmtree(aside, ignore_errors=True)


def _plan_and_claim(
    job: TrainJob, phase: Phase, folder: RunFolder, models: StartingModels, named: tuple[Path, CheckpointState] | None
) -> PhasePlan:
    """Resolve a phase, with the checkpoint that it goes on from, if any, and take its place in the run's folder.

    The run goes back to the checkpoint that the command names only once the plan shows that it can.
    """
    checkpoints = checkpoints_of(phase, job)
    distributed.on_main(checkpoints.clear_asides)
    if named and named[0].parent != checkpoints.folder:
        named = None
    resumed = named or (checkpoints.newest() if job.resume else None)
    plan = plan_phase(job, phase, models.start(phase), models.teacher(phase), resumed)
    if named:
        distributed.on_main(partial(go_back, folder, job, named[0]))
    distributed.on_main(partial(_claim, folder, job, plan))
    return plan


def _claim(folder: RunFolder, job: TrainJob, plan: PhasePlan) -> None:
    """Write both files as this run resolves them, and claim what the phase is going to write."""
    # A cache elsewhere was permitted by this user's flag or variable. In a file it would bind whoever gets the file.
    cache = job.recipe.cache_dir
    inside = cache is not None and Path(cache).resolve().is_relative_to(job.output.resolve())
    folder.write_json("recipe.json", redacted(job.recipe.model_dump() | {"cache_dir": cache if inside else None}))
    folder.write_json("command.json", redacted({"command": job.command}))
    relative = plan.folder.relative_to(folder.path)
    for name in ("model", "eval", "checkpoint-[0-9]*", "superseded-[0-9]*", "damaged-[0-9]*"):
        folder.claim(str(relative / name))
    folder.write_json(str(relative / "deepspeed_config.json"), redacted(plan.engine_config))


def _run_phase(job: TrainJob, plan: PhasePlan, stop: StopRequests) -> dict[str, Any]:
    phase = plan.phase
    examples = len(plan.task.examples("train"))
    with Report(job.output, phase.name, plan.clock.total, phase.loss, job.recipe.tensorboard, examples) as report:
        results = train(plan, report, checkpoints_of(phase, job), stop)
        if phase.techniques.exits:
            exits = _measure_exits(plan, phase.techniques.exits)
            scores = flat_scores(plan.task, exits)
            report.write_scores(plan.clock.total, scores)
            results["eval"] |= scores  # of the exported model, in place of those in training's precision
            results["exits"] = without_curves(exits)
        return results


def _measure_exits(plan: PhasePlan, spec: ExitsSpec) -> dict[str, Any]:
    """Calibrate and evaluate the exits of a phase's exported model; the results also go to a file."""
    model, batch_size = plan.folder / "model", plan.phase.per_device_eval_batch_size
    cure = partial(memory.evaluation_cure, "per_device_eval_batch_size", batch_size)
    with told_if_out(f" in the evaluation of the exits of phase {plan.phase.name}", cure):
        if spec.calibrated:
            calibrate_folder(model, plan.task, batch_size, spec)
        early = with_exits(plan.task.build_model(model), model).to(distributed.device()).eval()
        results = evaluate_exits(early, plan.task, batch_size)
    distributed.on_main(partial(write_json, plan.folder / "eval" / EXITS_FILE, results))
    return results


def _add_costs(job: TrainJob, results: dict[str, Any]) -> None:
    """Add to every phase's results what its model costs, all measured in turns; a failure is only a warning."""
    folders = {phase.name: folder_of(phase, job) / "model" for phase in job.recipe.phases}
    existing = distributed.on_main(lambda: [name for name, path in folders.items() if (path / "config.json").is_file()])
    try:
        subjects = {}
        for phase in job.recipe.phases:
            if phase.name in existing:
                task = build_task(task_of(phase, job.recipe), folders[phase.name], job.recipe.cache_dir)
                task.examples(task.splits[0])  # collective, unlike the measurement
                subjects[phase.name] = TimedModel(folders[phase.name], task)
        for name, costs in distributed.on_main(lambda: compare(subjects)).items():
            results[name] |= costs
    except Exception as error:  # noqa: BLE001 - all is trained: a figure for the report must not end the run
        distributed.warn(f"the models of the run are not measured: {error}")


def _description(plan: PhasePlan) -> dict[str, Any]:
    model, groups, _ = plan.prepare()
    return {
        "starts_from": plan.source,
        "steps": {"total": plan.clock.total, "warmup": plan.clock.warmup},
        "engine_file": plan.engine_config,
        "parameter_groups": [
            {
                "name": group.name,
                "parameters": group.size,
                "learning_rate": group.learning_rate,
                "weight_decay": group.weight_decay,
            }
            for group in groups
        ],
        "frozen_parameters": sum(p.numel() for p in model.parameters() if not p.requires_grad),
        "bytes_per_rank": plan.bytes_per_rank(model, groups),
    }
