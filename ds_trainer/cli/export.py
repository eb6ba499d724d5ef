"""`launch/export.py`: shrink or cut a model folder or a checkpoint, write it as ONNX, or as a compact file.

`launch/benchmark.py`: what model folders cost, side by side, and their scores on a task.
"""

import argparse
import contextlib
import importlib.util
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ds_trainer.cli.command import NO_TASK, Mistakes, Parser, names_task, one_process_mistakes, output_path, read_task
from ds_trainer.files.messages import listed, shown
from ds_trainer.files.run_folder import check_output_folder
from ds_trainer.files.writing import is_aside
from ds_trainer.models.folders import COMPACT_FILE, folder_mistakes
from ds_trainer.ranks.failures import UserError
from ds_trainer.recipe import jobs
from ds_trainer.recipe.cut_specs import CutSpec
from ds_trainer.recipe.jobs import trusting
from ds_trainer.recipe.recipe import parse_cut
from ds_trainer.recipe.saved_checkpoint import is_checkpoint, read_checkpoint
from ds_trainer.tasks.registry import check_data_files


def export_command(arguments: Sequence[str]) -> None:
    """Export a model folder or a checkpoint."""
    job = read_export_job(arguments)
    # a program may read the report on standard output: what DeepSpeed prints there goes to standard error
    with contextlib.redirect_stdout(sys.stderr):
        report = export(job)
    if report:
        print(json.dumps(report, indent=2), flush=True)


def export(job: jobs.ExportJob) -> dict[str, Any]:
    """Export a model folder, which is made first where the job names a checkpoint; return the report."""
    from ds_trainer.deploy.card import push_to_hub
    from ds_trainer.deploy.export_folder import export_folder

    report: dict[str, Any] = {}
    with trusting(job.trust), contextlib.ExitStack() as until_written:
        if job.checkpoint:
            from ds_trainer.run.scoring import model_of

            folder, _ = until_written.enter_context(model_of(job.checkpoint, job.cache_dir))
            job = job.model_copy(update={"model": folder})
        if job.onnx or job.writes_folder:
            report = export_folder(job)
        if job.push_to_hub:
            push_to_hub(job.output, job.push_to_hub)
    return report


def read_export_job(arguments: Sequence[str], **given: Any) -> jobs.ExportJob:
    """Parse and check an export command; a UserError has every mistake, one a line.

    A Python program can give flags as values, by their names; the fields of the task are `fields`.
    """
    flags = export_parser().options(arguments, given)
    of_checkpoint = is_checkpoint(flags.model)
    writes = [name for name in ("shrink", "cut", "onnx", "compact", "unpack") if getattr(flags, name)]
    mistakes = Mistakes(_flag_mistakes(flags, writes, of_checkpoint))
    checkpoint = mistakes.of(read_checkpoint, flags.model) if of_checkpoint else None
    mistakes.raise_all()
    task, cache_dir = None, flags.cache_dir
    if names_task(flags) or checkpoint:
        task, cache_dir = read_task(flags, mistakes, "validation", checkpoint)
    elif flags.cut:
        mistakes.append(f"--cut fits the model to training examples, and there is {NO_TASK}")
    cut = mistakes.of(_read_cut, flags.cut) if flags.cut else None
    mistakes += check_data_files(task, splits=("train",)) if task and cut else []
    mistakes += _output_mistakes(flags, writes, of_checkpoint)
    values = {"output": flags.output_dir or Path(flags.model), "cache_dir": cache_dir}
    checkpoint = replace(checkpoint, task=task) if checkpoint and task else None
    task = task if names_task(flags) or cut else None
    return mistakes.job(jobs.ExportJob, flags, task=task, checkpoint=checkpoint, cut=cut, **values)


