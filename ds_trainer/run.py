"""A run: the phases of a recipe in order, each from a model folder to a model folder, and the results of all.

The last phase writes into the output folder itself, the ones before it into a folder of their name.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from ds_trainer.config.exit_specs import EXITS_FILE, ExitsSpec
from ds_trainer.config.jobs import TrainJob
from ds_trainer.config.recipe import Phase, task_of
from ds_trainer.config.schedules import steps_of
from ds_trainer.deploy.latency import TimedModel, compare
from ds_trainer.engine import memory
from ds_trainer.engine.checkpoint import Best, Checkpoints, Position, check_fits, step_of
from ds_trainer.engine.engine_file import resolve_engine_file, said_by, settled_numbers
from ds_trainer.engine.optim import Hyperparameters
from ds_trainer.files.checkpoint_files import sync_folder
from ds_trainer.files.redaction import redacted
from ds_trainer.files.run_folder import RunFolder, check_output_folder
from ds_trainer.files.writing import write_json
from ds_trainer.loop import PhasePlan, train
from ds_trainer.ranks import distributed
from ds_trainer.ranks.failures import UserError
from ds_trainer.ranks.joining import joined, print_json
from ds_trainer.ranks.out_of_memory import told_if_out
from ds_trainer.ranks.stopping import StopRequests
from ds_trainer.report.log import Report, drop_later_records, results_table
from ds_trainer.report.page import write_report
from ds_trainer.report.status import RunStatus
from ds_trainer.starting_models import MADE, StartingModels
from ds_trainer.tasks.data import steps_for
from ds_trainer.tasks.registry import build_task
from ds_trainer.techniques.exits.early_exit import with_exits
from ds_trainer.techniques.exits.exit_evaluation import calibrate_folder, evaluate_exits, flat_scores, without_curves
from ds_trainer.techniques.technique import Clock

_RESULTS = "all_results.json"

_GOING_BACK = "going_back.json"
"""Names the checkpoint that a run is just going back to."""

_MIXING_OPTIMIZERS = {"muon", "onebitadam", "onebitlamb", "zerooneadam"}
"""In lower case, as DeepSpeed reads them."""


def run(job: TrainJob) -> None:
    """Train every phase of the recipe; the last phase's model is `output/model`."""
    status = RunStatus(job.output)
    with StopRequests() as stop, status.recorded(), joined(job.timeout):
        for plan in _rehearsed(job):
            plan.prepare()
        folder = RunFolder(job.output)
        distributed.on_main(folder.lock)
        wanted = _checkpoint_to_go_back_to(folder, job)
        results: dict[str, Any] = distributed.on_main(partial(_open, folder, job))
        status.begin()
        models = StartingModels(job.recipe, job.output / MADE)
        for phase in job.recipe.phases:
            stop.check()
            if phase.name not in results:
                plan = _plan_and_claim(job, phase, folder, models, wanted)
                status.phase(phase.name, plan.folder)
                results[phase.name] = _run_phase(job, plan, stop)
                distributed.on_main(partial(_write_results, folder, results))
                _checkpoints(phase, job).drop_unasked()
            models.left[phase.name] = str(_folder_of(phase, job) / "model")
        if job.recipe.report:
            _compare(job, results)
            distributed.on_main(partial(_write_results, folder, results))
            distributed.on_main(lambda: write_report(job.output))
        distributed.info("\n" + results_table(results) + "\n")
        status.finished(job.output / "model")


def dry_run(job: TrainJob) -> None:
    """Print both files resolved, the steps, the parameter groups, and what each rank will hold; train nothing."""
    with joined():
        print_json(redacted({"recipe": job.recipe.model_dump()}))
        for plan in _rehearsed(job):
            print_json(redacted({"phase": plan.phase.name, **_described(plan)}))


