"""How many heads and neurons each layer keeps under a budget for all layers together, by the loss that removing adds.

Optimal brain surgeon gives the error of a block's outputs at every number of decisions. How much such an error changes
the model's answers differs from block to block, so it is measured: with one block cut at a time, to a few sizes, the
divergence of the answers from the dense model's. Dynamic programming then chooses the sizes of the smallest sum.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ds_trainer.config.cut_specs import CutSpec
from ds_trainer.models.cut.blocks import CutBlock, OuterCut, with_grams
from ds_trainer.models.cut.fitting import Replacement
from ds_trainer.models.cut.layerwise import Calibration, Gram
from ds_trainer.ranks import distributed
from ds_trainer.ranks.failures import UserError
from ds_trainer.ranks.progress import progress

MEASURED = (0.0, 0.25, 0.5)
"""The shares of a block's decisions at which the divergence is measured."""
_SIZES = 32
"""How many sizes of a block are considered, beside 0."""
_BINS = 4096
"""The resolution of the budget in the dynamic programming."""

_UNITS = {
    "keep": "the weights in heads and neurons",
    "target_flops": "the encoder's FLOPs",
    "target_latency": "the encoder's seconds",
}


@dataclass(frozen=True)
class Prices:
    """What one decision of each block costs, by the names of `cut_places`, and what all may cost together.

    The spec's target is a share of `total`, which also counts what no cut can remove, such as norms.
    """

    each: Mapping[str, float]
    budget: float
    total: float


@dataclass(frozen=True)
class Curve:
    """The sizes that a block may have, (sizes,) ascending, and the loss that each one adds to the model."""

    sizes: NDArray[np.int64]
    losses: NDArray[np.float64]


@dataclass(frozen=True)
class _Trial:
    """A block's errors (count + 1,) by the number of decisions that are removed, and replacements by size."""

    errors: NDArray[np.float64]
    replacements: Mapping[int, Replacement]


def allocate(
    model: Any,
    places: Mapping[str, CutBlock],
    prices: Prices,
    calibration: Calibration,
    spec: CutSpec,
    device: torch.device,
) -> dict[str, int]:
    """Return how many decisions each block of `cut_places` keeps; collective. The model stays as it is.

    UserError as `check_budget` raises it.
    """
    check_budget(places, prices, spec)
    (target,), share = spec.targets, spec.share
    trials = {
        place.name: distributed.on_main(partial(_trial, place, gram, spec, calibration.check_alone))
        for place, gram in with_grams(model, places, calibration, device, "ordering heads and neurons")
    }
    losses = _measured_losses(model.to(device), places, trials, calibration)
    model.cpu()
    counts = cheapest_sizes({name: _curve(place, trials[name], losses[name]) for name, place in places.items()}, prices)
    for kind, noun, remedy in (("attention", "head", "set min_heads, or raise"), ("feed_forward", "neuron", "raise")):
        kept = [counts[name] for name, place in places.items() if place.block.kind == kind]
        if kept and not any(kept):
            distributed.warn(f"cut: no {noun} remains in any layer: {remedy} {target} (now {share:.3g})")
    return counts


def check_budget(places: Mapping[str, CutBlock], prices: Prices, spec: CutSpec) -> None:
    """Raise UserError where the decisions that must stay cost more than the budget."""
    least = sum(place.lowest * prices.each[name] for name, place in places.items())
    if least > prices.budget:
        (target,), share = spec.targets, spec.share
        needed = share + (least - prices.budget) / prices.total
        heads, remedy = "", ""
        if spec.min_heads:
            heads, remedy = "the heads that must stay, and ", f", or lower min_heads (now {spec.min_heads})"
        raise UserError(
            f"cut: {heads}all that no cut removes cost {needed:.1%} of {_UNITS[target]}, and {target} is {share:.3g}: "
            f"raise it{remedy}"
        )


def _trial(place: CutBlock, gram: Gram, spec: CutSpec, check: Callable[[], None]) -> _Trial:
    cut = OuterCut(place, gram, spec, check)
    sizes = sorted({max(place.lowest, round(share * place.count)) for share in MEASURED})
    return _Trial(np.cumsum([0.0, *cut.removal.errors]), {size: cut.keeping(size) for size in sizes})


@torch.no_grad()
def _measured_losses(
    model: Any, places: Mapping[str, CutBlock], trials: Mapping[str, _Trial], calibration: Calibration
) -> dict[str, dict[int, float]]:
    """Return how far the model's answers move with one block replaced, by block and size; collective."""
    dense = calibration.answers(model)
    losses: dict[str, dict[int, float]] = {}
    for name, place in progress(places.items(), "measuring the loss of cuts of one block", "block"):
        outer = place.outer
        before = {key: value.clone() for key, value in outer.state_dict().items()}
        losses[name] = {}
        for size, replacement in trials[name].replacements.items():
            replacement.write(outer)
            losses[name][size] = calibration.divergence(dense, calibration.answers(model))
        outer.load_state_dict(before)
    return losses


def _curve(place: CutBlock, trial: _Trial, losses: Mapping[int, float]) -> Curve:
    """Return the loss at every size: those measured, interpolated linearly in the error of the block's outputs."""
    shares = np.linspace(place.lowest / place.count, 1, _SIZES + 1)
    sizes = np.unique(np.append(np.round(shares * place.count).astype(np.int64), place.lowest))
    measured = sorted(losses, reverse=True)
    errors = trial.errors[[0, *(place.count - size for size in measured)]]
    known = np.maximum.accumulate([0.0, *(losses[size] for size in measured)])
    return Curve(sizes, np.interp(trial.errors[place.count - sizes], errors, known))


def cheapest_sizes(curves: dict[str, Curve], prices: Prices) -> dict[str, int]:
    """Return the sizes whose losses have the smallest sum within the budget, by dynamic programming.

    The smallest size of every block must fit the budget. What larger ones cost beyond that is rounded up to bins of the
    rest of the budget, so that the choice does not exceed it.
    """
    rest = prices.budget - sum(curve.sizes[0] * prices.each[name] for name, curve in curves.items())
    used = {name: _bins((curve.sizes - curve.sizes[0]) * prices.each[name], rest) for name, curve in curves.items()}
    best = np.zeros(_BINS + 1)  # the least sum of losses of the blocks so far, within each number of bins
    chosen: dict[str, NDArray[np.int64]] = {}
    for name, curve in curves.items():
        sums = np.full((len(curve.sizes), _BINS + 1), np.inf)
        for row, (bins, loss) in enumerate(zip(used[name], curve.losses, strict=True)):
            if bins <= _BINS:
                sums[row, bins:] = best[: _BINS + 1 - bins] + loss
        chosen[name], best = sums.argmin(0), sums.min(0)
    sizes: dict[str, int] = {}
    budget = _BINS
    for name in reversed(curves):
        row = chosen[name][budget]
        sizes[name] = int(curves[name].sizes[row])
        budget -= int(used[name][row])
    return sizes


def _bins(costs: NDArray[np.floating[Any]], budget: float) -> NDArray[np.int64]:
    """Return how many bins of the budget each cost takes: too many, _BINS + 1, where it is above the budget."""
    bins = np.where(costs > 0, _BINS + 1, 0)
    fits = (costs > 0) & (costs <= budget)
    bins[fits] = np.ceil(costs[fits] / budget * _BINS - 1e-6)
    return bins
