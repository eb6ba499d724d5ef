"""A model that exits early, on batches: samples that are sure leave, the rest go on as a smaller batch.

DeeBERT (arXiv 2004.12993) exits one sample at a time; here a hook before each layer asks the head there, cuts what the
layer is given to the rows that go on, and ends the forward once nobody is left. The model is the library's own.
Folders: the plain model, usable by `transformers` alone, and beside it `exit_heads.safetensors` and `exits.json`.
"""

from __future__ import annotations

import copy
import threading
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils import ModelOutput

from ds_trainer.config.exit_specs import ExitPolicy, policy_mistake
from ds_trainer.models.layers import encoder_layers
from ds_trainer.models.pretrained import load_trained
from ds_trainer.ranks.failures import UserError
from ds_trainer.techniques.exits.heads import ExitHead, LayerStates, after_layer, has_exits, load_heads, own_head
from ds_trainer.techniques.exits.policy import Decisions

_OF_POSITIONS = frozenset({"rel_embeddings"})
"""What a layer is given with a row for each relative position (DeBERTa): there may be as many as samples."""


@dataclass
class EarlyExitOutput(ModelOutput):
    """`logits` (rows, classes), and in `exit_layers` (rows,) the layers that each sample went through."""

    logits: Tensor | None = None
    exit_layers: Tensor | None = None


class EarlyExitModel(nn.Module):
    """A sequence classifier with exit heads, for inference. `config`, `device` and `dtype` are the model's."""

    def __init__(self, model: Any, heads: nn.ModuleDict, policy: ExitPolicy) -> None:
        super().__init__()
        self.model, self.exit_heads, self.policy = model, heads, policy
        last = len(encoder_layers(model))
        self.layers = [*map(int, heads), last]
        """Where there is a head, from first to last; the last is the model's own."""
        self.regression = model.config.num_labels == 1
        self._own = (own_head(model),)  # its modules are the model's: not registered once more
        self._running = threading.local()
        self._hooks = [after_layer(model, layer, partial(self._go_on, layer)) for layer in range(1, last + 1)]

    def __deepcopy__(self, memo: dict[int, Any]) -> EarlyExitModel:
        """One that exits by itself, whose model does not ask the heads of this one: for torch's quantisation, say."""
        # handles are copied to those of the copied model: this one is never without its hooks
        model, heads, hooks = copy.deepcopy((self.model, self.exit_heads, self._hooks), memo)
        for hook in hooks:
            hook.remove()
        found = EarlyExitModel(model, heads, self.policy)
        found.training = self.training
        memo[id(self)] = found
        return found

    @property
    def config(self) -> Any:
        return self.model.config

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    @property
    def heads(self) -> list[ExitHead]:
        """The heads in the order of `layers`, the own one last."""
        return [*self.exit_heads.values(), *self._own]  # type: ignore[list-item]

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
    ) -> EarlyExitOutput:
        """Run each sample as far as the policy wants; results are in the order of the rows. Keeps no gradient.

        There is no loss, and no hidden states or attentions of samples that have left: what asks for them is refused.
        """
        if not len(input_ids):
            return EarlyExitOutput(logits=self._of_nobody(), exit_layers=self._of_nobody()[:, 0].long())
        walk = self._walk(input_ids, attention_mask, _given(token_type_ids, position_ids))
        assert walk.logits is not None, "all have left"
        # copies made here are plain tensors, unlike what inference mode makes
        return EarlyExitOutput(logits=walk.logits.clone(), exit_layers=walk.exit_layers.clone())

    @torch.inference_mode()
    def _walk(self, input_ids: Tensor, attention_mask: Tensor | None, inputs: dict[str, Tensor]) -> _Walk:
        if attention_mask is not None and bool(attention_mask.all()):
            attention_mask = None  # nothing is padded: without a mask the library's models take a shorter way
        walk = _Walk(self, input_ids, attention_mask)
        self._running.walk = walk
        try:
            self.model(input_ids=input_ids, attention_mask=attention_mask, **inputs)
        except _AllLeft:
            pass
        finally:
            self._running.walk = None
        return walk

    @torch.no_grad()
    def all_logits(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
    ) -> Tensor:
        """What every head says of every sample, in one forward: (heads, rows, classes), the own head last."""
        if not len(input_ids):
            return self._of_nobody().expand(len(self.layers), 0, -1)
        states = LayerStates(self.model, self.layers)
        inputs = _given(token_type_ids, position_ids)
        try:
            self.model(input_ids=input_ids, attention_mask=attention_mask, **inputs)
        finally:
            states.remove()
        found = states.take()
        return torch.stack(
            [head(found[layer], attention_mask) for head, layer in zip(self.heads, self.layers, strict=True)]
        )

    def _of_nobody(self) -> Tensor:
        """(0, classes) logits: the library's models cannot be run on no row at all."""
        return torch.empty(0, self.config.num_labels, dtype=self.dtype, device=self.device)

    def _go_on(self, layer: int, args: Any, kwargs: Any) -> Any:
        walk = getattr(self._running, "walk", None)
        return None if walk is None else walk.after(layer, args, kwargs)


