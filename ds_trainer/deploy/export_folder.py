"""Make of a model folder what is deployed: shrink it, write it as ONNX, int8 ONNX or a compact file, each checked.

Folders of other programs are imported by `foreign_folders.py`.

All is made aside and takes its place once it is whole and its numbers agree: an error leaves nothing behind. Exit heads
are no part of an .onnx file, which holds the plain model.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch
import transformers

from ds_trainer.config.exit_specs import EXITS_FILE
from ds_trainer.config.jobs import ExportJob
from ds_trainer.deploy.export_files import ASIDE, INT8_FILE, ONNX_FILE, REPLACED, REPORT, WEIGHTS, is_aside, read_report
from ds_trainer.deploy.foreign_folders import import_folder
from ds_trainer.deploy.latency import bytes_on_disk
from ds_trainer.deploy.onnx_file import (
    Inputs,
    by_torch,
    check_onnx,
    compare,
    compare_file,
    predictor,
    quantise,
    session,
    write_onnx,
)
from ds_trainer.files.whole_file import read_value
from ds_trainer.models.compact import unpack_compact, write_compact_folder
from ds_trainer.models.folders import save_folder
from ds_trainer.models.layers import count_weights, total_weights
from ds_trainer.models.loading import told
from ds_trainer.models.model_folder import COMPACT_FILE, is_compact
from ds_trainer.models.pretrained import check_fits, load_tokenizer, load_trained, pad_token_id, positions_of
from ds_trainer.models.shrink import shrink
from ds_trainer.ranks import distributed
from ds_trainer.ranks.failures import UserError
from ds_trainer.ranks.interrupts import held_back, leaving
from ds_trainer.tasks.evaluation import evaluate
from ds_trainer.tasks.registry import build_task
from ds_trainer.tasks.task import Task
from ds_trainer.techniques.exits.heads import HEADS_FILE, has_exits

_TOLERANCE = 1e-5
"""Of logits, by how much those of a shrunk model may differ, where the largest is 1 or less."""
_SENTENCES = (
    "It rains.",
    "The old apple tree behind the house was cut down last winter, and nobody has planted another one since.",
    "Which of the two finches sang first?",
    "A model that is small enough runs where its users are, answers before they look away, and costs little to keep.",
)
"""Inputs where there is no task to take them from."""
_MOST_TOKENS = 160
"""Of those sentences: more than the 128 that some models see around a token."""


def export_folder(job: ExportJob, output: TextIO) -> None:
    """Write what a job asks for, and a report of it: `export.json` beside it, and to `output`."""
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    with leaving(), _aside(job.output) as aside:
        made = aside / "made"
        made.mkdir()
        source = job.checkpoint.path if job.checkpoint else job.model
        report = {"folder": str(source), **_written(job, made, aside)}
        if not job.writes_folder:
            report |= _earlier(job.output)
        (made / REPORT).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
        with held_back():  # between the old model and the new one there is none
            _put_in_place(made, job)
    print(json.dumps(report, indent=2), file=output, flush=True)


@contextlib.contextmanager
def _aside(output: Path) -> Iterator[Path]:
    """A folder on the output's own disk, which goes whatever happens; so do those of dead processes.

    ValueError where there can be none.
    """
    place = next(path for path in (output.absolute(), *output.absolute().parents) if path.is_dir())
    aside = lock = None
    try:
        with contextlib.suppress(OSError):
            _clear_leftovers(place)
        aside = Path(tempfile.mkdtemp(ASIDE[1], ASIDE[0], place))
        lock = os.open(aside, os.O_RDONLY)
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield aside
    except OSError as error:
        if aside:
            raise
        raise UserError(f"the output folder {output} cannot be written: {place}: {error.strerror}") from error
    finally:
        if aside:
            shutil.rmtree(aside, ignore_errors=True)
        if lock is not None:
            os.close(lock)


def _clear_leftovers(place: Path) -> None:
    """Remove what killed exports left: a folder that nobody has locked."""
    for path in place.iterdir():
        if not is_aside(path.name) or path.is_symlink() or not path.is_dir():
            continue
        opened = os.open(path, os.O_RDONLY)
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
        except OSError:  # another process has it, or this disk knows no locks
            continue
        finally:
            os.close(opened)


def _earlier(folder: Path) -> dict[str, Any]:
    """What is told of how the folder itself was made, which its next report keeps."""
    try:
        found = read_report(folder) or {}
    except ValueError:  # which is to be overwritten
        return {}
    made = {"shrunk", "compact", "unpacked", "imported"} & found.keys() or (
        "checkpoint" in found and "onnx" not in found
    )
    if not made:
        return {"earlier": found["earlier"]} if "earlier" in found else {}
    return {"earlier": {name: value for name, value in found.items() if name not in ("onnx", "int8")}}


def _put_in_place(made: Path, job: ExportJob) -> None:
    """The model that was there goes first, then comes the new one, its weights last: a mixture never loads."""
    job.output.mkdir(parents=True, exist_ok=True)
    old = REPLACED if job.writes_folder else (ONNX_FILE, INT8_FILE)
    there = sorted(path.name for path in job.output.iterdir())
    for name in sorted((name for name in there if _is_of(name, old)), key=lambda name: not _is_of(name, WEIGHTS)):
        (job.output / name).unlink()
    for name in sorted(os.listdir(made), key=lambda name: (_is_of(name, WEIGHTS), name)):
        (made / name).replace(job.output / name)


def _is_of(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _written(job: ExportJob, made: Path, aside: Path) -> dict[str, Any]:
    if job.import_from:
        return import_folder(job, made, aside)
    if job.unpack:
        unpack_compact(job.model, made)
        return {"unpacked": count_weights(load_trained(made))["model"]}
    return _exported(job, made, aside)


def _exported(job: ExportJob, made: Path, aside: Path) -> dict[str, Any]:
    """Write all but the report into `made`; gives the report."""
    model, tokenizer = load_trained(job.model).eval(), load_tokenizer(job.model)
    check_fits(model, tokenizer, max_seq_length=1)
    folder = job.model
    if job.shrink:  # before padding is set, which is of no model's own
        folder = aside / "shrunk" if job.compact else made
        _write_shrunk(job.model, model, tokenizer, folder)
    if job.plain:
        shutil.copytree(job.model, made, dirs_exist_ok=True)
    _pad(model, tokenizer)
    task = build_task(job.task, job.model, job.cache_dir) if job.task else None
    scores = {}
    if task:
        task.check_trained(job.model)
        scores["model"] = _score_of_folder(job, task, job.model)
    batches = [*_sentences(model, tokenizer), *(_of_task(task) if task else [])]
    report: dict[str, Any] = {}
    if job.checkpoint:
        step = {"phase": job.checkpoint.phase.name, "step": job.checkpoint.position["step"]}
        report["checkpoint"] = step | {"weights": total_weights(model)}
    if job.shrink:
        model, report["shrunk"] = _shrunk(model, tokenizer, batches, folder)
    if job.compact:
        report["compact"] = _compact(folder, model, tokenizer, batches, made, job.compact)
        report["compact"]["bytes"]["folder"] = bytes_on_disk(job.model)
        if task:
            scores["compact"] = _score_of_folder(job, task, made)
    if job.onnx:
        report |= _onnx(job, model, batches, made)
        for name in ("onnx", "int8") if task else ():
            if name in report:
                scores[name] = _score_of_file(job, task, made / report[name]["file"])
    return report | ({"scores": scores} if task else {})


def _pad(model: Any, tokenizer: Any) -> None:
    """Have the model run on batches: decoders that know no padding token classify one text at a time."""
    padding = pad_token_id(tokenizer)  # a tokenizer without one is given one
    if model.config.pad_token_id is None:
        model.config.pad_token_id = padding


def _write_shrunk(source: Path, model: Any, tokenizer: Any, folder: Path) -> None:
    save_folder(shrink(model).to(_dtype_of(source)), tokenizer, folder)
    if has_exits(source):
        for name in (EXITS_FILE, HEADS_FILE):  # hidden states are as wide as before
            shutil.copyfile(source / name, folder / name)


def _dtype_of(folder: Path) -> torch.dtype:
    """What the weights of a model folder are in. Those of a compact one are no wider file's: fp32 holds them all."""
    config = {} if is_compact(folder) else read_value(folder / "config.json")
    said = getattr(torch, str(config.get("dtype") or config.get("torch_dtype")), None)
    return said if isinstance(said, torch.dtype) else torch.float32


