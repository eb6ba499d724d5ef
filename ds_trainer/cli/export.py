"""The command that exports a model folder or a checkpoint: its flags, and every check that needs no torch."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import math
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, TextIO

from ds_trainer.cli.train import Mistakes, Parser, add_task_flags, asked_task, asked_trust
from ds_trainer.config.jobs import ExportJob
from ds_trainer.config.saved_checkpoint import is_checkpoint, read_checkpoint
from ds_trainer.config.trust import trusting
from ds_trainer.deploy.export_files import INT8_FILE, ONNX_FILE, REPLACED, read_report
from ds_trainer.files.messages import shown
from ds_trainer.files.reading import read_value
from ds_trainer.files.run_folder import check_output_folder
from ds_trainer.files.writing import is_aside
from ds_trainer.models.model_folder import COMPACT_FILE, VALUES, folder_mistakes
from ds_trainer.ranks import distributed
from ds_trainer.tasks.registry import check_data_files

MASKING_METHODS = ("topK", "magnitude", "threshold", "sigmoied_threshold", "l0")
_FOR_ONNX = ("onnx", "onnxruntime")


def export_command(arguments: Sequence[str]) -> None:
    """`launch/export.py`: shrink a model folder or a checkpoint, write it as ONNX, or as a compact file."""
    job = read_export_job(arguments)
    with _report_alone() as output, trusting(job.trust):
        from ds_trainer.deploy.export_folder import export_folder

        if job.checkpoint is None:
            export_folder(job, output)
            return
        from ds_trainer.checkpoint_model import model_of

        with model_of(job.checkpoint, job.cache_dir) as (folder, _):
            export_folder(replace(job, model=folder), output)


@contextlib.contextmanager
def _report_alone() -> Iterator[TextIO]:
    """Gives standard output to what is meant to be read by a program; what others print inside goes to standard error.

    DeepSpeed tells of itself on standard output, wherever its first import happens to be.
    """
    output = sys.stdout
    with contextlib.redirect_stdout(sys.stderr):
        yield output


def read_export_job(arguments: Sequence[str]) -> ExportJob:
    """Parse and check an export command; a ValueError tells every mistake of it, one a line."""
    flags = _parser().parse_args(list(arguments))
    mistakes = Mistakes(_flag_mistakes(flags))
    checkpoint = mistakes.of(lambda: read_checkpoint(flags.model)) if is_checkpoint(flags.model) else None
    mistakes += [] if is_checkpoint(flags.model) else _model_mistakes(flags)
    mistakes.tell()
    task, cache_dir = None, flags.cache_dir
    if names_task(flags) or checkpoint:
        task, cache_dir = asked_task(flags, mistakes, checkpoint)
        mistakes += check_data_files(task, splits=("validation",)) if task else []
    mistakes += _place_mistakes(flags)
    mistakes.tell()
    if checkpoint and task:
        checkpoint = replace(checkpoint, task=task)
    return ExportJob(
        model=Path(flags.model),
        output=flags.output_dir or Path(flags.model),
        shrink=flags.shrink,
        onnx=flags.onnx,
        quantize=flags.quantize,
        compact=flags.compact,
        unpack=flags.unpack,
        import_from=flags.import_from,
        threshold=flags.threshold,
        task=task if names_task(flags) else None,
        batch_size=flags.batch_size,
        cache_dir=cache_dir,
        trust=asked_trust(flags),
        checkpoint=checkpoint,
    )


def names_task(flags: argparse.Namespace) -> bool:
    """Whether a command that can do without a task is given one."""
    return any((flags.recipe, flags.task_name, flags.data_dir, flags.set))


def _model_mistakes(flags: argparse.Namespace) -> Iterator[str]:
    folder = Path(flags.model)
    if not os.path.isdir(folder):
        yield f"the model folder {folder} does not exist: what is exported is one on this machine"
    elif flags.unpack:
        yield from folder_mistakes(folder, asked_trust(flags))
        if not os.path.isfile(folder / COMPACT_FILE):
            yield f"--unpack: {folder} has no {COMPACT_FILE}: there is nothing to unpack"
    elif flags.import_from:
        # who names the program that wrote the folder permits its pickle, which is read as weights only
        mistakes = folder_mistakes(folder, replace(asked_trust(flags), allow_pickle=True))
        yield from mistakes or _foreign_mistakes(flags, read_value(folder / "config.json"))
    else:
        yield from folder_mistakes(folder, asked_trust(flags))


def _foreign_mistakes(flags: argparse.Namespace, config: dict[str, Any]) -> Iterator[str]:
    """Why a folder is not of the program that --import_from names, or --threshold is not what its weights need."""
    kind, method, threshold = config.get("model_type"), config.get("pruning_method"), flags.threshold
    if flags.import_from == "deebert":
        if kind not in (None, "bert", "roberta"):  # the oldest configs do not say
            yield f"--import_from deebert: the config of {flags.model} says model_type {shown(kind)} instead of bert"
        if threshold is not None:
            yield "--threshold goes with --import_from masked_bert: drop it"
    elif kind != "masked_bert":
        yield f"--import_from masked_bert: the config of {flags.model} says model_type {shown(kind)}"
    elif method not in MASKING_METHODS:
        yield f"the config of {flags.model} says pruning_method {shown(method)}: known are {', '.join(MASKING_METHODS)}"
    elif method == "l0" and threshold is not None:
        yield "--threshold: pruning_method l0 has none, its gates say what is kept: drop it"
    elif method != "l0" and threshold is None:
        yield "--threshold is missing, which the folder does not hold: give the final one of its run"
    elif method in ("topK", "magnitude") and not 0 < threshold <= 1:
        yield f"--threshold is {threshold:g}: {method} takes the share to keep, above 0 and up to 1"
    elif method == "sigmoied_threshold" and not 0 <= threshold < 1:
        yield f"--threshold is {threshold:g}: {method} compares it with probabilities, from 0 to below 1"


def _flag_mistakes(flags: argparse.Namespace) -> Iterator[str]:
    checkpoint = is_checkpoint(flags.model)
    if checkpoint and (flags.unpack or flags.import_from):
        flag = "--unpack" if flags.unpack else "--import_from"
        yield f"{flag}: {flags.model} is a checkpoint of this program, whose weights are whole: drop the flag"
    others = flags.shrink or flags.onnx or flags.compact
    if not (others or flags.unpack or flags.import_from or checkpoint):
        yield "nothing to do: give --shrink, --onnx, --compact, --unpack or --import_from"
    for flag in ("unpack", "import_from"):
        if getattr(flags, flag) and (others or names_task(flags) or (flags.unpack and flags.import_from)):
            yield f"--{flag} goes with --output_dir alone: export the folder that it writes by a second command"
    if flags.threshold is not None and not flags.import_from:
        yield "--threshold goes with --import_from masked_bert: drop it"
    if flags.quantize and not flags.onnx:
        yield f"--quantize {flags.quantize} is of an ONNX file: give --onnx, too"
    if flags.onnx:
        yield from onnx_mistakes("--onnx")
    if flags.batch_size < 1 and not names_task(flags):  # which says so itself
        yield f"--batch_size is {flags.batch_size}: give 1 or more"
    if distributed.world_size() > 1:
        yield "a folder is exported by one process: start it with python, not with deepspeed"


def onnx_mistakes(flag: str) -> Iterator[str]:
    """What a flag that needs onnx and onnxruntime lacks of them."""
    missing = [name for name in _FOR_ONNX if importlib.util.find_spec(name) is None]
    if missing:
        names = " and ".join(missing)
        yield f"""{flag}: {names} cannot be imported: pip install -e ".[onnx]" from the project's folder"""