def plan_phase(
    job: TrainJob,
    phase: Phase,
    source: str,
    teacher: str | None = None,
    resumed: tuple[Path, Position] | None = None,
) -> PhasePlan:
    """Resolve a phase that starts from the model folder `source`: its task, its steps, its engine file.

    What is left of it to do follows from the checkpoint that it goes on from. Raises ValueError.
    """
    recipe, world = job.recipe, distributed.world_size()
    task = build_task(task_of(phase, recipe), source, recipe.cache_dir)
    numbers = settled_numbers(job.engine_config, said_by(phase), world)
    examples = len(task.examples("train"))
    done = resumed[1] if resumed else None
    step, seen = (done.step, done.examples) if done else (0, 0)
    left = steps_for(phase.num_train_epochs or 0, examples, numbers.train_batch_size, seen)
    total = phase.max_steps or step + max(0, left)
    if done and done.batch_size != numbers.train_batch_size:
        distributed.warn(
            f"{phase.name}: train_batch_size was {done.batch_size} up to step {done.step} and is now "
            f"{numbers.train_batch_size}: the phase ends at step {total}, and its schedules follow"
        )
    clock = Clock(total, steps_of(phase.warmup_steps, total), recipe.seed)
    config = resolve_engine_file(
        job.engine_config,
        said_by(phase),
        world,
        hidden_size=task.hidden_size(source),
        total_steps=total,
        warmup_steps=clock.warmup,
    )
    base = Hyperparameters(
        numbers.learning_rate,
        numbers.weight_decay,
        (numbers.adam_beta1, numbers.adam_beta2),
        numbers.adam_epsilon,
    )
    if phase.techniques.keep_zeros:
        _check_is_elementwise(config.get("optimizer", {}).get("type", ""))
    techniques = phase.techniques.taught_by(teacher)
    plan = PhasePlan(phase, techniques, task, source, clock, config, base, _folder_of(phase, job), resumed)
    if resumed:
        check_fits(*resumed, plan.identity(plan.prepare()[1]))
    return plan


def _check_is_elementwise(optimizer: str) -> None:
    """Refuse optimizers that move a weight whose own gradient is zero."""
    if optimizer.lower() in _MIXING_OPTIMIZERS:
        raise UserError(
            f"keep_zeros: optimizer.type is {optimizer}, whose steps are not made weight by weight: zeros would not "
            f"stay; use AdamW, Adam, Adagrad or SGD"
        )


def _folder_of(phase: Phase, job: TrainJob) -> Path:
    """Where a phase writes: the last one into the output folder itself."""
    return job.output if phase is job.recipe.phases[-1] else job.output / phase.name


def _rehearsed(job: TrainJob) -> Iterator[PhasePlan]:
    """The plan of every phase before any is run; what it starts from stands for what it will leave."""
    aside = Path(distributed.on_main(tempfile.mkdtemp))
    try:
        models = StartingModels(job.recipe, aside)
        for phase in job.recipe.phases:
            plan = plan_phase(job, phase, models.start(phase), models.teacher(phase))
            for split in plan.task.splits:  # what is wrong with one would show after the training else
                plan.task.examples(split)
            if plan.teacher and not models.teacher_is_to_come(phase):
                plan.task.check_trained(plan.teacher)
            models.left[phase.name] = plan.source
            yield plan
        distributed.barrier()  # a host's folder is that of all its ranks
    finally:
        if distributed.local_rank() == 0:
            shutil.rmtree(aside, ignore_errors=True)


def _plan_and_claim(
    job: TrainJob, phase: Phase, folder: RunFolder, models: StartingModels, wanted: tuple[Path, Position] | None
) -> PhasePlan:
    """Resolve a phase, with the checkpoint that it goes on from, if any, and take its place in the run's folder.

    The one `wanted` is gone back to for good, once it is known that it can be: nothing is trained before.
    """
    checkpoints = _checkpoints(phase, job)
    distributed.on_main(checkpoints.clear_asides)
    named = wanted if wanted and wanted[0].parent == checkpoints.folder else None
    resumed = named or (checkpoints.newest() if job.resume else None)
    plan = plan_phase(job, phase, models.start(phase), models.teacher(phase), resumed)
    if named:
        distributed.on_main(partial(_go_back, folder, job, named[0]))
    distributed.on_main(partial(_claim, folder, job, plan))
    return plan


