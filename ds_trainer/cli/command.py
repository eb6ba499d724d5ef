"""What the commands share: how one ends, its parser, the list of its mistakes, and the flags of a task.

A command is a function of its arguments. It reads a job from them, which needs neither torch nor DeepSpeed and raises
all mistakes as one UserError, and then makes one call into the library, which is imported at that moment.
"""

import argparse
import contextlib
import difflib
import errno
import json
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from pydantic import BaseModel, ValidationError

from ds_trainer import __version__
from ds_trainer.files.messages import shown
from ds_trainer.files.reading import parse_json, read_json
from ds_trainer.files.redaction import redacted
from ds_trainer.ranks import distributed
from ds_trainer.ranks.failures import StoppedError, UserError, exit_code, raise_mistakes
from ds_trainer.recipe.jobs import Trust
from ds_trainer.recipe.recipe import Recipe, parse_recipe, parse_task
from ds_trainer.recipe.saved_checkpoint import SavedCheckpoint
from ds_trainer.recipe.settings import apply_to_task
from ds_trainer.recipe.task_specs import TaskSpec
from ds_trainer.tasks.registry import check_data_files

PROJECT = Path(__file__).resolve().parents[2]
NO_TASK = "no task: give --task_name, or --recipe with a task"
_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EACCES)
"""Errors of the disk or of permissions. Their messages name the file, and so no traceback is printed."""
T = TypeVar("T")
J = TypeVar("J", bound=BaseModel)


def run_command(command: Callable[[Sequence[str]], int | None], arguments: Sequence[str]) -> int:
    """Run a command and return its exit code (see `failures.py`); one rank prints what went wrong."""
    distributed.start_logging()
    try:
        return command(arguments) or 0
    except Exception as error:  # noqa: BLE001 - the last place to print it
        code = exit_code(error)
        with contextlib.suppress(OSError):  # the reader of standard error may be gone
            _print_error(error, foreseen=code > 1 or _is_of_the_disk(error))
        return code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr, flush=True)
        return 128 + signal.SIGINT


class Parser(argparse.ArgumentParser):
    """Raises what argparse would print on every rank."""

    def __init__(self, name: str, description: str) -> None:
        super().__init__(prog=f"ds-{name}", description=description, allow_abbrev=False)
        self.add_argument("--version", action="version", version=f"ds_trainer {__version__}")

    def options(self, arguments: Sequence[str], given: Mapping[str, Any]) -> argparse.Namespace:
        """Parse a command line. `given` has further flags by their names, as a Python program passes them.

        Texts and paths are parsed as on a command line, other values are taken as they are, and None is left out.
        """
        texts = [f"--{name}={value}" for name, value in given.items() if isinstance(value, str | Path)]
        options = self.parse_args([*arguments, *texts])
        others = {name: value for name, value in given.items() if not isinstance(value, str | Path | None)}
        vars(options).update(others)
        return options

    def parse_known_args(self, *arguments: Any, **more: Any) -> Any:
        """Parse, and load the plugins that are named, before anything is read that may need them."""
        flags, unknown = super().parse_known_args(*arguments, **more)
        flags.trust = Trust(getattr(flags, "allow_pickle", False), getattr(flags, "trust_remote_code", False))
        for name in getattr(flags, "plugin", []):
            from ds_trainer.cli.plugins import load_plugin  # loads torch, which a plugin needs anyway

            load_plugin(name)
        return flags, unknown

    def add_model_flags(self, model: str = "model folder or hub name") -> None:
        """Add the flags of a command that runs one model on a task; `model` is the help of its argument."""
        self.add_argument("model", help=model)
        self.add_argument("--batch_size", type=int, default=64, help="examples per rank and forward")
        self.add_task_flags()

    def add_task_flags(self) -> None:
        """Add the flags from which `read_task` reads."""
        source = "take the task from this recipe, e.g. OUTPUT_DIR/recipe.json, or a name of ds_configs/recipes"
        self.add_argument("--recipe", type=shipped_recipe, help=source)
        self.set_defaults(fields={})  # those of the task that a Python program gives
        self.add_common_flags("any field of the task: max_seq_length=128, or as for training task.max_seq_length=128")

    def add_common_flags(self, set_help: str) -> None:
        """Add the flags of every command that has a task, training included."""
        add = self.add_argument
        add("--task_name", help="a GLUE task, docstrings, text, ner, token, squad, mlm, clm, embedding or rerank")
        add("--data_dir", help="folder of the task's files")
        add("--set", action="append", default=[], metavar="PATH=JSON", help=set_help)
        add("--cache_dir", help="where tokenised data are kept ($DS_TRAINER_CACHE, ~/.cache/ds_trainer)")
        add("--plugin", action="append", default=[], metavar="MODULE", help="tasks and techniques of your own")
        add("--allow_pickle", action="store_true", help="load pytorch_model.bin, as weights only, without safetensors")
        add("--trust_remote_code", action="store_true", help="run Python code that comes with a model")
        add("--local_rank", type=int, help=argparse.SUPPRESS)  # DeepSpeed's launcher adds it
        add("--deepspeed", action="store_true", help=argparse.SUPPRESS)  # many scripts of its users have it

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}\n{self.format_usage().strip()}")


