"""The command that measures model folders: its flags, and every check that needs neither torch nor transformers."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from ds_trainer.cli.export import names_task, onnx_mistakes, output_path
from ds_trainer.cli.train import Mistakes, Parser, add_common_flags, asked_task, asked_trust
from ds_trainer.config.jobs import BACKENDS, DEVICES, DTYPES, OF_THE_TASK, BenchmarkJob
from ds_trainer.config.trust import trusting
from ds_trainer.files.messages import cut, listed
from ds_trainer.files.run_folder import check_output_folder
from ds_trainer.models.model_folder import INT8, folder_mistakes
from ds_trainer.ranks import distributed
from ds_trainer.tasks.registry import check_data_files

_MOST = 2**20
_SCORED_AT = 64
T = TypeVar("T")


def benchmark_command(arguments: Sequence[str]) -> None:
    """`launch/benchmark.py`: what model folders cost, side by side, and their scores on a task."""
    job = read_benchmark_job(arguments)
    from ds_trainer.deploy.benchmark import benchmark

    with trusting(job.trust):
        benchmark(job)


def read_benchmark_job(arguments: Sequence[str]) -> BenchmarkJob:
    """Parse and check a benchmark command; a ValueError tells every mistake of it, one a line."""
    flags = _parser().parse_args(list(arguments))
    trust, mistakes = asked_trust(flags), Mistakes()
    mistakes += [mistake for folder in flags.folders for mistake in folder_mistakes(folder, trust)]
    mistakes += _name_mistakes(flags) + _place_mistakes(flags)
    task, cache_dir = None, flags.cache_dir
    if names_task(flags):
        of_first = argparse.Namespace(**vars(flags), model=str(flags.folders[0]), batch_size=flags.eval_batch_size)
        task, cache_dir = asked_task(of_first, mistakes)
        mistakes += check_data_files(task, splits=("validation",)) if task else []
    elif OF_THE_TASK in flags.lengths:
        mistakes.append(f"--lengths {OF_THE_TASK}: there is no task: give --task_name, or --recipe with a task")
    mistakes.tell()
    names = flags.names or labels(flags.folders)
    return BenchmarkJob(
        folders=dict(zip(names, flags.folders, strict=True)),
        backends=BACKENDS if "all" in flags.backends else _distinct(flags.backends),
        devices=_distinct(flags.devices) if flags.devices else None,
        dtypes=_distinct(flags.dtypes),
        threads=_distinct(flags.threads),
        lengths=_distinct(flags.lengths) or (OF_THE_TASK if task else 128,),
        batch_sizes=_distinct(flags.batch_sizes),
        seconds=flags.seconds,
        task=task,
        eval_batch_size=flags.eval_batch_size,
        cache_dir=cache_dir,
        output=flags.output_dir,
        trust=trust,
    )


def labels(folders: Sequence[Path]) -> list[str]:
    """As few of the last parts of each path as tell all apart; of a folder that comes again, its number too."""
    paths = [folder.absolute() for folder in folders]
    most = max(len(path.parts) for path in paths)
    for count in range(1, most + 1):
        found = ["/".join(path.parts[-count:]) for path in paths]
        if len(set(found)) == len(set(paths)):
            break
    return [
        name if (times := found[: place + 1].count(name)) == 1 else f"{name} ({times})"
        for place, name in enumerate(found)
    ]


def _distinct(values: Sequence[T]) -> tuple[T, ...]:
    return tuple(dict.fromkeys(values))


def _name_mistakes(flags: argparse.Namespace) -> list[str]:
    names, folders = flags.names, flags.folders
    if names is None:
        return []
    if len(names) != len(folders):
        return [f"--names has {len(names)} values, and there are {len(folders)} folders: give one for each"]
    twice = [name for name in _distinct(names) if names.count(name) > 1]
    return [f"--names: {listed(twice)} comes twice: give each folder its own"] if twice else []


def _place_mistakes(flags: argparse.Namespace) -> list[str]:
    """What this process, its host or its installation is not fit for."""
    mistakes = []
    cores = len(os.sched_getaffinity(0))
    if max(flags.threads) > cores:
        mistakes.append(f"--threads {max(flags.threads)}: this process may use {cores} cores: give {cores} at most")
    if distributed.world_size() > 1:
        mistakes.append("a benchmark is measured by one process: start it with python, not with deepspeed")
    if {"onnxruntime", "all"} & {*flags.backends}:
        mistakes += onnx_mistakes("--backends onnxruntime")
    if flags.output_dir:
        mistakes += [f"--output_dir: {mistake}" for mistake in check_output_folder(flags.output_dir, overwrite=True)]
    return mistakes


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="benchmark.py", description="Measure model folders side by side.", allow_abbrev=False)
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER", help="the first is the base of all ratios")
    cores = len(os.sched_getaffinity(0))
    several: dict[str, Any] = {"nargs": "+", "metavar": "N"}
    parser.add_argument("--batch_sizes", type=_count, default=[1, 32], **several)
    parser.add_argument(
        "--lengths",
        type=_length,
        default=[],
        help=f'tokens; "{OF_THE_TASK}": the texts of the task, as long as they are ({OF_THE_TASK} if there is one, '
        f"else 128)",
        **several,
    )
    parser.add_argument("--threads", type=_count, default=[cores], help="of the CPU (all cores)", **several)
    parser.add_argument("--devices", nargs="+", choices=DEVICES, help="by default those that are there")
    parser.add_argument(
        "--dtypes",
        nargs="+",
        choices=[*DTYPES, INT8],
        default=["fp32"],
        help="onnxruntime runs fp32 and int8, torch all but int8",
    )
    parser.add_argument("--backends", nargs="+", choices=(*BACKENDS, "all"), default=["torch"])
    parser.add_argument(
        "--seconds", type=_seconds, default=20.0, metavar="X", help="of calls at a setting, all folders together (20)"
    )
    parser.add_argument("--names", nargs="+", metavar="NAME", help="what to call the folders, in their order")
    parser.add_argument(
        "--output_dir", type=output_path, help="write benchmark.json, benchmark.md and the figure there"
    )
    parser.add_argument("--recipe", help="take the task from this recipe, e.g. OUTPUT_DIR/recipe.json")
    parser.add_argument(
        "--eval_batch_size", type=_count, default=_SCORED_AT, metavar="N", help=f"for the scores ({_SCORED_AT})"
    )
    add_common_flags(parser, "any field of the task, e.g. max_seq_length=128")
    return parser


def _count(text: str) -> int:
    if text.isascii() and text.isdigit() and len(text) < 8 and 1 <= int(text) <= _MOST:
        return int(text)
    raise argparse.ArgumentTypeError(f"{cut(repr(text), 60)} is no whole number from 1 to {_MOST}")


def _length(text: str) -> int | str:
    return text if text == OF_THE_TASK else _count(text)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if math.isfinite(value) and value > 0:
        return value
    raise argparse.ArgumentTypeError(f"{cut(repr(text), 60)} is no number of seconds above 0")
