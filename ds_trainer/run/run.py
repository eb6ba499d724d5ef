"""A run: the phases of a recipe in order, each from a model folder to a model folder, and the results of all.

The last phase writes into the output folder itself, the ones before it into a folder of their name.
"""

import json
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

from ds_trainer.cuts.cut import CUT_FILE
from ds_trainer.deploy.card import write_cards
from ds_trainer.deploy.export import export_state_dict
from ds_trainer.deploy.measuring import measure_costs
from ds_trainer.engine.checkpoint import Checkpoint, Checkpoints
from ds_trainer.files.reading import read_object
from ds_trainer.files.redaction import redacted
from ds_trainer.files.run_folder import RunFolder
from ds_trainer.files.writing import write_json
from ds_trainer.models.pretrained import dtype_of
from ds_trainer.ranks import distributed
from ds_trainer.ranks.joining import joined, out_of_memory_named
from ds_trainer.ranks.stopping import StopRequests
from ds_trainer.recipe.jobs import TrainJob
from ds_trainer.recipe.recipe import Phase, task_of
from ds_trainer.recipe.saved_checkpoint import RECIPE
from ds_trainer.report.log import RunLog, RunStatus
from ds_trainer.report.page import write_report
from ds_trainer.report.results import dry_run_table, results_table
from ds_trainer.run.loop import train
from ds_trainer.run.phase import EVAL_CURE, PhasePlan, folder_of, plan_phase
from ds_trainer.run.rehearsal import rehearsal_folder, rehearse_phases
from ds_trainer.run.resuming import (
    checkpoint_to_go_back_to,
    go_back,
    open_run,
    phase_to_lengthen,
    write_finished,
    write_results,
)
from ds_trainer.run.starting_models import MADE, StartingModels
from ds_trainer.tasks.evaluation import evaluate, forward_of, score_folder
from ds_trainer.tasks.registry import build_task
from ds_trainer.techniques.registry import build_techniques


def run(job: TrainJob) -> dict[str, Any]:
    """Train every phase of the recipe, and return the results by phase; the last phase's model is `output/model`."""
    status = RunStatus(job.output)
    with StopRequests() as stop, status.recorded(), joined(job.timeout):
        with rehearsal_folder() as rehearsed:
            rehearse_phases(job, rehearsed)
            stop.check()  # whoever interrupts the run may have seen a mistake: nothing is deleted yet
            folder = RunFolder(job.output)
            distributed.on_main(folder.lock)
            named = checkpoint_to_go_back_to(folder, job)
            results: dict[str, Any] = distributed.on_main(partial(open_run, folder, job))
            models = StartingModels(job.recipe, job.output / MADE)
            if not results:  # a run that goes on has its model, and may yet be refused
                models.take_over(rehearsed)
        finished = [phase for phase in job.recipe.phases if phase.name in results]
        lengthened = distributed.on_main(partial(phase_to_lengthen, job, finished))
        if lengthened:
            distributed.info(f"{lengthened.name}: the finished phase is trained further")
            del results[lengthened.name]
        for phase in job.recipe.phases:
            stop.check()
            if phase.name not in results:
                plan = _plan(job, phase, folder, models, named, status)
                distributed.on_main(partial(_claim, folder, job, plan, results))
                results[phase.name] = _run_phase(job, plan, stop)
                distributed.on_main(partial(write_finished, folder, job, phase, results))
                plan.checkpoints.drop_passing()
            models.add(phase.name, folder_of(phase, job) / "model")
        if job.recipe.report:
            with distributed.as_warning("the models of the run are not measured"):
                _add_costs(job, results)
            distributed.on_main(partial(write_results, folder, results))
            distributed.on_main(lambda: write_report(job.output))
        distributed.on_main(partial(write_cards, job.output, job.recipe))
        distributed.info("\n" + results_table(results) + "\n")
        status.finished(job.output / "model")
    return results


def dry_run(job: TrainJob) -> str:
    """Return what would be done as a table; or as JSON, with both files resolved and what each rank holds."""
    with joined(), rehearsal_folder() as folder:
        phases = rehearse_phases(job, folder)
    whole = {"recipe": job.recipe.model_dump(), "phases": phases}
    return json.dumps(redacted(whole), indent=2) if job.dry_run == "json" else dry_run_table(phases)


def _plan(
    job: TrainJob,
    phase: Phase,
    folder: RunFolder,
    models: StartingModels,
    named: Checkpoint | None,
    status: RunStatus,
) -> PhasePlan:
    """Resolve a phase, with the checkpoint that it goes on from, if any.

    Where the command names a checkpoint of this phase, the run goes back to it once the plan shows that it can. The
    status says that the phase is running once no difference from its checkpoint can stand in the way.
    """
    checkpoints = Checkpoints(folder_of(phase, job))
    distributed.on_main(checkpoints.clear_asides)
    if named and named.path.parent != checkpoints.folder:
        named = None
    resumed = named or (checkpoints.newest() if job.resume else None)
    if not resumed:  # making the model may take long
        status.phase(phase.name, folder_of(phase, job))
    plan = plan_phase(job, phase, models, resumed)
    if named:
        distributed.on_main(partial(go_back, folder, job, named.path))
    status.phase(phase.name, plan.folder)
    return plan


