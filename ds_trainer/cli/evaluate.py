"""`launch/evaluate.py`: score a model folder, a checkpoint, or all checkpoints of a phase on a task."""

import argparse
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ds_trainer.cli.command import Mistakes, Parser, one_process_mistakes
from ds_trainer.cli.flags import add_model_flags, checked_exits, read_task, trust_of
from ds_trainer.files.messages import shown
from ds_trainer.files.writing import existing_above
from ds_trainer.models.model_folder import model_mistakes
from ds_trainer.ranks import distributed
from ds_trainer.ranks.failures import raise_mistakes
from ds_trainer.recipe.jobs import EvaluateJob
from ds_trainer.recipe.recipe import saved_exits
from ds_trainer.recipe.saved_checkpoint import SavedCheckpoint, checkpoints_in, is_checkpoint, read_checkpoint
from ds_trainer.recipe.trust import trusting

_POLICY_FLAGS = ("early_exit_entropy", "early_exit_confidence", "patience")
"""The flags that replace the exit policy of a model folder."""


def evaluate_command(arguments: Sequence[str]) -> None:
    """Score a model folder or checkpoints."""
    evaluate(read_evaluate_job(arguments))


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
    trust, mistakes, checkpoints = trust_of(flags), Mistakes(), list[SavedCheckpoint]()
    if flags.all_checkpoints or is_checkpoint(flags.model):
        checkpoints = _read_checkpoints(flags, mistakes)
    else:
        mistakes += model_mistakes(flags.model, trust)
    task, cache_dir = read_task(flags, mistakes, "validation", checkpoints[-1] if checkpoints else None)
    for flag in ("output_file", "predictions_dir"):
        if place := getattr(flags, flag):
            existing = existing_above(place)
            as_wanted = os.path.isdir(existing) == (flag == "predictions_dir" or existing != place)
            if not as_wanted or not os.access(existing, os.W_OK):
                mistakes.append(f"--{flag} is {place}: {existing} is not what can be written to: give another place")
    policy = {name: getattr(flags, name) for name in _POLICY_FLAGS if getattr(flags, name) is not None}
    saved, exits = mistakes.of(saved_exits, flags.model), mistakes.of(checked_exits, policy) if policy else None
    of_task = tuple(replace(checkpoint, task=task) for checkpoint in checkpoints) if task else ()
    values = {"task": task, "cache_dir": cache_dir, "exits": exits, "trust": trust, "checkpoints": of_task}
    job = mistakes.job(EvaluateJob, flags, **values)
    if not any(checkpoint.phase.techniques.exits for checkpoint in checkpoints):
        job.exit_policy(saved)  # whether it fits the heads of a checkpoint shows later
    return job


def evaluate_parser() -> Parser:
    parser = Parser("evaluate", "Score a model folder, or checkpoints, on a task.")
    add_model_flags(parser, model="model folder or hub name, OUT/checkpoint-N, or with --all_checkpoints OUT")
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


if __name__ == "__main__":  # `deepspeed --module ds_trainer.cli.evaluate`
    from ds_trainer.cli.main import main

    main("evaluate")
