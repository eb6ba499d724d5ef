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


def hard_concrete(log_alpha: Tensor, uniform: Tensor | None) -> Tensor:
    """Gates in [0, 1] of log-alpha's shape; `uniform` is the noise in (0, 1), None at evaluation (eq. 10 to 13)."""
    noise = 0.0 if uniform is None else torch.logit(uniform)
    scale = 1.0 if uniform is None else 1 / TEMPERATURE
    return torch.sigmoid((log_alpha + noise) * scale).mul(HIGH - LOW).add(LOW).clamp(0, 1)
