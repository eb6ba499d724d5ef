"""Score model folders and checkpoints apart from a run, and calibrate the exits of a folder.

A checkpoint is scored by its model folder: the one that its run would have exported at that step. No engine is started
to make it, which would need the ranks and the precision of the run, only to return weights that the files hold as well.
The weights are read from the files, and exported as at the end of a run (`deploy/export.py`), so that the folder has
the same bits for every ZeRO stage and number of ranks. One process does all of it.
"""

import contextlib
import json
import tempfile
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ds_trainer.deploy.export import export_state_dict
from ds_trainer.engine.saved_states import weights_of
from ds_trainer.files.checkpoint_files import DamagedCheckpointError, damage_of
from ds_trainer.files.messages import aligned
from ds_trainer.files.run_folder import RunFolder
from ds_trainer.files.writing import write_artifacts, write_json
from ds_trainer.ranks import distributed
from ds_trainer.ranks.failures import UserError
from ds_trainer.ranks.joining import joined, out_of_memory_named, print_json, silence_transformers
from ds_trainer.ranks.stopping import leaving
from ds_trainer.recipe.exit_specs import EXITS_FILE
from ds_trainer.recipe.jobs import DTYPES, CalibrateJob, EvaluateJob
from ds_trainer.recipe.recipe import saved_exits
from ds_trainer.recipe.saved_checkpoint import SavedCheckpoint
from ds_trainer.recipe.schedules import steps_of
from ds_trainer.report.results import encoder_weights, is_detail
from ds_trainer.run.phase import PhaseModel
from ds_trainer.run.starting_models import MADE, MadeModels
from ds_trainer.tasks.evaluation import score_folder
from ds_trainer.tasks.registry import build_task
from ds_trainer.techniques.exits.exit_evaluation import calibrate_folder, evaluate_exits
from ds_trainer.techniques.registry import build_techniques
from ds_trainer.techniques.technique import PhaseLength

_CURE = "Lower --batch_size or the task's max_seq_length."
"""What to change where memory does not suffice."""


def evaluate_folder(job: EvaluateJob) -> dict[str, float]:
    """Score a model folder, over all ranks, or a checkpoint; print and return the scores by name."""
    with joined(), contextlib.ExitStack() as until_scored:
        for saved in job.checkpoints:
            folder, _ = until_scored.enter_context(model_of(saved, job.cache_dir))
            job = job.model_copy(update={"model": str(folder)})
        scores, files = _scored(job)
        print_json(scores)  # before the files are written, which may fail
        if job.output_file:
            distributed.on_main(partial(_write_scores, job.output_file, scores))
        if job.predictions_dir:
            distributed.on_main(partial(write_artifacts, job.predictions_dir, files))
    return scores


def evaluate_checkpoints(job: EvaluateJob) -> dict[int, dict[str, float]]:
    """Score all checkpoints of a phase, print a table of them and write `checkpoints.json`; return the scores by step.

    The density is the share of the encoder's weights that are present and not 0, of those before any was cut out.
    Damaged checkpoints are left out.
    """
    with joined():
        rows: list[dict[str, Any]] = []
        for saved in job.checkpoints:
            try:
                with model_of(saved, job.cache_dir) as (folder, exported):
                    scores, files = _scored(job.model_copy(update={"model": str(folder)}))
            except (DamagedCheckpointError, FileNotFoundError) as error:  # a run that goes on deletes old ones
                distributed.warn(f"left out: {error}")
                continue
            kept, whole = encoder_weights(exported) or (1, 1)
            rows.append({"step": saved.position["step"], "scores": scores, "density": kept / whole})
            distributed.info(f"{saved.path}: " + "  ".join(f"{name} {value:.4f}" for name, value in scores.items()))
            if job.predictions_dir:
                write_artifacts(job.predictions_dir / saved.path.name, files)
        if not rows:
            raise UserError(f"none of the checkpoints in {job.model} is whole: there is nothing to score")
        cells = [
            {"step": f"{row['step']:,}"}
            # scores of single exit heads and classes are only in the file
            | {name: f"{value:.4f}" for name, value in row["scores"].items() if not is_detail(name)}
            | {"encoder weights": f"{100 * row['density']:.1f}%"}
            for row in rows
        ]
        print(aligned(cells), flush=True)
        newest = job.checkpoints[-1]
        value = {"phase": newest.phase.name, "checkpoints": rows}
        if job.output_file:
            _write_scores(job.output_file, value)
        if job.predictions_dir:
            write_json(job.predictions_dir / "checkpoints.json", value)
        else:
            relative = newest.path.parent.relative_to(newest.run)
            RunFolder(newest.run).write_json(str(relative / "checkpoints.json"), value)
    return {row["step"]: row["scores"] for row in rows}


