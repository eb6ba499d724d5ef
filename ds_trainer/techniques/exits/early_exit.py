"""A model that exits early, on batches: samples that are sure leave, and the rest go on as a smaller batch.

DeeBERT (arXiv 2004.12993) exits one sample at a time. Here a hook before each layer runs the exit head of the layer
before, selects the rows of the samples that go on from the layer's arguments, and ends the forward once all have left.
The model inside is the library's own, and its folder is an ordinary one: `exit_heads.safetensors` and `exits.json` lie
beside the weights.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils import ModelOutput

from ds_trainer.config.exit_specs import ExitPolicy, check_policy
from ds_trainer.models.layers import encoder_layers
from ds_trainer.models.pretrained import load_trained
from ds_trainer.techniques.exits.heads import ExitHead, LayerStates, after_layer, has_exits, load_heads, model_head
from ds_trainer.techniques.exits.policy import RunningPolicy

_NOT_BY_SAMPLE = frozenset({"rel_embeddings"})
"""Arguments of a layer with a row for each relative position (DeBERTa), of which there may be as many as samples."""


@dataclass
class EarlyExitOutput(ModelOutput):
    """`logits` as the model gives them, and `exit_layers` (batch,): how many layers each sample went through."""

    logits: Tensor | None = None
    exit_layers: Tensor | None = None


class EarlyExitModel(nn.Module):
    """A classifier of sequences or of tokens with exit heads, for inference.

    `layers` has the layer of each head in ascending order; the last is the depth of the model, where its own head is.
    A sequence leaves with all its tokens; the `special_tokens` do not count in how sure a head is of it.
    """

    special_tokens: Tensor

    def __init__(
        self, model: Any, heads: nn.ModuleDict, policy: ExitPolicy, special_tokens: Sequence[int] = ()
    ) -> None:
        super().__init__()
        self.model, self.exit_heads, self.policy = model, heads, policy
        last = len(encoder_layers(model))
        self.layers = [*map(int, heads), last]
        self.regression = model.config.num_labels == 1
        self.register_buffer("special_tokens", torch.tensor(special_tokens, dtype=torch.int64), persistent=False)
        self._model_head = (model_head(model),)  # in a tuple: its modules are registered as the model's already
        # by thread, since the hooks of one model serve all threads; a plain dict, so that the model can be copied
        self._running: dict[int, _RunningBatch] = {}
        for layer in range(1, last + 1):
            after_layer(model, layer, partial(self._after_layer, layer))

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
        """The heads in the order of `layers`, the model's own last."""
        return [*self.exit_heads.values(), *self._model_head]  # type: ignore[list-item]

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
    ) -> EarlyExitOutput:
        """Run each sample as far as the policy requires; results are in the order of the batch, without gradient.

        Labels are refused, since no loss is computed, and so are requests for hidden states and attentions, since the
        samples that leave early have none of the later layers.
        """
        if attention_mask is not None and bool(attention_mask.all()):
            attention_mask = None  # without padding the library's models take a faster way if there is no mask
        named = {"token_type_ids": token_type_ids, "position_ids": position_ids}
        inputs = {name: value for name, value in named.items() if value is not None}  # not every model takes them
        with torch.inference_mode():
            running = self._running[threading.get_ident()] = _RunningBatch(self, input_ids, attention_mask)
            try:
                self.model(input_ids=input_ids, attention_mask=attention_mask, **inputs)
            except _AllLeft:
                pass
            finally:
                del self._running[threading.get_ident()]
        assert running.logits is not None, "all have left"
        # tensors made in inference mode cannot be used in autograd later; copies made outside of it can
        return EarlyExitOutput(logits=running.logits.clone(), exit_layers=running.exit_layers.clone())

    @torch.no_grad()
    def all_logits(self, input_ids: Tensor, attention_mask: Tensor | None = None, **inputs: Tensor) -> Tensor:
        """Return the logits of all heads, the model's own last, from one forward: (heads, batch, ...)."""
        states = LayerStates(self.model, self.layers)
        try:
            self.model(input_ids=input_ids, attention_mask=attention_mask, **inputs)
        finally:
            states.remove()
        hidden = states.take()
        pairs = zip(self.heads, self.layers, strict=True)
        return torch.stack([head(hidden[layer], attention_mask) for head, layer in pairs])

    def counted(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor | None:
        """Return which tokens count in how sure a head is of a sequence, (batch, length): those of the text.

        All that are attended count where none is of the text. None where the heads classify whole sequences.
        """
        if self._model_head[0].pooling:
            return None
        attended = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        of_text = attended.bool() & ~torch.isin(input_ids, self.special_tokens)
        return torch.where(of_text.any(-1, keepdim=True), of_text, attended.bool())

    def _after_layer(self, layer: int, args: Any, kwargs: Any) -> Any:
        running = self._running.get(threading.get_ident())
        return None if running is None else running.after(layer, args, kwargs)


def load_for_inference(folder: str | Path) -> nn.Module:
    """Load the model of a folder in fp32, in evaluation mode; it exits early where the folder has exit heads.

    A hub name gives the plain model: exit heads are read from folders only. ValueError where the folder holds no
    trained model, or exit heads of another one.
    """
    model = load_trained(folder).eval()
    return with_exits(model, Path(folder)).eval() if has_exits(folder) else model


def with_exits(model: Any, folder: Path, policy: ExitPolicy | None = None) -> EarlyExitModel:
    """Give the model the heads of the folder, and the policy given or else the folder's.

    ValueError where heads or policy do not fit the model.
    """
    heads, saved = load_heads(model, folder)
    early = EarlyExitModel(model, heads, policy or saved.policy, saved.special_tokens)
    check_policy(early.policy, len(heads), early.regression)
    return early


class _AllLeft(Exception):  # noqa: N818
    """Ends the forward of a model whose samples have all left."""


class _RunningBatch:
    """A batch in one forward: which of its samples are still in it, and the results of those that left."""

    def __init__(self, model: EarlyExitModel, input_ids: Tensor, mask: Tensor | None) -> None:
        self.size, self.mask = len(input_ids), mask
        self.heads = dict(zip(model.layers, model.heads, strict=True))
        self.last = model.layers[-1]
        self.policy, self.counted = RunningPolicy(model.policy), model.counted(input_ids, mask)
        self.exit_layers = torch.full((self.size,), self.last, device=input_ids.device)
        self.logits: Tensor | None = None
        self._samples = torch.arange(self.size, device=input_ids.device)  # indices of those still in the batch
        self._next_head = 0
        self._selected: dict[int, tuple[Tensor, Tensor]] = {}

    def after(self, layer: int, args: Any, kwargs: Any) -> Any:
        """Run the head of the layer, if it has one; return the next layer's arguments, for the samples that stay."""
        hidden = args[0] if args else kwargs["hidden_states"]
        if layer in self.heads:
            hidden = self._staying(layer, hidden)
        if len(self._samples) == self.size:
            return None  # the arguments stay as they are
        named = {name: value if name in _NOT_BY_SAMPLE else self._select(value) for name, value in kwargs.items()}
        if args:
            return (hidden, *map(self._select, args[1:])), named
        return args, named | {"hidden_states": hidden}

    def _staying(self, layer: int, hidden: Tensor) -> Tensor:
        """Record the logits of the samples that leave here; return the states of those that stay."""
        logits = self.heads[layer](hidden, self._select(self.mask))
        head, self._next_head, counted = self._next_head, self._next_head + 1, self._select(self.counted)
        if layer == self.last or (len(logits) == 1 and self.policy.one_is_sure(head, logits, counted)):
            self._leave(layer, logits, self._samples)
            raise _AllLeft
        if len(logits) == 1:
            return hidden
        sure = self.policy.sure(head, logits, counted)
        staying = (~sure).nonzero().squeeze(1)
        if len(staying) == len(logits):
            return hidden
        self._leave(layer, logits[sure], self._samples[sure])
        if len(staying) == 0:
            raise _AllLeft
        self._samples = self._samples[staying]
        self.policy.keep(staying)
        self._selected.clear()
        return hidden[staying]

    def _leave(self, layer: int, logits: Tensor, samples: Tensor) -> None:
        if self.logits is None:
            self.logits = logits.new_empty(self.size, *logits.shape[1:])
        self.logits[samples] = logits
        self.exit_layers[samples] = layer

    def _select(self, value: Any) -> Any:
        """Select the rows of the samples still in the batch, from a tensor with a row for each, or a tuple of such.

        All else is returned as it is.
        """
        if len(self._samples) == self.size:
            return value
        if isinstance(value, tuple):
            return tuple(map(self._select, value))
        if not isinstance(value, Tensor) or value.dim() < 2 or len(value) != self.size:
            return value
        # all layers get the same tensors, which are reduced once; keeping the tensor keeps its id from being reused
        if id(value) not in self._selected:
            self._selected[id(value)] = (value, value.index_select(0, self._samples))
        return self._selected[id(value)][1]
