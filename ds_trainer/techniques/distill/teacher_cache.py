"""What a teacher says of the whole training set, computed once and kept on disk in half precision, memory-mapped.

Keyed by the tokenised examples, the teacher's files and what is asked of it, so that a second run finds it. Only for
inputs that are the same in every epoch. Rank 0 writes it; all hosts must see the folder.
"""

from __future__ import annotations

import math
import os
import shutil
import time
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ds_trainer.models.folders import folder_hash
from ds_trainer.models.pretrained import load_config
from ds_trainer.ranks import distributed
from ds_trainer.ranks.failures import UserError
from ds_trainer.tasks.data import Array, Examples, evaluation_shard, fingerprint, open_arrays, save_aside, write_index
from ds_trainer.tasks.task import PAD_LOGIT, Batch, Task
from ds_trainer.techniques.distill.teacher import Outputs, Teacher

_TOKENS = 2048
"""At most so many positions in a batch while the cache is filled: with a vocabulary each, 400 MB."""

_Rows = tuple[Array, Array]
"""Where values go in an array's first dimension, and the values."""


class CachedTeacher:
    """Answers for the teacher on the training set, from disk. Values in fp32, rounded to fp16 once."""

    def __init__(self, arrays: dict[str, Array], examples: Examples, teacher: Teacher) -> None:
        self._arrays, self._examples = arrays, examples
        self._layout, self._device = teacher.task.logits_of, teacher.device
        self._layers = teacher.wanted.hidden
        self._kept_logits = [arrays[name] for name in sorted(arrays) if name.startswith("logits")]

    def __call__(self, batch: Batch) -> Outputs:
        ids = batch.ids.numpy()
        places = _places(self._examples, batch)
        logits = tuple(self._logits(kept, ids, places, batch) for kept in self._kept_logits)
        hidden = {layer: self._tensor(self._arrays[f"hidden.{layer}"][places.clip(0)]) for layer in self._layers}
        return Outputs(logits, hidden)

    def _logits(self, kept: Array, ids: Array, places: Array, batch: Batch) -> Tensor:
        if self._layout == "example":
            return self._tensor(kept[ids])
        if self._layout == "position":
            return self._tensor(kept[places.ravel()[batch.inputs["head_positions"].cpu().numpy()]])
        return self._tensor(np.where(places >= 0, kept[places.clip(0)], PAD_LOGIT))

    def _tensor(self, values: Array) -> Tensor:
        return torch.from_numpy(values.astype(np.float32)).to(self._device, non_blocking=True)


def cached_teacher(teacher: Teacher) -> CachedTeacher:
    """The cache of this teacher for its task's training set, filled by all ranks where there is none; collective."""
    task, examples = teacher.task, teacher.task.examples("train")
    key = fingerprint(
        *("teacher", task.key("train"), distributed.on_main(lambda: _identity(teacher))),
        *(teacher.wanted.hidden, teacher.spec.teacher_dtype, task.label_names),
    )
    folder = task.cache_dir.expanduser() / f"teacher-{key}"
    if not distributed.on_main(lambda: open_arrays(folder) is not None):
        _fill(teacher, examples, folder)
    found = open_arrays(folder)
    seen = distributed.broadcast(distributed.gather(found is not None))
    if found is None or not all(seen):
        raise UserError(
            f"the teacher's outputs are in {folder}, and not every rank sees them: set cache_dir to a folder "
            f"that all hosts share"
        )
    return CachedTeacher(found[0], examples, teacher)


def _fill(teacher: Teacher, examples: Examples, folder: Path) -> None:
    """Run the teacher over the training set on all ranks; rank 0 writes what they find."""
    started = time.monotonic()
    found = _outputs(teacher, examples)
    first = next(found)

    def write(aside: Path) -> None:
        shapes = _shapes(examples, teacher.task, first[0])
        _check_space(shapes, folder)
        arrays = {name: _allocated(aside / f"{name}.npy", shape) for name, shape in shapes.items()}
        for shards in chain([first], found):
            for rows in shards:
                for name, (places, values) in rows.items():
                    arrays[name][places] = values
        for array in arrays.values():
            array.flush()
        write_index(aside, arrays, {})

    mistake = None
    if distributed.is_main():
        try:
            save_aside(folder, write)
        except ValueError as error:
            mistake = str(error)
    for _ in found:  # the other ranks; and rank 0 after a mistake, as long as they wait for it
        pass
    mistake = distributed.broadcast(mistake)
    if mistake:
        raise UserError(mistake)
    distributed.info(f"the teacher's outputs are kept in {folder} ({time.monotonic() - started:.0f} s)")
    teacher.close()