def _checkpoints(phase: Phase, job: TrainJob) -> Checkpoints:
    best = Best(phase.metric_for_best_model, phase.greater_is_better) if phase.metric_for_best_model else None
    return Checkpoints(_folder_of(phase, job), phase.save_total_limit, best)


def _number_of(checkpoint: Path, job: TrainJob) -> int:
    """Which of the recipe's phases a checkpoint is of."""
    folders = [_folder_of(phase, job).resolve() for phase in job.recipe.phases]
    if checkpoint.resolve().parent not in folders:
        raise UserError(f"--resume {checkpoint}: the checkpoint is of no phase of the recipe")
    return folders.index(checkpoint.resolve().parent)


def _checkpoint_to_go_back_to(folder: RunFolder, job: TrainJob) -> tuple[Path, Position] | None:
    """The checkpoint that the command names, if it names one, still whole; what was cut short before is ended first."""
    if job.checkpoint is None:
        if job.resume:
            distributed.on_main(partial(_end_going_back, folder, job))
        return None
    if distributed.on_main((folder.path / _GOING_BACK).is_file):
        raise UserError(
            f"--resume {job.checkpoint}: the run was killed while it went back to another checkpoint, which "
            f"{folder.path / _GOING_BACK} names: give --resume alone first"
        )
    phase = job.recipe.phases[_number_of(job.checkpoint, job)]
    return _checkpoints(phase, job).named(job.checkpoint)


def _go_back(folder: RunFolder, job: TrainJob, checkpoint: Path) -> None:
    """Make a checkpoint the newest of the run for good: checkpoints, records and results of later steps go.

    What is to be done is written down first, so that it is also done where this run is killed in the midst of it.
    """
    folder.write_json(_GOING_BACK, str(checkpoint.relative_to(folder.path)))
    _end_going_back(folder, job)


def _end_going_back(folder: RunFolder, job: TrainJob) -> None:
    """Do what `_go_back` has written down, if there is something; it can be done twice."""
    note = folder.path / _GOING_BACK
    if not note.is_file():
        return
    checkpoint = folder.path / json.loads(note.read_text(encoding="utf-8"))
    number = _number_of(checkpoint, job)
    before = {phase.name for phase in job.recipe.phases[:number]}
    _write_results(folder, {name: found for name, found in _read_results(folder).items() if name in before})
    for phase in job.recipe.phases[number:]:
        last = step_of(checkpoint) if phase is job.recipe.phases[number] else -1
        _checkpoints(phase, job).supersede(after=last)
        sync_folder(_folder_of(phase, job))
        drop_later_records(folder.path / "log.jsonl", phase.name, max(last, 0), max(last, 0))
    note.unlink()
    sync_folder(folder.path)


def _run_phase(job: TrainJob, plan: PhasePlan, stop: StopRequests) -> dict[str, Any]:
    phase = plan.phase
    examples = len(plan.task.examples("train"))
    with Report(job.output, phase.name, plan.clock.total, phase.loss, job.recipe.tensorboard, examples) as report:
        results = train(plan, report, _checkpoints(phase, job), stop)
        if phase.techniques.exits:
            found = _measure_exits(plan, phase.techniques.exits)
            flat = flat_scores(plan.task, found)
            report.write_scores(plan.clock.total, flat)
            results["eval"] |= flat  # of the exported model: what training's own precision said of its heads goes
            results["exits"] = without_curves(found)
        return results


def _measure_exits(plan: PhasePlan, spec: ExitsSpec) -> dict[str, Any]:
    """Calibrate and evaluate the exits of a phase's exported model; what is found also goes to a file."""
    model, batch_size = plan.folder / "model", plan.phase.per_device_eval_batch_size
    cure = partial(memory.evaluation_cure, "per_device_eval_batch_size", batch_size)
    with told_if_out(f" in the evaluation of the exits of phase {plan.phase.name}", cure):
        if spec.calibrated:
            calibrate_folder(model, plan.task, batch_size, spec)
        early = with_exits(plan.task.build_model(model), model).to(distributed.device()).eval()
        found = evaluate_exits(early, plan.task, batch_size)
    distributed.on_main(partial(write_json, plan.folder / "eval" / EXITS_FILE, found))
    return found


