"""What a finished phase was asked for, kept in `finished.json`, against what the files of a resumed run ask.

A finished phase is not trained again. So files that ask something else of it are an error, in place of results that are
not theirs. Only more steps of the last phase are trained, from its newest checkpoint.
"""

import json
import math
from collections.abc import Mapping
from typing import Any

from ds_trainer.config.jobs import TrainJob
from ds_trainer.config.recipe import Phase, task_of
from ds_trainer.engine.checkpoint import Checkpoints
from ds_trainer.engine.keys import value_at
from ds_trainer.files.messages import changes
from ds_trainer.files.redaction import redacted
from ds_trainer.files.run_folder import RunFolder
from ds_trainer.phase import folder_of
from ds_trainer.ranks import distributed
from ds_trainer.ranks.failures import UserError
from ds_trainer.report.run_files import read_object
from ds_trainer.run_state import read_results
from ds_trainer.starting_models import hashes_of_sources
from ds_trainer.tasks.registry import build_task

FILE = "finished.json"
_PATIENCE = "early_stopping_patience"
_LENGTHS = {"max_steps": 0, "num_train_epochs": 0, _PATIENCE: math.inf}
"""The fields that may grow, and what null stands for."""
_RECORDS_AND_PACE = {
    *("name", "task", "per_device_train_batch_size", "gradient_accumulation_steps", "gradient_checkpointing"),
    *("per_device_eval_batch_size", "max_skipped_steps", "logging_steps", "histograms"),
    *("eval_steps", "save_steps", "save_total_limit"),
}
"""The fields of a phase on which its model does not depend. (The task is compared as `task_of` gives it.)"""
_OF_ENGINE_FILE = ("optimizer", "scheduler", "gradient_clipping", "bf16", "bfloat16", "fp16", "torch_autocast")
"""The sections on which it depends; batch sizes may follow the number of ranks."""
_PLACES = {
    *("start_from", "model.name_or_path", "techniques.distill.teacher", "cut.vocabulary.file"),
    *("task.data_dir", "task.train_file", "task.validation_file"),
    *("engine_file.scheduler.params.total_num_steps", "engine_file.scheduler.params.warmup_num_steps"),
}
"""What is not compared itself: of names the contents are, and the steps of the schedule follow the recipe's."""
_WARMUP = "scheduler.params.warmup_num_steps"
"""Compared as the user's engine file has it."""
_CONTENTS, _DATA = "contents", "the data of "


def asked(job: TrainJob, phase: Phase, engine_file: Mapping[str, Any]) -> dict[str, Any]:
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
    folder.write_json(FILE, _read(folder) | {phase.name: values})


def to_be_lengthened(job: TrainJob, finished: Mapping[str, Mapping[str, Any]]) -> Phase | None:
    """Return the last phase where it is finished and asked for more steps; `finished` has what is asked of each phase.

    Raises UserError where a finished phase was asked for something else. Runs of older versions, which did not keep
    what was asked, are not checked.
    """
    folder = RunFolder(job.output)
    before, results, mistakes, lengthened = _read(folder), read_results(folder), [], None
    for phase in job.recipe.phases:
        if phase.name not in finished or phase.name not in before:
            continue
        old, now = before[phase.name], finished[phase.name]
        different = _differences(old, now)
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


def _differences(old: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, str]:
    """Return what a finished phase was asked for otherwise, in words; hashes are not shown, and fields come first."""
    different = {path: text for path, text in changes(old, now) if path not in _PLACES}
    hashed = [path for path in different if path.startswith(f"{_CONTENTS}.")]
    fields = {path: text for path, text in different.items() if path not in hashed}
    for what in (path.removeprefix(f"{_CONTENTS}.") for path in hashed):
        follows = what.startswith(_DATA) and any(path.startswith("task.") for path in fields)
        is_read = what in old[_CONTENTS] and what in now[_CONTENTS]  # unlike the data of a deleted model
        if not follows and (is_read or not what.startswith(_DATA)):
            fields[what] = f"{what} is another, or has other contents"
    return fields


def _read(folder: RunFolder) -> dict[str, Any]:
    file = folder.path / FILE
    return read_object(file) if file.is_file() else {}
