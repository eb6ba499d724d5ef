"""`launch/tune.py`: find the fastest settings for a phase on this machine, or those with which a recipe scores best."""

import argparse
import copy
import json
import os
import re
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ds_trainer.cli.command import Mistakes, Parser, one_process_mistakes
from ds_trainer.cli.flags import output_path
from ds_trainer.cli.train import FIELDS, apply_flags, apply_to_files, read_train_job, source_mistakes, train_parser
from ds_trainer.config.jobs import RecipeSpace, RecipeTuneJob, TrainJob, TuneJob, ValueRange
from ds_trainer.config.recipe import Recipe, TextSpec
from ds_trainer.config.settings import assign
from ds_trainer.config.task_specs import LabelledSpec
from ds_trainer.engine.engine_file import MICRO, STEPS, TRAIN, read_engine_file
from ds_trainer.engine.keys import key_table
from ds_trainer.files.json_file import parse_json, read_json
from ds_trainer.files.messages import listed, shown
from ds_trainer.files.run_folder import check_output_folder
from ds_trainer.hosts.hostfile import read_hostfile
from ds_trainer.hosts.remote import PROJECT
from ds_trainer.ranks.failures import UserError, raise_mistakes
from ds_trainer.tasks.text.glue import score_names
from ds_trainer.tuning.space import checked_recipe

_SECONDS = {"s": 1, "m": 60, "h": 3600}
_COUNTS = ("ranks", "threads", MICRO)
_WRITE = 'write {"PATH": [values to try], ...} or {"PATH": {"low": 1e-5, "high": 1e-3, "log": true}, ...}'
_OF_SPEED = ("space", "phase", "trial_seconds")
_OF_A_RUN = ("--resume", "--overwrite_output_dir", "--debug_port", "--dry_run", "--world", "--trial", "--push_to_hub")


def tune_command(arguments: Sequence[str]) -> None:
    """Tune the settings of a phase, or a recipe."""
    job = read_tune_job(arguments)
    from ds_trainer.tuning.recipe_search import tune_recipe
    from ds_trainer.tuning.tune import tune

    paths = [str(PROJECT), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))  # the trials run this code, installed or not
    for ending in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(ending, signal.default_int_handler)  # the trial that runs is to end as well
    tune_recipe(job) if isinstance(job, RecipeTuneJob) else tune(job)


def read_tune_job(arguments: Sequence[str]) -> TuneJob:
    """Parse and check a tuning command; a UserError has every mistake, one a line."""
    flags, training = tune_parser().parse_known_args(list(arguments))
    mistakes = Mistakes(one_process_mistakes("a tuning is started"))
    words = [word.partition("=")[0] for word in training]
    mistakes += [f"{flag} is for a run, not for a tuning: drop it" for flag in _OF_A_RUN if flag in words]
    if flags.recipe_space:
        given = [flag for flag in _OF_SPEED if getattr(flags, flag) is not None]
        mistakes += [f"--{flag} is for tuning the speed: tune that first, then the recipe" for flag in given]
    if bool(flags.recipe_space) != bool(flags.metric):
        mistakes.append("--recipe_space and --metric go together: give both, such as --metric eval/accuracy")
    mistakes.raise_all()
    files = ["--deepspeed_config", flags.deepspeed_config, "--recipe", flags.recipe, *training]
    mistakes += check_output_folder(flags.output, overwrite=True)  # a tuning goes on in the folder of an earlier one
    hosts = mistakes.of(read_hostfile, flags.hostfile) if flags.hostfile else None
    if hosts:
        flags.num_gpus = sum(host.slots for host in hosts)
    dry = ["--output_dir", str(flags.output), "--dry_run", "--world", str(flags.num_gpus or 1)]
    train = mistakes.of(read_train_job, [*files, *dry])
    recipe_file, engine_file = _files(files) if train else (None, None)
    flags.trial_seconds = flags.trial_seconds or 4.0
    flags.trial_timeout = flags.trial_timeout or (1800.0 if flags.recipe_space else 300.0)
    values: dict[str, Any] = {"train": train, "arguments": tuple(files), "trust": train and train.trust}
    values |= {"engine_file": engine_file, "hosts": len(hosts) if hosts else 1}
    if flags.recipe_space:
        values |= _recipe_values(flags, mistakes, train, recipe_file)
        return mistakes.job(RecipeTuneJob, flags, **values)
    phase = mistakes.of(_phase, train, flags.phase) if train else None
    space = mistakes.of(_space, flags.space) if flags.space else None
    if train and space:
        mistakes += _space_mistakes(train, space, ranks_are_given=flags.num_gpus is not None)
    return mistakes.job(TuneJob, flags, **values, phase=phase, space=space)