def _outputs(teacher: Teacher, examples: Examples) -> Iterator[list[dict[str, _Rows]]]:
    """Batch by batch what every rank's teacher said, on rank 0; every rank must exhaust it."""
    size = max(1, _TOKENS // int(examples.lengths.max()))
    for positions in evaluation_shard(examples.lengths, distributed.rank(), distributed.world_size(), size):
        batch = teacher.task.collate(examples, positions)
        rows = _rows(teacher(batch.to(teacher.device)), batch, examples, teacher.task)
        yield distributed.gather(rows)


def _rows(said: Outputs, batch: Batch, examples: Examples, task: Task) -> dict[str, _Rows]:
    """The outputs without padding, in half precision, and where each goes."""
    places = _places(examples, batch)
    real = places >= 0
    rows: dict[str, _Rows] = {}
    for number, logits in enumerate(said.logits):
        values = _half(logits)
        if task.logits_of == "example":
            rows[f"logits.{number}"] = (batch.ids.numpy(), values)
        elif task.logits_of == "position":
            rows[f"logits.{number}"] = (places.ravel()[batch.inputs["head_positions"].numpy()], values)
        else:
            rows[f"logits.{number}"] = (places[real], values[real])
    for layer, hidden in said.hidden.items():
        rows[f"hidden.{layer}"] = (places[real], _half(hidden)[real])
    return rows


def _places(examples: Examples, batch: Batch) -> Array:
    """(rows, width) where each position of the batch stands among all tokens of the split; -1 for padding.

    From what is on the host: asking the device for the mask would wait for it.
    """
    ids = batch.ids.numpy()
    column = np.arange(batch.inputs["input_ids"].shape[1])
    return np.where(column < examples.lengths[ids][:, None], examples.offsets[ids][:, None] + column, -1)


def _shapes(examples: Examples, task: Task, rows: dict[str, _Rows]) -> dict[str, tuple[int, ...]]:
    """The arrays for the whole split, from the outputs for one batch."""
    shapes = {}
    for name, (_, values) in rows.items():
        per_example = name.startswith("logits") and task.logits_of == "example"
        shapes[name] = (len(examples) if per_example else int(examples.offsets[-1]), *values.shape[1:])
    return shapes


def _check_space(shapes: dict[str, tuple[int, ...]], folder: Path) -> None:
    """Tell what will be written, and refuse what does not fit."""
    size = sum(2 * math.prod(shape) for shape in shapes.values())
    free = shutil.disk_usage(folder.parent).free
    distributed.info(f"cache_teacher: {size / 1e6:,.1f} MB of the teacher's outputs go to {folder}")
    if size > free:
        raise UserError(
            f"cache_teacher: {size / 1e9:,.2f} GB would go to {folder.parent}, where {free / 1e9:,.2f} GB are free: "
            f"set cache_dir to another disk, or drop cache_teacher"
        )


def _allocated(path: Path, shape: tuple[int, ...]) -> Any:
    """An empty array on disk, its room reserved: a mapped file that runs out of disk ends the process by a signal."""
    array = np.lib.format.open_memmap(path, mode="w+", dtype=np.float16, shape=shape)
    if hasattr(os, "posix_fallocate"):
        with path.open("r+b") as file:
            os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
    return array


def _identity(teacher: Teacher) -> str:
    """Hash of the teacher's config and weights; the commit, for one of the hub."""
    source = Path(teacher.spec.teacher)
    if not source.is_dir():
        commit = getattr(load_config(teacher.spec.teacher, teacher.task.head), "_commit_hash", None)
        if commit is None:
            raise UserError(f"cache_teacher: the hub does not tell the version of {source}: give a folder")
        return str(commit)
    return folder_hash(source)


def _half(values: Tensor) -> Array:
    """As fp16, what is beyond its range at its ends."""
    return values.float().clamp(-65504, 65504).cpu().numpy().astype(np.float16)
