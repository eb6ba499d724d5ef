"""Loss terms and score penalties: pure functions of tensors, computed in fp32."""

from __future__ import annotations

import math

import torch
from torch import Tensor

# Hard-concrete distribution of arXiv 1712.01312: temperature, and the interval (0, 1) stretched to (LOW, HIGH).
TEMPERATURE = 2 / 3
LOW, HIGH = -0.1, 1.1

L0_SHIFT = -TEMPERATURE * math.log(-LOW / HIGH)
"""Added to log-alpha, the sigmoid is the chance that a hard-concrete gate is not 0 (eq. 12)."""

L0_KEPT_ABOVE = math.log(-LOW / HIGH)
"""Without noise, a gate is above 0 where log-alpha is above this: sigmoid(x) * (HIGH - LOW) + LOW > 0."""

PENALTY_SHIFT = {"l1": 0.0, "l0": L0_SHIFT}


def score_penalty(scores: Tensor, kind: str) -> Tensor:
    """Mean of sigmoid(scores + shift) over one matrix, a scalar in [0, 1].

    "l1" is the norm of sigmoid(scores) divided by their number (arXiv 2005.07683, section 4); "l0" the expected
    share of open hard-concrete gates.
    """
    return torch.sigmoid(scores.float() + PENALTY_SHIFT[kind]).mean()


def score_penalty_slope(scores: Tensor, kind: str) -> Tensor:
    """Gradient of `score_penalty` by the scores, in their shape and dtype."""
    share = torch.sigmoid(scores.float() + PENALTY_SHIFT[kind])
    return (share * (1 - share)).div_(scores.numel()).to(scores.dtype)


def hard_concrete(log_alpha: Tensor, uniform: Tensor | None) -> Tensor:
    """Gates in [0, 1] of log-alpha's shape; `uniform` is the noise in (0, 1), None at evaluation (eq. 10 to 13)."""
    return _stretched(_concrete(log_alpha, uniform)).clamp(0, 1)


def hard_concrete_slope(log_alpha: Tensor, uniform: Tensor | None) -> Tensor:
    """Derivative of `hard_concrete` by log-alpha, elementwise: 0 where a gate is clamped."""
    concrete = _concrete(log_alpha, uniform)
    gates = _stretched(concrete)
    return concrete * (1 - concrete) * (_scale(uniform) * (HIGH - LOW)) * ((gates > 0) & (gates < 1))


def _concrete(log_alpha: Tensor, uniform: Tensor | None) -> Tensor:
    noise = 0.0 if uniform is None else torch.logit(uniform)
    return torch.sigmoid((log_alpha + noise) * _scale(uniform))


def _scale(uniform: Tensor | None) -> float:
    return 1.0 if uniform is None else 1 / TEMPERATURE


def _stretched(concrete: Tensor) -> Tensor:
    return concrete * (HIGH - LOW) + LOW
