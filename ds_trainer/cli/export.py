"""`launch/export.py`: shrink or cut a model folder or a checkpoint, write it as ONNX, or as a compact file."""

import argparse
import contextlib
import importlib.util
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from ds_trainer.cli.command import NO_TASK, Mistakes, Parser, names_task, one_process_mistakes, output_path, read_task
from ds_trainer.files.messages import shown
from ds_trainer.files.run_folder import MODEL_FILES, check_output_folder
from ds_trainer.files.writing import is_aside
from ds_trainer.models.folders import COMPACT_FILE, folder_mistakes
from ds_trainer.ranks.failures import UserError
from ds_trainer.recipe.cut_specs import CutSpec
from ds_trainer.recipe.jobs import INT8, INT8_FILE, ONNX_FILE, WEIGHTS, ExportJob
from ds_trainer.recipe.recipe import parse_cut
from ds_trainer.recipe.saved_checkpoint import is_checkpoint, read_checkpoint
from ds_trainer.recipe.trust import trusting
from ds_trainer.tasks.registry import check_data_files


def export_command(arguments: Sequence[str]) -> None:
    """Export a model folder or a checkpoint."""
    job = read_export_job(arguments)
    # a program may read the report on standard output: what DeepSpeed prints there goes to standard error
    with contextlib.redirect_stdout(sys.stderr):
        report = export(job)
    if report:
        print(json.dumps(report, indent=2), flush=True)


def export(job: ExportJob) -> dict[str, Any]:
    """Export a model folder, which is made first where the job names a checkpoint; return the report."""
    from ds_trainer.deploy.card import open_repository, push_to_hub
    from ds_trainer.deploy.export_folder import export_folder

    report: dict[str, Any] = {}
    repository = open_repository(job.push_to_hub) if job.push_to_hub else ""
    with trusting(job.trust), contextlib.ExitStack() as until_written:
        if job.checkpoint:
            from ds_trainer.run.scoring import model_of

            folder, _ = until_written.enter_context(model_of(job.checkpoint, job.cache_dir))
            job = job.model_copy(update={"model": folder})
        if job.onnx or job.writes_folder:
            report = export_folder(job)
        if repository:
            push_to_hub(job.output, repository)
    return report


def read_export_job(arguments: Sequence[str], **given: Any) -> ExportJob:
    """Parse and check an export command; a UserError has every mistake, one a line.

    A Python program can give flags as values, by their names; the fields of the task are `fields`.
    """
    flags = export_parser().options(arguments, given)
    mistakes, of_checkpoint = Mistakes(_flag_mistakes(flags)), is_checkpoint(flags.model)
    checkpoint = mistakes.of(read_checkpoint, flags.model) if of_checkpoint else None
    mistakes += [] if of_checkpoint else _model_mistakes(flags)
    mistakes.raise_all()
    task, cache_dir = None, flags.cache_dir
    if names_task(flags) or checkpoint:
        task, cache_dir = read_task(flags, mistakes, "validation", checkpoint)
    elif flags.cut:
        mistakes.append(f"--cut fits the model to training examples, and there is {NO_TASK}")
    cut = mistakes.of(_read_cut, flags.cut) if flags.cut else None
    mistakes += check_data_files(task, splits=("train",)) if task and cut else []
    mistakes += _output_mistakes(flags)
    values = {"output": flags.output_dir or Path(flags.model), "cache_dir": cache_dir}
    checkpoint = replace(checkpoint, task=task) if checkpoint and task else None
    task = task if names_task(flags) or cut else None
    return mistakes.job(ExportJob, flags, task=task, checkpoint=checkpoint, cut=cut, **values)


def export_parser() -> Parser:
    parser = Parser("export", "Make of a model or checkpoint what is deployed.")
    parser.add_model_flags(model="model folder, or OUT/checkpoint-N")
    add = parser.add_argument
    add("--output_dir", type=output_path, help="where to write; by default .onnx files go to the model folder")
    add("--overwrite", action="store_true", help="replace the existing model, or the .onnx files")
    add("--shrink", action="store_true", help="cut out the heads and neurons that are wholly zero")
    add("--cut", metavar="SHARE", help="keep this share of heads and neurons, or a phase's cut as JSON; needs a task")
    add("--onnx", action="store_true", help=f"write {ONNX_FILE}, never compact, and check it in onnxruntime")
    add("--quantize", choices=(INT8,), help=f"with --onnx: also write {INT8_FILE}")
    add("--compact", choices=("fp16",), help=f"write {COMPACT_FILE} in the place of the weights")
    add("--unpack", action="store_true", help="write the ordinary folder of a compact one")
    parser.add_push_flag()
    return parser


