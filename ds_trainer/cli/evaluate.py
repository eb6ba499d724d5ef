"""`launch/evaluate.py` and `launch/calibrate.py`: score models on a task, and pick the exit thresholds of one."""

import argparse
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from pydantic import ValidationError

from ds_trainer.cli.command import Mistakes, Parser, flag_mistake, one_process_mistakes, read_task
from ds_trainer.files.messages import shown
from ds_trainer.files.writing import existing_above
from ds_trainer.models.folders import model_mistakes
from ds_trainer.ranks import distributed
from ds_trainer.ranks.failures import UserError, raise_mistakes
from ds_trainer.recipe.exit_specs import EXITS_FILE, Criterion, ExitsSpec, aim_mistakes
from ds_trainer.recipe.jobs import CalibrateJob, EvaluateJob, trusting
from ds_trainer.recipe.recipe import saved_exits
from ds_trainer.recipe.saved_checkpoint import SavedCheckpoint, checkpoints_in, is_checkpoint, read_checkpoint
from ds_trainer.recipe.task_specs import TaskSpec, TextSpec
from ds_trainer.tasks.text.text_data import is_regression


def evaluate_command(arguments: Sequence[str]) -> None:
    """Score a model folder or checkpoints."""
    evaluate(read_evaluate_job(arguments))


def calibrate_command(arguments: Sequence[str]) -> None:
    """Pick the exit thresholds of a model folder."""
    job = read_calibrate_job(arguments)
    from ds_trainer.run.scoring import calibrate_exits

    with trusting(job.trust):
        calibrate_exits(job)


def evaluate(job: EvaluateJob) -> dict[Any, Any]:
    """Score a model folder or checkpoints, print and write the scores, and return them: of all checkpoints, by step."""
    from ds_trainer.run.scoring import evaluate_checkpoints, evaluate_folder

    with trusting(job.trust):
        return evaluate_checkpoints(job) if job.all_checkpoints else evaluate_folder(job)


def read_evaluate_job(arguments: Sequence[str], **given: Any) -> EvaluateJob:
    """Parse and check an evaluation command; a UserError has every mistake, one a line.

    A Python program can give the recipe, as an object too, and the fields of the task, by the names `recipe`, `fields`.
    """
    flags = evaluate_parser().options(arguments, given)
    mistakes, checkpoints = Mistakes(), list[SavedCheckpoint]()
    if flags.all_checkpoints or is_checkpoint(flags.model):
        checkpoints = _read_checkpoints(flags, mistakes)
    else:
        mistakes += model_mistakes(flags.model, flags.trust)
    task, cache_dir = read_task(flags, mistakes, "validation", checkpoints[-1] if checkpoints else None)
    for flag in ("output_file", "predictions_dir"):
        if place := getattr(flags, flag):
            existing = existing_above(place)
            as_wanted = os.path.isdir(existing) == (flag == "predictions_dir" or existing != place)
            if not as_wanted or not os.access(existing, os.W_OK):
                mistakes.append(f"--{flag} is {place}: {existing} is not what can be written to: give another place")
    saved = mistakes.of(saved_exits, flags.model)
    exits = mistakes.of(_exits_of, flags, "early_exit_entropy", "early_exit_confidence", "patience")
    of_task = tuple(replace(checkpoint, task=task) for checkpoint in checkpoints) if task else ()
    job = mistakes.job(EvaluateJob, flags, task=task, cache_dir=cache_dir, exits=exits, checkpoints=of_task)
    if not any(checkpoint.phase.techniques.exits for checkpoint in checkpoints):
        job.exit_policy(saved)  # whether it fits the heads of a checkpoint shows later
    return job


def evaluate_parser() -> Parser:
    parser = Parser("evaluate", "Score a model folder, or checkpoints, on a task.")
    parser.add_model_flags(model="model folder or hub name, OUT/checkpoint-N, or with --all_checkpoints OUT")
    every = "score every checkpoint in OUT, or OUT/PHASE: a table, and checkpoints.json"
    parser.add_argument("--all_checkpoints", action="store_true", help=every)
    parser.add_argument("--output_file", type=Path, help="also write the scores there, as JSON")
    parser.add_argument("--predictions_dir", type=Path, help="write predictions and curves of exits there, if any")
    add = parser.add_mutually_exclusive_group().add_argument
    values = "a number, or one per head with commas; replaces the folder's thresholds"
    add("--early_exit_entropy", type=_numbers, metavar="X", help=f"leave below this entropy: {values}")
    add("--early_exit_confidence", type=_numbers, metavar="X", help=f"leave above this probability: {values}")
    add("--patience", type=int, metavar="N", help="leave once N heads in a row agree with the one before")
    return parser


