"""The command lines: flags, `--set`, and every check that needs neither torch nor DeepSpeed.

All mistakes of a command are collected and told at once, by rank 0, within the first seconds; exit code 2.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import errno
import os
import shlex
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from ds_trainer.cli.exit_flags import (
    add_aim_flags,
    asked_calibration,
    calibration_mistakes,
    saved_exits,
)
from ds_trainer.config.jobs import CalibrateJob, TrainJob
from ds_trainer.config.recipe import Recipe, TaskSpec, parse_recipe, parse_task, recipe_schema
from ds_trainer.config.saved_checkpoint import SavedCheckpoint
from ds_trainer.config.settings import assign, parse_setting
from ds_trainer.config.trust import Trust, trusting
from ds_trainer.engine.engine_file import (
    check_engine_file,
    idle_warnings,
    read_engine_file,
)
from ds_trainer.files.json_file import read_json
from ds_trainer.files.messages import shortened
from ds_trainer.files.redaction import redacted
from ds_trainer.files.run_folder import check_output_folder
from ds_trainer.files.write_places import (
    cache_place,
    engine_place_mistakes,
    environment_of,
    is_run,
    output_place_mistakes,
    placed_engine_file,
)
from ds_trainer.models.model_folder import model_mistakes
from ds_trainer.ranks import distributed
from ds_trainer.ranks.debugging import debug_port_mistakes, wait_for_debugger
from ds_trainer.ranks.failures import StoppedError, UserError, exit_code
from ds_trainer.tasks.registry import check_data_files

_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)
"""What no flag mends: told without a traceback."""
T = TypeVar("T")


def run_command(command: Callable[[Sequence[str]], None], arguments: Sequence[str]) -> int:
    """Run a command of this library and give its exit code (see `failures.py`); one rank tells what went wrong."""
    distributed.start_logging()
    try:
        command(arguments)
    except Exception as error:  # noqa: BLE001 - the last place to tell of one
        code = exit_code(error)
        with contextlib.suppress(OSError):  # whoever read it may be gone
            (_tell if code > 1 or _is_of_the_disk(error) else _tell_traceback)(error)
        return code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr, flush=True)
        return 128 + signal.SIGINT
    return 0


def _is_of_the_disk(error: Exception) -> bool:
    """Safetensors has an error of its own for what the system says."""
    if isinstance(error, OSError):
        return error.errno in _DISK
    return any(str(error).endswith(f"(os error {number})") for number in _DISK)


def _tell(error: Exception) -> None:
    """On the rank that the error names; before the ranks know of each other, on the first of every host."""
    teller = getattr(error, "teller", None)
    if distributed.local_rank() == 0 if teller is None else distributed.rank() == teller:
        sys.stdout.flush()
        elsewhere = "" if distributed.is_main() or teller is not None else f"rank {distributed.rank()}: "
        first = str(error) if isinstance(error, StoppedError) else f"error: {elsewhere}{error}"
        told = "\n".join([first, *getattr(error, "__notes__", [])])
        print(shortened(redacted(told)), file=sys.stderr, flush=True)


def _tell_traceback(error: Exception) -> None:
    """Of what this library did not foresee, all that is known, on every rank that it happens on."""
    sys.stdout.flush()
    print(redacted("".join(traceback.format_exception(error))), end="", file=sys.stderr)
    if sys.version_info < (3, 11):
        print("\n".join(getattr(error, "__notes__", [])), file=sys.stderr)


def train_command(arguments: Sequence[str]) -> None:
    """`launch/train.py`: check everything, then train."""
    if "--recipe_schema" in arguments:
        print(recipe_schema())
        return
    job = read_train_job(arguments)
    os.environ.update(environment_of(job.engine_config, job.output))
    if job.debug_port:
        wait_for_debugger(job.debug_port)
    from ds_trainer.run import dry_run, run

    with trusting(job.trust):
        (dry_run if job.dry_run else run)(job)


def calibrate_command(arguments: Sequence[str]) -> None:
    """`launch/calibrate.py`: pick the exit thresholds of a model folder on held-out training examples."""
    job = read_calibrate_job(arguments)
    from ds_trainer.scoring import calibrate_exits

    with trusting(job.trust):
        calibrate_exits(job)


def read_train_job(arguments: Sequence[str]) -> TrainJob:
    """Parse and check a training command; a ValueError tells every mistake of it, one a line."""
    flags = _train_parser().parse_args(list(arguments))
    mistakes = Mistakes()
    recipe_data = mistakes.of(lambda: read_json(flags.recipe, "the recipe")) or {}
    engine_config = mistakes.of(lambda: read_engine_file(flags.deepspeed_config)) or {}
    mistakes.tell()
    recipe_read, engine_read = copy.deepcopy((recipe_data, engine_config))
    for setting in flags.set:
        mistakes.of(partial(_apply_setting, recipe_data, engine_config, setting))
    mistakes.of(lambda: _apply_flags(recipe_data, flags))
    recipe = mistakes.of(lambda: parse_recipe(recipe_data))
    phases = recipe.phases if recipe else [None]
    for phase in phases:
        mistakes += check_engine_file(engine_config, phase, distributed.world_size(), name=flags.deepspeed_config)
    mistakes += _source_mistakes(recipe, asked_trust(flags)) if recipe else []
    resume, checkpoint = flags.resume is not None, Path(flags.resume) if flags.resume else None
    if flags.timeout < 1:
        mistakes.append(f"--timeout is {flags.timeout}: give the seconds that a rank waits for another, 1 or more")
    mistakes += debug_port_mistakes(flags.debug_port)
    output = Path(recipe.output_dir) if recipe and recipe.output_dir else None
    if recipe and output is None:
        mistakes.append("no output folder: give --output_dir, or output_dir in the recipe")
    if output and not flags.dry_run and distributed.is_main():
        mistakes += check_output_folder(output, flags.overwrite_output_dir, resume, checkpoint)
    if recipe and output:
        mistakes += output_place_mistakes(output, recipe.output_dir == recipe_read.get("output_dir"))
        mistakes += engine_place_mistakes(engine_config, engine_read, output, flags.allow_write)
        roots = [output, *flags.allow_write]
        cache = mistakes.of(partial(cache_place, recipe.cache_dir, recipe_read.get("cache_dir"), roots))
        recipe = recipe.model_copy(update={"cache_dir": cache})
    mistakes.tell()
    assert recipe is not None
    assert output is not None
    for line in idle_warnings(engine_config, phases, distributed.world_size(), name=flags.deepspeed_config):
        distributed.warn(line)
    engine_config, told = placed_engine_file(engine_config, engine_read, output)
    for line in told:
        distributed.info(line)
    asked = (flags.overwrite_output_dir, resume, checkpoint, flags.dry_run, flags.timeout)
    return TrainJob(_as_given(arguments), recipe, engine_config, output, *asked, asked_trust(flags), flags.debug_port)


def read_calibrate_job(arguments: Sequence[str]) -> CalibrateJob:
    """Parse and check a calibration command; a ValueError tells every mistake of it, one a line."""
    flags = _calibrate_parser().parse_args(list(arguments))
    mistakes = Mistakes()
    task, cache_dir = asked_task(flags, mistakes)
    mistakes += check_data_files(task, splits=("train",)) if task else []
    mistakes.tell()
    assert task is not None
    saved = mistakes.of(lambda: saved_exits(flags.model))
    mistakes.tell()
    mistakes += calibration_mistakes(flags, saved, task)
    mistakes.tell()
    assert saved is not None
    spec = asked_calibration(flags, saved)
    return CalibrateJob(flags.model, task, flags.batch_size, cache_dir, spec, asked_trust(flags))


def asked_task(
    flags: argparse.Namespace, mistakes: Mistakes, saved: SavedCheckpoint | None = None
) -> tuple[TaskSpec | None, str | None]:
    """The task that the flags say, or the last one of their recipe, and its cache folder; checks the model, too.

    In place of a model there may be a checkpoint: without a recipe of the flags, its own phase's task is taken.
    """
    data = (mistakes.of(lambda: read_json(flags.recipe, "the recipe")) or {}) if flags.recipe else {}
    recipe = mistakes.of(lambda: parse_recipe(data)) if data else None
    spec, file = (recipe.phases[-1].task or recipe.task) if recipe else None, flags.recipe or ""
    if saved and not flags.recipe:
        recipe, spec, file = saved.recipe, saved.task, saved.recipe_file
    task_data = spec.model_dump() if spec else {}
    for name, value in (("name", flags.task_name), ("data_dir", flags.data_dir)):
        if value is not None:
            task_data[name] = value
    for setting in flags.set:
        mistakes.of(partial(_apply_task_setting, task_data, setting))
    task = mistakes.of(lambda: parse_task(task_data))
    mistakes += [] if saved else model_mistakes(flags.model, asked_trust(flags))
    if flags.batch_size < 1:
        mistakes.append(f"--batch_size is {flags.batch_size}: give 1 or more")
    if "name" not in task_data:
        mistakes.append("no task: give --task_name, or --recipe with a task")
    said, own_run = recipe.cache_dir if recipe else None, Path(file).parent
    roots = [*([own_run] if is_run(own_run) else []), *flags.allow_write]
    return task, flags.cache_dir or mistakes.of(partial(cache_place, said, said, roots))


def _as_given(arguments: Sequence[str]) -> str:
    """The training command, but for what the launcher adds to it; where it ran is told by the ranks."""
    local, world = distributed.local_world_size(), distributed.world_size()
    launcher = ["python"] if world == 1 else ["deepspeed", *(["--num_gpus", str(world)] if local == world else [])]
    return shlex.join([*launcher, "launch/train.py", *(word for word in arguments if "--local_rank" not in word)])


def asked_trust(flags: argparse.Namespace) -> Trust:
    return Trust(flags.allow_pickle, flags.trust_remote_code)


class Parser(argparse.ArgumentParser):
    """Raises what argparse would print on every rank."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}\n{self.format_usage().strip()}")