def onnx_mistakes(flag: str) -> Iterator[str]:
    """Say which packages are missing for a flag that needs onnx and onnxruntime."""
    missing = [name for name in ("onnx", "onnxruntime") if importlib.util.find_spec(name) is None]
    if missing:
        yield f"{flag}: {' and '.join(missing)} cannot be imported: pip install {' '.join(missing)}"


def _read_cut(text: Any) -> CutSpec:
    """Read the value of --cut; a cut in steps is refused, since it is trained between them."""
    try:
        value = json.loads(text) if isinstance(text, str) else text
    except (ValueError, RecursionError):
        raise UserError(f"--cut {shown(text)}: give the share to keep, such as 0.5, or a phase's cut as JSON") from None
    spec = parse_cut(value)
    if isinstance(spec.keep, list):
        raise UserError(f"--cut: keep is {spec.keep}, a cut in steps with training between: make it in a phase")
    return spec


def _writes(flags: argparse.Namespace) -> bool:
    """Whether anything is to be written, and not only sent."""
    named = ("shrink", "cut", "onnx", "compact", "unpack")
    return is_checkpoint(flags.model) or any(getattr(flags, name) for name in named)


def _flag_mistakes(flags: argparse.Namespace) -> Iterator[str]:
    """Report the flags that do not go together."""
    if not (_writes(flags) or flags.push_to_hub):
        yield "nothing to do: give --shrink, --cut, --onnx, --compact, --unpack or --push_to_hub"
    others = flags.shrink or flags.cut or flags.onnx or flags.compact or names_task(flags)
    if flags.unpack and (others or is_checkpoint(flags.model)):
        yield "--unpack goes with --output_dir alone, and with a compact folder: export it by a second command"
    if flags.shrink and flags.cut:
        yield "--shrink and --cut: a cut of heads and neurons also takes out those that are zero: drop --shrink"
    if flags.quantize and not flags.onnx:
        yield f"--quantize {flags.quantize} is for an ONNX file: give --onnx, too"
    if flags.onnx:
        yield from onnx_mistakes("--onnx")
    yield from one_process_mistakes("a folder is exported")


def _model_mistakes(flags: argparse.Namespace) -> Iterator[str]:
    yield from folder_mistakes(Path(flags.model), flags.trust)
    if flags.unpack and not os.path.isfile(os.path.join(flags.model, COMPACT_FILE)):
        yield f"--unpack: {flags.model} has no {COMPACT_FILE}: there is nothing to unpack"


def _output_mistakes(flags: argparse.Namespace) -> Iterator[str]:
    """Say why the output cannot be written where the flags want it."""
    if not _writes(flags):
        if flags.output_dir:
            yield "--output_dir: --push_to_hub alone sends the folder as it is, and writes nothing: drop it"
        return
    output, of_checkpoint = flags.output_dir or Path(flags.model), is_checkpoint(flags.model)
    itself = os.path.realpath(output) == os.path.realpath(flags.model)
    only_onnx = flags.onnx and not (flags.shrink or flags.cut or flags.compact)
    if itself and (of_checkpoint or not only_onnx):
        yield f"{flags.model} is what is exported, and stays as it is: give --output_dir with another folder"
        return
    if unfit := check_output_folder(output, overwrite=True):
        yield from (f"--output_dir: {mistake}" for mistake in unfit)
        return
    names = sorted(path.name for path in output.iterdir() if not is_aside(path)) if output.is_dir() else []
    if not only_onnx:
        if names and "config.json" not in names:
            yield f"--output_dir: {output} holds something else than a model: give another"
        elif names and not flags.overwrite:
            yield f"--output_dir: {output} is not empty: give another, or --overwrite"
        return
    # the config and tokenizer of an earlier .onnx file may be replaced, and weights may not
    kept = [*WEIGHTS[:-1], *([] if ONNX_FILE in names else MODEL_FILES)]
    model = next((name for name in names if any(fnmatchcase(name, pattern) for pattern in kept)), None)
    if model and not itself:
        yield f"--output_dir: {output} holds another model ({model}) than the .onnx file would: give another"
    existing = [name for name in (ONNX_FILE, INT8_FILE) if name in names]
    if existing and not flags.overwrite:
        yield f"{output} has {' and '.join(existing)} already: give another --output_dir, or --overwrite"
