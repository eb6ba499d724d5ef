"""Calibration sets of random tokens for tiny models, and a linear layer's inputs as plain hooks see them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from support.zeroed import inputs_of
from torch import Tensor

from ds_trainer.cuts.calibration import Calibration

CPU = torch.device("cpu")


def calibration(batches: int = 8) -> Calibration:
    """Batches of two rows, one of them padded: 15 tokens in each. Answers are the model's first output."""
    inputs = [inputs_of(seed) for seed in range(batches)]
    return Calibration(
        inputs=inputs,
        attended=[batch["attention_mask"].bool() for batch in inputs],
        answers=lambda model: answers_of(model, inputs),
        divergence=lambda dense, cut: float((dense - cut).square().mean()),
        loss=lambda model, number: model(**inputs[number])[0].square().sum(),
    )


@torch.no_grad()
def answers_of(model: Any, inputs: Iterable[dict[str, Tensor]]) -> Tensor:
    """The first output of each row, or of each token that is attended."""
    parts = []
    for batch in inputs:
        out = model(**batch)[0]
        parts.append(out if out.dim() == 2 else out[batch["attention_mask"].bool()])
    return torch.cat(parts)


@torch.no_grad()
def inputs_seen(model: Any, names: Iterable[str], given: Calibration) -> dict[str, Tensor]:
    """The inputs (tokens, in), in fp64, that linear layers get at attended positions when the whole model runs."""
    seen: dict[str, list[Tensor]] = {name: [] for name in names}
    hooks = [
        model.get_submodule(name).register_forward_pre_hook(lambda _, args, name=name: seen[name].append(args[0]))
        for name in seen
    ]
    for batch in given.inputs:
        model(**batch)
    for hook in hooks:
        hook.remove()
    return {
        name: torch.cat([x.view(*at.shape, -1)[at] for x, at in zip(calls, given.attended, strict=True)]).double()
        for name, calls in seen.items()
    }