def _compare(job: TrainJob, results: dict[str, Any]) -> None:
    """Add to every phase's results what its model costs, all measured in one place; what fails is only warned of."""
    places = {phase.name: _folder_of(phase, job) / "model" for phase in job.recipe.phases}
    there = distributed.on_main(lambda: [name for name, model in places.items() if (model / "config.json").is_file()])
    try:
        subjects = {}
        for phase in job.recipe.phases:
            if phase.name in there:
                model = places[phase.name]
                task = build_task(task_of(phase, job.recipe), model, job.recipe.cache_dir)
                task.examples(task.splits[0])  # collective, unlike what follows
                subjects[phase.name] = TimedModel(model, task)
        for name, costs in distributed.on_main(lambda: compare(subjects)).items():
            results[name] |= costs
    except Exception as error:  # noqa: BLE001 - all is trained: a figure for the report must not end the run
        distributed.warn(f"the models of the run are not measured: {error}")


def _open(folder: RunFolder, job: TrainJob) -> dict[str, Any]:
    """Make the run folder; gives the results of the phases that an earlier, resumed run has finished.

    Another run may have written to it since it was checked.
    """
    mistakes = check_output_folder(folder.path, job.overwrite, job.resume, job.checkpoint)
    if mistakes:
        raise UserError("\n".join(mistakes))
    folder.open(job.overwrite)
    for name in ("log.jsonl", "tensorboard", "deepspeed"):
        folder.claim(name)
    folder.claim(MADE).mkdir(exist_ok=True)
    results = _read_results(folder) if job.resume else {}
    if job.checkpoint is None:
        return results
    before = [phase.name for phase in job.recipe.phases[: _number_of(job.checkpoint, job)]]
    missing = [name for name in before if name not in results]
    if missing:
        raise UserError(
            f"--resume {job.checkpoint}: phase {missing[0]}, which comes before, is not finished: --resume without a "
            f"checkpoint goes on with it"
        )
    return {name: results[name] for name in before}


def _claim(folder: RunFolder, job: TrainJob, plan: PhasePlan) -> None:
    """Write both files as this run resolves them, and claim what the phase is going to write."""
    # a cache elsewhere was this user's word, by a flag or a variable: in a file it would be a stranger's
    cache = job.recipe.cache_dir
    own = cache is not None and Path(cache).resolve().is_relative_to(job.output.resolve())
    folder.write_json("recipe.json", redacted(job.recipe.model_dump() | {"cache_dir": cache if own else None}))
    folder.write_json("command.json", redacted({"command": job.command}))
    relative = plan.folder.relative_to(folder.path)
    for name in ("model", "eval", "checkpoint-[0-9]*", "superseded-[0-9]*", "damaged-[0-9]*"):
        folder.claim(str(relative / name))
    folder.write_json(str(relative / "deepspeed_config.json"), redacted(plan.engine_config))


def _read_results(folder: RunFolder) -> dict[str, Any]:
    """The results of the phases that are finished, by name."""
    file = folder.path / _RESULTS
    results: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    return results


def _write_results(folder: RunFolder, results: dict[str, Any]) -> None:
    for kind in ("train", "eval"):
        folder.write_json(f"{kind}_results.json", {name: found[kind] for name, found in results.items()})
    folder.write_json(_RESULTS, results)


def _described(plan: PhasePlan) -> dict[str, Any]:
    model, groups, _ = plan.prepare()
    return {
        "starts_from": plan.source,
        "steps": {"total": plan.clock.total, "warmup": plan.clock.warmup},
        "engine_file": plan.engine_config,
        "parameter_groups": [
            {
                "name": g.name,
                "parameters": g.size,
                "learning_rate": g.learning_rate,
                "weight_decay": g.weight_decay,
            }
            for g in groups
        ],
        "frozen_parameters": sum(p.numel() for p in model.parameters() if not p.requires_grad),
        "bytes_per_rank": plan.bytes_per_rank(model, groups),
    }
