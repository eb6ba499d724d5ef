"""The command line of training: flags, `--set`, and every check that needs neither torch nor DeepSpeed.

All mistakes of a command are collected and told at once, by rank 0, within the first seconds; exit code 2.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NoReturn

from ds_trainer import distributed
from ds_trainer.engine_file import Said, check_engine_file, read_engine_file
from ds_trainer.json_file import read_json
from ds_trainer.readers import check_data_files
from ds_trainer.recipe import Phase, Recipe, parse_recipe, recipe_schema
from ds_trainer.run_folder import check_output_folder

USER_ERROR = 2


@dataclass(frozen=True)
class Job:
    """A checked command: the recipe, the engine file as written, and what the flags ask."""

    recipe: Recipe
    engine_config: dict[str, Any]
    output: Path
    overwrite: bool = False
    resume: bool = False
    dry_run: bool = False


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}\n{self.format_usage().strip()}")


def run_command(command: Callable[[Sequence[str]], None], arguments: Sequence[str]) -> int:
    """Run a command of this library and give its exit code: 0, or 2 for what a user wrote, told by rank 0 alone."""
    distributed.start_logging()
    try:
        command(arguments)
    except ValueError as error:
        if not _is_told(error):
            raise
        if distributed.is_main():
            sys.stdout.flush()
            print(f"error: {error}", file=sys.stderr, flush=True)
        return USER_ERROR
    return 0


def train_command(arguments: Sequence[str]) -> None:
    """`launch/train.py`: check everything, then train."""
    if "--recipe_schema" in arguments:
        print(recipe_schema())
        return
    job = read_job(arguments)
    from ds_trainer.run import dry_run, run

    (dry_run if job.dry_run else run)(job)


def read_job(arguments: Sequence[str]) -> Job:
    """Parse and check a training command."""
    flags = _train_parser().parse_args(list(arguments))
    recipe_data = read_json(flags.recipe, "the recipe")
    engine_config = read_engine_file(flags.deepspeed_config)
    for setting in flags.set:
        _apply_setting(recipe_data, engine_config, setting)
    _apply_flags(recipe_data, flags)
    recipe = parse_recipe(recipe_data)
    if recipe.output_dir is None:
        raise ValueError("no output folder: give --output_dir, or output_dir in the recipe")
    output = Path(recipe.output_dir)
    mistakes = _engine_mistakes(recipe, engine_config, flags.deepspeed_config) + _source_mistakes(recipe)
    if not flags.dry_run and distributed.is_main():
        mistakes += check_output_folder(output, flags.overwrite_output_dir, flags.resume)
    if mistakes:
        raise ValueError("\n".join(dict.fromkeys(mistakes)))
    return Job(recipe, engine_config, output, flags.overwrite_output_dir, flags.resume, flags.dry_run)


def said_by(phase: Phase) -> Said:
    """What a phase says about values whose home is the engine file."""
    return Said(**{field.name: getattr(phase, field.name) for field in fields(Said)})


def _train_parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="train.py", description="Train a recipe on DeepSpeed.", allow_abbrev=False)
    parser.add_argument("--deepspeed_config", required=True, help="the engine file, DeepSpeed's own JSON")
    parser.add_argument("--recipe", required=True, help="model, task, phases and techniques, as JSON")
    parser.add_argument("--model_name_or_path", help="model folder or hub name the first phase starts from")
    parser.add_argument("--task_name", help="GLUE task, docstrings, or text")
    parser.add_argument("--data_dir", help="folder of the task's files")
    parser.add_argument("--output_dir", help="where everything is written")
    parser.add_argument("--seed", type=int)
    existing = parser.add_mutually_exclusive_group()
    existing.add_argument("--overwrite_output_dir", action="store_true", help="replace what an earlier run wrote there")
    existing.add_argument("--resume", action="store_true", help="go on from the newest checkpoint of --output_dir")
    parser.add_argument("--dry_run", action="store_true", help="print what would be done, train nothing")
    parser.add_argument("--recipe_schema", action="store_true", help="print the recipe's JSON schema")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="PATH=JSON",
        help="any field of either file; phases by name",
    )
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)  # DeepSpeed's launcher adds it
    parser.add_argument("--deepspeed", action="store_true", help=argparse.SUPPRESS)  # habit of its users
    return parser


def _apply_flags(recipe: dict[str, Any], flags: argparse.Namespace) -> None:
    values = {
        ("model", "name_or_path"): flags.model_name_or_path,
        ("task", "name"): flags.task_name,
        ("task", "data_dir"): flags.data_dir,
        ("output_dir",): flags.output_dir,
        ("seed",): flags.seed,
    }
    for path, value in values.items():
        if value is not None:
            _assign(recipe, list(path), value, "a flag")


def _apply_setting(recipe: dict[str, Any], engine_config: dict[str, Any], setting: str) -> None:
    path, equals, text = setting.partition("=")
    if not equals or not path:
        raise ValueError(f'--set "{setting}": write PATH=JSON, e.g. phases.prune.max_steps=100')
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        value = text  # a bare word: launchers strip quotes on the way
    parts = path.split(".")
    _assign(recipe if parts[0] in Recipe.model_fields else engine_config, parts, value, f'--set "{setting}"')


def _assign(target: Any, path: list[str], value: Any, who: str) -> None:
    """Set a nested value; list elements go by index, by their "name", or all of them by *."""
    part, rest = path[0], path[1:]
    if isinstance(target, list):
        named = [str(item.get("name")) if isinstance(item, dict) else "" for item in target]
        chosen = [i for i, name in enumerate(named) if part in ("*", name, str(i))]
        if not chosen or not rest:
            raise ValueError(f'{who}: there is no "{part}" to set; it has {", ".join(filter(None, named))}')
        for index in chosen:
            _assign(target[index], rest, value, who)
    elif not isinstance(target, dict):
        raise ValueError(f'{who}: "{part}" is looked for inside {json.dumps(target)}, which is no object')
    elif not rest:
        target[part] = value
    else:
        if target.get(part) is None:
            target[part] = {}
        _assign(target[part], rest, value, who)


def _engine_mistakes(recipe: Recipe, config: dict[str, Any], name: str) -> list[str]:
    world = distributed.world_size()
    return [m for phase in recipe.phases for m in check_engine_file(config, said_by(phase), world, name=name)]


def _source_mistakes(recipe: Recipe) -> list[str]:
    mistakes = [m for phase in recipe.phases for m in check_data_files(phase.task or recipe.task)]
    if recipe.model.name_or_path is None and recipe.model.config is None:
        mistakes.append("no model: give --model_name_or_path, or model.config in the recipe for a new one")
    folders = [recipe.model.name_or_path, *(phase.start_from for phase in recipe.phases)]
    return mistakes + [m for folder in folders if folder for m in model_mistakes(folder)]


def model_mistakes(name: str) -> list[str]:
    """What is wrong with a model's folder, as far as its names show; a hub name is looked up later."""
    folder = Path(name)
    if name.startswith("@") or (not folder.exists() and name.count("/") <= 1 and not name.startswith((".", "/", "~"))):
        return []
    if not folder.is_dir():
        return [f"the model folder {name} does not exist"]
    if not (folder / "config.json").is_file():
        return [f"the model folder {name} has no config.json: it is not a transformers model"]
    weights = [*folder.glob("*.safetensors"), *folder.glob("*.safetensors.index.json")]
    return [] if weights else [f"the model folder {name} has no .safetensors weights"]


def _is_told(error: ValueError) -> bool:
    """Whether this library raised it for the user: a ValueError from deeper down is a bug and keeps its traceback."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and str(trace.tb_frame.f_globals.get("__name__", "")).startswith("ds_trainer")
