"""The teacher: a frozen model, whole on each rank, or partitioned by ZeRO-3 over all of them.

It has no optimizer and no gradient. Since it is not a part of the student's module, no checkpoint holds it.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from ds_trainer.config.jobs import DTYPES
from ds_trainer.config.recipe import DistillSpec
from ds_trainer.files.messages import listed
from ds_trainer.models.layers import FIELD
from ds_trainer.models.pretrained import load_config
from ds_trainer.ranks.failures import UserError
from ds_trainer.tasks.data import Array
from ds_trainer.tasks.divergences import TopK
from ds_trainer.tasks.task import Batch, Task


@dataclass(frozen=True)
class Outputs:
    """The outputs of one model for a batch: `Task.logits`, and states and attention maps of the layers compared.

    In place of logits a teacher whose cache has a `top_k` gives `TopK`. States are (batch, length, width), maps (batch,
    heads, length, length). Both are by layer: 1 is the first, -1 the last, and 0 the embeddings.
    """

    logits: tuple[Any, ...]
    hidden: dict[int, Tensor] = field(default_factory=dict)
    attention: dict[int, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class ComparedLayers:
    """The layers of one model whose states (`hidden`) and attention maps are compared, numbered as in `Outputs`.

    Pruning may have cut all attention heads of a layer. Such layers, which give no map, are in `headless`, from 1.
    """

    hidden: tuple[int, ...] = ()
    attention: tuple[int, ...] = ()
    headless: tuple[int, ...] = ()

    def request(self, model: Any) -> Callable[[], None]:
        """Have the model return the states and maps of these layers; return a function that undoes that."""
        config, implementation = model.config, model.config._attn_implementation
        before = {name: getattr(config, name) for name in ("output_hidden_states", "output_attentions")}
        config.output_hidden_states |= bool(self.hidden)
        if self.attention:
            model.set_attn_implementation("eager")  # only the eager implementation returns attention maps
            config.output_attentions = True

        def undo() -> None:
            config.update(before)
            if self.attention:
                model.set_attn_implementation(implementation)

        return undo

    def outputs(self, out: Any, logits: tuple[Any, ...]) -> Outputs:
        """Pick the states and maps of these layers from a model's output, and return them with the logits."""
        maps = [one for one in out.attentions or () if one is not None]  # one for each layer that has heads
        depth = len(maps) + len(self.headless)
        with_maps = [layer for layer in range(1, depth + 1) if layer not in self.headless]
        hidden = {layer: out.hidden_states[layer] for layer in self.hidden}
        # layer % (depth + 1) is the number from 1 of a layer that is counted from the end
        return Outputs(logits, hidden, {n: maps[with_maps.index(n % (depth + 1))] for n in self.attention})


def compared_layers(spec: DistillSpec, config: Any, who: Literal["student", "teacher"]) -> ComparedLayers:
    """Return the layers of the student or teacher that the terms need; UserError where the model lacks one."""
    layers = tuple(dict.fromkeys(pair[("student", "teacher").index(who)] for pair in spec.layer_pairs))
    depth = config.num_hidden_layers
    kept_heads = (getattr(config, FIELD, None) or {}).get("heads", ())
    headless = tuple(layer for layer, heads in enumerate(kept_heads, 1) if not heads)
    for layer in layers:
        if layer > depth:
            raise UserError(
                f"distill: layer_pairs names layer {layer} of the {who}, which has {depth}: write -1 to {depth}"
            )
        if "attention" in spec.terms and layer % (depth + 1) in headless:
            raise UserError(
                f"distill: layer_pairs names layer {layer} of the {who}, and its layers {listed(headless)} have no "
                "attention heads left: name another, or take attention out of terms"
            )
    compares_states = bool({"cos", "hidden"} & set(spec.terms))
    return ComparedLayers(layers if compares_states else (), layers if "attention" in spec.terms else (), headless)


class Teacher:
    """The teacher's model, loaded at the first call in the precision of `teacher_dtype`. Every rank must call.

    Batches have the student's tokens. `ids` are the teacher's for them, None where they are the same.
    """

    def __init__(
        self, task: Task, spec: DistillSpec, layers: ComparedLayers, device: torch.device, ids: Tensor | None = None
    ) -> None:
        self.task, self.spec, self.layers, self.device = task, spec, layers, device
        self.ids = None if ids is None else ids.to(device)
        self._model: Any = None
        self._engine: Any = None

    @torch.no_grad()
    def __call__(self, batch: Batch) -> Outputs:
        """Return the teacher's outputs for a batch, in its precision, without gradient."""
        out, k = self.predict(batch), self.spec.top_k
        logits = self.task.logits(out, batch)
        kept = tuple(TopK.of(each, k, self.spec.temperature) for each in logits) if k else logits
        return self.layers.outputs(out, kept)

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
        self.layers.request(model)
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


class RememberedTeacher:
    """Gives the teacher's outputs for batches, and keeps them for when a batch comes again.

    The logits are copies, since a loss may overwrite them.
    """

    def __init__(self, teacher: Teacher) -> None:
        self._teacher = teacher
        self._outputs: dict[tuple[int, ...], Outputs] = {}

    def __call__(self, batch: Batch) -> Outputs:
        ids = tuple(batch.ids.tolist())
        if ids not in self._outputs:
            self._outputs[ids] = self._teacher(batch)
        kept = self._outputs[ids]
        logits = tuple(one if isinstance(one, TopK) else one.clone() for one in kept.logits)
        return Outputs(logits, kept.hidden, kept.attention)


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
