"""The command-line flags of early exits, and every check of them that needs neither torch nor DeepSpeed."""

import argparse
import os
from pathlib import Path
from typing import Any, get_args

from pydantic import ValidationError

from ds_trainer.cli.command import flag_mistake
from ds_trainer.config.exit_specs import EXITS_FILE, Criterion, ExitsSpec, SavedExits, aim_mistakes
from ds_trainer.config.recipe import TaskSpec, TextSpec, parse_exits
from ds_trainer.files.json_file import read_json
from ds_trainer.ranks.failures import UserError
from ds_trainer.tasks.text.glue import is_regression


def add_policy_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that replace the policy of a model folder."""
    add = parser.add_mutually_exclusive_group().add_argument
    values = "a number, or one per head with commas; replaces the folder's thresholds"
    add("--early_exit_entropy", type=_numbers, metavar="X", help=f"leave below this entropy: {values}")
    add("--early_exit_confidence", type=_numbers, metavar="X", help=f"leave above this probability: {values}")
    add("--patience", type=int, metavar="N", help="leave once N heads in a row agree with the one before")


def add_aim_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that say what to calibrate for."""
    aim = parser.add_mutually_exclusive_group(required=True)
    aim.add_argument("--target_speedup", type=float, metavar="X", help="all layers / mean layers used, e.g. 1.5")
    aim.add_argument("--max_drop", type=float, metavar="POINTS", help="points below the full model's score, e.g. 0.5")
    parser.add_argument("--criterion", choices=get_args(Criterion), help="by default the folder's")
    parser.add_argument("--patience", type=int, metavar="N", help="for a regression, whose tolerance is picked")
    parser.add_argument("--per_head", action="store_true", help="calibrate one threshold per head")


def saved_exits(model: str) -> SavedExits | None:
    """Read the `exits.json` of a model folder; None where there is none, ValueError where it is not valid."""
    path = Path(model) / EXITS_FILE
    return parse_exits(read_json(path, "the exits of a model,"), str(path)) if os.path.isfile(path) else None


def requested_exits(flags: argparse.Namespace) -> ExitsSpec | None:
    """Return the exit policy that the flags request in place of the folder's, or None without such flags."""
    names = ("early_exit_entropy", "early_exit_confidence", "patience")
    values = {name: getattr(flags, name) for name in names if getattr(flags, name) is not None}
    return _checked(**values) if values else None


def requested_calibration(flags: argparse.Namespace, task: TaskSpec) -> ExitsSpec:
    """Return the aim of a calibration; criterion and patience are the folder's where no flag gives them.

    ValueError where the folder has no exits, or cannot be calibrated as requested.
    """
    saved = saved_exits(flags.model)
    if saved is None:
        raise UserError(f"the model folder {flags.model} has no {EXITS_FILE}: it has no exit heads to calibrate")
    aim = {name: getattr(flags, name) for name in ("criterion", "patience", "target_speedup", "max_drop", "per_head")}
    regression = isinstance(task, TextSpec) and is_regression(task)
    criterion = flags.criterion or saved.policy.criterion
    if regression and criterion == "patience" and flags.patience is None:
        aim["patience"] = saved.policy.patience
    spec = _checked(**aim | {"criterion": criterion})
    mistakes = [f"--{mistake}" for mistake in aim_mistakes(spec, criterion, saved.layers, None, regression)]
    share = getattr(task, "held_out", 0.0)
    heads = f"the exit heads of {flags.model} were trained"
    if not saved.held_out:
        mistakes.append(f"{heads} on all training examples: train them with task.held_out, e.g. 0.02, to calibrate")
    elif share != saved.held_out:
        way_out = f"give --set held_out={saved.held_out!r}"
        mistakes.append(f"task.held_out is {share:g}, and {heads} without {saved.held_out:g} of the data: {way_out}")
    if mistakes:
        raise UserError("\n".join(mistakes))
    return spec


def _checked(**values: Any) -> ExitsSpec:
    """Build a specification of the values of flags; UserError names the flag whose value is not valid."""
    try:
        return ExitsSpec(**values)
    except ValidationError as error:
        raise UserError(flag_mistake(error.errors()[0])) from None


def _numbers(text: str) -> float | list[float]:
    """Parse one threshold for every head, or a list with one per head."""
    values = [float(part) for part in text.split(",")]
    return values if len(values) > 1 else values[0]
