"""Compute language-model heads only at the positions that carry a loss.

A head over the vocabulary can cost more than the encoder below it, and masked language modelling needs its logits at
15% of the positions. Hooks cut the hidden states down to these positions before they reach the model's head. The hidden
states are the output of the base model, or of the decoder inside it (OPT, BART). The task chooses the positions.
"""

import inspect
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from ds_trainer.ranks.failures import UserError

NAME = "head_positions"
"""The argument that the hooks add to the forward of a model."""


def take_head_positions(model: Any) -> Any:
    """Let the model's forward take `head_positions`, and return logits (1, n, vocabulary) at those alone.

    The positions are (n,) int64 indices into the flattened batch x length; without them the model behaves as before.
    Hidden states in the output are (batch, length, width) either way. Copies of the model and engines keep the hooks,
    saved folders do not. Returns the model, as it is where it takes them already.
    """
    if any(isinstance(getattr(hook, "__self__", None), _HeadPositions) for hook in model._forward_hooks.values()):
        return model
    encoder = model.base_model
    if encoder is model:
        raise UserError(f"{type(model).__name__} has no encoder below its head: use another architecture")
    head = _HeadPositions("use_cache" in inspect.signature(model.forward).parameters)
    model.register_forward_pre_hook(head.take, with_kwargs=True)
    encoder.register_forward_hook(head.select)
    decoder = getattr(encoder, "decoder", None)
    if isinstance(decoder, PreTrainedModel):
        decoder.register_forward_hook(head.select)
    model.register_forward_hook(head.forget, always_call=True)
    return model


class _HeadPositions:
    """The positions of one forward, between its hooks. These are bound methods, so that a model's copy has its copy."""

    def __init__(self, has_cache: bool) -> None:
        self.has_cache = has_cache
        self.wanted: Tensor | None = None

    def take(self, model: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        self.wanted = kwargs.pop(NAME, None)
        if self.wanted is not None and self.has_cache:
            kwargs.setdefault("use_cache", False)  # a loss needs no cache, whose filling copies all keys and values
        return args, kwargs

    def select(self, encoder: nn.Module, args: Any, output: Any) -> Any:
        """Pick the positions from the output of a decoder or base model, whichever ends first.

        The modules around it pass its output on, and must not pick from it again.
        """
        if self.wanted is None:
            return output
        rows = output[0].flatten(0, 1).index_select(0, self.wanted).unsqueeze(0)
        self.wanted = None
        if isinstance(output, tuple):
            return (rows, *output[1:])
        output.last_hidden_state = rows
        return output

    def forget(self, model: nn.Module, args: Any, output: Any) -> None:
        """Drop the positions also after a forward that raised: the next call must not use them."""
        self.wanted = None