def export_parser() -> Parser:
    parser = Parser("export", "Make of a model or checkpoint what is deployed.")
    parser.add_model_flags(model="model folder, or OUT/checkpoint-N")
    add = parser.add_argument
    add("--output_dir", type=output_path, help="where to write; by default .onnx files go to the model folder")
    add("--overwrite", action="store_true", help="replace the existing model, or the .onnx files")
    add("--shrink", action="store_true", help="cut out the heads and neurons that are wholly zero")
    add("--cut", metavar="SHARE", help="keep this share of heads and neurons, or a phase's cut as JSON; needs a task")
    add("--onnx", action="store_true", help=f"write {jobs.ONNX_FILE}, never compact, and check it in onnxruntime")
    add("--quantize", choices=(jobs.INT8,), help=f"with --onnx: also write {jobs.INT8_FILE}")
    add("--compact", choices=("fp16",), help=f"write {COMPACT_FILE} in the place of the weights")
    add("--unpack", action="store_true", help="write the ordinary folder of a compact one")
    add("--push_to_hub", metavar="NAME", help="send the model folder to this repository of the Hugging Face hub")
    return parser


def _onnx_mistakes(flag: str) -> Iterator[str]:
    """Say which packages are missing for a flag that needs onnx and onnxruntime."""
    missing = [name for name in ("onnx", "onnxruntime") if importlib.util.find_spec(name) is None]
    if missing:
        yield f"{flag}: {' and '.join(missing)} cannot be imported: pip install {' '.join(missing)}"


def _read_cut(text: Any) -> CutSpec:
    try:
        value = json.loads(text) if isinstance(text, str) else text
    except (ValueError, RecursionError):
        raise UserError(f"--cut {shown(text)}: give the share to keep, such as 0.5, or a phase's cut as JSON") from None
    return parse_cut(value)


def _flag_mistakes(flags: argparse.Namespace, writes: list[str], of_checkpoint: bool) -> Iterator[str]:
    """Report the flags that do not go together, or with this model; `writes` are those that ask for files."""
    if not (writes or of_checkpoint or (flags.push_to_hub and not flags.output_dir)):
        yield "nothing to do: give --shrink, --cut, --onnx, --compact, --unpack or --push_to_hub"
    if flags.unpack and (writes != ["unpack"] or names_task(flags) or of_checkpoint):
        yield "--unpack goes with --output_dir alone, and with a compact folder: export it by a second command"
    elif flags.unpack and not os.path.isfile(os.path.join(flags.model, COMPACT_FILE)):
        yield f"--unpack: {flags.model} has no {COMPACT_FILE}: there is nothing to unpack"
    if flags.shrink and flags.cut:
        yield "--shrink and --cut: a cut of heads and neurons also takes out those that are zero: drop --shrink"
    if flags.quantize and not flags.onnx:
        yield f"--quantize {flags.quantize} is for an ONNX file: give --onnx, too"
    if flags.onnx:
        yield from _onnx_mistakes("--onnx")
    yield from one_process_mistakes("a folder is exported")
    if not of_checkpoint:
        yield from folder_mistakes(Path(flags.model), flags.trust)


def _output_mistakes(flags: argparse.Namespace, writes: list[str], of_checkpoint: bool) -> Iterator[str]:
    """Say why the output cannot be written where the flags want it."""
    if not (writes or of_checkpoint):
        return  # the folder is sent to the hub as it is
    output = flags.output_dir or Path(flags.model)
    is_itself = os.path.realpath(output) == os.path.realpath(flags.model)
    if is_itself and (of_checkpoint or writes != ["onnx"]):
        yield f"{flags.model} is what is exported, and stays as it is: give --output_dir with another folder"
    elif unfit := check_output_folder(output, overwrite=True):
        yield from (f"--output_dir: {mistake}" for mistake in unfit)
    elif output.is_dir() and not flags.overwrite:
        names = sorted(path.name for path in output.iterdir() if not is_aside(path))
        if replaced := [name for name in names if not is_itself or name in (jobs.ONNX_FILE, jobs.INT8_FILE)]:
            yield f"--output_dir: {output} has {listed(replaced, 3)} already: give another, or --overwrite"


