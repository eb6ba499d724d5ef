"""Where a run writes beside its models and checkpoints: into the output folder, unless the user names another place.

A recipe or an engine file may be somebody else's. A path in it that leads out of the output folder is an error, which
`--allow_write` lifts. Paths in flags and in `--set` are the user's own and are taken as they are; so is `nvme_path`,
whose purpose is to name another disk. This module loads neither torch nor DeepSpeed.
"""

import copy
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ds_trainer.files.messages import quoted
from ds_trainer.ranks.failures import UserError, raise_mistakes

CACHE_VARIABLE = "DS_TRAINER_CACHE"
DEFAULT_CACHE = "~/.cache/ds_trainer"
DEEPSPEED_FOLDER = "deepspeed"
"""In the output folder, for what DeepSpeed itself writes."""

_WRITTEN = {
    "tensorboard": ("output_path", "job_name"),
    "csv_monitor": ("output_path", "job_name"),
    "flops_profiler": ("output_file",),
    "autotuning": ("exps_dir", "results_dir", "metric_path", "model_info_path"),
}
"""The keys of the engine file by which DeepSpeed finds what it writes. It appends a job_name to the output_path."""
_BY_ENVIRONMENT = {"wandb": "WANDB_DIR", "comet": "COMET_OFFLINE_DIRECTORY"}


def placed_engine_file(
    config: Mapping[str, Any], as_read: Mapping[str, Any], output: Path, allowed: Sequence[str]
) -> tuple[dict[str, Any], list[str]]:
    """Take the relative paths of an engine file inside `OUTPUT_DIR/deepspeed`.

    `as_read` is the file before `--set`. Returns the new config, and a line for each path that was changed. Raise
    UserError where a path of the file leads out of the output folder and of the `allowed` ones.
    """
    folder = output / DEEPSPEED_FOLDER
    placed, notes, mistakes = copy.deepcopy(dict(config)), list[str](), list[str]()
    for section, keys in _WRITTEN.items():
        if not _is_on(placed, section):
            continue
        block, block_read = placed[section], as_read.get(section)
        for key in keys:
            value = block.get(key)
            if key == "output_path" and value in (None, "", "auto"):
                value = "."  # DeepSpeed would write to the current folder
            elif not (
                isinstance(block_read, Mapping) and block_read.get(key) == value and value and type(value) is str
            ):
                continue  # it comes from --set, is missing, or is an error that the check of the engine file reports
            target = os.path.normpath(folder / value)
            if not _is_inside(target, [folder, *allowed]):
                way_out = (
                    f"write a relative path, which is taken inside {folder}, or give --allow_write with its folder"
                )
                outside = f"{section}.{key} is {quoted(value)}, which lies outside of the output folder"
                mistakes.append(f"{outside}: {way_out}")
            elif key != "job_name" and target != value:
                block[key] = target
                notes.append(f"the engine file's {section}.{key} is {target}")
    raise_mistakes(mistakes)
    return placed, notes


def environment_of(config: Mapping[str, Any], output: Path) -> dict[str, str]:
    """Return the variables that name a folder to the monitors without a key for it.

    A variable that is set already stays.
    """
    names = [name for section, name in _BY_ENVIRONMENT.items() if _is_on(config, section) and name not in os.environ]
    return dict.fromkeys(names, str(output / DEEPSPEED_FOLDER))


def cache_place(cache_dir: str | None, as_read: Any, roots: Sequence[str | Path]) -> str | None:
    """Return the cache folder of a recipe; by default $DS_TRAINER_CACHE.

    A cache folder that the recipe's file names (`as_read`) must lie in one of the `roots` or in the user's default
    cache; a relative one is taken inside the first root. Raise UserError where it lies elsewhere.
    """
    default = os.environ.get(CACHE_VARIABLE) or None
    if cache_dir is None:
        return default
    if cache_dir != as_read:
        return cache_dir
    place = os.path.abspath(os.path.join(*roots[:1], os.path.expanduser(cache_dir)))
    if not _is_inside(place, [*roots, DEFAULT_CACHE, *filter(None, [default])]):
        way_out = "give --cache_dir or --allow_write with it if you mean that, or drop it"
        raise UserError(f"the recipe's cache_dir is {quoted(cache_dir)}, outside of the output folder: {way_out}")
    return place


def _is_on(config: Mapping[str, Any], section: str) -> bool:
    block = config.get(section)
    return isinstance(block, Mapping) and bool(block.get("enabled"))


def _is_inside(place: str, folders: Sequence[str | Path]) -> bool:
    """Whether a path lies in one of the folders, or is one; symbolic links are followed."""
    real = Path(os.path.realpath(place))
    return any(real.is_relative_to(os.path.realpath(os.path.expanduser(folder))) for folder in folders)
