"""The flags that commands share: the task, what model folders are permitted, and what DeepSpeed's launcher adds."""

import argparse
import difflib
import json
import os
import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ds_trainer.cli.command import Mistakes, flag_mistake
from ds_trainer.files.json_file import parse_json, read_json
from ds_trainer.files.messages import shown
from ds_trainer.files.run_folder import RUN_LIST
from ds_trainer.files.write_places import cache_place
from ds_trainer.ranks.failures import UserError
from ds_trainer.recipe.exit_specs import ExitsSpec
from ds_trainer.recipe.recipe import Recipe, parse_recipe, parse_task
from ds_trainer.recipe.saved_checkpoint import SavedCheckpoint
from ds_trainer.recipe.settings import apply_to_task
from ds_trainer.recipe.task_specs import TaskSpec
from ds_trainer.recipe.trust import Trust
from ds_trainer.tasks.registry import check_data_files

PROJECT = Path(__file__).resolve().parents[2]
NO_TASK = "no task: give --task_name, or --recipe with a task"


def _shipped(folder: str, text: str) -> str:
    """Return the path of the file in `folder` of this library that has this name; any other path as it is."""
    files = {path.stem: path for path in sorted((PROJECT / folder).glob("*.json"))}
    if text in files and not os.path.isfile(text):
        return str(files[text])
    if os.path.exists(text) or not re.fullmatch(r"[\w-]{1,60}", text):
        return text  # whoever reads it says what is wrong with it
    near = difflib.get_close_matches(text, files) or files
    raise argparse.ArgumentTypeError(f"{shown(text)} is no file, nor a name in {folder}: {', '.join(near)}")


shipped_engine = partial(_shipped, "ds_configs")
"""Parses a flag that names an engine file."""
shipped_recipe = partial(_shipped, "ds_configs/recipes")
"""Parses a flag that names a recipe."""


def read_source(
    flags: argparse.Namespace, name: str, role: str, read: Callable[[str, str], dict[str, Any]] = read_json
) -> dict[str, Any]:
    """Read the JSON file that a flag names, or copy the object that a Python program gives in its place."""
    source = getattr(flags, name)
    if isinstance(source, Recipe):
        source = source.model_dump(exclude_none=True)
    if isinstance(source, Mapping):
        return parse_json(json.dumps(source, default=str).encode(), role)
    if not source:
        raise UserError(f"{role} is missing: give --{name}")
    return read(source, role)


def add_model_flags(parser: argparse.ArgumentParser, model: str = "model folder or hub name") -> None:
    """Add the flags of a command that runs one model on a task; `model` is the help of its argument."""
    parser.add_argument("model", help=model)
    parser.add_argument("--batch_size", type=int, default=64, help="examples per rank and forward")
    add_task_flags(parser)


def add_task_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags from which `read_task` reads."""
    source = "take the task from this recipe, e.g. OUTPUT_DIR/recipe.json, or a name of ds_configs/recipes"
    parser.add_argument("--recipe", type=shipped_recipe, help=source)
    parser.set_defaults(fields={})  # those of the task that a Python program gives
    add_common_flags(parser, "any field of the task: max_seq_length=128, or as for training task.max_seq_length=128")


def add_common_flags(parser: argparse.ArgumentParser, set_help: str) -> None:
    """Add the flags of every command that has a task, training included."""
    add = parser.add_argument
    add("--task_name", help="a GLUE task, docstrings, text, ner, token, squad, mlm or clm")
    add("--data_dir", help="folder of the task's files")
    add("--set", action="append", default=[], metavar="PATH=JSON", help=set_help)
    add("--cache_dir", help="where tokenised data are kept ($DS_TRAINER_CACHE, ~/.cache/ds_trainer)")
    write = "a folder that paths in the recipe and the engine file may lead into, beside the output folder"
    add("--allow_write", action="append", default=[], metavar="DIR", help=write)
    add("--plugin", action="append", default=[], metavar="MODULE", help="tasks and techniques of your own (plugins.py)")
    add("--allow_pickle", action="store_true", help="load pytorch_model.bin, as weights only, without safetensors")
    add("--trust_remote_code", action="store_true", help="run Python code that comes with a model")
    add("--local_rank", type=int, help=argparse.SUPPRESS)  # DeepSpeed's launcher adds it
    add("--deepspeed", action="store_true", help=argparse.SUPPRESS)  # many scripts of its users have it


def trust_of(flags: argparse.Namespace) -> Trust:
    return Trust(flags.allow_pickle, flags.trust_remote_code)


def names_task(flags: argparse.Namespace) -> bool:
    """Whether a command that can do without a task is given one."""
    return any((flags.recipe, flags.task_name, flags.data_dir, flags.set, flags.fields))


def read_task(
    flags: argparse.Namespace, mistakes: Mistakes, split: str, saved: SavedCheckpoint | None = None
) -> tuple[TaskSpec | None, str | None]:
    """Read the task and its cache folder from the flags and the last phase of their recipe; check the split's files.

    Without a recipe in the flags, the task of a checkpoint is that of the phase that wrote it.
    """
    recipe, spec, folder = (saved.recipe, saved.task, saved.run) if saved else (None, None, None)
    if flags.recipe:
        data = mistakes.of(read_source, flags, "recipe", "the recipe")
        recipe = mistakes.of(parse_recipe, data) if data else None
        spec = (recipe.phases[-1].task or recipe.task) if recipe else None
        folder = Path(flags.recipe).parent if isinstance(flags.recipe, str) else None
    task_data = spec.model_dump(exclude={"packing"}) if spec else {}  # a model is served one text in each row
    given = {"name": flags.task_name, "data_dir": flags.data_dir, **flags.fields}
    task_data |= {field: value for field, value in given.items() if value is not None}
    for setting in flags.set:
        mistakes.of(apply_to_task, task_data, setting)
    task = mistakes.of(parse_task, task_data)
    if "name" not in task_data:
        mistakes.append(NO_TASK)
    mistakes += check_data_files(task, splits=(split,)) if task else []
    cache_dir = recipe.cache_dir if recipe else None
    # a recipe in the folder of its run names a cache there; any other recipe may be somebody else's
    roots = [*([folder] if folder and os.path.isfile(folder / RUN_LIST) else []), *flags.allow_write]
    return task, flags.cache_dir or mistakes.of(cache_place, cache_dir, cache_dir, roots)


def checked_exits(values: dict[str, Any]) -> ExitsSpec:
    """Build a specification of exits from the values of flags; UserError names the flag whose value is not valid."""
    try:
        return ExitsSpec(**values)
    except ValidationError as error:
        raise UserError(flag_mistake(error.errors()[0])) from None


def add_push_flag(parser: argparse.ArgumentParser) -> None:
    help = "send the model folder to this repository of the Hugging Face hub, which is made unless it exists"
    parser.add_argument("--push_to_hub", metavar="NAME", type=_hub_name, help=help)


def _hub_name(text: str) -> str:
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    try:
        validate_repo_id(text)
    except HFValidationError as error:
        raise argparse.ArgumentTypeError(f"it is {shown(text)}: write NAME or OWNER/NAME ({error})") from None
    return text


def output_path(text: str) -> Path:
    """Return the folder that a flag names; an empty text would be the current folder."""
    if not text:
        raise argparse.ArgumentTypeError("it is empty: give a folder, . for the current one")
    return Path(text)
