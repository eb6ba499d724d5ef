"""The teacher: a frozen model, whole on each rank or partitioned by ZeRO-3, and the cache of its answers.

It has no optimizer and no gradient. Since it is not a part of the student's module, no checkpoint holds it. It reads
the student's tokens by its own ids or, with another tokenizer, the same texts in its own tokens (`own_reader`).

The cache has its outputs for the whole training set, computed once and kept on disk in half precision, memory-mapped.
The folder's name is a hash of the tokenised examples, the teacher's files and the layers compared, so that a later run
takes the same folder. Only inputs that are the same in every epoch can be cached. All ranks compute and rank 0 writes;
all hosts must see the folder.

Each kind of output is one array. Logits per example are indexed by the example. Logits and states per token are indexed
by the token's place among all tokens of the split: token t of example i is at `Examples.offsets[i] + t`. Padding has no
place: its index is -1. Logits of positions are indexed by the position's place among all labels of the split.

With `top_k` a position has a record of bytes in place of its logits: the log-probabilities of the k likeliest tokens
and of all others together, in fp16, and then the k ids in int32, the likeliest first.
"""

import copy
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ds_trainer.files.messages import listed
from ds_trainer.models.pretrained import identity_of, load_tokenizer, positions_of
from ds_trainer.ranks import distributed
from ds_trainer.ranks.failures import UserError
from ds_trainer.ranks.progress import progress
from ds_trainer.recipe.jobs import DTYPES
from ds_trainer.recipe.technique_specs import DistillSpec
from ds_trainer.tasks.data import Array, evaluation_shard, fingerprint, open_arrays, save_aside, write_index
from ds_trainer.tasks.losses import TopK
from ds_trainer.tasks.task import PAD_LOGIT, Batch, Task

_TOKENS = 2048
"""Tokens in a batch while the cache is filled, at most: with logits for a vocabulary at each they take 400 MB."""


@dataclass(frozen=True)
class Outputs:
    """The teacher's outputs for a batch: `Task.logits`, or `TopK` in place of them, and states of the layers compared.

    States are (batch, length, width), by layer: 1 is the first, -1 the last, and 0 the embeddings.
    """

    logits: tuple[Any, ...]
    hidden: dict[int, Tensor]


class Teacher:
    """The teacher's model, loaded at the first call in the precision of `teacher_dtype`. Every rank must call.

    Batches have the student's tokens. `ids` are the teacher's for them, None where they are the same. With a `reader`,
    as `own_reader` returns it, the teacher is run on the same texts in its own tokens instead.
    """

    def __init__(
        self,
        task: Task,
        spec: DistillSpec,
        device: torch.device,
        ids: Tensor | None = None,
        reader: Task | None = None,
    ) -> None:
        self.task, self.spec, self.device, self.reader = task, spec, device, reader or task
        self.layers = tuple(dict.fromkeys(layer for _, layer in spec.compared_layers))
        self.ids = None if ids is None else ids.to(device)
        self._model: Any = None
        self._engine: Any = None

    @torch.no_grad()
    def __call__(self, batch: Batch) -> Outputs:
        """Return the teacher's outputs for a batch, in its precision, without gradient."""
        out, k = self.predict(batch), self.spec.top_k
        logits = self.task.logits(out, batch)
        kept = tuple(TopK.of(each, k, self.spec.temperature) for each in logits) if k else logits
        return Outputs(kept, {layer: out.hidden_states[layer] for layer in self.layers})

    @torch.no_grad()
    def predict(self, batch: Batch) -> Any:
        """Return the model's whole output; every rank must call, since the weights may be partitioned.

        Logits over a vocabulary are those of the student's tokens, in the student's order.
        """
        if self._model is None:
            self._load()
        if self.reader is not self.task:
            return self.task.output_of(self.reader, self._run, batch)
        out = self._run(batch)
        if self.ids is not None and self.task.over_vocabulary:
            out.logits = out.logits.index_select(-1, self.ids)
        return out

    @cached_property
    def label_offsets(self) -> Array:
        """(n + 1,) where the labels of each training example begin among all labels, for logits of positions."""
        examples = self.task.examples("train")
        ids = np.arange(len(examples))
        return np.cumsum([0, *(self.task.counts(examples, ids[i : i + 1])["label"] for i in ids)])

    @property
    def size(self) -> int:
        """The bytes of the whole model, once it is loaded."""
        values = sum(getattr(p, "ds_numel", p.numel()) for p in self._model.parameters())
        return int(values * getattr(torch, DTYPES[self.spec.teacher_dtype]).itemsize)

    def close(self) -> None:
        """Free the model."""
        if self._engine is not None:
            self._engine.destroy()
        self._model = self._engine = None

    def _run(self, batch: Batch) -> Any:
        inputs = self.reader.inputs_for(self._model, batch)
        if self.ids is not None:
            inputs["input_ids"] = self.ids[inputs["input_ids"]]
        with torch.autocast(self.device.type, enabled=False):
            return (self._engine or self._model)(**inputs)

    def _load(self) -> None:
        model: Any = self.reader.build_model(self.spec.teacher)
        model.config.output_hidden_states |= bool(self.layers)
        if self.ids is not None:  # a decoder finds the last token of a text by it
            model.config.pad_token_id = int(self.ids[self.task.pad_token_id])
        self._model = model.to(getattr(torch, DTYPES[self.spec.teacher_dtype])).eval().requires_grad_(False)
        if self.spec.teacher_zero_stage == 0:
            self._model.to(self.device)
            return
        import deepspeed

        # an engine for inference only: each rank holds its part of the weights, gathered layer by layer
        config: dict[str, Any] = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
        if self.spec.teacher_dtype != "fp32":
            config[self.spec.teacher_dtype] = {"enabled": True}
        self._engine, *_ = deepspeed.initialize(model=self._model, config=config)
        self._engine.eval()