def _shrunk(model: Any, tokenizer: Any, batches: list[Inputs], folder: Path) -> tuple[Any, Any]:
    """The model of the shrunk folder, once its outputs are those of the whole one, and what is reported of it."""
    reloaded, dtype = load_trained(folder).eval(), _dtype_of(folder)
    _pad(reloaded, tokenizer)
    found = compare(model, by_torch(reloaded), batches)
    # constants are added to biases, which are rounded to what they are saved in
    tolerance = max(_TOLERANCE, 0.0 if dtype == torch.float32 else 4 * torch.finfo(dtype).eps)
    if found["max_difference"] > tolerance * max(1.0, found["largest"]):
        raise RuntimeError(f"the shrunk model's outputs differ by {found['max_difference']}")
    return reloaded, found | {"weights": total_weights(reloaded)}


def _compact(
    folder: Path, model: Any, tokenizer: Any, batches: list[Inputs], made: Path, values: str
) -> dict[str, Any]:
    report = write_compact_folder(folder, model, made, values)
    packed = load_trained(made).eval()
    _pad(packed, tokenizer)
    return {"file": COMPACT_FILE, **report, **compare(model, by_torch(packed), batches)}


def _onnx(job: ExportJob, model: Any, batches: list[Inputs], made: Path) -> dict[str, Any]:
    if has_exits(job.model):
        distributed.warn(f"{job.model} has exit heads: the .onnx file holds the plain model, which never exits early")
    if job.compact:
        distributed.warn(f"{ONNX_FILE} holds the weights as they were before they were made compact")
    target, threads = made / ONNX_FILE, torch.get_num_threads()
    started = time.perf_counter()
    told(f"{job.model} cannot be written as ONNX", partial(write_onnx, model, batches[0], target))
    taken = time.perf_counter() - started
    found = check_onnx(model, target, batches, threads)
    report = {"onnx": {"file": ONNX_FILE, "bytes": target.stat().st_size, "seconds": round(taken, 1), **found}}
    if job.quantize:
        small = made / INT8_FILE
        told(f"{job.model} cannot be quantised", partial(quantise, target, small))
        found = compare_file(model, small, batches, threads)
        report["int8"] = {"file": INT8_FILE, "bytes": small.stat().st_size, **found}
    return report


