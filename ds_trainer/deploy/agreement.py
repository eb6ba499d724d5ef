"""Whether an exported model computes what the model it was made of does: how far its outputs are off, and may be."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from ds_trainer.ranks.failures import UserError

TOLERANCE = 1e-5
"""By how much outputs in fp32 may differ, where the largest is 1 or less; a share of the largest where it is more."""


def differences(outputs: Iterable[tuple[Tensor, Tensor]]) -> dict[str, float]:
    """Compare pairs of an expected output and the one to check: `max_difference`, and the `largest` one expected.

    UserError where an output is not finite.
    """
    difference = largest = 0.0
    for expected, given in outputs:
        if not (expected.isfinite().all() and given.isfinite().all()):
            raise UserError("the model's outputs are not finite (NaN or infinity): its weights are broken")
        if expected.numel():
            difference = max(difference, float((given.double() - expected.double()).abs().max()))
            largest = max(largest, float(expected.abs().max()))
    return {"max_difference": difference, "largest": largest}


def agree(compared: Mapping[str, float], tolerance: float) -> bool:
    """Return whether `differences` are within a tolerance, a share of the largest output where that is more than 1."""
    return compared["max_difference"] <= tolerance * max(1.0, compared["largest"])


def check_same(compared: Mapping[str, float], tolerance: float, what: str) -> None:
    """Raise RuntimeError where `differences` are more than rounding: this library made a mistake."""
    if not agree(compared, tolerance):
        raise RuntimeError(f"{what} differ by {compared['max_difference']}")


def tolerance_in(dtype: torch.dtype) -> float:
    """Return by how much the outputs of a shrunk model may differ that is saved in this precision.

    The constants of what was cut are added to biases, which are then rounded to that precision.
    """
    return max(TOLERANCE, 4 * torch.finfo(dtype).eps)