class Mistakes(list[str]):
    """The mistakes of a command, which are collected until they are raised together."""

    def of(self, call: Callable[..., T], *arguments: Any) -> T | None:
        """Return the value of a call; or None where it raises a UserError, whose message is kept."""
        try:
            return call(*arguments)
        except UserError as error:
            self.append(str(error))
            return None

    def job(self, kind: type[J], flags: argparse.Namespace, **values: Any) -> J:
        """Make a job from `values` and from the flags that are named like its other fields; or raise all mistakes.

        A value that could not be read is None; its mistake is in the list already.
        """
        try:
            job = kind.model_validate({**vars(flags), **values})
        except ValidationError as error:
            unread = {name for name, value in values.items() if value is None}
            self += [flag_mistake(item) for item in error.errors() if item["loc"][0] not in unread]
            if not self:
                raise
        self.raise_all()
        return job

    def raise_all(self) -> None:
        """Raise one UserError with a line for each mistake; do nothing if there is none."""
        raise_mistakes(self)


def flag_mistake(error: Any) -> str:
    """Say what is wrong with a flag, from one of pydantic's errors about the field of that name."""
    allowed = error["msg"].removeprefix("Value error, ").replace("Input should", "it must")
    return f"--{error['loc'][0]} is {shown(error['input'])}: {allowed}" if error["loc"] else allowed


def one_process_mistakes(work: str) -> list[str]:
    """Return the mistake if a launcher has started several processes for work such as "a folder is measured"."""
    alone = distributed.world_size() == 1
    return [] if alone else [f"{work} by one process: start it with python, not with deepspeed"]


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


def read_source(flags: argparse.Namespace, name: str, role: str) -> dict[str, Any]:
    """Read the JSON file that a flag names, or copy the object that a Python program gives in its place."""
    source = getattr(flags, name)
    if isinstance(source, Recipe):
        source = source.model_dump(exclude_none=True)
    if isinstance(source, Mapping):
        return parse_json(json.dumps(source, default=str).encode(), role)
    if not source:
        raise UserError(f"{role} is missing: give --{name}")
    return read_json(source, role)


def names_task(flags: argparse.Namespace) -> bool:
    """Whether a command that can do without a task is given one."""
    return any((flags.recipe, flags.task_name, flags.data_dir, flags.set, flags.fields))


def read_task(
    flags: argparse.Namespace, mistakes: Mistakes, split: str, saved: SavedCheckpoint | None = None
) -> tuple[TaskSpec | None, str | None]:
    """Read the task and its cache folder from the flags and the last phase of their recipe; check the split's files.

    Without a recipe in the flags, the task of a checkpoint is that of the phase that wrote it.
    """
    recipe, spec = (saved.recipe, saved.task) if saved else (None, None)
    if flags.recipe:
        data = mistakes.of(read_source, flags, "recipe", "the recipe")
        recipe = mistakes.of(parse_recipe, data) if data else None
        spec = (recipe.phases[-1].task or recipe.task) if recipe else None
    task_data = spec.model_dump(exclude={"packing"}) if spec else {}  # a model is served one text in each row
    given = {"name": flags.task_name, "data_dir": flags.data_dir, **flags.fields}
    task_data |= {field: value for field, value in given.items() if value is not None}
    for setting in flags.set:
        mistakes.of(apply_to_task, task_data, setting)
    task = mistakes.of(parse_task, task_data)
    if "name" not in task_data:
        mistakes.append(NO_TASK)
    splits = () if task is None else task.scored_splits if split == "validation" else (split,)
    mistakes += check_data_files(task, splits) if task else []
    return task, flags.cache_dir or (recipe.cache_dir if recipe else None)


def output_path(text: str) -> Path:
    """Return the folder that a flag names; an empty text would be the current folder."""
    if not text:
        raise argparse.ArgumentTypeError("it is empty: give a folder, . for the current one")
    return Path(text)


def _is_of_the_disk(error: Exception) -> bool:
    if isinstance(error, OSError):
        return error.errno in _DISK
    # safetensors raises an error of its own for what the system reports
    return any(str(error).endswith(f"(os error {number})") for number in _DISK)


def _print_error(error: Exception, foreseen: bool) -> None:
    """Print the message of an error that this library foresaw, on one rank; of any other, all that is known, on each.

    The rank is the one that the error names; before the ranks know of each other, it is the first of every host.
    """
    notes = getattr(error, "__notes__", [])
    if foreseen:
        reporter = getattr(error, "reporter", None)
        if (distributed.local_rank() if reporter is None else distributed.rank()) != (reporter or 0):
            return
        where = "" if distributed.is_main() or reporter is not None else f"rank {distributed.rank()}: "
        first = str(error) if isinstance(error, StoppedError) else f"error: {where}{error}"
        text = redacted("\n".join([first, *notes]))
    else:
        before_python_311 = notes if sys.version_info < (3, 11) else []
        text = redacted("".join([*traceback.format_exception(error), *before_python_311])).rstrip("\n")
    sys.stdout.flush()
    print(text, file=sys.stderr, flush=True)
