"""Which share of its weights each matrix keeps, within one number for all of them.

Magnitudes and Fisher costs are comparable: the largest over all matrices are kept. The errors of two matrices are not,
so the divergence of the model's answers is measured with one matrix cut at a time, to a few shares; dynamic programming
then chooses the sizes of the smallest sum, as it does for heads and neurons.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ds_trainer.models.cut.allocation import Curve, Prices, cheapest_sizes
from ds_trainer.models.cut.fitting import Replacement
from ds_trainer.models.cut.layerwise import Calibration
from ds_trainer.models.layers import AnyLinear

_SIZES = 100
"""How many sizes of a matrix are considered."""


def measured_shares(keep: float) -> tuple[float, ...]:
    """Return the shares at which the divergence is measured, where all matrices together keep `keep`."""
    return keep / 4, keep, keep**0.5


def largest_shares(scores: Mapping[str, Tensor], keep: float) -> dict[str, float]:
    """Return each matrix's share of the largest scores, of which `keep` is the share among all matrices."""
    joined = torch.cat([of_matrix.flatten() for of_matrix in scores.values()])
    kept = torch.zeros_like(joined, dtype=torch.bool)
    kept[joined.topk(round(keep * len(joined)), sorted=False).indices] = True
    parts = kept.split([of_matrix.numel() for of_matrix in scores.values()])
    return {name: float(part.double().mean()) for name, part in zip(scores, parts, strict=True)}


def cheapest_shares(
    model: Any,
    linears: Mapping[str, AnyLinear],
    trials: Mapping[str, Mapping[float, Replacement]],
    calibration: Calibration,
    keep: float,
) -> dict[str, float]:
    """Return the shares whose losses have the smallest sum, by trials of each matrix at `measured_shares`; collective.

    The model, on the device on which it is to run, stays as it is.
    """
    losses = _losses(model, linears, trials, calibration)
    counts = {name: linear.weight.numel() for name, linear in linears.items()}
    typical = float(np.mean([max(of_matrix.values()) for of_matrix in losses.values()]))
    curves = {name: _curve(counts[name], losses[name], keep, typical) for name in linears}
    total = sum(counts.values())
    sizes = cheapest_sizes(curves, Prices(dict.fromkeys(linears, 1.0), keep * total))
    unused = keep * total / sum(sizes.values())  # the sizes are rounded to steps of the curves and of the budget
    return {name: min(1.0, unused * size / counts[name]) for name, size in sizes.items()}


def _losses(
    model: Any,
    linears: Mapping[str, AnyLinear],
    trials: Mapping[str, Mapping[float, Replacement]],
    calibration: Calibration,
) -> dict[str, dict[float, float]]:
    """Return how far the model's answers move with one matrix replaced, by matrix and share."""
    dense = calibration.answers(model)
    losses: dict[str, dict[float, float]] = {}
    for name, linear in linears.items():
        before = {key: value.clone() for key, value in linear.state_dict().items()}
        losses[name] = {}
        for share, replacement in trials[name].items():
            replacement.write(linear)
            losses[name][share] = calibration.divergence(dense, calibration.answers(model))
        linear.load_state_dict(before)
    return losses


def _curve(count: int, losses: Mapping[float, float], keep: float, typical: float) -> Curve:
    """Return the loss at every size. Its logarithm is nearly linear in the share; a floor stands for no loss."""
    measured = sorted(losses)
    known = np.maximum.accumulate([0.0, *(losses[share] for share in reversed(measured))])[::-1]
    shares = np.geomspace(keep / 4, 1, _SIZES)
    logarithms = np.interp(shares, [*measured, 1.0], np.log(known + 1e-4 * typical))
    return Curve(np.round(shares * count).astype(np.int64), np.exp(logarithms))