def output_path(text: str) -> Path:
    """A folder that a flag names; none at all would be the current one."""
    if not text:
        raise argparse.ArgumentTypeError("it is empty: give a folder, . for the current one")
    return Path(text)


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text} is no threshold: give a number")
    return value


def _place_mistakes(flags: argparse.Namespace) -> Iterator[str]:
    """Why the output cannot be written where it was asked for."""
    model, output = Path(flags.model), flags.output_dir or Path(flags.model)
    itself = os.path.realpath(output) == os.path.realpath(model)
    unfit = [f"--output_dir: {mistake}" for mistake in check_output_folder(output, overwrite=True)]
    checkpoint = is_checkpoint(flags.model)
    writes_folder = (
        flags.shrink or flags.compact or flags.unpack or flags.import_from or (checkpoint and not flags.onnx)
    )
    if flags.output_dir is None and checkpoint:
        yield f"{model} is a checkpoint, which stays as it is: give --output_dir"
    elif flags.output_dir is None and writes_folder:
        yield "--shrink, --compact, --unpack and --import_from write a model folder: give --output_dir"
    elif itself and (checkpoint or writes_folder):
        yield f"--output_dir: {output} is the model folder itself, which stays as it is: give another"
    elif writes_folder:
        yield from unfit or _folder_mistakes(output, flags.overwrite)
    else:
        yield from unfit or _file_mistakes(output, itself, flags.overwrite)