def _files(arguments: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the recipe and the engine file with the command's flags and `--set`, and paths as the user wrote them."""
    flags = train_parser().parse_args(list(arguments))
    recipe, engine = read_json(flags.recipe, "the recipe"), read_engine_file(flags.deepspeed_config)
    apply_flags(flags, recipe, engine)  # without mistakes: the training command was read before
    return recipe, engine


def tune_parser() -> argparse.ArgumentParser:
    more = "All other flags are those of ds-train, for every trial."
    parser = Parser("tune", f"Find the fastest settings for a phase on this machine. {more}")
    add = parser.add_argument
    add("--deepspeed_config", required=True, help="the engine file to start from, which is a candidate too")
    add("--recipe", required=True)
    add("--output_dir", dest="output", required=True, type=output_path, help="for tuned.json, the trials and a table")
    add("--phase", help="of the recipe; by default the last one that trains")
    add("--space", help='JSON file of the values to try: {"PATH": [...]}, paths as in --set, and "ranks", "threads"')
    add("--budget", type=_seconds, default=1200.0, help="of time, e.g. 90s, 20m, 2h (20m)")
    hung = "after which a trial counts as hung (5m); of a recipe: after its last sign of life (30m)"
    add("--trial_timeout", type=_seconds, help=hung)
    add("--trial_seconds", type=_seconds, help="of steps that are timed in a trial, at the least (4s)")
    values = '{"PATH": [...] or {"low": 1e-5, "high": 1e-3, "log": true}}, paths as in --set'
    add("--recipe_space", help=f"tune the recipe instead, by whole runs: a JSON file, or JSON: {values}")
    add("--metric", help="with --recipe_space: the score to go by, on held-out training examples, e.g. eval/accuracy")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--num_gpus", type=int, help="of every trial; by default all, on a CPU varied")
    where.add_argument("--hostfile", type=Path, help="as for deepspeed: run every trial on these hosts")
    return parser


def _seconds(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh])", text)
    if not match:
        raise argparse.ArgumentTypeError(f"it is {shown(text)}: write a number and s, m or h, such as 20m")
    return float(match[1]) * _SECONDS[match[2]]


def _phase(train: TrainJob, name: str | None) -> str:
    """Return the phase to tune; UserError for one that is not there, does not train, or has batch sizes of its own."""
    names = [phase.name for phase in train.recipe.phases if phase.trains]
    if not names or (name and name not in names):
        raise UserError(f"--phase is {shown(name)}: the phases that train are {listed(names) or 'none'}")
    chosen = next(phase for phase in train.recipe.phases if phase.name == (name or names[-1]))
    for field in ("per_device_train_batch_size", "gradient_accumulation_steps"):
        if getattr(chosen, field):
            raise UserError(
                f"phase {chosen.name} sets {field}, which a tuning is to find: give --set "
                f"phases.{chosen.name}.{field}=null, and phases.{chosen.name}.train_batch_size where it is not set"
            )
    return chosen.name


def _space(path: str) -> dict[str, list[Any]]:
    space = read_json(path, "the space")
    wrong = [name for name, values in space.items() if not isinstance(values, list) or not values]
    if wrong or not space:
        raise UserError(f'the space {path} has {listed(wrong) or "no path"}: write {{"PATH": [values to try], ...}}')
    return space


def _space_mistakes(train: TrainJob, space: dict[str, list[Any]], ranks_are_given: bool) -> list[str]:
    """Report paths that lead nowhere, and counts that are none; other values are checked for every candidate."""
    mistakes = Mistakes()
    for path, values in space.items():
        root = path.partition(".")[0]
        numbers = all(isinstance(value, int) and not isinstance(value, bool) and value > 0 for value in values)
        if path in _COUNTS and not numbers:
            mistakes.append(f"--space {path} is {shown(values)}: write whole numbers above 0")
        if path in (TRAIN, STEPS) or (path == "ranks" and ranks_are_given):
            mistakes.append(f"--space {path} is fixed by the global batch, --num_gpus or --hostfile: drop it")
        if path in ("ranks", "threads"):
            continue
        if root != "phases" and root not in key_table()["keys"]:
            mistakes.append(f"--space {path}: a tuning varies keys of the engine file, phases.*, ranks and threads")
            continue
        target = copy.deepcopy(train.recipe.model_dump() if root == "phases" else train.engine_config)
        mistakes.of(assign, target, path.split("."), values[0], f"--space {path}")
    return mistakes


