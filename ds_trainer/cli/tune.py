"""`launch/tune.py`: find the fastest settings for a phase on this machine, and the memory that they take."""

import argparse
import copy
import re
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ds_trainer.cli.command import Mistakes, Parser, one_process_mistakes
from ds_trainer.cli.flags import output_path
from ds_trainer.cli.train import apply_to_files, read_train_job, train_parser
from ds_trainer.config.jobs import TrainJob, TuneJob
from ds_trainer.config.settings import assign
from ds_trainer.engine.engine_file import MICRO, STEPS, TRAIN, read_engine_file
from ds_trainer.engine.keys import key_table
from ds_trainer.files.json_file import read_json
from ds_trainer.files.messages import listed, shown
from ds_trainer.files.run_folder import check_output_folder
from ds_trainer.hosts.hostfile import read_hostfile
from ds_trainer.ranks.failures import UserError

_SECONDS = {"s": 1, "m": 60, "h": 3600}
_COUNTS = ("ranks", "threads", MICRO)
_OF_A_RUN = ("--resume", "--overwrite_output_dir", "--debug_port", "--dry_run", "--world", "--trial")


def tune_command(arguments: Sequence[str]) -> None:
    """Tune the settings of a phase."""
    job = read_tune_job(arguments)
    from ds_trainer.tuning.tune import tune

    for ending in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(ending, signal.default_int_handler)  # the trial that runs is to end as well
    tune(job)


def read_tune_job(arguments: Sequence[str]) -> TuneJob:
    """Parse and check a tuning command; a UserError has every mistake, one a line."""
    flags, training = tune_parser().parse_known_args(list(arguments))
    mistakes = Mistakes(one_process_mistakes("a tuning is started"))
    words = [word.partition("=")[0] for word in training]
    mistakes += [f"{flag} is for a run, not for a tuning: drop it" for flag in _OF_A_RUN if flag in words]
    mistakes.raise_all()
    files = ["--deepspeed_config", flags.deepspeed_config, "--recipe", flags.recipe, *training]
    mistakes += check_output_folder(flags.output, overwrite=True)  # a tuning goes on in the folder of an earlier one
    hosts = mistakes.of(read_hostfile, flags.hostfile) if flags.hostfile else None
    if hosts:
        flags.num_gpus = sum(host.slots for host in hosts)
    dry = ["--output_dir", str(flags.output), "--dry_run", "--world", str(flags.num_gpus or 1)]
    train = mistakes.of(read_train_job, [*files, *dry])
    phase = mistakes.of(_phase, train, flags.phase) if train else None
    space = mistakes.of(_space, flags.space) if flags.space else None
    if train and space:
        mistakes += _space_mistakes(train, space, ranks_are_given=flags.num_gpus is not None)
    values = {"train": train, "arguments": tuple(files), "phase": phase, "space": space, "trust": train and train.trust}
    file = _engine_file(files) if train else None
    return mistakes.job(TuneJob, flags, **values, engine_file=file, hosts=len(hosts) if hosts else 1)


def _engine_file(arguments: Sequence[str]) -> dict[str, Any]:
    """Return the engine file with the command's `--set`, and its paths as the user wrote them."""
    flags = train_parser().parse_args(list(arguments))
    recipe, engine = read_json(flags.recipe, "the recipe"), read_engine_file(flags.deepspeed_config)
    for setting in flags.set:
        apply_to_files(recipe, engine, setting)
    return engine


def tune_parser() -> argparse.ArgumentParser:
    more = "All other flags are those of launch/train.py, for every trial."
    parser = Parser("tune", f"Find the fastest settings for a phase on this machine. {more}")
    add = parser.add_argument
    add("--deepspeed_config", required=True, help="the engine file to start from, which is a candidate too")
    add("--recipe", required=True)
    add("--output_dir", dest="output", required=True, type=output_path, help="for tuned.json, the trials and a table")
    add("--phase", help="of the recipe; by default the last one that trains")
    add("--space", help='JSON file of the values to try: {"PATH": [...]}, paths as in --set, and "ranks", "threads"')
    add("--budget", type=_seconds, default=1200.0, help="of time, e.g. 90s, 20m, 2h (20m)")
    add("--trial_timeout", type=_seconds, default=300.0, help="after which a trial counts as hung (5m)")
    add("--trial_seconds", type=_seconds, default=4.0, help="of steps that are timed in a trial, at the least (4s)")
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