def _folder_mistakes(output: Path, overwrite: bool) -> Iterator[str]:
    """Of a folder that a model is to be written to."""
    names = _names_in(output)
    yield from _targets_mistakes(output, names)
    if names and "config.json" not in names:
        yield f"--output_dir: {output} holds something else than a model: give another"
    elif names and not overwrite:
        yield f"--output_dir: {output} is not empty: give another, or --overwrite"


def _file_mistakes(output: Path, itself: bool, overwrite: bool) -> Iterator[str]:
    """Of a folder that .onnx files are to be written to."""
    names = _names_in(output)
    yield from _targets_mistakes(output, names)
    models = [name for name in names if name == "config.json" or fnmatchcase(name, "*.safetensors")]
    if models and not itself:
        yield f"--output_dir: {output} holds another model ({models[0]}), which the .onnx file is not of: give another"
    there = [name for name in (ONNX_FILE, INT8_FILE) if name in names]
    if there and not overwrite:
        yield f"{output} has {' and '.join(there)} already: give another --output_dir, or --overwrite"
    try:
        read_report(output)
    except ValueError as error:
        if not overwrite:
            yield f"{error}: give another --output_dir, or --overwrite"


def _targets_mistakes(output: Path, names: Sequence[str]) -> Iterator[str]:
    for name in names:
        if any(fnmatchcase(name, pattern) for pattern in REPLACED) and os.path.isdir(output / name):
            yield f"{output / name} is a folder, in the place of a file: remove it, or give another --output_dir"


def _names_in(folder: Path) -> list[str]:
    """Of all that is there but what is written aside; none where there is no folder. It can be read, as was checked."""
    try:
        return sorted(name for name in os.listdir(folder) if not is_aside(Path(name)))
    except OSError:
        return []


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="export.py", description="Make of a model or checkpoint what is deployed.", allow_abbrev=False)
    add_task_flags(parser, model="model folder, or OUT/checkpoint-N")
    parser.add_argument(
        "--output_dir", type=output_path, help="where to write; by default .onnx files go to the model folder"
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="replace the model, or the .onnx files, that are there"
    )
    parser.add_argument("--shrink", action="store_true", help="cut out the heads and neurons that are wholly zero")
    parser.add_argument(
        "--onnx",
        action="store_true",
        help=f"write {ONNX_FILE}, checked in onnxruntime; with --compact its weights are those before",
    )
    parser.add_argument("--quantize", choices=("int8",), help=f"with --onnx: also write {INT8_FILE}")
    parser.add_argument("--compact", choices=VALUES, help=f"write {COMPACT_FILE} in the place of the weights")
    parser.add_argument("--unpack", action="store_true", help="write the ordinary folder of a compact one")
    parser.add_argument(
        "--import_from",
        choices=("masked_bert", "deebert"),
        help="the program that wrote the folder: movement pruning's scripts (folded), or DeeBERT's (with exit heads)",
    )
    parser.add_argument("--threshold", type=_finite, help="with --import_from masked_bert: the final one of its run")
    return parser