def remembering(teacher: Teacher) -> Callable[[Batch], Outputs]:
    """Return a function that gives the teacher's outputs for a batch, and runs it once for batches that come again."""
    outputs: dict[tuple[int, ...], Outputs] = {}

    def answer(batch: Batch) -> Outputs:
        ids = tuple(batch.ids.tolist())
        if ids not in outputs:
            outputs[ids] = teacher(batch)
        return copy.deepcopy(outputs[ids])  # a loss may overwrite the logits

    return answer


def has_own_tokens(task: Task, spec: DistillSpec, tokenizer: Any) -> bool:
    """Return whether the teacher reads the texts by its own tokenizer, since not all of its tokens are the student's.

    UserError for a task or a term that compares token by token.
    """
    unknown = sorted(task.tokenizer.get_vocab().keys() - tokenizer.get_vocab().keys())
    otherwise = task.reads_otherwise(spec.teacher)
    if unknown:
        why = f"the student has tokens that the teacher {spec.teacher} does not have, such as {listed(unknown, 5)}"
        way_out = "take a teacher with the student's tokenizer, or with the one that its vocabulary was cut from"
    elif otherwise:
        why, way_out = f"the teacher {spec.teacher} has {otherwise}", "take a teacher that reads as the student does"
    elif spec.teacher_max_seq_length:
        why, way_out = "teacher_max_seq_length is set, with which a teacher cuts texts elsewhere", "drop it"
    else:
        return False
    if task.over_vocabulary or task.logits_of == "token":
        raise UserError(f"{why}, and answers of {task.spec.name} are compared token by token: {way_out}")
    if spec.compared_layers:
        terms = "the terms cos and hidden compare states token by token: drop these terms"
        raise UserError(f"{why}, and {terms}, or {way_out}")
    return True


def own_reader(task: Task, spec: DistillSpec) -> Task:
    """Return the task by which the teacher reads the texts; collective. Its classes have the student's order."""
    length = spec.teacher_max_seq_length or task.spec.max_seq_length
    own = task.reader_spec(spec.teacher).model_copy(update={"max_seq_length": length})
    reader = type(task)(own, load_tokenizer(spec.teacher), spec.teacher, task.cache_dir)
    with torch.device("meta"):
        positions = positions_of(reader.head.classes(reader.config)[0](reader.config))
    if positions is not None and length > positions:
        raise UserError(
            f"the teacher {spec.teacher} has {positions} positions, and would read texts of up to {length} tokens: set "
            f"teacher_max_seq_length to {positions} or less"
        )
    reader.label_names = task.label_names
    distributed.info_once(f"the teacher {spec.teacher} reads the texts by its own tokenizer, up to {length} tokens:")
    for split in ("train", *task.splits):  # a mistake in one would otherwise show after the training
        reader.examples(split)
    return reader


def teacher_ids(task: Task, tokenizer: Any) -> Tensor | None:
    """Return the teacher's id of each of the student's tokens, (student's vocabulary,) int64; None if they agree.

    A student may have fewer tokens, numbered otherwise, once its vocabulary was cut. The teacher must have all of them.
    """
    ours, theirs = task.tokenizer.get_vocab(), tokenizer.get_vocab()
    if ours == theirs:
        return None
    ids = torch.zeros(max(ours.values()) + 1, dtype=torch.int64)
    ids[list(ours.values())] = torch.tensor([theirs[token] for token in ours])
    return ids


def cached_teacher(teacher: Teacher) -> Callable[[Batch], Outputs]:
    """Return a function that reads a teacher's outputs for batches of the training set, rounded to fp16, as fp32.

    Collective: all ranks fill the cache where it is new.
    """
    task, spec = teacher.task, teacher.spec
    key = fingerprint(
        *("teacher", task.key("train"), distributed.on_main(lambda: identity_of(spec.teacher))),
        *(teacher.layers, spec.teacher_dtype, task.label_names),
        *([] if teacher.ids is None else [teacher.ids.tolist()]),
        *([] if teacher.reader is task else ["own tokens", teacher.reader.key("train")]),
        *(["labels"] if task.logits_of == "position" else []),  # earlier versions kept logits of every token
        *([spec.top_k, spec.temperature, "int32"] if spec.top_k else []),  # earlier versions packed the bits of ids
    )
    folder = task.cache_dir.expanduser() / f"teacher-{key}"
    if not distributed.on_main(lambda: open_arrays(folder) is not None):
        _fill(teacher, folder)
    opened = open_arrays(folder)
    everywhere = all(distributed.broadcast(distributed.gather(opened is not None)))
    if opened is None or not everywhere:
        raise UserError(
            f"the teacher's outputs in {folder} are not seen by every rank: set cache_dir to a shared folder"
        )
    return partial(_read, opened[0], teacher)