def _recipe_values(
    flags: argparse.Namespace, mistakes: Mistakes, train: TrainJob | None, recipe_file: dict[str, Any] | None
) -> dict[str, Any]:
    """Return the fields of a `RecipeTuneJob` that are about the recipe, and note the mistakes."""
    space = mistakes.of(_recipe_space, flags.recipe_space)
    metric = flags.metric.removeprefix("eval/")
    if train:
        mistakes += _held_out_mistakes(train.recipe)
        mistakes += _metric_mistakes(train.recipe, metric)
    if train and space and not mistakes:
        engine = train.engine_config
        for path, values in space.items():
            for value in values if isinstance(values, list) else values.examples:
                mistakes.of(_check_value, path, value, train, copy.deepcopy((recipe_file, engine)))
    phase, greater = None, None
    if train:
        last = train.recipe.phases[-1]
        phase = last.name
        greater = None if mistakes else mistakes.of(last.prefers_more, metric, last.task or train.recipe.task)
    fields = {"recipe_file": recipe_file, "recipe_space": space, "metric": metric, "phase": phase}
    return {**fields, "greater_is_better": greater}


def _recipe_space(text: str) -> RecipeSpace:
    """Read a space from a file, or from the text itself where that is an object."""
    is_inline = text.lstrip().startswith("{")
    data = parse_json(text.encode(), "--recipe_space") if is_inline else read_json(text, "the space")
    if not data or [] in data.values():
        raise UserError(f"--recipe_space has no values to try: {_WRITE}")
    return {path: values if isinstance(values, list) else _range(path, values) for path, values in data.items()}


def _range(path: str, values: Any) -> ValueRange:
    try:
        return ValueRange.model_validate(values)
    except ValidationError as error:
        why = error.errors()[0]["msg"].removeprefix("Value error, ")
        raise UserError(f"--recipe_space {path} is {shown(values)} ({why}): {_WRITE}") from None


def _held_out_mistakes(recipe: Recipe) -> list[str]:
    """Require that all phases hold out the same share: their scores are of examples that none has trained on."""
    mistakes, shares = [], set()
    for phase in recipe.phases:
        task, path = phase.task or recipe.task, f"phases.{phase.name}.task" if phase.task else "task"
        shares.add(getattr(task, "held_out", 0.0))
        if not isinstance(task, LabelledSpec):
            text = "only labelled text and tagged words have held-out examples, on which trials are scored"
            mistakes.append(f"phase {phase.name} has the task {task.name}: {text}")
        elif not task.held_out:
            way_out = f"set it in the recipe, or give --set {path}.held_out=0.1"
            mistakes.append(f"{path}.held_out is 0, and trials are scored on held-out training examples: {way_out}")
    if not mistakes and len(shares) > 1:
        mistakes.append(f"held_out is {listed(sorted(shares))} in different phases: write the same in all of them")
    return mistakes


def _metric_mistakes(recipe: Recipe, metric: str) -> list[str]:
    """Refuse a metric that the last phase's task has not; those of techniques, with a slash, show in the first run."""
    task = recipe.phases[-1].task or recipe.task
    names = score_names(task) if isinstance(task, TextSpec) else ("f1", "precision", "recall", "accuracy")
    if "/" in metric or not isinstance(task, LabelledSpec) or metric in names:
        return []
    return [f"--metric is {shown(metric)}: the task {task.name} has {', '.join(f'eval/{name}' for name in names)}"]


def _check_value(path: str, value: Any, train: TrainJob, files: tuple[dict[str, Any], dict[str, Any]]) -> None:
    """Resolve both files with one value of the space; a UserError says what is wrong with it."""
    try:
        flag = next((flag for flag, field in FIELDS.items() if field == path), None)
        if flag and f"--{flag}" in train.command.replace("=", " ").split():
            raise UserError(f"--{flag} is given too, and wins: drop one of them")
        apply_to_files(*files, f"{path}={json.dumps(value)}")
        recipe = checked_recipe(*files, train.world or 1)
        mistakes = source_mistakes(recipe, train.trust) + _held_out_mistakes(recipe)
        if _scored_data(recipe) != _scored_data(train.recipe):
            mistakes.append("scores on other held-out examples could not be compared: drop it")
        raise_mistakes(mistakes)
    except UserError as error:
        raise UserError(f"--recipe_space {path}, {shown(value)}: {error}") from None


def _scored_data(recipe: Recipe) -> list[Any]:
    """Return what decides which examples are held out of the last phase's task."""
    task = recipe.phases[-1].task or recipe.task
    sources = ("name", "data_dir", "dataset", "train_file", "header", "held_out")
    fields = (*sources, "text_columns", "label_column", "tokens_column", "tags_column")
    return [getattr(task, field, None) for field in fields]