def benchmark_command(arguments: Sequence[str]) -> None:
    """Measure model folders side by side."""
    job = read_benchmark_job(arguments)
    from ds_trainer.deploy.benchmark import benchmark

    with trusting(job.trust):
        benchmark(job)


def read_benchmark_job(arguments: Sequence[str]) -> jobs.BenchmarkJob:
    """Parse and check a benchmark command; a UserError has every mistake, one a line."""
    flags = benchmark_parser().parse_args(list(arguments))
    mistakes = Mistakes(_benchmark_mistakes(flags))
    mistakes += [mistake for folder in flags.folders for mistake in folder_mistakes(folder, flags.trust)]
    task, cache_dir = None, flags.cache_dir
    if names_task(flags):
        task, cache_dir = read_task(flags, mistakes, "validation")
    elif jobs.OF_THE_TASK in flags.lengths:
        mistakes.append(f"--lengths {jobs.OF_THE_TASK}: {NO_TASK}")
    values = {
        "folders": dict(zip(flags.names or map(str, flags.folders), flags.folders, strict=False)),
        "backends": jobs.BACKENDS if "all" in flags.backends else flags.backends,
        "lengths": flags.lengths or [jobs.OF_THE_TASK if task else 128],
    }
    return mistakes.job(jobs.BenchmarkJob, flags, task=task, cache_dir=cache_dir, **values)


def benchmark_parser() -> argparse.ArgumentParser:
    parser, cores = Parser("benchmark", "Measure model folders side by side."), len(os.sched_getaffinity(0))
    add = parser.add_argument
    add("folders", nargs="+", type=Path, metavar="FOLDER", help="the first is the base of all ratios")
    add("--batch_sizes", nargs="+", metavar="N", default=[1, 32])
    lengths = f'tokens; "{jobs.OF_THE_TASK}": as long as the texts of the task are (the default with a task, else 128)'
    add("--lengths", nargs="+", metavar="N", default=[], help=lengths)
    add("--threads", nargs="+", metavar="N", type=int, default=[cores], help="of the CPU (all cores)")
    add("--devices", nargs="+", choices=jobs.DEVICES, help="by default all that this machine has")
    dtypes = [*jobs.DTYPES, jobs.INT8]
    add("--dtypes", nargs="+", choices=dtypes, default=["fp32"], help="torch: no int8; onnxruntime: no 16-bit")
    add("--backends", nargs="+", choices=(*jobs.BACKENDS, "all"), default=["torch"])
    add("--seconds", default=20, metavar="X", help="of calls at a setting, all folders together (20)")
    add("--names", nargs="+", metavar="NAME", help="what to call the folders, in their order")
    add("--output_dir", dest="output", type=output_path, help="where to write benchmark.json and benchmark.md")
    add("--eval_batch_size", default=64, metavar="N", help="for the scores (64)")
    parser.add_task_flags()
    return parser


def _benchmark_mistakes(flags: argparse.Namespace) -> Iterator[str]:
    """Report the flags that do not fit each other, this machine or this installation."""
    cores = len(os.sched_getaffinity(0))
    names = flags.names or [str(folder) for folder in flags.folders]
    if not len(flags.folders) == len(names) == len(set(names)):
        yield f"the names are {', '.join(names)}: give each of the {len(flags.folders)} folders its own by --names"
    if max(flags.threads) > cores:
        yield f"--threads is {max(flags.threads)}: this process may use {cores} cores: give {cores} at most"
    yield from one_process_mistakes("a benchmark is measured")
    if {"onnxruntime", "all"} & {*flags.backends}:
        yield from _onnx_mistakes("--backends onnxruntime")
    if flags.output:
        yield from (f"--output_dir: {mistake}" for mistake in check_output_folder(flags.output, overwrite=True))