def calibrate_exits(job: CalibrateJob) -> None:
    """Calibrate the exits of a model folder on a task, over all ranks; the thresholds are printed as JSON."""
    with joined():
        task = build_task(job.task, job.model, job.cache_dir)
        task.check_trained(job.model)
        with out_of_memory_named(" in the calibration", lambda: _CURE):
            print_json(calibrate_folder(Path(job.model), task, job.batch_size, job.exits))


def _scored(job: EvaluateJob) -> tuple[dict[str, float], dict[str, Any]]:
    """Compute the scores of a model folder on every split of the task, and the files to write beside them, by name."""
    task = build_task(job.task, job.model, job.cache_dir)
    saved = saved_exits(job.model)
    policy = job.exit_policy(saved)
    with out_of_memory_named(" in the evaluation", lambda: _CURE):
        evaluation = score_folder(task, job.model, job.batch_size)
        for warning in evaluation.warnings:
            distributed.warn(f"{job.model}: {warning}")
        files = evaluation.files(task) if distributed.is_main() else {}  # only rank 0 has the answers
        if job.predictions_dir and distributed.is_main() and not files:
            distributed.warn(
                f"{job.predictions_dir} gets no predictions: the task {job.task.name} is scored by its loss"
            )
        if saved:
            scores, files[EXITS_FILE] = evaluate_exits(Path(job.model), task, job.batch_size, policy)
            evaluation.scores |= scores
    return evaluation.scores, files


def _write_scores(file: Path, scores: Mapping[str, Any]) -> None:
    """Write to the place that the command names, in place: it may be a device, such as /dev/stdout."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(scores, indent=2) + "\n", encoding="utf-8")


@contextlib.contextmanager
def model_of(saved: SavedCheckpoint, cache_dir: str | None) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Make the model folder of a checkpoint for as long as the context lasts; yield it and the export's report."""
    silence_transformers()
    with leaving(), tempfile.TemporaryDirectory(prefix="ds_trainer-") as aside:
        folder = Path(aside, saved.path.name)
        yield folder, export_checkpoint(saved, cache_dir, folder)


def export_checkpoint(saved: SavedCheckpoint, cache_dir: str | None, folder: Path) -> dict[str, Any]:
    """Write the model folder that the run would have exported at the checkpoint's step; return the export's report.

    Raises UserError where the checkpoint is damaged, or the model that its phase started from is missing.
    """
    phase, state = saved.phase, saved.position
    step, total, identity = state["step"], state["total"], state["identity"]
    if damage := damage_of(saved.path, saved.sums):
        raise DamagedCheckpointError(f"{saved.path} is damaged ({damage}): use another checkpoint")
    models = MadeModels(saved.recipe, saved.run / MADE)
    for earlier in saved.recipe.phases[: saved.recipe.phases.index(phase)]:
        models.add(earlier.name, saved.run / earlier.name / "model")
    source, techniques = models.start(phase), models.techniques(phase)
    task = build_task(saved.task, source, cache_dir)
    length = PhaseLength(total, steps_of(phase.warmup_steps or 0, total), identity["the seed"])
    rebuild = partial(PhaseModel(phase, techniques, task, source, length).rebuild, state["techniques"])
    weights = weights_of(saved.path, getattr(torch, DTYPES[identity["the precision"]]))
    results = export_state_dict(weights, rebuild, task, step, folder, phase.shrink)
    for technique in build_techniques(techniques, length, task):
        technique.after_export(folder, phase.per_device_eval_batch_size)
    return results
