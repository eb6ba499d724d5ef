"""Where a command writes: what stands in a recipe or an engine file leads nowhere but into the output folder.

Either file may come from anywhere. What the user says in flags and in `--set` is the user's own word and holds; so does
what lies in a folder given by `--allow_write`. Files that DeepSpeed writes by relative paths, or by none at all into
the current folder, go to `OUTPUT_DIR/deepspeed`. Loads neither torch nor DeepSpeed.
"""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from ds_trainer.files.messages import quoted
from ds_trainer.files.run_folder import RUN_LIST
from ds_trainer.ranks.failures import UserError

CACHE_VARIABLE = "DS_TRAINER_CACHE"
DEFAULT_CACHE = "~/.cache/ds_trainer"
OWN_FOLDER = "deepspeed"
"""In the output folder, for what DeepSpeed itself writes."""

_PLACE = re.compile(r"(^|_)(path|dir|directory|folder|file|filename)s?$")
_ONLY_READ = {"index_to_sample_path", "index_to_metric_path"}
_FOLDER_NAMES = {"job_name"}
"""Keys whose text DeepSpeed appends to a path as a folder's name."""
_SWITCHED = ("tensorboard", "csv_monitor", "flops_profiler", "autotuning", "wandb", "comet")
"""Sections that write nothing unless they are enabled."""
_UNSAID = {("tensorboard", "output_path"): ".", ("csv_monitor", "output_path"): "."}
"""What DeepSpeed writes to the current folder where nothing is said of it, and its name in `OWN_FOLDER`."""
_BY_ENVIRONMENT = {"wandb": "WANDB_DIR", "comet": "COMET_OFFLINE_DIRECTORY"}

Key: TypeAlias = tuple[str | int, ...]


def engine_place_mistakes(
    config: Mapping[str, Any], as_read: Mapping[str, Any], output: Path, allowed: Sequence[str]
) -> list[str]:
    """Where the engine file would have DeepSpeed write elsewhere; `as_read` is the file before `--set`."""
    return [*_engine_place_mistakes(config, as_read, output, allowed)]


def placed_engine_file(
    config: Mapping[str, Any], as_read: Mapping[str, Any], output: Path
) -> tuple[dict[str, Any], list[str]]:
    """A new config of one without mistakes, its relative places inside the output folder; and what to tell of that."""
    moved: dict[Key, str] = {
        key: value
        for key, value in _places(config)
        if key[-1] not in _FOLDER_NAMES and not os.path.isabs(value) and _at(as_read, key) == value
    }
    unsaid: dict[Key, str] = {
        key: default
        for key, default in _UNSAID.items()
        if _is_on(config, key[0]) and _at(config, key) in (None, "", "auto")
    }
    placed, told = copy.deepcopy(dict(config)), []
    for key, value in {**moved, **unsaid}.items():
        target = os.path.normpath(output / OWN_FOLDER / value)
        _at(placed, key[:-1])[key[-1]] = target
        told.append(f"the engine file's {_dotted(key)} is {target}")
    return placed, told


def environment_of(config: Mapping[str, Any], output: Path) -> dict[str, str]:
    """The variables by which monitors without a key for it are told where to write; what is set already stays."""
    wanted = {name: str(output / OWN_FOLDER) for section, name in _BY_ENVIRONMENT.items() if _is_on(config, section)}
    return {name: value for name, value in wanted.items() if name not in os.environ}


def cache_place(said: str | None, as_read: Any, roots: Sequence[str | Path]) -> str | None:
    """A recipe's cache folder; where it stands in the file it must lie in a root, or in the user's own cache.

    A relative one is taken inside the first root. Where none is said, it is $DS_TRAINER_CACHE. Raises ValueError.
    """
    if said is None:
        return os.environ.get(CACHE_VARIABLE) or None
    if said != as_read:
        return said
    place = os.path.expanduser(said)
    if not os.path.isabs(place) and roots:
        place = os.path.abspath(os.path.join(roots[0], place))
    own = [DEFAULT_CACHE, *filter(None, [os.environ.get(CACHE_VARIABLE)])]
    if _is_inside(place, [*roots, *own]):
        return place
    raise UserError(
        f"the recipe's cache_dir is {quoted(said)}, outside of the output folder: give --cache_dir or --allow_write "
        f"with it if you mean that, or drop it (then it is {own[-1]})"
    )


