"""What command lines say of early exits: their flags, and every check that needs neither torch nor DeepSpeed."""

from __future__ import annotations

import argparse
import math
import os
from pathlib import Path
from typing import get_args

from ds_trainer.config.exit_specs import (
    EXITS_FILE,
    MOST_CONFIDENCE,
    MOST_PATIENCE,
    Criterion,
    ExitPolicy,
    ExitsSpec,
    SavedExits,
    aim_mistakes,
    policy_of,
)
from ds_trainer.config.recipe import TaskSpec, TextSpec, parse_exits
from ds_trainer.files.json_file import read_json
from ds_trainer.ranks.failures import UserError
from ds_trainer.tasks.text.glue import is_regression


def add_policy_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of a policy in place of the folder's."""
    policy = parser.add_mutually_exclusive_group()
    several = "a number, or one a head with commas; instead of the folder's thresholds"
    policy.add_argument(
        "--early_exit_entropy", type=_thresholds, metavar="X", help=f"leave below this entropy, in nats: {several}"
    )
    policy.add_argument(
        "--early_exit_confidence", type=_confidences, metavar="X", help=f"leave above this probability: {several}"
    )
    policy.add_argument(
        "--patience", type=_patience, metavar="N", help="leave once N heads in a row agree with the one before"
    )


def add_aim_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of a calibration."""
    aim = parser.add_mutually_exclusive_group(required=True)
    aim.add_argument("--target_speedup", type=_speedup, metavar="X", help="layers / mean layers used, e.g. 1.5")
    aim.add_argument("--max_drop", type=_drop, metavar="POINTS", help="allowed below the full model's score, e.g. 0.5")
    parser.add_argument("--criterion", choices=get_args(Criterion), help="by default the folder's")
    parser.add_argument("--patience", type=_patience, metavar="N", help="of a regression, whose tolerance is picked")
    parser.add_argument("--per_head", action="store_true", help="refine to a threshold for each head")


def saved_exits(model: str) -> SavedExits | None:
    """What a model folder says of its exit heads; None where it has none. ValueError where that is no JSON of ours."""
    path = Path(model) / EXITS_FILE
    return parse_exits(read_json(path, "the exits of a model,"), str(path)) if os.path.isfile(path) else None


def asked_policy(flags: argparse.Namespace, saved: SavedExits | None, task: TaskSpec) -> ExitPolicy | None:
    """The policy that the flags ask for; None where they ask for none. ValueError where it does not go with heads."""
    asked = {name: getattr(flags, name) for name in ("early_exit_entropy", "early_exit_confidence", "patience")}
    asked = {name: value for name, value in asked.items() if value is not None}
    if not asked:
        return None
    ((name, value),) = asked.items()
    if saved is None:
        raise UserError(f"--{name}: {flags.model} has no {EXITS_FILE}, and so no heads to exit at")
    regression = _regression(task)
    if name == "patience" and regression:  # its tolerances stay
        return saved.policy.model_copy(update={"patience": value})
    criterion = name.removeprefix("early_exit_")
    return policy_of(ExitsSpec.model_validate({"criterion": criterion, name: value}), len(saved.layers), regression)


def calibration_mistakes(flags: argparse.Namespace, saved: SavedExits | None, task: TaskSpec) -> list[str]:
    """Why a folder's exits cannot be calibrated as asked."""
    if not os.path.isdir(flags.model):
        return [f"{flags.model} is no folder: exits are calibrated in one, which is changed"]
    if saved is None:
        return [f"the model folder {flags.model} has no {EXITS_FILE}: it has no exit heads to calibrate"]
    mistakes = _criterion_mistakes(flags, saved, task) + _held_out_mistakes(flags.model, saved, task)
    if not os.access(flags.model, os.W_OK):
        mistakes.append(f"the model folder {flags.model} cannot be written")
    return mistakes


def asked_calibration(flags: argparse.Namespace, saved: SavedExits) -> ExitsSpec:
    """What to calibrate for, the folder's criterion and patience where the flags say none."""
    of_regression = saved.policy.criterion == "patience" and bool(saved.policy.thresholds)
    return ExitsSpec(
        criterion=flags.criterion or saved.policy.criterion,
        patience=flags.patience or (saved.policy.patience if of_regression else None),
        target_speedup=flags.target_speedup,
        max_drop=flags.max_drop,
        per_head=flags.per_head,
    )


def _criterion_mistakes(flags: argparse.Namespace, saved: SavedExits, task: TaskSpec) -> list[str]:
    aim = {name: getattr(flags, name) for name in ("target_speedup", "max_drop", "per_head", "patience")}
    criterion = flags.criterion or saved.policy.criterion
    found = aim_mistakes(ExitsSpec(**aim), criterion, saved.layers, None, _regression(task))
    return [f"--{mistake}" for mistake in found]


def _held_out_mistakes(model: str, saved: SavedExits, task: TaskSpec) -> list[str]:
    share = getattr(task, "held_out", 0.0)
    if not saved.held_out:
        return [
            f"the exit heads of {model} were trained on all training examples: a calibration set would hold examples "
            f"that they have seen; train them with task.held_out (0.02, say)"
        ]
    if share != saved.held_out:
        return [
            f"task.held_out is {share:g}, and the exit heads of {model} were trained without {saved.held_out:g} of the "
            f"training set: the calibration set would hold examples that they have seen; give "
            f"--set held_out={saved.held_out!r}"
        ]
    return []


def _regression(task: TaskSpec) -> bool:
    return isinstance(task, TextSpec) and is_regression(task)


def _number(text: str, least: float, most: float = math.inf) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (least <= value <= most and math.isfinite(value)):
        allowed = f"from {least:g} to {most:g}" if math.isfinite(most) else f"of {least:g} or more"
        raise argparse.ArgumentTypeError(f"{text!r} is no number {allowed}")
    return value


def _speedup(text: str) -> float:
    return _number(text, 1)


def _drop(text: str) -> float:
    return _number(text, 0)


def _thresholds(text: str, most: float = math.inf) -> float | list[float]:
    """One for every head, or one a head."""
    values = [_number(part, 0, most) for part in text.split(",")]
    return values if len(values) > 1 else values[0]


def _confidences(text: str) -> float | list[float]:
    return _thresholds(text, MOST_CONFIDENCE)


def _patience(text: str) -> int:
    # Python refuses to read a number of some thousand digits
    value = int(text) if text.isascii() and text.isdigit() and len(text) <= len(str(MOST_PATIENCE)) else 0
    if not 1 <= value <= MOST_PATIENCE:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 1 to {MOST_PATIENCE}")
    return value
