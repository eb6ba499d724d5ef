"""`launch/tune.py`: find the fastest settings for a phase on this machine, or those with which a recipe scores best."""

import argparse
import os
import re
import signal
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from itertools import islice, product
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ds_trainer.cli.command import PROJECT, Mistakes, Parser, one_process_mistakes, output_path, read_source
from ds_trainer.cli.doctor import doctor_command, read_hostfile
from ds_trainer.cli.train import apply_flags, read_train_job, train_parser
from ds_trainer.engine.engine_file import MICRO, STEPS, TRAIN
from ds_trainer.engine.keys import key_table
from ds_trainer.files.messages import listed, shown
from ds_trainer.files.reading import parse_json, read_json
from ds_trainer.files.run_folder import check_output_folder
from ds_trainer.ranks.failures import UserError, raise_mistakes
from ds_trainer.recipe.jobs import TrainJob, TuneJob, ValueRange
from ds_trainer.recipe.recipe import Recipe
from ds_trainer.recipe.task_specs import LabelledSpec
from ds_trainer.tasks.registry import check_metric
from ds_trainer.tune.trials import RANKS, checked

_SECONDS = {"s": 1, "m": 60, "h": 3600}
_OF_A_RUN = ("--resume", "--overwrite_output_dir", "--debug_port", "--dry_run", "--world", "--push_to_hub")
_IN_THE_FILES = ("set", "model_name_or_path", "task_name", "data_dir", "seed")
"""The flags of a training command whose values are in the files that a tuning writes."""
_OF_THE_DATA = {"name", "data_dir", "dataset", "train_file", "header", "held_out", "text_columns", "label_column"}
_OF_THE_DATA |= {"tokens_column", "tags_column"}
"""The fields of a task that decide which examples are held out."""
_WRITE = 'write {"PATH": [values to try], ...} or {"PATH": {"low": 1e-5, "high": 1e-3, "log": true}, ...}'
_TRIED_BEFORE = 200
"""The combinations of a space of which one must fit the user's own files before anything is run."""


def tune_command(arguments: Sequence[str]) -> None:
    """Tune the settings of a phase, or a recipe."""
    job = read_tune_job(arguments)
    if job.hostfile and doctor_command(["--hostfile", str(job.hostfile), "--output_dir", str(job.output)]):
        raise UserError(f"the hosts of {job.hostfile} are not ready for a run: mend what the doctor reports first")
    from ds_trainer.tune.search import tune

    paths = [str(PROJECT), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))  # the trials run this code, installed or not
    for ending in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(ending, signal.default_int_handler)  # the trial that runs is to end as well
    tune(job)


def read_tune_job(arguments: Sequence[str]) -> TuneJob:
    """Parse and check a tuning command; a UserError has every mistake, one a line."""
    flags, training = tune_parser().parse_known_args(list(arguments))
    mistakes = Mistakes(one_process_mistakes("a tuning is started"))
    words = [word.partition("=")[0] for word in training]
    mistakes += [f"{flag} is for a run, not for a tuning: drop it" for flag in _OF_A_RUN if flag in words]
    mistakes += check_output_folder(flags.output, overwrite=True)  # a tuning goes on in the folder of an earlier one
    if flags.hostfile:
        flags.num_gpus = sum((mistakes.of(read_hostfile, flags.hostfile) or {"": 1}).values())
    files = ["--deepspeed_config", flags.deepspeed_config, "--recipe", flags.recipe, *training]
    dry = ["--output_dir", str(flags.output), "--dry_run", "--world", str(flags.num_gpus or 1)]
    space = mistakes.of(_space, flags.space) if flags.space else None
    train = mistakes.of(read_train_job, [*files, *dry])
    if train is None:
        raise UserError("\n".join(mistakes))
    given = train_parser().parse_args(files)
    recipe_file = read_source(given, "recipe", "the recipe")
    engine_file = read_source(given, "deepspeed_config", "the engine file")
    apply_flags(given, recipe_file, engine_file)  # without mistakes: the job was read
    metric = flags.metric and flags.metric.removeprefix("eval/")
    last = train.recipe.phases[-1]
    mistakes += _score_mistakes(train.recipe, flags) if metric else []
    greater = mistakes.of(last.prefers_more, metric, last.task or train.recipe.task) if metric else True
    phase = last.name if metric else mistakes.of(_phase, train, flags.phase)
    flags.trial_timeout = flags.trial_timeout or (1800.0 if metric else 300.0)
    in_the_files = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in _IN_THE_FILES:
        in_the_files.add_argument(f"--{name}", action="append")
    values = {"train": train, "trust": train.trust, "phase": phase, "space": space, "metric": metric}
    values |= {"recipe_file": recipe_file, "engine_file": engine_file, "greater_is_better": greater}
    job = mistakes.job(TuneJob, flags, **values, train_flags=in_the_files.parse_known_args(training)[1])
    raise_mistakes(_space_mistakes(job))
    raise_mistakes(_refused(job))
    return job


