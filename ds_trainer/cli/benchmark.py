"""`launch/benchmark.py`: what model folders cost, side by side, and their scores on a task."""

import argparse
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from ds_trainer.cli.command import NO_TASK, Mistakes, Parser, names_task, one_process_mistakes, output_path, read_task
from ds_trainer.cli.export import onnx_mistakes
from ds_trainer.files.run_folder import check_output_folder
from ds_trainer.models.folders import folder_mistakes
from ds_trainer.recipe.jobs import BACKENDS, DEVICES, DTYPES, INT8, OF_THE_TASK, BenchmarkJob
from ds_trainer.recipe.trust import trusting


def benchmark_command(arguments: Sequence[str]) -> None:
    """Measure model folders side by side."""
    job = read_benchmark_job(arguments)
    from ds_trainer.deploy.benchmark import benchmark

    with trusting(job.trust):
        benchmark(job)


def read_benchmark_job(arguments: Sequence[str]) -> BenchmarkJob:
    """Parse and check a benchmark command; a UserError has every mistake, one a line."""
    flags = benchmark_parser().parse_args(list(arguments))
    mistakes = Mistakes(_flag_mistakes(flags))
    mistakes += [mistake for folder in flags.folders for mistake in folder_mistakes(folder, flags.trust)]
    task, cache_dir = None, flags.cache_dir
    if names_task(flags):
        task, cache_dir = read_task(flags, mistakes, "validation")
    elif OF_THE_TASK in flags.lengths:
        mistakes.append(f"--lengths {OF_THE_TASK}: {NO_TASK}")
    values = {
        "folders": dict(zip(flags.names or labels(flags.folders), flags.folders, strict=False)),
        "backends": BACKENDS if "all" in flags.backends else flags.backends,
        "lengths": flags.lengths or [OF_THE_TASK if task else 128],
    }
    return mistakes.job(BenchmarkJob, flags, task=task, cache_dir=cache_dir, **values)


def benchmark_parser() -> argparse.ArgumentParser:
    parser, cores = Parser("benchmark", "Measure model folders side by side."), len(os.sched_getaffinity(0))
    add = parser.add_argument
    add("folders", nargs="+", type=Path, metavar="FOLDER", help="the first is the base of all ratios")
    add("--batch_sizes", nargs="+", metavar="N", default=[1, 32])
    lengths = f'tokens; "{OF_THE_TASK}": as long as the texts of the task are (the default with a task, else 128)'
    add("--lengths", nargs="+", metavar="N", default=[], help=lengths)
    add("--threads", nargs="+", metavar="N", type=int, default=[cores], help="of the CPU (all cores)")
    add("--devices", nargs="+", choices=DEVICES, help="by default all that this machine has")
    add("--dtypes", nargs="+", choices=[*DTYPES, INT8], default=["fp32"], help="torch: no int8; onnxruntime: no 16-bit")
    add("--backends", nargs="+", choices=(*BACKENDS, "all"), default=["torch"])
    add("--seconds", default=20, metavar="X", help="of calls at a setting, all folders together (20)")
    add("--names", nargs="+", metavar="NAME", help="what to call the folders, in their order")
    add("--output_dir", dest="output", type=output_path, help="where to write benchmark.json and benchmark.md")
    add("--eval_batch_size", default=64, metavar="N", help="for the scores (64)")
    parser.add_task_flags()
    return parser


def labels(folders: Sequence[Path]) -> list[str]:
    """Label folders by as few of the last parts of their paths as tell them apart; a repeated folder has its number."""
    paths = [folder.absolute() for folder in folders]
    for count in range(1, max(len(path.parts) for path in paths) + 1):
        names = ["/".join(path.parts[-count:]) for path in paths]
        if len(set(names)) == len(set(paths)):
            break
    times = [names[: index + 1].count(name) for index, name in enumerate(names)]
    return [name if time == 1 else f"{name} ({time})" for name, time in zip(names, times, strict=True)]


def _flag_mistakes(flags: argparse.Namespace) -> Iterator[str]:
    """Report the flags that do not fit each other, this machine or this installation."""
    cores = len(os.sched_getaffinity(0))
    if flags.names and not len(flags.folders) == len(flags.names) == len(set(flags.names)):
        yield f"--names is {', '.join(flags.names)}: give each of the {len(flags.folders)} folders a name of its own"
    if max(flags.threads) > cores:
        yield f"--threads is {max(flags.threads)}: this process may use {cores} cores: give {cores} at most"
    yield from one_process_mistakes("a benchmark is measured")
    if {"onnxruntime", "all"} & {*flags.backends}:
        yield from onnx_mistakes("--backends onnxruntime")
    if flags.output:
        yield from (f"--output_dir: {mistake}" for mistake in check_output_folder(flags.output, overwrite=True))