def load_model(folder: str | Path) -> nn.Module:
    """The model of a folder, in evaluation mode, in fp32; one that exits early where the folder has exit heads.

    Exit heads are read from folders only: a hub name gives the plain model.
    Raises ValueError where the folder holds no trained model, or exit heads that are not its own.
    """
    model = load_trained(folder).eval()
    return with_exits(model, Path(folder)).eval() if has_exits(folder) else model


def with_exits(model: Any, folder: Path, policy: ExitPolicy | None = None) -> EarlyExitModel:
    """The model with the heads of the folder, and its policy where no other is given.

    ValueError where the heads or the policy are none of this model.
    """
    heads, saved = load_heads(model, folder)
    early = EarlyExitModel(model, heads, policy or saved.policy)
    mistake = policy_mistake(early.policy, len(heads), early.regression)
    if mistake:
        raise UserError(f"the exits of {folder}: {mistake}")
    return early


def _given(token_type_ids: Tensor | None, position_ids: Tensor | None) -> dict[str, Tensor]:
    """Those that are there, by name: not every model takes all."""
    named = {"token_type_ids": token_type_ids, "position_ids": position_ids}
    return {name: value for name, value in named.items() if value is not None}


class _AllLeft(Exception):  # noqa: N818
    """Ends the forward of a model whose samples have all left."""


class _Walk:
    """One forward: who is still there, and what was said of those who left."""

    def __init__(self, model: EarlyExitModel, input_ids: Tensor, mask: Tensor | None) -> None:
        self.size = len(input_ids)
        self.heads = dict(zip(model.layers, model.heads, strict=True))
        self.last = model.layers[-1]
        self.decisions = Decisions(model.policy, model.regression)
        self.mask = mask
        self.exit_layers = torch.full((self.size,), self.last, device=input_ids.device)
        self.logits: Tensor | None = None
        self._rows: Tensor | None = None  # those still there; None while all are
        self._asked = 0
        self._cut: dict[int, tuple[Tensor, Tensor]] = {}

    def after(self, layer: int, args: Any, kwargs: Any) -> Any:
        """Ask the layer's head, if it has one; give the arguments with which those who stay go on."""
        hidden = args[0] if args else kwargs["hidden_states"]
        if layer in self.heads:
            hidden = self._ask(layer, hidden)
        if self._rows is None:
            return None
        named = {name: value if name in _OF_POSITIONS else self._of_rows(value) for name, value in kwargs.items()}
        if args:
            return (hidden, *map(self._of_rows, args[1:])), named
        return args, named | {"hidden_states": hidden}

    def _ask(self, layer: int, hidden: Tensor) -> Tensor:
        """The states of those who stay; the others' logits are kept."""
        logits = self.heads[layer](hidden, self._of_rows(self.mask))
        if layer == self.last:
            self._leave(layer, logits, self._rows)
            raise _AllLeft
        head, self._asked = self._asked, self._asked + 1
        if len(logits) == 1:
            sure, leaving = None, int(self.decisions.one_is_sure(head, logits))
        else:
            sure = self.decisions.sure(head, logits)
            leaving = int(sure.count_nonzero())
        if leaving == 0:
            return hidden
        if leaving == len(logits):
            self._leave(layer, logits, self._rows)
            raise _AllLeft
        assert sure is not None, "of a single row none or all leave"
        staying = (~sure).nonzero().squeeze(1)
        rows = torch.arange(self.size, device=sure.device) if self._rows is None else self._rows
        self._leave(layer, logits[sure], rows[sure])
        self._rows = rows[staying]
        self.decisions.keep(staying)
        self._cut.clear()
        return hidden[staying]

    def _leave(self, layer: int, logits: Tensor, rows: Tensor | None) -> None:
        if rows is None:
            self.logits = logits
            self.exit_layers.fill_(layer)
            return
        if self.logits is None:
            self.logits = logits.new_empty(self.size, logits.shape[-1])
        self.logits[rows] = logits
        self.exit_layers[rows] = layer

    def _of_rows(self, value: Any) -> Any:
        """What has a row for each sample, cut to those still there; all else as it is."""
        if self._rows is None:
            return value
        if isinstance(value, tuple):
            return tuple(map(self._of_rows, value))
        if not isinstance(value, Tensor) or value.dim() < 2 or len(value) != self.size:
            return value
        # layers are given the same tensors: cut once. The tensor is kept, so that its id stays its own
        _, cut = self._cut.get(id(value), (None, None))
        if cut is None:
            cut = value.index_select(0, self._rows)
            self._cut[id(value)] = (value, cut)
        return cut
