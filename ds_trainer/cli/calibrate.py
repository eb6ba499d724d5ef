"""`launch/calibrate.py`: pick the exit thresholds of a model folder on held-out training examples."""

import argparse
import os
from collections.abc import Sequence
from typing import get_args

from ds_trainer.cli.command import Mistakes, Parser
from ds_trainer.cli.flags import add_model_flags, checked_exits, read_task, trust_of
from ds_trainer.models.model_folder import model_mistakes
from ds_trainer.ranks.failures import UserError, raise_mistakes
from ds_trainer.recipe.exit_specs import EXITS_FILE, Criterion, ExitsSpec, aim_mistakes
from ds_trainer.recipe.jobs import CalibrateJob
from ds_trainer.recipe.recipe import saved_exits
from ds_trainer.recipe.task_specs import TaskSpec, TextSpec
from ds_trainer.recipe.trust import trusting
from ds_trainer.tasks.text.glue import is_regression


def calibrate_command(arguments: Sequence[str]) -> None:
    """Pick the exit thresholds of a model folder."""
    job = read_calibrate_job(arguments)
    from ds_trainer.run.scoring import calibrate_exits

    with trusting(job.trust):
        calibrate_exits(job)


def read_calibrate_job(arguments: Sequence[str]) -> CalibrateJob:
    """Parse and check a calibration command; a UserError has every mistake, one a line."""
    flags = calibrate_parser().parse_args(list(arguments))
    trust, mistakes = trust_of(flags), Mistakes()
    mistakes += model_mistakes(flags.model, trust)
    if os.path.isdir(flags.model) and not os.access(flags.model, os.W_OK):
        mistakes.append(f"{flags.model} cannot be written to, and the thresholds are kept in it: copy the folder first")
    task, cache_dir = read_task(flags, mistakes, "train")
    exits = mistakes.of(_requested_calibration, flags, task) if task and not mistakes else None
    return mistakes.job(CalibrateJob, flags, task=task, cache_dir=cache_dir, exits=exits, trust=trust)


def calibrate_parser() -> argparse.ArgumentParser:
    parser = Parser("calibrate", "Pick a model folder's exit thresholds on the held-out part of the training set.")
    add_model_flags(parser)
    aim = parser.add_mutually_exclusive_group(required=True)
    aim.add_argument("--target_speedup", type=float, metavar="X", help="all layers / mean layers used, e.g. 1.5")
    aim.add_argument("--max_drop", type=float, metavar="POINTS", help="points below the full model's score, e.g. 0.5")
    parser.add_argument("--criterion", choices=get_args(Criterion), help="by default the folder's")
    parser.add_argument("--patience", type=int, metavar="N", help="for a regression, whose tolerance is picked")
    return parser


def _requested_calibration(flags: argparse.Namespace, task: TaskSpec) -> ExitsSpec:
    """Return the aim of a calibration; UserError where the folder has no exits, or cannot be calibrated like this."""
    saved = saved_exits(flags.model)
    if saved is None:
        raise UserError(f"the model folder {flags.model} has no {EXITS_FILE}: it has no exit heads to calibrate")
    regression = isinstance(task, TextSpec) and is_regression(task)
    names = ("criterion", "patience", "target_speedup", "max_drop")
    spec = checked_exits({name: getattr(flags, name) for name in names})
    criterion = spec.chosen_criterion or saved.policy.criterion
    mistakes = [f"--{mistake}" for mistake in aim_mistakes(spec, criterion, saved.layers, None, regression)]
    share, heads = getattr(task, "held_out", 0.0), f"the exit heads of {flags.model} were trained"
    if not saved.held_out:
        mistakes.append(f"{heads} on all training examples: train them with task.held_out, e.g. 0.02, to calibrate")
    elif share != saved.held_out:
        without = f"task.held_out is {share:g}, and {heads} without {saved.held_out:g} of the data"
        mistakes.append(f"{without}: give --set held_out={saved.held_out!r}")
    raise_mistakes(mistakes)
    return spec