class Mistakes(list[str]):
    """The mistakes of a command, gathered until they are told together."""

    def of(self, call: Callable[[], T]) -> T | None:
        """The call's value; or None, and its ValueError kept."""
        try:
            return call()
        except ValueError as error:
            self.append(str(error))
            return None

    def tell(self) -> None:
        if self:
            raise UserError("\n".join(dict.fromkeys(self)))


def _train_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="train.py", description="Train a recipe on DeepSpeed.", allow_abbrev=False)
    parser.add_argument("--deepspeed_config", required=True, help="the engine file, DeepSpeed's own JSON")
    parser.add_argument("--recipe", required=True, help="model, task, phases and techniques, as JSON")
    parser.add_argument("--model_name_or_path", help="model folder or hub name the first phase starts from")
    parser.add_argument("--output_dir", help="where everything is written")
    parser.add_argument("--seed", type=int)
    existing = parser.add_mutually_exclusive_group()
    existing.add_argument("--overwrite_output_dir", action="store_true", help="replace what an earlier run wrote there")
    existing.add_argument(
        "--resume",
        nargs="?",
        const="",
        metavar="CHECKPOINT",
        help="go on with the run in --output_dir, from its newest whole checkpoint or from this one; start it if there "
        "is none",
    )
    parser.add_argument(
        "--timeout", type=int, default=1800, help="seconds that a rank waits for another before the run ends (1800)"
    )
    parser.add_argument(
        "--debug_port",
        type=int,
        metavar="PORT",
        help="rank 0 waits at 127.0.0.1:PORT for a debugger (debugpy); the others wait for it, --timeout at most",
    )
    parser.add_argument("--dry_run", action="store_true", help="print what would be done, train nothing")
    parser.add_argument("--recipe_schema", action="store_true", help="print the recipe's JSON schema")
    add_common_flags(parser, "any field of either file, phases by name, e.g. phases.prune.max_steps=100")
    return parser


