"""Compute language-model heads only at the positions that carry a loss.

A head over the vocabulary can cost more than the encoder below it, and masked language modelling needs it at 15% of
the positions. Hooks pick those positions from the hidden states that the library's own head receives, whatever the
architecture: the output of the base model, or of that model's own decoder (OPT, BART). The task chooses the positions.
"""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from ds_trainer.ranks.failures import UserError

NAME = "head_positions"
"""The argument that the hooks add to the model's forward."""


def take_head_positions(model: Any) -> Any:
    """Let the model's forward take `head_positions`, and return logits (1, n, vocabulary) at those alone.

    They are (n,) int64 indices into the flattened batch x length. Without them the model behaves as before. Requested
    hidden states are (batch, length, width) either way. The hooks follow the model into copies and engines, and are not
    saved in folders. A forward that never uses its positions is an error. Returns the model.
    """
    encoder = model.base_model
    if encoder is model:
        raise UserError(f"{type(model).__name__} has no encoder below its head: use another architecture")
    head = _HeadPositions("use_cache" in inspect.signature(model.forward).parameters)
    model.register_forward_pre_hook(head.take, with_kwargs=True)
    encoder.register_forward_hook(head.select)
    decoder = getattr(encoder, "decoder", None)
    if isinstance(decoder, PreTrainedModel):
        decoder.register_forward_hook(head.select)
    model.register_forward_hook(head.check)
    model.register_forward_hook(head.forget, always_call=True)
    return model


class _HeadPositions:
    """The hooks' state during one forward. The hooks are its methods, so that copying a model copies the state."""

    def __init__(self, has_cache: bool) -> None:
        self.has_cache = has_cache
        self.wanted: Tensor | None = None

    def take(self, model: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        self.wanted = kwargs.pop(NAME, None)
        if self.wanted is not None and self.has_cache:
            kwargs.setdefault("use_cache", False)  # a loss needs no cache, and filling it copies all keys and values
        return args, kwargs

    def select(self, encoder: nn.Module, args: Any, output: Any) -> Any:
        """Pick the positions in the innermost module, which runs first; the modules around it hand its output on."""
        if self.wanted is None:
            return output
        rows = output[0].flatten(0, 1).index_select(0, self.wanted).unsqueeze(0)
        self.wanted = None
        if isinstance(output, tuple):
            return (rows, *output[1:])
        output.last_hidden_state = rows
        return output

    def check(self, model: nn.Module, args: Any, output: Any) -> None:
        if self.wanted is not None:
            raise UserError(
                f"the head of {type(model).__name__} does not read the output of its base model, so that logits cannot "
                f"be computed at some positions alone: use another architecture"
            )

    def forget(self, model: nn.Module, args: Any, output: Any) -> None:
        """Drop the positions, also after a forward that raised: they are not for the next call."""
        self.wanted = None
