"""The command that scores a model folder or checkpoints: its flags, and every check that needs no torch."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from ds_trainer.cli.exit_flags import add_policy_flags, asked_policy, saved_exits
from ds_trainer.cli.train import Mistakes, Parser, add_task_flags, asked_task, asked_trust
from ds_trainer.config.jobs import EvaluateJob
from ds_trainer.config.saved_checkpoint import SavedCheckpoint, checkpoints_in, is_checkpoint, read_checkpoint
from ds_trainer.config.trust import trusting
from ds_trainer.files.write_places import result_place_mistakes
from ds_trainer.ranks import distributed
from ds_trainer.tasks.registry import check_data_files


def evaluate_command(arguments: Sequence[str]) -> None:
    """`launch/evaluate.py`: score a model folder, a checkpoint, or all checkpoints of a phase on a task."""
    flags = _evaluate_parser().parse_args(list(arguments))
    job = _checked(flags)
    from ds_trainer.scoring import evaluate_checkpoints, evaluate_folder

    with trusting(job.trust):
        (evaluate_checkpoints if flags.all_checkpoints else evaluate_folder)(job)


def read_evaluate_job(arguments: Sequence[str]) -> EvaluateJob:
    """Parse and check an evaluation command; a ValueError tells every mistake of it, one a line."""
    return _checked(_evaluate_parser().parse_args(list(arguments)))


def _checked(flags: argparse.Namespace) -> EvaluateJob:
    mistakes = Mistakes()
    checkpoints = _asked_checkpoints(flags, mistakes)
    mistakes.tell()
    task, cache_dir = asked_task(flags, mistakes, checkpoints[-1] if checkpoints else None)
    mistakes += check_data_files(task, splits=("validation",)) if task else []
    saved = mistakes.of(lambda: saved_exits(flags.model))
    later = any(checkpoint.phase.techniques.exits for checkpoint in checkpoints)
    policy = mistakes.of(partial(asked_policy, flags, saved, task)) if task and not later else None
    written = (flags.output_file, flags.predictions_dir)
    mistakes += result_place_mistakes(*written)
    if flags.all_checkpoints and not flags.predictions_dir and not os.access(flags.model, os.W_OK):
        mistakes.append(f"{flags.model} cannot be written to: give --predictions_dir, for the table and the figure")
    mistakes.tell()
    assert task is not None
    return EvaluateJob(
        flags.model,
        task,
        flags.batch_size,
        cache_dir,
        *written,
        policy,
        asked_trust(flags),
        tuple(replace(checkpoint, task=task) for checkpoint in checkpoints),
        lambda folder: asked_policy(flags, saved_exits(folder), task),
    )


def _asked_checkpoints(flags: argparse.Namespace, mistakes: Mistakes) -> list[SavedCheckpoint]:
    """The checkpoints to score: none where a model folder is; of all, those whose markers can be read."""
    if not (flags.all_checkpoints or is_checkpoint(flags.model)):
        return []
    if distributed.world_size() > 1:
        mistakes.append("a checkpoint is scored by one process: start it with python, not with deepspeed")
    if not flags.all_checkpoints:
        checkpoint = mistakes.of(partial(read_checkpoint, flags.model))
        return [checkpoint] if checkpoint else []
    paths = checkpoints_in(Path(flags.model))
    if not paths:
        mistakes.append(
            f"--all_checkpoints: {flags.model} holds no checkpoint-N: name the output folder of a run, for its last "
            f"phase, or the folder of an earlier phase in it"
        )
    unread = Mistakes()
    found = [one for path in paths if (one := unread.of(partial(read_checkpoint, path)))]
    if not found:
        mistakes += unread
    for mistake in unread if found else ():
        distributed.warn(f"left out: {mistake}")
    return found


def _evaluate_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="evaluate.py", description="Score a model folder, or checkpoints, on a task.", allow_abbrev=False
    )
    add_task_flags(parser, model="model folder or hub name, OUT/checkpoint-N, or with --all_checkpoints OUT")
    parser.add_argument(
        "--all_checkpoints",
        action="store_true",
        help="score every checkpoint in OUT, or OUT/PHASE: a table, checkpoints.json and a figure",
    )
    parser.add_argument("--output_file", type=Path, help="also write the scores there, as JSON")
    parser.add_argument("--predictions_dir", type=Path, help="write predictions and curves of exits there, if any")
    add_policy_flags(parser)
    return parser
