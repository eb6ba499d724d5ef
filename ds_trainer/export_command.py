"""The command that exports a model folder: its flags, and every check that needs neither torch nor transformers."""

from __future__ import annotations

import argparse
import importlib.util
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ds_trainer import distributed
from ds_trainer.command import Mistakes, Parser, add_task_flags, asked_task, asked_trust
from ds_trainer.model_folder import COMPACT_FILE, config_mistakes, folder_mistakes
from ds_trainer.recipe import TaskSpec
from ds_trainer.run_folder import check_output_folder
from ds_trainer.task_files import check_data_files
from ds_trainer.trust import Trust, trusting

ONNX_FILE, INT8_FILE = "model.onnx", "model.int8.onnx"
VALUES = ("fp16", "int8")
_FOR_ONNX = ("onnx", "onnxruntime")


@dataclass(frozen=True)
class ExportJob:
    """A checked export command."""

    model: Path
    output: Path
    """A folder; the model's own where only .onnx files are written."""
    shrink: bool
    onnx: bool
    quantize: str | None
    """ "int8", or None; only with `onnx`."""
    compact: str | None
    """How the values of a compact file are held, or None."""
    unpack: bool
    task: TaskSpec | None
    """To take inputs from, and to score on."""
    batch_size: int
    cache_dir: str | None
    trust: Trust

    @property
    def writes_folder(self) -> bool:
        """Whether the output is a model folder."""
        return self.shrink or self.unpack or self.compact is not None


def export_command(arguments: Sequence[str]) -> None:
    """`launch/export.py`: shrink a model folder, write it as ONNX, or as a compact file."""
    job = read_export_job(arguments)
    from ds_trainer.export_folder import export_folder

    with trusting(job.trust):
        export_folder(job)


def read_export_job(arguments: Sequence[str]) -> ExportJob:
    """Parse and check an export command; a ValueError tells every mistake of it, one a line."""
    flags = _parser().parse_args(list(arguments))
    mistakes = Mistakes([*_model_mistakes(flags), *_flag_mistakes(flags)])
    mistakes.tell()
    task, cache_dir = None, flags.cache_dir
    if _names_task(flags):
        task, cache_dir = asked_task(flags, mistakes)
        mistakes += check_data_files(task, splits=("validation",)) if task else []
    mistakes += _place_mistakes(flags)
    mistakes.tell()
    return ExportJob(
        model=Path(flags.model),
        output=flags.output_dir or Path(flags.model),
        shrink=flags.shrink,
        onnx=flags.onnx,
        quantize=flags.quantize,
        compact=flags.compact,
        unpack=flags.unpack,
        task=task,
        batch_size=flags.batch_size,
        cache_dir=cache_dir,
        trust=asked_trust(flags),
    )


def _names_task(flags: argparse.Namespace) -> bool:
    return any((flags.recipe, flags.task_name, flags.data_dir, flags.set))


def _model_mistakes(flags: argparse.Namespace) -> Iterator[str]:
    folder = Path(flags.model)
    if not os.path.isdir(folder):
        yield f"the model folder {folder} does not exist: what is exported is one on this machine"
    elif flags.unpack:
        yield from config_mistakes(folder, asked_trust(flags))
        if not os.path.isfile(folder / COMPACT_FILE):
            yield f"--unpack: {folder} has no {COMPACT_FILE}: there is nothing to unpack"
    else:
        yield from folder_mistakes(folder, asked_trust(flags))


def _flag_mistakes(flags: argparse.Namespace) -> Iterator[str]:
    if not (flags.shrink or flags.onnx or flags.compact or flags.unpack):
        yield "nothing to do: give --shrink, --onnx, --compact or --unpack"
    if flags.unpack and (flags.shrink or flags.onnx or flags.compact or _names_task(flags)):
        yield "--unpack goes with --output_dir alone: export the folder that it writes by a second command"
    if flags.quantize and not flags.onnx:
        yield f"--quantize {flags.quantize} is of an ONNX file: give --onnx, too"
    missing = [name for name in _FOR_ONNX if importlib.util.find_spec(name) is None]
    if flags.onnx and missing:
        names = " and ".join(missing)
        yield f"""--onnx: {names} cannot be imported: pip install -e ".[onnx]" from the project's folder"""
    if distributed.world_size() > 1:
        yield "a folder is exported by one process: start it with python, not with deepspeed"


def _place_mistakes(flags: argparse.Namespace) -> Iterator[str]:
    """Why the output cannot be written where it was asked for."""
    model, output = Path(flags.model), flags.output_dir or Path(flags.model)
    wanted = [ONNX_FILE] * flags.onnx + [INT8_FILE] * bool(flags.quantize)
    if flags.shrink or flags.compact or flags.unpack:
        if flags.output_dir is None:
            yield "--shrink, --compact and --unpack write a model folder: give --output_dir"
            return
        if os.path.realpath(output) == os.path.realpath(model):
            yield f"--output_dir: {output} is the model folder itself, which stays as it is: give another"
            return
        yield from _folder_mistakes(output, flags.overwrite)
    yield from (f"--output_dir: {mistake}" for mistake in check_output_folder(output, overwrite=True))
    there = [name for name in wanted if os.path.lexists(output / name)]
    if there and not flags.overwrite:
        yield f"{output} has {' and '.join(there)} already: give another --output_dir, or --overwrite"


def _folder_mistakes(output: Path, overwrite: bool) -> Iterator[str]:
    try:
        there = any(output.iterdir()) if os.path.isdir(output) else False
    except OSError as error:
        yield f"--output_dir: {output} cannot be read: {error.strerror}"
        return
    if there and not os.path.isfile(output / "config.json"):
        yield f"--output_dir: {output} holds something else than a model: give another"
    elif there and not overwrite:
        yield f"--output_dir: {output} is not empty: give another, or --overwrite"


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="export.py", description="Make of a model folder what is deployed.", allow_abbrev=False)
    add_task_flags(parser)
    parser.add_argument("--output_dir", type=Path, help="where to write; by default .onnx files go to the model folder")
    parser.add_argument(
        "--overwrite", action="store_true", help="replace the model, or the .onnx files, that are there"
    )
    parser.add_argument("--shrink", action="store_true", help="cut out the heads and neurons that are wholly zero")
    parser.add_argument("--onnx", action="store_true", help=f"write {ONNX_FILE}, checked in onnxruntime")
    parser.add_argument("--quantize", choices=("int8",), help=f"with --onnx: also write {INT8_FILE}")
    parser.add_argument("--compact", choices=VALUES, help=f"write {COMPACT_FILE} in the place of the weights")
    parser.add_argument("--unpack", action="store_true", help="write the ordinary folder of a compact one")
    return parser