def _claim(folder: RunFolder, job: TrainJob, plan: PhasePlan, results: dict[str, Any]) -> None:
    """Write both files as this run resolves them, and claim what the phase is going to write.

    The results are written first. They lack the phase that is trained further, so that the next session does not take
    it for finished.
    """
    write_results(folder, results)
    # where data is cached is this user's choice; it is not written down, since recipes are passed on
    written = job.recipe.model_copy(update={"cache_dir": None})
    folder.write_json(RECIPE, redacted(written.model_dump(exclude_none=True)))
    folder.write_json("command.json", redacted({"command": job.command}))
    relative = plan.folder.relative_to(folder.path)
    for name in ("model", "eval", "checkpoint-[0-9]*", "superseded-[0-9]*", "damaged-[0-9]*"):
        folder.claim(str(relative / name))
    folder.write_json(str(relative / "deepspeed_config.json"), redacted(plan.engine_config))


def _run_phase(job: TrainJob, plan: PhasePlan, stop: StopRequests) -> dict[str, Any]:
    """Train and export a phase, or keep its model as it is; return its results, with those of its techniques."""
    phase, batch_size = plan.phase, plan.phase.per_device_eval_batch_size
    of_cut: dict[str, float] = {}
    if phase.cut and phase.trains:
        with _evaluating("the cut of ", plan):
            of_cut = score_folder(plan.task, plan.source, batch_size).scores
        line = "  ".join(f"{name} {value:.4f}" for name, value in of_cut.items())
        distributed.info(f"{phase.name}: cut  {line} (before any training)")
    examples = len(plan.task.examples("train"))
    with RunLog(job.output, phase.name, plan.length.total, phase.loss, job.recipe.tensorboard, examples) as log:
        results = train(plan, log, stop) if phase.trains else _keep_as_it_is(plan, log)
        for warning in results["warnings"]:
            distributed.warn(f"{phase.name}: {warning}")
        for technique in build_techniques(plan.techniques, plan.length, plan.task):
            with _evaluating(f"the {technique.name} of ", plan):
                technique.after_export(plan.folder / "model", batch_size)
                measured = technique.measure(plan.folder / "model", batch_size)
            if measured:
                file = plan.folder / "eval" / f"{technique.name}.json"
                distributed.on_main(partial(write_json, file, measured.details))
                log.write_scores(results["train"]["steps"], measured.scores)
                results["eval"] |= measured.scores  # of the exported model: they replace those of training's precision
                results[technique.name] = measured.summary
        if phase.cut:
            cut = distributed.on_main(partial(read_object, Path(plan.source) / CUT_FILE))
            results["cut"] = cut | {"scores": of_cut or results["eval"]}
    return results


def _keep_as_it_is(plan: PhasePlan, log: RunLog) -> dict[str, Any]:
    """Score and export the model that a phase without steps starts from; no engine is started.

    The results are those that `train` returns.
    """
    task, batch_size = plan.task, plan.phase.per_device_eval_batch_size
    log.open(0, evaluated=-1)  # an earlier session may have scored it, and then been killed
    with _evaluating("", plan):
        model: Any = plan.build()[0].to(distributed.device()).eval()
        evaluation = evaluate(forward_of(model), task, batch_size)
    log.write_scores(0, evaluation.scores)
    evaluation.write(task, plan.folder / "eval")
    state = model.to("cpu", dtype_of(plan.source)).state_dict()
    export = partial(export_state_dict, state, plan.build, task, 0, plan.folder / "model")
    results = {"train": log.totals() | {"steps": 0}, "eval": evaluation.scores, "warnings": evaluation.warnings}
    return results | {"trained_on": log.trained_on} | distributed.on_main(export)


def _evaluating(what: str, plan: PhasePlan) -> AbstractContextManager[None]:
    """Name the place and the cure where memory does not suffice for an evaluation."""
    return out_of_memory_named(f" in the evaluation of {what}phase {plan.phase.name}", lambda: EVAL_CURE)


def _add_costs(job: TrainJob, results: dict[str, Any]) -> None:
    """Add to every phase's results what its model costs, all measured in turns."""
    subjects = {}
    for phase in job.recipe.phases:
        model = folder_of(phase, job) / "model"
        if distributed.on_main((model / "config.json").is_file):  # the user may have deleted an earlier session's
            task = build_task(task_of(phase, job.recipe), model, job.recipe.cache_dir)
            task.examples(task.splits[0])  # collective, unlike the measurement
            subjects[phase.name] = (model, task)
    for name, costs in distributed.on_main(lambda: measure_costs(subjects)).items():
        results[name] |= costs
