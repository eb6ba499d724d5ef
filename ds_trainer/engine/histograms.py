"""Histograms of what an engine trains, for TensorBoard: weights, scores, and the gradients of both.

ZeRO frees gradients as it steps, and no rank has more than its part of them. So every rank counts the values that it is
about to step, in a hook of the optimizer, and only bounds and counts go over the network: no matrix is gathered. The
gradients are those that the optimizer is given: averaged over the ranks, without the loss scale, clipped.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ds_trainer.engine import reshard
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
    """The histograms of the steps that are due. Make it after the engine has resumed, which may replace its tensors."""

    def __init__(self, engine: Engine, due: Callable[[int], bool]) -> None:
        self._engine, self._due = engine, due
        self._slices = [part for part in reshard.slices(engine) if part.length]
        self._sizes: dict[str, int] = {}
        for parameter, name in engine.param_names.items():
            if parameter.requires_grad:
                size = getattr(parameter, "ds_numel", parameter.numel())
                self._sizes |= {_tag(name): size, f"gradients/{name}": size}
        self._histograms: dict[str, Histogram] = {}
        for optimizer in reshard.stepping(engine):
            optimizer.register_step_pre_hook(self._before_step)

    def take(self) -> dict[str, Histogram]:
        """Return the histograms of the last step that was due, by tag, on every rank; empty where it was skipped."""
        histograms, self._histograms = self._histograms, {}
        return histograms

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Count the values that the optimizer is about to step; ZeRO calls it for one group after the other."""
        if not self._due(int(self._engine.global_steps) + 1):
            return
        stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        scale = getattr(optimizer, "grad_scale", None)  # a fused optimizer divides by torch's loss scale itself
        values: dict[str, Tensor] = {}
        for part in self._slices:
            if id(part.master) in stepped:
                place = slice(part.start, part.start + part.length)
                values[_tag(part.name)] = part.master.detach().reshape(-1)[place].float()
                if part.master.grad is not None:
                    gradient = part.master.grad.reshape(-1)[place].float()
                    values[f"gradients/{part.name}"] = gradient if scale is None else gradient / scale
        self._histograms |= self._counted(values)

    def _counted(self, values: dict[str, Tensor]) -> dict[str, Histogram]:
        """Count over the parts of all ranks, of which any may have none; collective.

        Without ZeRO every rank has all values, and would count each once per rank: so the counts are scaled to the size
        of the parameter.
        """
        tags, device = list(self._sizes), self._engine.device
        bounds = torch.full((len(tags), 2), -math.inf, device=device)
        for bound, tag in zip(bounds, tags, strict=True):
            if tag in values:
                low, high = values[tag].aminmax()
                bound.copy_(torch.stack([-low, high]))  # one maximum over the ranks gives both
        limits = zip(tags, distributed.maximum(bounds).tolist(), strict=True)
        ranges = {tag: _widened(-low, high) for tag, (low, high) in limits if math.isfinite(low + high)}
        rows = torch.zeros(len(ranges), _BUCKETS + 2, dtype=torch.float64, device=device)
        for row, (tag, bounds_of_tag) in zip(rows, ranges.items(), strict=True):
            if tag in values:
                row[:_BUCKETS] = values[tag].histc(_BUCKETS, *bounds_of_tag)
                row[_BUCKETS] = values[tag].sum(dtype=torch.float64)
                row[_BUCKETS + 1] = torch.linalg.vector_norm(values[tag], dtype=torch.float64) ** 2
        histograms = {}
        for (tag, bounds_of_tag), row in zip(ranges.items(), distributed.mean(rows).cpu(), strict=True):
            *counts, total, squares = (row * (self._sizes[tag] / row[:_BUCKETS].sum())).tolist()
            histograms[tag] = Histogram(*bounds_of_tag, counts, total, squares)
        return histograms


def _tag(name: str) -> str:
    return f"{'scores' if name.endswith('.mask_scores') else 'weights'}/{name}"


def _widened(low: float, high: float) -> tuple[float, float]:
    """Return bounds between which buckets have a width, also where all values are the same."""
    return (low, high) if low < high else (low - 1, high + 1)
