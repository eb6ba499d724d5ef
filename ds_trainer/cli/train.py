"""`launch/train.py`: train a recipe on DeepSpeed; and `launch/report.py`: make the report of a run again."""

import argparse
import contextlib
import copy
import difflib
import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from ds_trainer.cli.command import Mistakes, Parser, read_source, shipped_engine, shipped_recipe
from ds_trainer.engine.engine_file import check_engine_file
from ds_trainer.engine.keys import key_table
from ds_trainer.files.messages import cut, shown
from ds_trainer.files.run_folder import check_output_folder, placed_engine_file
from ds_trainer.models.folders import model_mistakes
from ds_trainer.ranks import distributed
from ds_trainer.ranks.failures import UserError
from ds_trainer.ranks.joining import wait_for_debugger
from ds_trainer.recipe.jobs import TrainJob, Trust, trusting
from ds_trainer.recipe.recipe import Phase, Recipe, parse_recipe
from ds_trainer.recipe.settings import assign, parse_setting
from ds_trainer.recipe.task_specs import TaskSpec
from ds_trainer.tasks.registry import check_data_files, check_metric

FIELDS = {"model_name_or_path": "model.name_or_path", "task_name": "task.name", "data_dir": "task.data_dir"}
FIELDS |= {name: name for name in ("output_dir", "cache_dir", "seed")}
"""The fields of the recipe that have a flag, by the flag."""


def train_command(arguments: Sequence[str]) -> None:
    """Check everything, then train."""
    if "--recipe_schema" in arguments:
        train_parser().parse_args(list(arguments))  # loads the plugins, whose tasks and techniques are in the schema
        print(json.dumps(Recipe.model_json_schema(), indent=2))
        return
    train(read_train_job(arguments))


def train(job: TrainJob) -> dict[str, Any]:
    """Train, and return the results by phase; of a dry run, which only prints, there are none."""
    if job.debug_port:
        wait_for_debugger(job.debug_port)
    with trusting(job.trust):
        if job.dry_run:
            # a program may read standard output: what DeepSpeed prints there goes to standard error
            with contextlib.redirect_stdout(sys.stderr):
                from ds_trainer.run.run import dry_run

                table = dry_run(job)
            if distributed.is_main():
                print(table, flush=True)
            return {}
        from ds_trainer.deploy.card import push_to_hub
        from ds_trainer.run.run import run

        results = run(job)
        if job.push_to_hub and distributed.is_main():
            push_to_hub(job.output / "model", job.push_to_hub)
        return results


def read_train_job(arguments: Sequence[str] = (), **given: Any) -> TrainJob:
    """Parse and check a training command; a UserError has every mistake, one a line.

    A Python program can give both files, as objects too, and the output folder as values, by the names of their flags.
    """
    flags = train_parser().options(arguments, given)
    world, mistakes = flags.world or distributed.world_size(), Mistakes()
    if flags.world and not flags.dry_run:
        mistakes.append("--world is for --dry_run: the launcher says how many ranks train, deepspeed --num_gpus N")
    recipe_file = mistakes.of(read_source, flags, "recipe", "the recipe") or {}
    engine_file = mistakes.of(read_source, flags, "deepspeed_config", "the engine file") or {}
    mistakes.raise_all()
    recipe_data, engine_config = copy.deepcopy((recipe_file, engine_file))
    mistakes += apply_flags(flags, recipe_data, engine_config)
    recipe = mistakes.of(parse_recipe, recipe_data)
    phases = recipe.phases if recipe else [None]
    name = flags.deepspeed_config if isinstance(flags.deepspeed_config, str) else "the engine file"
    for phase in phases:
        mistakes += check_engine_file(engine_config, phase, world, name=name)
    mistakes += source_mistakes(recipe, flags.trust) if recipe else []
    output = Path(recipe.output_dir) if recipe and recipe.output_dir else None
    resume, checkpoint = flags.resume is not None, Path(flags.resume) if flags.resume else None
    if recipe and output is None:
        mistakes.append("no output folder: give --output_dir, or output_dir in the recipe")
    if recipe and output:
        if distributed.is_main() and not flags.dry_run:
            mistakes += check_output_folder(output, flags.overwrite, resume, checkpoint)
        engine_config = placed_engine_file(engine_config, output)
    values = {"recipe": recipe, "engine_config": engine_config, "output": output, "checkpoint": checkpoint}
    command = _as_given(arguments, given)
    return mistakes.job(TrainJob, flags, **values, command=command, resume=resume)


