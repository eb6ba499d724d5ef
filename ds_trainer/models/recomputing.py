"""Gradient checkpointing (arXiv 1604.06174): keep each layer's input alone, and compute the rest again in the backward.

`transformers` does it, in torch's non-reentrant form. What a technique draws or remembers in a layer's forward must be
the same when that forward runs again: it asks `is_recomputing`.
"""

import contextlib
from collections.abc import Iterator
from contextlib import nullcontext
from contextvars import ContextVar
from typing import Any

from ds_trainer.ranks.failures import UserError

_RECOMPUTING = ContextVar("recomputing", default=False)


def is_recomputing() -> bool:
    """Return whether this forward of a layer is the second one, in a backward."""
    return _RECOMPUTING.get()


def can_recompute(model: Any) -> bool:
    return bool(getattr(model, "supports_gradient_checkpointing", False))


def set_recomputing(model: Any, recomputes: bool) -> None:
    """Have a model of `transformers` keep its layers' activations in training, or compute them again.

    UserError where it cannot compute them again.
    """
    if recomputes and not can_recompute(model):
        raise UserError(f"gradient_checkpointing: {type(model).__name__} of transformers does not have it: drop it")
    name = "activation_checkpointing" if hasattr(model, "activation_checkpointing_enable") else "gradient_checkpointing"
    if recomputes:  # transformers 5.23 has renamed the methods
        how = {"use_reentrant": False, "context_fn": lambda: (nullcontext(), _recomputing())}  # 1st and 2nd forward
        getattr(model, f"{name}_enable")(how)
        model.disable_input_require_grads()  # else gradients would run through frozen embeddings and layers
    elif can_recompute(model):
        getattr(model, f"{name}_disable")()


@contextlib.contextmanager
def _recomputing() -> Iterator[None]:
    token = _RECOMPUTING.set(True)
    try:
        yield
    finally:
        _RECOMPUTING.reset(token)
