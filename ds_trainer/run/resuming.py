"""What a run that is resumed takes over from its folder, and how it goes back to an older checkpoint.

A finished phase is not trained again. So `finished.json` keeps what it was asked for, and files that ask something else
of it are an error, in place of results that are not theirs; only more steps of the last phase are trained, from its
newest checkpoint. Going back to a checkpoint deletes results. So the run first writes a note of the checkpoint: if it
is killed in the midst of going back, it does the rest when it is resumed.
"""

import json
import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from ds_trainer.engine.checkpoint import Checkpoint, Checkpoints, step_of
from ds_trainer.engine.keys import value_at
from ds_trainer.files.checkpoint_files import sync_folder
from ds_trainer.files.messages import changes
from ds_trainer.files.reading import read_object
from ds_trainer.files.redaction import redacted
from ds_trainer.files.run_folder import RunFolder, check_output_folder
from ds_trainer.ranks import distributed
from ds_trainer.ranks.failures import UserError, raise_mistakes
from ds_trainer.recipe.jobs import TrainJob
from ds_trainer.recipe.recipe import Phase, task_of
from ds_trainer.recipe.saved_checkpoint import RECIPE
from ds_trainer.report.log import drop_later_records
from ds_trainer.run.phase import folder_of
from ds_trainer.run.starting_models import MADE, hashes_of_sources
from ds_trainer.tasks.registry import build_task

FINISHED = "finished.json"
_RESULTS = "all_results.json"
_GOING_BACK = "going_back.json"
"""The note: a file with the path of the checkpoint that the run is going back to. It exists only meanwhile."""

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
_PLACES = {
    *("model.name_or_path", "cut.vocabulary.file", "task.data_dir", "task.train_file", "task.validation_file"),
    *("engine_file.scheduler.params.total_num_steps", "engine_file.scheduler.params.warmup_num_steps"),
}
"""Fields that are not compared as written: of a folder or file its hash is, and a schedule follows the recipe."""
_WARMUP = "scheduler.params.warmup_num_steps"
"""Compared as the user's engine file has it."""
_CONTENTS, _DATA = "contents", "the data of "


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
    results = _read(folder, _RESULTS) if job.resume else {}
    if job.checkpoint is None:
        return results
    before = [phase.name for phase in job.recipe.phases[: _phase_number(job.checkpoint, job)]]
    return {name: results[name] for name in before if name in results}


def write_results(folder: RunFolder, results: dict[str, Any]) -> None:
    """Write the results of the phases that are finished, by name: a resumed run takes these phases for finished."""
    for kind in ("train", "eval"):
        folder.write_json(f"{kind}_results.json", {name: of_phase[kind] for name, of_phase in results.items()})
    folder.write_json(_RESULTS, results)


def asked_of(job: TrainJob, phase: Phase, engine_file: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a phase with a resolved engine file is asked for, as JSON values; collective.

    Its data is hashed with the tokenizer of its own model, and not at all once that is deleted.
    """
    model = folder_of(phase, job) / "model"
    contents = distributed.on_main(lambda: hashes_of_sources(job.recipe, phase))
    if distributed.on_main((model / "config.json").is_file):
        task = build_task(task_of(phase, job.recipe), model, job.recipe.cache_dir)
        contents |= {f"{_DATA}{split}": task.key(split) for split in ("train", *task.splits)}
    values = {
        "seed": job.recipe.seed,
        # without defaults: a field that a later version adds is no difference
        "model": job.recipe.model.model_dump(exclude_defaults=True),
        "task": task_of(phase, job.recipe).model_dump(exclude_defaults=True),
        **phase.model_dump(exclude=_RECORDS_AND_PACE, exclude_defaults=True),
        "engine_file": {name: engine_file[name] for name in _OF_ENGINE_FILE if name in engine_file},
        _WARMUP: value_at(job.engine_config, _WARMUP),
        _CONTENTS: contents,
    }
    as_json: dict[str, Any] = json.loads(json.dumps(redacted(values)))
    return as_json


def write_asked(folder: RunFolder, phase: Phase, values: Mapping[str, Any]) -> None:
    """Keep what a phase that is finished was asked for."""
    folder.write_json(FINISHED, _read(folder, FINISHED) | {phase.name: values})


def phase_to_lengthen(job: TrainJob, asked: Mapping[str, Mapping[str, Any]]) -> Phase | None:
    """Return the last phase where it is finished and asked for more steps; `asked` is `asked_of` each finished phase.

    Raises UserError where a finished phase was asked for something else. Runs of older versions, which did not keep
    what was asked, are not checked.
    """
    folder = RunFolder(job.output)
    before, results, mistakes, lengthened = _read(folder, FINISHED), _read(folder, _RESULTS), [], None
    for phase in job.recipe.phases:
        if phase.name not in asked or phase.name not in before:
            continue
        old, now = before[phase.name], asked[phase.name]
        different = _differences(old, now, {*_PLACES, *phase.sources})
        is_longer = all(
            name in _LENGTHS and (now.get(name) or _LENGTHS[name]) > (old.get(name) or math.inf) for name in different
        )
        if different and is_longer and phase is job.recipe.phases[-1]:
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


def _differences(old: Mapping[str, Any], now: Mapping[str, Any], places: set[str]) -> dict[str, str]:
    """Return in words what a finished phase was asked for otherwise, fields first; hashes are not shown."""
    different = {path: text for path, text in changes(old, now) if path not in places}
    hashed = [path for path in different if path.startswith(f"{_CONTENTS}.")]
    fields = {path: text for path, text in different.items() if path not in hashed}
    for what in (path.removeprefix(f"{_CONTENTS}.") for path in hashed):
        follows = what.startswith(_DATA) and any(path.startswith("task.") for path in fields)
        is_read = what in old[_CONTENTS] and what in now[_CONTENTS]  # unlike the data of a deleted model
        if not follows and (is_read or not what.startswith(_DATA)):
            fields[what] = f"{what} is another, or has other contents"
    return fields


def checkpoint_to_go_back_to(folder: RunFolder, job: TrainJob) -> Checkpoint | None:
    """Return the checkpoint that the command names, checked; None where it names none.

    A plain `--resume` first completes an interrupted return to a checkpoint. Raises UserError where the run has other
    phases than the recipe.
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
        distributed.on_main(partial(_end_going_back, folder, job))
        return None
    if distributed.on_main((folder.path / _GOING_BACK).is_file):
        raise UserError(
            f"--resume {job.checkpoint}: the run was killed while it went back to another checkpoint, which "
            f"{folder.path / _GOING_BACK} names: give --resume alone first"
        )
    phase = job.recipe.phases[_phase_number(job.checkpoint, job)]
    return Checkpoints(folder_of(phase, job)).named(job.checkpoint)


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
    # the results go first: while they are there, a phase counts as finished, and its checkpoints are not looked at
    write_results(folder, {name: value for name, value in _read(folder, _RESULTS).items() if name in before})
    for phase in job.recipe.phases[number:]:
        last = step_of(checkpoint) if phase is job.recipe.phases[number] else -1  # later phases begin anew
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


def _read(folder: RunFolder, name: str) -> dict[str, Any]:
    file = folder.path / name
    return read_object(file) if file.is_file() else {}