def _calibrate_parser() -> argparse.ArgumentParser:
    description = "Pick a model folder's exit thresholds on the held-out part of the training set."
    parser = Parser(prog="calibrate.py", description=description, allow_abbrev=False)
    add_task_flags(parser)
    add_aim_flags(parser)
    return parser


def add_task_flags(parser: argparse.ArgumentParser, model: str = "model folder or hub name") -> None:
    parser.add_argument("model", help=model)
    parser.add_argument("--recipe", help="take the task from this recipe, e.g. OUTPUT_DIR/recipe.json")
    parser.add_argument("--batch_size", type=int, default=64, help="examples per rank and forward")
    add_common_flags(parser, "any field of the task, e.g. max_seq_length=128")


def add_common_flags(parser: argparse.ArgumentParser, set_help: str) -> None:
    parser.add_argument("--task_name", help="a GLUE task, docstrings, text, squad, mlm or clm")
    parser.add_argument("--data_dir", help="folder of the task's files")
    parser.add_argument("--set", action="append", default=[], metavar="PATH=JSON", help=set_help)
    parser.add_argument("--cache_dir", help="where tokenised data are kept ($DS_TRAINER_CACHE, ~/.cache/ds_trainer)")
    parser.add_argument(
        "--allow_write",
        action="append",
        default=[],
        metavar="DIR",
        help="a folder that paths in the recipe and the engine file may lead into, beside the output folder",
    )
    add_trust_flags(parser)
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)  # DeepSpeed's launcher adds it
    parser.add_argument("--deepspeed", action="store_true", help=argparse.SUPPRESS)  # habit of its users


