"""Histograms of what an engine trains, for TensorBoard: weights, scores, and the gradients of both.

ZeRO frees gradients as it steps, and no rank has more than its part of them. So every rank counts what it is about to
step itself, in a hook of the optimizer, and only bounds and counts go over the network: no matrix is gathered. The
gradients are those that the optimizer is given: averaged over the ranks, without the loss scale, clipped.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ds_trainer.engine import universal
from ds_trainer.engine.engine import Engine
from ds_trainer.ranks import distributed

_BUCKETS = 64


@dataclass(frozen=True)
class Histogram:
    """How many values lie in each of equally wide buckets from `low` to `high`, and their sum and sum of squares."""

    low: float
    high: float
    counts: list[float]
    total: float
    squares: float


class Histograms:
    """The histograms of the steps that are due; make it after the engine has resumed, which may replace its tensors."""

    def __init__(self, engine: Engine, due: Callable[[int], bool]) -> None:
        self._engine, self._due = engine, due
        self._own = [own for own in universal.slices(engine) if own.length]
        self._sizes: dict[str, int] = {}
        for parameter, name in engine.param_names.items():
            if parameter.requires_grad:
                size = getattr(parameter, "ds_numel", parameter.numel())
                self._sizes |= {_tag(name): size, f"gradients/{name}": size}
        self._found: dict[str, Histogram] = {}
        for optimizer in universal.stepping(engine):
            optimizer.register_step_pre_hook(self._before_step)

    def take(self) -> dict[str, Histogram]:
        """Those of the last step that was due, by tag, on every rank; empty where it was skipped."""
        found, self._found = self._found, {}
        return found

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Count what the optimizer is about to step; with ZeRO it is called for one group after the other."""
        if not self._due(int(self._engine.global_steps) + 1):
            return
        stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        scale = getattr(optimizer, "grad_scale", None)  # a fused optimizer takes torch's loss scale off itself
        values: dict[str, Tensor] = {}
        for own in self._own:
            if id(own.master) in stepped:
                part = slice(own.start, own.start + own.length)
                values[_tag(own.name)] = own.master.detach().reshape(-1)[part].float()
                if own.master.grad is not None:
                    gradient = own.master.grad.reshape(-1)[part].float()
                    values[f"gradients/{own.name}"] = gradient if scale is None else gradient / scale
        self._found |= self._counted(values)

    def _counted(self, values: dict[str, Tensor]) -> dict[str, Histogram]:
        """Over the parts of all ranks, of which any may have none; collective.

        Without ZeRO every rank has all values: hence the counts are scaled to the size of the parameter.
        """
        tags, device = list(self._sizes), self._engine.device
        bounds = torch.full((len(tags), 2), -math.inf, device=device)
        for bound, tag in zip(bounds, tags, strict=True):
            if tag in values:
                low, high = values[tag].aminmax()
                bound.copy_(torch.stack([-low, high]))
        limits = zip(tags, distributed.maximum(bounds).tolist(), strict=True)
        ranges = {tag: (-low, high) for tag, (low, high) in limits if math.isfinite(low + high)}
        rows = torch.zeros(len(ranges), _BUCKETS + 2, dtype=torch.float64, device=device)
        for row, (tag, (low, high)) in zip(rows, ranges.items(), strict=True):
            if tag in values:
                row[:_BUCKETS] = values[tag].histc(_BUCKETS, *_widened(low, high))
                row[_BUCKETS] = values[tag].sum(dtype=torch.float64)
                row[_BUCKETS + 1] = torch.linalg.vector_norm(values[tag], dtype=torch.float64) ** 2
        found = {}
        for (tag, (low, high)), row in zip(ranges.items(), distributed.mean(rows).cpu(), strict=True):
            *counts, total, squares = (row * (self._sizes[tag] / row[:_BUCKETS].sum())).tolist()
            found[tag] = Histogram(*_widened(low, high), counts, total, squares)
        return found


def _tag(name: str) -> str:
    return f"{'scores' if name.endswith('.mask_scores') else 'weights'}/{name}"


def _widened(low: float, high: float) -> tuple[float, float]:
    """Bounds between which buckets have a width, also where all values are the same."""
    return (low, high) if low < high else (low - 1, high + 1)