def tune_parser() -> argparse.ArgumentParser:
    more = "All other flags are those of ds-train, for every trial."
    parser = Parser("tune", f"Find the fastest settings for a phase, or those with the best score. {more}")
    add = parser.add_argument
    add("--deepspeed_config", required=True, help="the engine file to start from, which is a candidate too")
    add("--recipe", required=True)
    add("--output_dir", dest="output", required=True, type=output_path, help="for the best files and the trials")
    add("--metric", help="the score to go by, of held-out training examples, e.g. eval/accuracy; without it, speed")
    values = '{"PATH": [...] or {"low": 1e-5, "high": 1e-3, "log": true}}, paths as in --set, and "ranks"'
    add("--space", "--recipe_space", dest="space", help=f"what to try: a JSON file, or JSON: {values}")
    add("--phase", help="the one that is to be fast; by default the last one that trains")
    add("--budget", type=_seconds, default=1200.0, help="of time, e.g. 90s, 20m, 2h (20m)")
    hung = "without a sign of life, after which a trial counts as hung (5m; with --metric 30m)"
    add("--trial_timeout", type=_seconds, help=hung)
    add("--trial_steps", type=int, default=20, help="of a trial for speed; the last three quarters are timed (20)")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--num_gpus", type=int, help="of every trial; by default all, on a CPU 1")
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


def _space(text: str) -> dict[str, list[Any] | ValueRange]:
    """Read a space from a file, or from the text itself where that is an object."""
    is_inline = text.lstrip().startswith("{")
    data = parse_json(text.encode(), "--space") if is_inline else read_json(text, "the space")
    if not data or [] in data.values():
        raise UserError(f"--space has no values to try: {_WRITE}")
    return {path: values if isinstance(values, list) else _range(path, values) for path, values in data.items()}


def _range(path: str, values: Any) -> ValueRange:
    try:
        return ValueRange.model_validate(values)
    except ValidationError as error:
        why = error.errors()[0]["msg"].removeprefix("Value error, ")
        raise UserError(f"--space {path} is {shown(values)} ({why}): {_WRITE}") from None


def _score_mistakes(recipe: Recipe, flags: argparse.Namespace) -> Iterator[str]:
    """Require optuna, a space, and that all phases hold out the same share: scores are of what none has trained on."""
    if not find_spec("optuna"):
        yield "--metric needs optuna, which searches for the best score: pip install optuna"
    if not flags.space:
        yield "--metric needs --space, the values to try"
    if flags.phase:
        yield "--phase is for speed: with --metric the whole recipe is run, and its last model scored; drop it"
    yield from check_metric(recipe.phases[-1].task or recipe.task, flags.metric.removeprefix("eval/"))
    tasks = {
        f"phases.{phase.name}.task" if phase.task else "task": phase.task or recipe.task for phase in recipe.phases
    }
    for path, task in tasks.items():
        if not isinstance(task, LabelledSpec):
            yield f"{path} is {task.name}: only labelled text and tagged words have held-out examples"
        elif not task.held_out:
            yield f"{path}.held_out is 0, and trials are scored on held-out examples: give --set {path}.held_out=0.1"
    if len(shares := {task.held_out_share for task in tasks.values()}) > 1:
        yield f"held_out is {listed(sorted(shares))} in different phases: write the same in all of them"


def _space_mistakes(job: TuneJob) -> Iterator[str]:
    """Report the paths of the space that cannot be varied."""
    for path, values in (job.space or {}).items():
        root, is_list = path.partition(".")[0], isinstance(values, list)
        if root not in {RANKS, *Recipe.model_fields, *key_table()["keys"]}:
            yield f"--space {path}: neither the recipe nor the engine file has a field {shown(root)}"
        elif path in (RANKS, MICRO) and is_list and not all(type(value) is int and value > 0 for value in values):
            yield f"--space {path} is {shown(values)}: write whole numbers above 0"
        elif not job.metric and (path in (TRAIN, STEPS) or (path == RANKS and job.num_gpus)):
            yield f"--space {path} is fixed by the global batch, --num_gpus or --hostfile: drop it"
        elif not job.metric and not is_list:
            yield f"--space {path} is a range, which only a search with --metric draws from: write a list"
        elif job.metric and set(path.split(".")) & _OF_THE_DATA:
            yield f"--space {path}: scores on other held-out examples could not be compared: drop it"


def _refused(job: TuneJob) -> list[str]:
    """Return the first mistake where every combination is one, as for a misspelt path; others show in the table."""
    space, mistakes = job.space or {}, Mistakes()
    lists = [each if isinstance(each, list) else [int(each.low) if each.whole else each.low] for each in space.values()]
    steps = {STEPS: "auto"} if MICRO in space and not job.metric else {}
    for values in islice(product(*lists), _TRIED_BEFORE):
        if mistakes.of(checked, job, steps | dict(zip(space, values, strict=True))):
            return []
    return [f"--space: {mistakes[0]}"]
