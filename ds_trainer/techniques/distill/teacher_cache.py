"""The teacher's outputs for the whole training set, computed once and kept on disk in half precision, memory-mapped.

The folder's name is a hash of the tokenised examples, the teacher's files and the layers compared, so that a later run
takes the same folder. Only inputs that are the same in every epoch can be cached. All ranks compute and rank 0 writes;
all hosts must see the folder.

Each kind of output is one array. Logits per example are indexed by the example. Logits and states per token are indexed
by the token's place among all tokens of the split: token t of example i is at `Examples.offsets[i] + t`. Padding has no
place: its index is -1. Logits of positions are indexed by the position's place among all labels of the split. With
`top_k` a position has a record of bytes in place of its logits (`top_k_records.py`).
"""

import os
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ds_trainer.models.pretrained import identity_of
from ds_trainer.ranks import distributed
from ds_trainer.ranks.failures import UserError
from ds_trainer.ranks.progress import progress
from ds_trainer.tasks.data import Array, Examples, evaluation_shard, fingerprint, open_arrays, save_aside, write_index
from ds_trainer.tasks.divergences import TopK
from ds_trainer.tasks.task import PAD_LOGIT, Batch
from ds_trainer.techniques.distill.teacher import Outputs, Teacher
from ds_trainer.techniques.distill.top_k_records import bytes_per_token, half, pack, unpack

_TOKENS = 2048
"""Tokens in a batch while the cache is filled, at most: with logits for a vocabulary at each they take 400 MB."""

_Values = tuple[Array, Array]
"""Indices in the first dimension of an array of the cache, and the values that go there."""


class CachedTeacher:
    """Gives the teacher's outputs for batches of the training set from disk, in fp32 after a rounding to fp16."""

    def __init__(self, arrays: dict[str, Array], examples: Examples, teacher: Teacher) -> None:
        self._arrays, self._examples, self._teacher = arrays, examples, teacher
        self._logit_arrays = [arrays[name] for name in sorted(arrays) if name.startswith("logits")]

    def __call__(self, batch: Batch) -> Outputs:
        tokens = _token_indices(self._examples, batch)
        places = _logit_indices(self._teacher, tokens, batch)
        logits: tuple[Any, ...]
        if top_k := self._teacher.spec.top_k:
            records = (torch.from_numpy(array[places]) for array in self._logit_arrays)
            moved = (record.to(self._teacher.device, non_blocking=True) for record in records)
            logits = tuple(unpack(record, top_k, self._teacher.vocabulary) for record in moved)
        else:
            logits = tuple(self._tensor(array, places, PAD_LOGIT) for array in self._logit_arrays)
        layers = self._teacher.layers.hidden
        return Outputs(logits, {layer: self._tensor(self._arrays[f"hidden.{layer}"], tokens, 0.0) for layer in layers})

    def _tensor(self, array: Array, places: Array, padding: float) -> Tensor:
        """Read the values at these indices of the first dimension, and `padding` where an index is -1."""
        values = array[places.clip(0)].astype(np.float32)
        values[places < 0] = padding
        return torch.from_numpy(values).to(self._teacher.device, non_blocking=True)


def cached_teacher(teacher: Teacher) -> CachedTeacher:
    """Return the cache of a teacher for its task's training set. Collective: all ranks fill it where it is new."""
    task, examples = teacher.task, teacher.task.examples("train")
    key = fingerprint(
        *("teacher", task.key("train"), distributed.on_main(lambda: identity_of(teacher.spec.teacher))),
        *(teacher.layers.hidden, teacher.spec.teacher_dtype, task.label_names),
        *([] if teacher.ids is None else [teacher.ids.tolist()]),
        *(["labels"] if task.logits_of == "position" else []),  # earlier versions kept logits of every token
        *([teacher.spec.top_k, teacher.spec.temperature] if teacher.spec.top_k else []),
    )
    folder = task.cache_dir.expanduser() / f"teacher-{key}"
    if not distributed.on_main(lambda: open_arrays(folder) is not None):
        if teacher.spec.top_k:
            announce(teacher)
        _fill(teacher, examples, folder)
    opened = open_arrays(folder)
    everywhere = all(distributed.broadcast(distributed.gather(opened is not None)))
    if opened is None or not everywhere:
        raise UserError(
            f"the teacher's outputs in {folder} are not seen by every rank: set cache_dir to a shared folder"
        )
    return CachedTeacher(opened[0], examples, teacher)


