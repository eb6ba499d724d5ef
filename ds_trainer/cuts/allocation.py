"""How many heads and neurons each layer keeps under a budget for all layers together, by the loss that removing adds.

Optimal brain surgeon gives the error of a block's outputs at every number of decisions. How much such an error changes
the model's answers differs from block to block, so it is measured: with one block cut at a time, to a few sizes, the
divergence of the answers from the dense model's. Dynamic programming then chooses the sizes of the smallest sum.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ds_trainer.cuts.blocks import CutBlock, OuterCut
from ds_trainer.cuts.calibration import Calibration
from ds_trainer.cuts.layerwise import grams_of_whole, resumed
from ds_trainer.cuts.surgeon import Gram, Replacement
from ds_trainer.models.costs import decision_flops, encoder_flops, measured_seconds
from ds_trainer.models.layers import encoder_layers
from ds_trainer.ranks import distributed
from ds_trainer.ranks.failures import UserError
from ds_trainer.ranks.progress import progress
from ds_trainer.recipe.cut_specs import CutSpec

MEASURED_SHARES = (0.0, 0.25, 0.5)
"""The shares of a block's decisions at which the divergence is measured."""
_SIZES = 32
"""How many sizes of a block are considered, beside 0."""
_BINS = 4096
"""The resolution of the budget in the dynamic programming."""


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


def prices_of(model: Any, places: Mapping[str, CutBlock], spec: CutSpec, device: torch.device) -> Prices:
    """Return what decisions cost in the spec's unit: weights, operations, or seconds measured on rank 0's device."""
    if spec.target_latency is not None:
        by_kind, total = distributed.on_main(partial(measured_seconds, model, spec.cost_tokens, device))
        each = {name: by_kind[place.block.kind] for name, place in places.items()}
    elif spec.target_flops is not None:
        each = {
            name: decision_flops(place.block, place.layer, model.config, spec.cost_tokens)
            for name, place in places.items()
        }
        total = encoder_flops(model, spec.cost_tokens)
    else:
        weights = {name: sum(linear.weight.numel() for linear in place.linears) for name, place in places.items()}
        each = {name: weights[name] / place.count for name, place in places.items()}
        total = sum(weights.values())
    removable = sum(each[name] * place.count for name, place in places.items())
    return Prices(each, spec.share * total - (total - removable), total)


def check_budget(places: Mapping[str, CutBlock], prices: Prices, spec: CutSpec) -> None:
    """Raise UserError where the decisions that must stay cost more than the budget."""
    least = sum(place.lowest * prices.each[name] for name, place in places.items())
    if least > prices.budget:
        (target,), share = spec.targets, spec.share
        needed = share + (least - prices.budget) / prices.total
        raise UserError(
            f"cut: {target} is {share:.3g}, and the heads that must stay, with all that no cut removes, cost "
            f"{needed:.1%}: raise it, or lower min_heads (now {spec.min_heads})"
        )


@torch.no_grad()
def allocate(
    model: Any, places: Mapping[str, CutBlock], prices: Prices, calibration: Calibration, spec: CutSpec
) -> tuple[dict[str, CutBlock], dict[str, int]]:
    """Return the blocks of `cut_places` with their orders, and how many decisions each one keeps; collective.

    The orders are those of the dense model: ordering again on the inputs of a partly cut model did no better. The model
    stays as it is. UserError as `check_budget` raises it.
    """
    check_budget(places, prices, spec)

    def tried(place: CutBlock, gram: Gram) -> tuple[Sequence[int], NDArray[np.float64], dict[int, Replacement]]:
        """Return the order, the errors by the number of removed decisions, (count + 1,), and replacements by size."""
        cut = OuterCut(place, gram, spec)
        sizes = sorted({max(place.lowest, round(share * place.count)) for share in MEASURED_SHARES})
        return cut.order, np.cumsum([0.0, *cut.errors]), {size: cut.keeping(size) for size in sizes}

    outers = {name: place.outer for name, place in places.items()}
    trials = {
        name: distributed.on_main(partial(tried, places[name], gram))
        for name, gram in grams_of_whole(model, outers, calibration, "ordering heads and neurons")
    }
    model.to(calibration.device)
    run = partial(calibration.answers, model)
    dense, curves, count = run(), dict[str, Curve](), len(encoder_layers(model))
    for layer in progress(resumed(model, run), "measuring the loss of cuts of one block", "layer", count):
        for name in (name for name in trials if places[name].layer is layer):
            outer, (_, errors, replacements) = places[name].outer, trials[name]
            before = {key: value.clone() for key, value in outer.state_dict().items()}
            losses = {}
            for size, replacement in replacements.items():
                replacement.write(outer)
                losses[size] = calibration.divergence(dense, run())
            outer.load_state_dict(before)
            curves[name] = _curve(places[name], errors, losses)
    model.cpu()
    ordered = {name: replace(places[name], order=order) for name, (order, _, _) in trials.items()}
    return ordered, cheapest_sizes(curves, prices)


def _curve(place: CutBlock, errors: NDArray[np.float64], losses: Mapping[int, float]) -> Curve:
    """Return the loss at every size: those measured, interpolated linearly in the error of the block's outputs."""
    shares = np.linspace(place.lowest / place.count, 1, _SIZES + 1)
    sizes = np.unique(np.append(np.round(shares * place.count).astype(np.int64), place.lowest))
    measured = sorted(losses, reverse=True)
    known_errors = errors[[0, *(place.count - size for size in measured)]]
    # a smaller size that happens to lose less than a larger one would make the curve fall where errors rise
    known_losses = np.maximum.accumulate([0.0, *(losses[size] for size in measured)])
    return Curve(sizes, np.interp(errors[place.count - sizes], known_errors, known_losses))


def cheapest_sizes(curves: dict[str, Curve], prices: Prices) -> dict[str, int]:
    """Return the sizes whose losses have the smallest sum within the budget, by dynamic programming.

    The smallest size of every block must fit the budget. What larger ones cost beyond that is rounded up to bins of the
    rest of the budget, so that the choice does not exceed it.
    """
    rest = prices.budget - sum(curve.sizes[0] * prices.each[name] for name, curve in curves.items())
    best = np.zeros(_BINS + 1)  # the least sum of losses of the blocks so far, within each number of bins
    used, chosen = dict[str, NDArray[np.int64]](), dict[str, NDArray[np.int64]]()
    for name, curve in curves.items():
        costs = (curve.sizes - curve.sizes[0]) * prices.each[name]
        bins = np.where(costs > 0, _BINS + 1, 0)  # too many where a cost is above the budget
        fits = (costs > 0) & (costs <= rest)
        bins[fits] = np.ceil(costs[fits] / rest * _BINS - 1e-6)
        sums = np.full((len(curve.sizes), _BINS + 1), np.inf)
        for row, (number, loss) in enumerate(zip(bins, curve.losses, strict=True)):
            if number <= _BINS:
                sums[row, number:] = best[: _BINS + 1 - number] + loss
        used[name], chosen[name], best = bins, sums.argmin(0), sums.min(0)
    sizes: dict[str, int] = {}
    left = _BINS
    for name in reversed(curves):  # back from the last block, with what each choice leaves to those before
        row = chosen[name][left]
        sizes[name] = int(curves[name].sizes[row])
        left -= int(used[name][row])
    return sizes
