"""`launch/calibrate.py`: pick the exit thresholds of a model folder on held-out training examples."""

import argparse
import os
from collections.abc import Sequence

from ds_trainer.cli.command import Mistakes, Parser
from ds_trainer.cli.exit_flags import add_aim_flags, requested_calibration
from ds_trainer.cli.flags import add_model_flags, read_task, trust_of
from ds_trainer.config.jobs import CalibrateJob
from ds_trainer.config.trust import trusting
from ds_trainer.models.model_folder import model_mistakes


def calibrate_command(arguments: Sequence[str]) -> None:
    """Pick the exit thresholds of a model folder."""
    job = read_calibrate_job(arguments)
    from ds_trainer.scoring import calibrate_exits

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
    exits = mistakes.of(requested_calibration, flags, task) if task and not mistakes else None
    return mistakes.job(CalibrateJob, flags, task=task, cache_dir=cache_dir, exits=exits, trust=trust)


def calibrate_parser() -> argparse.ArgumentParser:
    parser = Parser("calibrate", "Pick a model folder's exit thresholds on the held-out part of the training set.")
    add_model_flags(parser)
    add_aim_flags(parser)
    return parser
