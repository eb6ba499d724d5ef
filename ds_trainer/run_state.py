"""The state that a run keeps in its folder: which phases are finished, and how it goes back to an older checkpoint.

Going back deletes results. So the run first writes a note of the checkpoint: if it is killed in the midst of going
back, it does the rest when it is resumed.
"""

import json
from functools import partial
from pathlib import Path
from typing import Any

from ds_trainer.config.jobs import TrainJob
from ds_trainer.config.saved_checkpoint import RECIPE
from ds_trainer.engine.checkpoint import Checkpoints, WholeCheckpoint, step_of
from ds_trainer.files.checkpoint_files import sync_folder
from ds_trainer.files.run_folder import RunFolder, check_output_folder
from ds_trainer.phase import folder_of
from ds_trainer.ranks import distributed
from ds_trainer.ranks.failures import UserError, raise_mistakes
from ds_trainer.report.log import drop_later_records
from ds_trainer.report.run_files import read_object
from ds_trainer.starting_models import MADE

_RESULTS = "all_results.json"
_GOING_BACK = "going_back.json"
"""The note: a file with the path of the checkpoint that the run is going back to. It exists only meanwhile."""


def open_run(folder: RunFolder, job: TrainJob) -> dict[str, Any]:
    """Make the run's folder, and return the results of the phases that earlier sessions of this run have finished.

    The folder is checked again: another run may have written to it after the command was checked. Where the command
    names a checkpoint, only phases before that of the checkpoint count as finished.
    """
    raise_mistakes(check_output_folder(folder.path, job.overwrite, job.resume, job.checkpoint))
    folder.open(job.overwrite)
    for name in ("log.jsonl", "tensorboard", "deepspeed"):
        folder.claim(name)
    folder.claim(MADE).mkdir(exist_ok=True)
    results = read_results(folder) if job.resume else {}
    if job.checkpoint is None:
        return results
    before = [phase.name for phase in job.recipe.phases[: _phase_number(job.checkpoint, job)]]
    missing = [name for name in before if name not in results]
    if missing:
        raise UserError(
            f"--resume {job.checkpoint}: the earlier phase {missing[0]} is not finished: give --resume without a "
            f"checkpoint, which goes on with it"
        )
    return {name: results[name] for name in before}


def write_results(folder: RunFolder, results: dict[str, Any]) -> None:
    for kind in ("train", "eval"):
        folder.write_json(f"{kind}_results.json", {name: of_phase[kind] for name, of_phase in results.items()})
    folder.write_json(_RESULTS, results)


def checkpoint_to_go_back_to(folder: RunFolder, job: TrainJob) -> WholeCheckpoint | None:
    """Return the checkpoint that the command names, checked; None where it names none.

    A plain `--resume` first completes an interrupted return to a checkpoint. Raises UserError where the run has other
    phases than the recipe.
    """
    if job.resume:
        distributed.on_main(partial(_check_phases, folder, job))
    if job.checkpoint is None:
        if job.resume:
            distributed.on_main(partial(_end_going_back, folder, job))
        return None
    if distributed.on_main((folder.path / _GOING_BACK).is_file):
        raise UserError(
            f"--resume {job.checkpoint}: the run was killed while it went back to another checkpoint, which "
            f"{folder.path / _GOING_BACK} names: give --resume alone first"
        )
    phase = job.recipe.phases[_phase_number(job.checkpoint, job)]
    return Checkpoints(folder_of(phase, job)).named(job.checkpoint)


def _check_phases(folder: RunFolder, job: TrainJob) -> None:
    """Raise UserError where the run was begun with other phases: their names and their order place their files."""
    file, names = folder.path / RECIPE, [phase.name for phase in job.recipe.phases]
    before = [phase["name"] for phase in read_object(file)["phases"]] if file.is_file() else names
    if before != names:
        raise UserError(
            f"--resume: the run in {folder.path} has the phases {', '.join(before)}, and the recipe has "
            f"{', '.join(names)}: give the phases that the run has or, for further ones, another --output_dir and "
            f'"start_from": "{folder.path / "model"}"'
        )


def go_back(folder: RunFolder, job: TrainJob, checkpoint: Path) -> None:
    """Make a checkpoint the newest of the run for good: remove later checkpoints, records and results."""
    folder.write_json(_GOING_BACK, str(checkpoint.relative_to(folder.path)))
    _end_going_back(folder, job)


def _end_going_back(folder: RunFolder, job: TrainJob) -> None:
    """Do what the note says, if there is one; doing it twice does no harm."""
    note = folder.path / _GOING_BACK
    if not note.is_file():
        return
    checkpoint = folder.path / json.loads(note.read_text(encoding="utf-8"))
    number = _phase_number(checkpoint, job)
    before = {phase.name for phase in job.recipe.phases[:number]}
    write_results(folder, {name: value for name, value in read_results(folder).items() if name in before})
    for phase in job.recipe.phases[number:]:
        last = step_of(checkpoint) if phase is job.recipe.phases[number] else -1
        Checkpoints(folder_of(phase, job)).supersede(after=last)
        sync_folder(folder_of(phase, job))
        drop_later_records(folder.path / "log.jsonl", phase.name, max(last, 0), max(last, 0))
    note.unlink()
    sync_folder(folder.path)


def _phase_number(checkpoint: Path, job: TrainJob) -> int:
    """Return the number of the recipe's phase that wrote a checkpoint. Raises UserError where none did."""
    folders = [folder_of(phase, job).resolve() for phase in job.recipe.phases]
    if checkpoint.resolve().parent not in folders:
        raise UserError(f"--resume {checkpoint}: the checkpoint is of no phase of the recipe")
    return folders.index(checkpoint.resolve().parent)


def read_results(folder: RunFolder) -> dict[str, Any]:
    """Return the results of the phases that are finished, by name."""
    file = folder.path / _RESULTS
    results: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    return results
