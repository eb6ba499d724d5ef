"""A frozen model that says what a student should: whole on each rank, or partitioned by ZeRO-3 over all of them.

It has no optimizer and no gradient, and is no part of the student's module: no checkpoint holds it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ds_trainer.config.recipe import DistillSpec
from ds_trainer.models.layers import FIELD
from ds_trainer.ranks.failures import UserError
from ds_trainer.tasks.task import Batch, Task

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Outputs:
    """What a model says of a batch: `Task.logits`, and the states and attention maps of the layers asked for.

    States are (rows, length, width), maps (rows, heads, length, length), by layer: 1 is the first, -1 the last, 0 the
    embeddings.
    """

    logits: tuple[Tensor, ...]
    hidden: dict[int, Tensor] = field(default_factory=dict)
    attention: dict[int, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Wanted:
    """The layers whose states and attention maps are compared; `emptied` ones, counted from 1, give no maps."""

    hidden: tuple[int, ...] = ()
    attention: tuple[int, ...] = ()
    emptied: tuple[int, ...] = ()

    def of_model(self, config: Any, who: str) -> Wanted:
        """The same of a model with such a config; ValueError where a map is wanted of a layer that has none."""
        heads = (getattr(config, FIELD, None) or {}).get("heads", ())
        emptied = tuple(layer for layer, left in enumerate(heads, 1) if not left)
        for layer in self.attention:
            if layer % (len(heads) + 1) in emptied:
                left = ", ".join(str(number) for number in range(1, len(heads) + 1) if number not in emptied)
                raise UserError(
                    f"distill: layer_pairs names layer {layer} of the {who}, which has no attention left to compare: "
                    + (
                        f"write one of {left}, or take attention out of terms"
                        if left
                        else "take attention out of terms"
                    )
                )
        return replace(self, emptied=emptied)

    def ask(self, model: Any) -> Callable[[], None]:
        """Have the model give them; call what is returned to undo that."""
        config = model.config
        before = config.output_hidden_states, config.output_attentions, config._attn_implementation
        if self.attention:
            model.set_attn_implementation("eager")  # the others never hold the maps
            config.output_attentions = True
        if self.hidden:
            config.output_hidden_states = True

        def undo() -> None:
            if self.attention:
                config.output_attentions = before[1]
                model.set_attn_implementation(before[2])
            config.output_hidden_states = before[0]

        return undo

    def of(self, out: Any, logits: tuple[Tensor, ...]) -> Outputs:
        """A model's output, reduced to what is wanted."""
        hidden = {layer: out.hidden_states[layer] for layer in self.hidden}
        given = [entry for entry in out.attentions or () if entry is not None]
        maps = {layer: given[self._place(layer, len(given) + len(self.emptied))] for layer in self.attention}
        return Outputs(logits, hidden, maps)

    def _place(self, layer: int, layers: int) -> int:
        """Where the map of a layer stands among those given."""
        number = layer % (layers + 1)
        return number - 1 - sum(emptied < number for emptied in self.emptied)


class Teaches(Protocol):
    """What answers for the teacher in training: the model itself, or what it said before."""

    def __call__(self, batch: Batch) -> Outputs: ...


class Teacher:
    """The model of a folder or hub name, in a precision of its own; loaded at the first call. Calls are collective."""

    def __init__(self, task: Task, spec: DistillSpec, wanted: Wanted, device: torch.device) -> None:
        self.task, self.spec, self.wanted, self.device = task, spec, wanted, device
        self._model: Any = None
        self._engine: Any = None

    @torch.no_grad()
    def __call__(self, batch: Batch) -> Outputs:
        out = self.predict(batch)
        return self.wanted.of(out, self.task.logits(out, batch))

    @torch.no_grad()
    def predict(self, batch: Batch) -> Any:
        """The model's output; every rank must ask, where it is partitioned."""
        model = self._loaded()
        with torch.autocast(self.device.type, enabled=False):
            return (self._engine or model)(**self.task.inputs_for(model, batch))

    def close(self) -> None:
        """Free the model."""
        if self._engine is not None:
            self._engine.destroy()
        self._model = self._engine = None

    def _loaded(self) -> Any:
        if self._model is None:
            model: Any = self.task.build_model(self.spec.teacher)
            self.wanted.ask(model)
            dtype = DTYPES[self.spec.teacher_dtype]
            self._model = model.to(dtype).eval().requires_grad_(False)
            if self.spec.teacher_zero_stage == 3:
                self._engine = _partitioned(self._model, self.spec.teacher_dtype)
            else:
                self._model.to(self.device)
        return self._model


def _partitioned(model: nn.Module, dtype: str) -> Any:
    """An inference-only engine: each rank holds its part of the weights, gathered layer by layer."""
    import deepspeed

    config: dict[str, Any] = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
    if dtype != "fp32":
        config[dtype] = {"enabled": True}
    engine, *_ = deepspeed.initialize(model=model, config=config)
    engine.eval()
    return engine


def check_vocabulary(task: Task, teacher_tokenizer: Any, teacher: str) -> None:
    """Refuse a teacher that reads other tokens than the student; says which differ."""
    ours, theirs = task.tokenizer.get_vocab(), teacher_tokenizer.get_vocab()
    differ = sorted(token for token in ours.keys() | theirs.keys() if ours.get(token) != theirs.get(token))
    if differ:
        some = ", ".join(f"{token!r} ({ours.get(token)} and {theirs.get(token)})" for token in differ[:5])
        raise UserError(
            f"the teacher {teacher} reads other tokens than the student: {len(differ):,} differ, {some}"
            f"{', ...' if len(differ) > 5 else ''}: take a teacher with the student's tokenizer"
        )