def pack(top: TopK) -> Array:
    """Return records (rows, bytes) uint8."""
    ids = top.ids.cpu().numpy().astype(np.int32)
    return np.concatenate([_half(top.log_probs).view(np.uint8), ids.view(np.uint8)], -1)


def unpack(records: Tensor, k: int) -> TopK:
    """Return what records (rows, bytes) uint8 hold, on their device, with probabilities that sum to 1 again."""
    log_probs, ids = (part.contiguous() for part in records.split([2 * (k + 1), 4 * k], -1))
    return TopK(ids.view(torch.int32).long(), log_probs.view(torch.float16).float().log_softmax(-1))


def _half(values: Tensor) -> Array:
    """Round to fp16; values beyond its range become its largest."""
    return values.float().clamp(-65504, 65504).half().cpu().numpy()


def _read(arrays: dict[str, Array], teacher: Teacher, batch: Batch) -> Outputs:
    def read(name: str, indices: Array, padding: float) -> Tensor:
        values = arrays[name][indices.clip(0)].astype(np.float32)
        values[indices < 0] = padding
        return torch.from_numpy(values).to(teacher.device, non_blocking=True)

    of_logits, of_tokens = _indices(teacher, batch)
    names = sorted(name for name in arrays if name.startswith("logits"))
    logits: tuple[Any, ...]
    if top_k := teacher.spec.top_k:
        records = (torch.from_numpy(arrays[name][of_logits]) for name in names)
        moved = (record.to(teacher.device, non_blocking=True) for record in records)
        logits = tuple(unpack(record, top_k) for record in moved)
    else:
        logits = tuple(read(name, of_logits, PAD_LOGIT) for name in names)
    return Outputs(logits, {layer: read(f"hidden.{layer}", of_tokens, 0.0) for layer in teacher.layers})


def _fill(teacher: Teacher, folder: Path) -> None:
    """Run the teacher over the training set on all ranks, and write its outputs on rank 0."""
    started, outputs, arrays = time.monotonic(), _outputs(teacher), dict[str, Any]()
    examples = teacher.task.examples("train")
    offsets = {"token": examples.offsets, "example": np.arange(len(examples) + 1)}

    def write(aside: Path) -> None:
        for name, indices, values in (item for shards in outputs for shard in shards for item in shard):
            if name not in arrays:
                kind = teacher.task.logits_of if name.startswith("logits") else "token"
                rows = int((teacher.label_offsets if kind == "position" else offsets[kind])[-1])
                shape, path = (rows, *values.shape[1:]), aside / f"{name}.npy"
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


def _outputs(teacher: Teacher) -> Iterator[list[list[tuple[str, Array, Array]]]]:
    """Yield the outputs of all ranks batch by batch on rank 0, elsewhere empty lists; every rank must exhaust it.

    Those of a rank are the name of an array, indices in its first dimension, and the values in half precision that go
    there, without padding.
    """
    examples = teacher.task.examples("train")
    longest = max(int(task.examples("train").lengths.max()) for task in (teacher.task, teacher.reader))
    size = max(1, _TOKENS // longest)
    shards = evaluation_shard(examples.lengths, distributed.rank(), distributed.world_size(), size)
    for chosen in progress(shards, "cache_teacher: the teacher answers the training set", "forward"):
        batch = teacher.task.collate(examples, chosen)
        of_logits, of_tokens = _indices(teacher, batch)
        outputs = teacher(batch.to(teacher.device))
        named = [(f"logits.{number}", of_logits, values) for number, values in enumerate(outputs.logits)]
        named += [(f"hidden.{layer}", of_tokens, values) for layer, values in outputs.hidden.items()]
        kept = [
            (name, where, pack(values) if isinstance(values, TopK) else _half(values)) for name, where, values in named
        ]
        yield distributed.gather([(name, where[where >= 0], values[where >= 0]) for name, where, values in kept])


def _indices(teacher: Teacher, batch: Batch) -> tuple[Array, Array]:
    """Return the index in the cache of every row of logits of a batch, and of every token: (batch, length).

    Padding has -1. They are computed from the lengths, which the host has: reading the mask would wait for the device.
    """
    ids, examples = batch.ids.numpy(), teacher.task.examples("train")
    column, (sequences, rows) = np.arange(batch.inputs["input_ids"].shape[1]), examples.batch_rows(ids)
    of_tokens = np.where(column < sequences.lengths[rows][:, None], sequences.offsets[rows][:, None] + column, -1)
    if teacher.task.logits_of == "position":
        starts, ends = teacher.label_offsets[ids], teacher.label_offsets[ids + 1]
        return np.concatenate([np.arange(*labels) for labels in zip(starts, ends, strict=True)]), of_tokens
    return (ids if teacher.task.logits_of == "example" else of_tokens), of_tokens
