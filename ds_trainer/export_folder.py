"""Make of a model folder what is deployed: shrink it, write it as ONNX, int8 ONNX or a compact file, each checked.

All is made aside and takes its place once it is whole and its numbers agree: an error leaves nothing behind. Exit heads
are no part of an .onnx file, which holds the plain model.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from ds_trainer import distributed
from ds_trainer.compact import unpack_compact, write_compact_folder
from ds_trainer.evaluate import evaluate
from ds_trainer.exit_specs import EXITS_FILE
from ds_trainer.export_command import INT8_FILE, ONNX_FILE, ExportJob
from ds_trainer.loading import told
from ds_trainer.model_folder import COMPACT_FILE
from ds_trainer.models import count_weights, save_folder
from ds_trainer.onnx_file import (
    Inputs,
    by_torch,
    check_onnx,
    compare,
    outputs,
    predictor,
    quantise,
    session,
    write_onnx,
)
from ds_trainer.shrink import shrink
from ds_trainer.tasks import Task, build_task
from ds_trainer.tasks.pretrained import load_tokenizer, load_trained, pad_token_id, positions_of
from ds_trainer.techniques.exit_heads import HEADS_FILE, has_exits

REPORT = "export.json"
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
_OLD = ("model*.safetensors", "model.safetensors.index.json", "pytorch_model*", "model*.onnx")
"""Of a model that is replaced."""


def export_folder(job: ExportJob) -> None:
    """Write what a job asks for, and a report of it: `export.json` beside it, and on standard output."""
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    with _aside(job.output) as aside:
        made = aside / "made"
        made.mkdir()
        report = {"folder": str(job.model), **(_unpacked(job, made) if job.unpack else _exported(job, made, aside))}
        (made / REPORT).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
        _put_in_place(made, job)
    print(json.dumps(report, indent=2), flush=True)


@contextlib.contextmanager
def _aside(output: Path) -> Iterator[Path]:
    """A folder on the output's own disk, which goes whatever happens."""
    place = next(path for path in (output.absolute(), *output.absolute().parents) if path.is_dir())
    aside = place / f".export.{os.getpid()}.tmp"
    aside.mkdir()
    try:
        yield aside
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _put_in_place(made: Path, job: ExportJob) -> None:
    job.output.mkdir(parents=True, exist_ok=True)
    new = {path.name for path in made.iterdir()}
    old = [path for pattern in _OLD for path in job.output.glob(pattern)] if job.writes_folder else []
    for path in made.iterdir():
        path.replace(job.output / path.name)
    for path in old:
        if path.name not in new:
            path.unlink()


def _unpacked(job: ExportJob, made: Path) -> dict[str, Any]:
    unpack_compact(job.model, made)
    return {"unpacked": count_weights(load_trained(made))["model"]}


def _exported(job: ExportJob, made: Path, aside: Path) -> dict[str, Any]:
    """Write all but the report into `made`; gives the report."""
    model, tokenizer = load_trained(job.model).eval(), load_tokenizer(job.model)
    if model.config.pad_token_id is None:  # without one, decoders classify one text at a time
        model.config.pad_token_id = pad_token_id(tokenizer)
    task = build_task(job.task, job.model, job.cache_dir) if job.task else None
    scores = {}
    if task:
        task.check_trained(job.model)
        scores["model"] = _score_of_folder(job, task, job.model)
    batches = [*_sentences(model, tokenizer), *(_of_task(task) if task else [])]
    report: dict[str, Any] = {}
    folder = job.model
    if job.shrink:
        folder = aside / "shrunk" if job.compact else made
        model, report["shrunk"] = _shrunk(job, model, tokenizer, batches, folder)
    if job.compact:
        report["compact"] = _compact(folder, model, batches, made, job.compact)
        if task:
            scores["compact"] = _score_of_folder(job, task, made)
    if job.onnx:
        report |= _onnx(job, model, batches, made)
        for name in ("onnx", "int8") if task else ():
            if name in report:
                scores[name] = _score_of_file(job, task, made / report[name]["file"])
    return report | ({"scores": scores} if task else {})


def _shrunk(job: ExportJob, model: Any, tokenizer: Any, batches: list[Inputs], folder: Path) -> tuple[Any, Any]:
    """Write the shrunk folder; gives its model, reloaded, once its outputs are those of the whole one."""
    save_folder(shrink(model), tokenizer, folder)
    if has_exits(job.model):
        for name in (EXITS_FILE, HEADS_FILE):  # hidden states are as wide as before
            shutil.copyfile(job.model / name, folder / name)
    reloaded = load_trained(folder).eval()
    reloaded.config.pad_token_id = model.config.pad_token_id
    found = compare(model, by_torch(reloaded), batches)
    if found["max_difference"] > _TOLERANCE * max(1.0, found["largest"]):
        raise RuntimeError(f"the shrunk model's outputs differ by {found['max_difference']}")
    weights = {name: counts for name, counts in count_weights(reloaded).items() if name != "layers"}
    return reloaded, found | {"weights": weights}


def _compact(folder: Path, model: Any, batches: list[Inputs], made: Path, values: str) -> dict[str, Any]:
    report = write_compact_folder(folder, model, made, values)
    packed = load_trained(made).eval()
    packed.config.pad_token_id = model.config.pad_token_id
    return {"file": COMPACT_FILE, **report, **compare(model, by_torch(packed), batches)}


def _onnx(job: ExportJob, model: Any, batches: list[Inputs], made: Path) -> dict[str, Any]:
    if has_exits(job.model):
        distributed.warn(f"{job.model} has exit heads: the .onnx file holds the plain model, which never exits early")
    target, threads = made / ONNX_FILE, torch.get_num_threads()
    started = time.perf_counter()
    told(f"{job.model} cannot be written as ONNX", partial(write_onnx, model, batches[0], target))
    taken = time.perf_counter() - started
    found = check_onnx(model, target, batches, threads)
    report = {"onnx": {"file": ONNX_FILE, "bytes": target.stat().st_size, "seconds": round(taken, 1), **found}}
    if job.quantize:
        small = made / INT8_FILE
        told(f"{job.model} cannot be quantised", partial(quantise, target, small))
        found = compare(model, partial(outputs, session(small, threads)), batches)
        report["int8"] = {"file": INT8_FILE, "bytes": small.stat().st_size, **found}
    return report


def _sentences(model: Any, tokenizer: Any) -> list[Inputs]:
    """Batches of the built-in sentences as the model takes them: padded, alone, several, and long."""
    pad_token_id(tokenizer)  # a tokenizer without one is given one
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