def read_calibrate_job(arguments: Sequence[str]) -> CalibrateJob:
    """Parse and check a calibration command; a UserError has every mistake, one a line."""
    flags = calibrate_parser().parse_args(list(arguments))
    mistakes = Mistakes(model_mistakes(flags.model, flags.trust))
    if os.path.isdir(flags.model) and not os.access(flags.model, os.W_OK):
        mistakes.append(f"{flags.model} cannot be written to, and the thresholds are kept in it: copy the folder first")
    task, cache_dir = read_task(flags, mistakes, "train")
    exits = mistakes.of(_requested_calibration, flags, task) if task and not mistakes else None
    return mistakes.job(CalibrateJob, flags, task=task, cache_dir=cache_dir, exits=exits)


def calibrate_parser() -> argparse.ArgumentParser:
    parser = Parser("calibrate", "Pick a model folder's exit thresholds on the held-out part of the training set.")
    parser.add_model_flags()
    aim = parser.add_mutually_exclusive_group(required=True)
    aim.add_argument("--target_speedup", type=float, metavar="X", help="all layers / mean layers used, e.g. 1.5")
    aim.add_argument("--max_drop", type=float, metavar="POINTS", help="points below the full model's score, e.g. 0.5")
    parser.add_argument("--criterion", choices=get_args(Criterion), help="by default the folder's")
    parser.add_argument("--patience", type=int, metavar="N", help="for a regression, whose tolerance is picked")
    return parser


def _numbers(text: str) -> float | list[float]:
    """Parse one threshold for every head, or a list with one per head."""
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"it is {shown(text)}: write a number, or several with commas") from None
    return values if len(values) > 1 else values[0]


def _read_checkpoints(flags: argparse.Namespace, mistakes: Mistakes) -> list[SavedCheckpoint]:
    """Read the checkpoint that the command names, or with --all_checkpoints every one that can be read."""
    mistakes += one_process_mistakes("a checkpoint is scored")
    paths = checkpoints_in(Path(flags.model)) if flags.all_checkpoints else [Path(flags.model)]
    if not paths:
        way_out = "name the output folder of a run, for its last phase, or the folder of an earlier phase in it"
        mistakes.append(f"--all_checkpoints: {flags.model} holds no checkpoint-N: {way_out}")
    unreadable = Mistakes()
    checkpoints = [checkpoint for path in paths if (checkpoint := unreadable.of(read_checkpoint, path))]
    if not checkpoints:
        raise_mistakes([*mistakes, *unreadable])  # the task is that of a checkpoint
    if unreadable:
        distributed.warn("these checkpoints are not scored:\n" + "\n".join(unreadable))
    return checkpoints


def _requested_calibration(flags: argparse.Namespace, task: TaskSpec) -> ExitsSpec:
    """Return the aim of a calibration; UserError where the folder has no exits, or cannot be calibrated like this."""
    saved = saved_exits(flags.model)
    if saved is None:
        raise UserError(f"the model folder {flags.model} has no {EXITS_FILE}: it has no exit heads to calibrate")
    regression = isinstance(task, TextSpec) and is_regression(task)
    spec = _exits_of(flags, "criterion", "patience", "target_speedup", "max_drop")
    assert spec is not None, "one of the aims is required"
    criterion = spec.chosen_criterion or saved.policy.criterion
    mistakes = [f"--{mistake}" for mistake in aim_mistakes(spec, criterion, saved.layers, None, regression)]
    share, heads = task.held_out_share, f"the exit heads of {flags.model} were trained"
    if not saved.held_out:
        mistakes.append(f"{heads} on all training examples: train them with task.held_out, e.g. 0.02, to calibrate")
    elif share != saved.held_out:
        without = f"task.held_out is {share:g}, and {heads} without {saved.held_out:g} of the data"
        mistakes.append(f"{without}: give --set held_out={saved.held_out!r}")
    raise_mistakes(mistakes)
    return spec


def _exits_of(flags: argparse.Namespace, *names: str) -> ExitsSpec | None:
    """Return what the flags of these names say of exits; None where none is given."""
    values = {name: value for name in names if (value := getattr(flags, name)) is not None}
    try:
        return ExitsSpec(**values) if values else None
    except ValidationError as error:
        raise UserError(flag_mistake(error.errors()[0])) from None


if __name__ == "__main__":  # `deepspeed --module ds_trainer.cli.evaluate`
    from ds_trainer.cli.main import main

    main("evaluate")