def output_place_mistakes(output: Path, in_recipe: bool) -> list[str]:
    """Why an output folder that only stands in a recipe's file may not be written to: other things are in it."""
    try:
        foreign = in_recipe and output.is_dir() and any(output.iterdir()) and not (output / RUN_LIST).is_file()
    except OSError:  # told by the check of the folder itself
        return []
    if not foreign:
        return []
    return [f"the recipe's output_dir {output} holds something else than a run of this program: give --output_dir"]


def is_run(folder: Path) -> bool:
    """Whether a run of ours wrote in this folder."""
    return os.path.isfile(folder / RUN_LIST)


def result_place_mistakes(output_file: Path | None, predictions_dir: Path | None) -> list[str]:
    """Where an evaluation could not write its results."""
    mistakes = []
    if output_file and os.path.isdir(output_file):
        mistakes.append(
            f"--output_file: {output_file} is a folder: name a file in it, e.g. {output_file / 'scores.json'}"
        )
    elif output_file:
        parent = output_file.absolute().parent
        if not os.path.isdir(parent):
            mistakes.append(f"--output_file: the folder {parent} does not exist")
        elif not os.access(output_file if os.path.exists(output_file) else parent, os.W_OK):
            mistakes.append(f"--output_file: {output_file} cannot be written: give another, or change its permissions")
    if predictions_dir:
        above = (predictions_dir.absolute(), *predictions_dir.absolute().parents)
        there = next(path for path in above if os.path.exists(path))
        if not there.is_dir():
            mistakes.append(f"--predictions_dir: {there} is a file: name a folder")
        elif not os.access(there, os.W_OK):
            mistakes.append(f"--predictions_dir: {there} cannot be written to: give another folder")
    return mistakes


def _engine_place_mistakes(
    config: Mapping[str, Any], as_read: Mapping[str, Any], output: Path, allowed: Sequence[str]
) -> Iterator[str]:
    own = output / OWN_FOLDER
    for key, value in _places(config):
        if _at(as_read, key) != value:
            continue  # of --set
        if key[-1] in _FOLDER_NAMES:
            if value in ("", ".", "..") or os.path.basename(value) != value:
                yield f"{_dotted(key)} is {quoted(value)}: write a name, not a path"
        elif not _is_inside(os.path.join(own, value), [own, *allowed]):
            yield (
                f"{_dotted(key)} is {quoted(value)}, which is written to and lies outside of the output folder: write "
                f"a relative path, which is taken inside {own}, or give --allow_write with its folder"
            )


def _places(config: Mapping[str, Any]) -> Iterator[tuple[Key, str]]:
    """The texts by which DeepSpeed finds what it writes: of known keys, and of all that are named like a place."""
    for key, value in _texts(config, ()):
        name = next(part for part in reversed(key) if isinstance(part, str))
        if name in _ONLY_READ or not (_PLACE.search(name) or name in _FOLDER_NAMES) or value == "auto":
            continue
        if key[0] in _SWITCHED and not (_is_on(config, str(key[0])) and value):
            continue
        if name == "nvme_path" and _at(config, (*key[:-1], "device")) != "nvme":
            continue
        yield key, value


def _texts(value: Any, key: Key) -> Iterator[tuple[Key, str]]:
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _texts(inner, (*key, name))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _texts(inner, (*key, index))
    elif isinstance(value, str):
        yield key, value


def _at(value: Any, key: Key) -> Any:
    """What is at a place; None where there is nothing."""
    for part in key:
        if isinstance(value, Mapping):
            value = value.get(part)
        elif isinstance(value, list) and isinstance(part, int) and part < len(value):
            value = value[part]
        else:
            return None
    return value


def _is_on(config: Mapping[str, Any], section: str) -> bool:
    block = config.get(section)
    return isinstance(block, Mapping) and bool(block.get("enabled"))


def _is_inside(place: str, folders: Sequence[str | Path]) -> bool:
    """Whether a path lies in one of the folders, or is one, links followed."""
    real = os.path.realpath(place)
    homes = [os.path.realpath(os.path.expanduser(folder)) for folder in folders]
    return any(os.path.commonpath([real, home]) == home for home in homes)


def _dotted(key: Key) -> str:
    return ".".join(map(str, key))