def train_parser() -> Parser:
    parser = Parser("train", "Train a recipe on DeepSpeed.")
    add, existing = parser.add_argument, parser.add_mutually_exclusive_group()
    engine = "the engine file, DeepSpeed's own JSON; or a name of ds_configs, e.g. zero2"
    recipe = "model, task, phases and techniques, as JSON; or a name of ds_configs/recipes, e.g. sst2_cut"
    add("--deepspeed_config", type=shipped_engine, help=engine)
    add("--recipe", type=shipped_recipe, help=recipe)
    add("--model_name_or_path", help="model folder or hub name the first phase starts from")
    add("--output_dir", help="where everything is written")
    add("--seed", type=int)
    existing.add_argument("--overwrite_output_dir", dest="overwrite", action="store_true", help="replace earlier files")
    resume = "go on with the run in --output_dir from its newest whole checkpoint, or from CHECKPOINT; start it if new"
    existing.add_argument("--resume", nargs="?", const="", metavar="CHECKPOINT", help=resume)
    add("--timeout", type=int, default=1800, help="seconds that a rank waits for another before the run ends (1800)")
    debug = "rank 0 waits at 127.0.0.1:PORT for a debugger (debugpy); the others wait for it, --timeout at most"
    add("--debug_port", type=int, metavar="PORT", help=debug)
    dry = "train nothing: print a table of steps, parameters, memory and minutes; or all that is known, as JSON"
    add("--dry_run", nargs="?", const="table", choices=("table", "json"), help=dry)
    add("--world", type=int, metavar="N", help="with --dry_run: as if on N ranks")
    add("--recipe_schema", action="store_true", help="print the recipe's JSON schema")
    add("--push_to_hub", metavar="NAME", help="send the run's model to this repository of the Hugging Face hub")
    parser.add_common_flags("any field of either file, phases by name, e.g. phases.prune.max_steps=100")
    return parser


def apply_flags(flags: argparse.Namespace, recipe: dict[str, Any], engine_config: dict[str, Any]) -> list[str]:
    """Change what `--set` and the flags of fields change in both files; return the mistakes."""
    mistakes = Mistakes()
    for setting in flags.set:
        mistakes.of(apply_to_files, recipe, engine_config, setting)
    for flag, field in FIELDS.items():
        if (value := getattr(flags, flag)) is not None:
            mistakes.of(assign, recipe, field.split("."), value, f"--{flag}")
    return mistakes


def apply_to_files(recipe: dict[str, Any], engine_config: dict[str, Any], setting: str) -> None:
    """Change a field of the file that has a field of its name; UserError names the nearest of both files."""
    path, value = parse_setting(setting)
    name, source, of_recipe, of_engine = path[0], f'--set "{cut(setting, 200)}"', Recipe.model_fields, key_table()
    if name not in {*of_recipe, *of_engine["keys"], *of_engine["refused"], *engine_config}:
        homes = {field: f"task.{field}" for task in get_args(TaskSpec) for field in task.model_fields}
        homes |= {field: f"phases.*.{field}" for field in Phase.model_fields}
        homes |= {field: field for field in (*of_engine["keys"], *of_recipe)}
        near = difflib.get_close_matches(name, homes, 1)
        way_out = f"did you mean {homes[near[0]]}?" if near else f"the recipe has {', '.join(of_recipe)}"
        raise UserError(f"{source}: neither the recipe nor the engine file has a field {shown(name)}: {way_out}")
    assign(recipe if name in of_recipe else engine_config, path, value, source)


def source_mistakes(recipe: Recipe, trust: Trust) -> list[str]:
    """Return the mistakes in what a run reads (data, models, teachers), and in the metrics that choose checkpoints."""
    mistakes = list[str]()
    for phase in recipe.phases:
        task, metric = phase.task or recipe.task, phase.metric_for_best_model
        mistakes += check_data_files(task) + (check_metric(task, metric) if metric else [])
    if recipe.model.name_or_path is None and recipe.model.config is None:
        mistakes.append("no model: give --model_name_or_path, or model.config in the recipe for a new one")
    folders = [recipe.model.name_or_path, *(name for phase in recipe.phases for name in phase.sources.values())]
    return mistakes + [mistake for folder in folders if folder for mistake in model_mistakes(folder, trust)]


def report_command(arguments: Sequence[str]) -> None:
    """Make the report of an output folder again."""
    parser = Parser("report", "Make a run's report again.")
    parser.add_argument("output_dir", type=Path, help="the output folder of a run")
    folder = parser.parse_args(list(arguments)).output_dir
    from ds_trainer.report.page import make_report

    make_report(folder)


def _as_given(arguments: Sequence[str], given: Mapping[str, Any]) -> str:
    """Return the training command without what a launcher adds to it.

    A file that a Python program gave as an object is named by the copy that the run writes into its folder.
    """
    words = ["ds-train", *(word for word in arguments if "--local_rank" not in word)]
    for name, value in given.items():
        place = value if isinstance(value, str | Path) else f"{given['output_dir']}/{name}.json"
        words += [f"--{name}", str(place)]
    return shlex.join(words)


if __name__ == "__main__":  # `deepspeed --module ds_trainer.cli.train`
    from ds_trainer.cli.main import main

    main("train")
