"""What a run that is resumed takes over from its folder, and how it goes back to an older checkpoint.

A finished phase is not trained again. So `finished.json` keeps what it was asked for, and files that ask something else
of it are an error, in place of results that are not theirs; only more steps of the last phase are trained, from its
newest checkpoint.
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ds_trainer.engine.checkpoint import Checkpoint, Checkpoints, step_of
from ds_trainer.files.checkpoint_files import sync_folder
from ds_trainer.files.messages import changes
from ds_trainer.files.reading import read_object
from ds_trainer.files.redaction import redacted
from ds_trainer.files.run_folder import LOG, RESULTS, RunFolder, check_output_folder
from ds_trainer.ranks import distributed
from ds_trainer.ranks.failures import UserError, raise_mistakes
from ds_trainer.recipe.jobs import TrainJob
from ds_trainer.recipe.recipe import Phase, task_of
from ds_trainer.recipe.saved_checkpoint import RECIPE
from ds_trainer.report.log import drop_later_records
from ds_trainer.run.phase import folder_of
from ds_trainer.run.starting_models import MADE

FINISHED = "finished.json"
_PATIENCE = "early_stopping_patience"
_LENGTHS = {"max_steps": 0, "num_train_epochs": 0, _PATIENCE: math.inf}
"""The fields that may grow, and what null stands for."""
_RECORDS_AND_PACE = {
    *("name", "task", "per_device_train_batch_size", "gradient_accumulation_steps", "gradient_checkpointing"),
    *("per_device_eval_batch_size", "max_skipped_steps", "logging_steps"),
    *("eval_steps", "save_steps", "save_total_limit"),
}
"""The fields of a phase on which its model does not depend. (The task is compared as `task_of` gives it.)"""
_OF_ENGINE_FILE = ("optimizer", "scheduler", "gradient_clipping", "bf16", "bfloat16", "fp16", "torch_autocast")
"""The sections on which it depends; batch sizes may follow the number of ranks."""


def open_run(folder: RunFolder, job: TrainJob) -> dict[str, Any]:
    """Make the run's folder, and return the results of the phases that earlier sessions of this run have finished.

    The folder is checked again: another run may have written to it after the command was checked. Where the command
    names a checkpoint, only phases before that of the checkpoint count as finished.
    """
    raise_mistakes(check_output_folder(folder.path, job.overwrite, job.resume, job.checkpoint))
    folder.open(job.overwrite)
    for name in (LOG, "tensorboard", "deepspeed"):
        folder.claim(name)
    folder.claim(MADE).mkdir(exist_ok=True)
    results = _read(folder, RESULTS) if job.resume else {}
    if job.checkpoint is None:
        return results
    before = [phase.name for phase in job.recipe.phases[: _phase_number(job.checkpoint, job)]]
    return {name: results[name] for name in before if name in results}


def write_results(folder: RunFolder, results: dict[str, Any]) -> None:
    """Write the results of the phases that are finished, by name: a resumed run takes these phases for finished."""
    for kind in ("train", "eval"):
        folder.write_json(f"{kind}_results.json", {name: of_phase[kind] for name, of_phase in results.items()})
    folder.write_json(RESULTS, results)


def write_finished(folder: RunFolder, job: TrainJob, phase: Phase, results: dict[str, Any]) -> None:
    """Keep what a phase that is finished was asked for, and write the results, with its own."""
    folder.write_json(FINISHED, _read(folder, FINISHED) | {phase.name: asked_of(job, phase)})
    write_results(folder, results)


def asked_of(job: TrainJob, phase: Phase) -> dict[str, Any]:
    """Return what the files ask of a phase, as JSON values, without the folder of its data, which may be moved.

    They are as the user wrote them, without defaults: a field that a later version adds is no difference.
    """
    values = {
        "seed": job.recipe.seed,
        "model": job.recipe.model.model_dump(exclude_defaults=True),
        "task": task_of(phase, job.recipe).model_dump(exclude_defaults=True, exclude={"data_dir"}),
        **phase.model_dump(exclude=_RECORDS_AND_PACE, exclude_defaults=True),
        "engine_file": {name: job.engine_config[name] for name in _OF_ENGINE_FILE if name in job.engine_config},
    }
    as_json: dict[str, Any] = json.loads(json.dumps(redacted(values)))
    return as_json


def phase_to_lengthen(job: TrainJob, finished: Sequence[Phase]) -> Phase | None:
    """Return the last phase where it is finished and asked for more steps.

    Raises UserError where a finished phase was asked for something else. Runs of older versions, which did not keep
    what was asked, are not checked.
    """
    folder = RunFolder(job.output)
    asked_before, results, mistakes, lengthened = _read(folder, FINISHED), _read(folder, RESULTS), [], None
    for phase in finished:
        before, now = asked_before.get(phase.name), asked_of(job, phase)
        if before is None or before == now:
            continue
        different = dict(changes(before, now))
        is_longer = all(
            name in _LENGTHS and (now.get(name) or _LENGTHS[name]) > (before.get(name) or math.inf)
            for name in different
        )
        if is_longer and phase is job.recipe.phases[-1]:
            if not Checkpoints(folder_of(phase, job)).all():
                different["checkpoint"] = "it has no checkpoint from which it could go on"
            elif "stopped_early_at" in results[phase.name]["train"] and _PATIENCE not in different:
                # the scores that ended it would end it again at once
                different[_PATIENCE] = f"it ended early: raise {_PATIENCE}"
            else:
                lengthened = phase
                continue
        mistakes += [f"phase {phase.name} is finished, and {text}" for text in different.values()]
    if mistakes:
        way_out = (
            "--resume changes nothing in a finished phase: write the files as they were; or train anew, with "
            "--overwrite_output_dir or another --output_dir; or train its model further, in another --output_dir and "
            f'with "start_from": "{job.output / "model"}"'
        )
        raise UserError("\n".join([*mistakes, way_out]))
    return lengthened


def checkpoint_to_go_back_to(folder: RunFolder, job: TrainJob) -> Checkpoint | None:
    """Return the checkpoint that the command names, checked; None where it names none.

    Raises UserError where the run has other phases than the recipe.
    """
    if not job.resume:
        return None

    def check_phases() -> None:
        """The names and the order of the phases place their files, so that a run cannot change them."""
        file, names = folder.path / RECIPE, [phase.name for phase in job.recipe.phases]
        before = [phase["name"] for phase in read_object(file)["phases"]] if file.is_file() else names
        if before != names:
            raise UserError(
                f"--resume: the run in {folder.path} has the phases {', '.join(before)}, and the recipe has "
                f"{', '.join(names)}: give the phases that the run has or, for further ones, another --output_dir and "
                f'"start_from": "{folder.path / "model"}"'
            )

    distributed.on_main(check_phases)
    if job.checkpoint is None:
        return None
    phase = job.recipe.phases[_phase_number(job.checkpoint, job)]
    return Checkpoints(folder_of(phase, job)).named(job.checkpoint)


def go_back(folder: RunFolder, job: TrainJob, checkpoint: Path) -> None:
    """Make a checkpoint the newest of the run for good: remove later checkpoints, records and results.

    What is latest goes first. So if the run is killed in between, the checkpoints that are left are those of a run up
    to some point, and the results are still those of before; given again, the same command does the rest.
    """
    number = _phase_number(checkpoint, job)
    for phase in reversed(job.recipe.phases[number:]):
        last = step_of(checkpoint) if phase is job.recipe.phases[number] else -1  # later phases begin anew
        Checkpoints(folder_of(phase, job)).supersede(after=last)
        sync_folder(folder_of(phase, job))
        drop_later_records(folder.path / "log.jsonl", phase.name, max(last, 0), max(last, 0))
    before = {phase.name for phase in job.recipe.phases[:number]}
    write_results(folder, {name: value for name, value in _read(folder, RESULTS).items() if name in before})


def _phase_number(checkpoint: Path, job: TrainJob) -> int:
    """Return the number of the recipe's phase that wrote a checkpoint. Raises UserError where none did."""
    folders = [folder_of(phase, job).resolve() for phase in job.recipe.phases]
    if checkpoint.resolve().parent not in folders:
        raise UserError(f"--resume {checkpoint}: the checkpoint is of no phase of the recipe")
    return folders.index(checkpoint.resolve().parent)


def _read(folder: RunFolder, name: str) -> dict[str, Any]:
    file = folder.path / name
    return read_object(file) if file.is_file() else {}