def _sentences(model: Any, tokenizer: Any) -> list[Inputs]:
    """Batches of the built-in sentences as the model takes them: padded, alone, several, and long."""
    longest = min(_MOST_TOKENS, positions_of(model) or _MOST_TOKENS)
    taken = {"input_ids", "attention_mask"}
    if getattr(model.config, "type_vocab_size", 0) > 1:
        taken.add("token_type_ids")
    batches: list[Inputs] = []
    for texts in ([*_SENTENCES[:2]], [_SENTENCES[0]], [*_SENTENCES], [" ".join(_SENTENCES * 8)]):
        tokens = tokenizer(texts, truncation=True, max_length=longest, return_token_type_ids=True)
        padded = tokenizer.pad(tokens, return_attention_mask=True, return_tensors="pt")
        batches.append({name: value for name, value in padded.items() if name in taken})
    return batches


def _of_task(task: Task) -> Iterator[Inputs]:
    """Batches of the task's texts: the shortest, the longest, both with one between, and eight of all lengths."""
    examples = task.examples(task.splits[0])
    order = np.argsort(examples.lengths, kind="stable").tolist()
    of_all = order[:: max(1, len(order) // 8)][:8]
    for some in ([order[0]], [order[-1]], [order[0], order[len(order) // 2], order[-1]], of_all):
        inputs = task.collate(examples, some).inputs
        yield {name: value for name, value in inputs.items() if name not in task.own_inputs}


@torch.no_grad()
def _score_of_folder(job: ExportJob, task: Task, folder: Path) -> dict[str, float]:
    model: Any = task.build_model(folder).to(distributed.device()).eval()
    return evaluate(lambda batch: model(**batch.inputs), task, job.batch_size).scores


def _score_of_file(job: ExportJob, task: Any, path: Path) -> dict[str, float]:
    return evaluate(predictor(session(path, torch.get_num_threads())), task, job.batch_size).scores