def add_trust_flags(parser: argparse.ArgumentParser) -> None:
    """What the user permits model folders: by default nothing."""
    parser.add_argument(
        "--allow_pickle", action="store_true", help="load pytorch_model.bin, as weights only, where no safetensors are"
    )
    parser.add_argument("--trust_remote_code", action="store_true", help="run Python code that comes with a model")


def _apply_flags(recipe: dict[str, Any], flags: argparse.Namespace) -> None:
    values = {
        "model.name_or_path": flags.model_name_or_path,
        "task.name": flags.task_name,
        "task.data_dir": flags.data_dir,
        "output_dir": flags.output_dir,
        "cache_dir": flags.cache_dir,
        "seed": flags.seed,
    }
    for path, value in values.items():
        if value is not None:
            assign(recipe, path.split("."), value, "a flag")


def _apply_setting(recipe: dict[str, Any], engine_config: dict[str, Any], setting: str) -> None:
    path, value = parse_setting(setting)
    target = recipe if path[0] in Recipe.model_fields else engine_config
    assign(target, path, value, f'--set "{setting}"')


def _apply_task_setting(task: dict[str, Any], setting: str) -> None:
    path, value = parse_setting(setting)
    assign(task, path, value, f'--set "{setting}"')


def _source_mistakes(recipe: Recipe, trust: Trust) -> list[str]:
    mistakes = [mistake for phase in recipe.phases for mistake in check_data_files(phase.task or recipe.task)]
    if recipe.model.name_or_path is None and recipe.model.config is None:
        mistakes.append("no model: give --model_name_or_path, or model.config in the recipe for a new one")
    teachers = [phase.techniques.distill.teacher for phase in recipe.phases if phase.techniques.distill]
    folders = [recipe.model.name_or_path, *(phase.start_from for phase in recipe.phases), *teachers]
    return mistakes + [mistake for folder in folders if folder for mistake in model_mistakes(folder, trust)]
