"""The teacher: a frozen model, whole on each rank, or partitioned by ZeRO-3 over all of them.

It has no optimizer and no gradient. Since it is not a part of the student's module, no checkpoint holds it.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ds_trainer.files.messages import listed
from ds_trainer.models.pretrained import load_config
from ds_trainer.ranks.failures import UserError
from ds_trainer.recipe.jobs import DTYPES
from ds_trainer.recipe.technique_specs import DistillSpec
from ds_trainer.tasks.data import Array
from ds_trainer.tasks.divergences import TopK
from ds_trainer.tasks.task import Batch, Task


@dataclass(frozen=True)
class Outputs:
    """The teacher's outputs for a batch: `Task.logits`, or `TopK` in place of them, and states of the layers compared.

    States are (batch, length, width), by layer: 1 is the first, -1 the last, and 0 the embeddings.
    """

    logits: tuple[Any, ...]
    hidden: dict[int, Tensor]


class Teacher:
    """The teacher's model, loaded at the first call in the precision of `teacher_dtype`. Every rank must call.

    Batches have the student's tokens. `ids` are the teacher's for them, None where they are the same.
    """

    def __init__(self, task: Task, spec: DistillSpec, device: torch.device, ids: Tensor | None = None) -> None:
        self.task, self.spec, self.device = task, spec, device
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
        inputs = self.task.inputs_for(self._model, batch)
        if self.ids is not None:
            inputs["input_ids"] = self.ids[inputs["input_ids"]]
        with torch.autocast(self.device.type, enabled=False):
            out = (self._engine or self._model)(**inputs)
        if self.ids is not None and self.task.over_vocabulary:
            out.logits = out.logits.index_select(-1, self.ids)
        return out

    @cached_property
    def vocabulary(self) -> int:
        """The number of its logits over a vocabulary, which are those of the student's tokens."""
        if self.ids is not None:
            return len(self.ids)
        return int(load_config(self.spec.teacher, self.task.head).get_text_config().vocab_size)

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

    def _load(self) -> None:
        model: Any = self.task.build_model(self.spec.teacher)
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


def teacher_ids(task: Task, teacher_tokenizer: Any, teacher: str) -> Tensor | None:
    """Return the teacher's id of each of the student's tokens, (student's vocabulary,) int64; None if they agree.

    A student may have fewer tokens, numbered otherwise, once its vocabulary was cut. UserError names some of those that
    the teacher lacks.
    """
    ours, theirs = task.tokenizer.get_vocab(), teacher_tokenizer.get_vocab()
    if ours == theirs:
        return None
    unknown = sorted(ours.keys() - theirs.keys())
    if unknown:
        raise UserError(
            f"the student has tokens that the teacher {teacher} does not have, such as {listed(unknown, 5)}: take a "
            f"teacher with the student's tokenizer, or with the one that its vocabulary was cut from"
        )
    ids = torch.zeros(max(ours.values()) + 1, dtype=torch.int64)
    ids[list(ours.values())] = torch.tensor([theirs[token] for token in ours])
    return ids