def announce(teacher: Teacher) -> None:
    """Log what a cache with `top_k` takes on disk before it is filled."""
    a_token = bytes_per_token(teacher.spec.top_k, teacher.vocabulary)
    labels = int(teacher.label_offsets[-1])
    told = f"{a_token} bytes a token, {a_token * labels / 1e6:,.1f} MB for the {labels:,} labels of the training set"
    distributed.info(f"cache_teacher: top_k {teacher.spec.top_k} takes {told}")


def _fill(teacher: Teacher, examples: Examples, folder: Path) -> None:
    """Run the teacher over the training set on all ranks, and write its outputs on rank 0."""
    started, outputs, arrays = time.monotonic(), _outputs(teacher, examples), dict[str, Any]()

    def write(aside: Path) -> None:
        for shards in outputs:
            for name, (indices, values) in (item for shard in shards for item in shard.items()):
                if name not in arrays:
                    kind = teacher.task.logits_of if name.startswith("logits") else "token"
                    tokens = teacher.label_offsets if kind == "position" else examples.offsets
                    size = len(examples) if kind == "example" else int(tokens[-1])
                    shape, path = (size, *values.shape[1:]), aside / f"{name}.npy"
                    arrays[name] = np.lib.format.open_memmap(path, mode="w+", dtype=values.dtype, shape=shape)
                    with path.open("r+b") as file:  # reserved: a mapped file on a full disk would kill the process
                        os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
                arrays[name][indices] = values
        for array in arrays.values():
            array.flush()
        write_index(aside, arrays, {})

    def save() -> None:
        try:
            save_aside(folder, write)
        finally:
            deque(outputs, maxlen=0)  # after an error the other ranks still wait for this one, batch by batch

    if not distributed.is_main():
        deque(outputs, maxlen=0)  # this rank computes its part, which rank 0 gathers
    distributed.on_main(save)
    size, seconds = sum(array.nbytes for array in arrays.values()) / 1e6, time.monotonic() - started
    distributed.info(f"cache_teacher: {size:,.1f} MB of the teacher's outputs are kept in {folder} ({seconds:.0f} s)")
    teacher.close()


def _outputs(teacher: Teacher, examples: Examples) -> Iterator[list[dict[str, _Values]]]:
    """Yield the outputs of all ranks batch by batch on rank 0, elsewhere empty lists; every rank must exhaust it."""
    size = max(1, _TOKENS // int(examples.lengths.max()))
    shards = evaluation_shard(examples.lengths, distributed.rank(), distributed.world_size(), size)
    for chosen in progress(shards, "cache_teacher: the teacher answers the training set", "forward"):
        batch = teacher.task.collate(examples, chosen)
        outputs = teacher(batch.to(teacher.device))
        yield distributed.gather(_without_padding(outputs, batch, examples, teacher))


def _without_padding(outputs: Outputs, batch: Batch, examples: Examples, teacher: Teacher) -> dict[str, _Values]:
    """Return the outputs for a batch in half precision, by the name of their array, and their indices in it."""
    tokens = _token_indices(examples, batch)
    places = _logit_indices(teacher, tokens, batch)
    indexed = {f"logits.{number}": (places, logits) for number, logits in enumerate(outputs.logits)}
    indexed |= {f"hidden.{layer}": (tokens, states) for layer, states in outputs.hidden.items()}
    kept = {
        name: pack(values, teacher.vocabulary) if isinstance(values, TopK) else half(values).cpu().numpy()
        for name, (_, values) in indexed.items()
    }
    return {name: (where[where >= 0], kept[name][where >= 0]) for name, (where, _) in indexed.items()}


def _token_indices(examples: Examples, batch: Batch) -> Array:
    """Return (batch, length): the place of each token among all tokens of the split, -1 for padding.

    It is computed from the lengths, which the host has: reading the mask would wait for the device.
    """
    ids = batch.ids.numpy()
    column = np.arange(batch.inputs["input_ids"].shape[1])
    return np.where(column < examples.lengths[ids][:, None], examples.offsets[ids][:, None] + column, -1)


def _logit_indices(teacher: Teacher, tokens: Array, batch: Batch) -> Array:
    """Return the index of every row of logits of a batch in the cache, -1 for padding."""
    ids = batch.ids.numpy()
    if teacher.task.logits_of == "example":
        return ids
    if teacher.task.logits_of == "token":
        return tokens
    starts, ends = teacher.label_offsets[ids], teacher.label_offsets[ids + 1]
    return np.concatenate([np.arange(*labels) for labels in zip(starts, ends, strict=True)])
