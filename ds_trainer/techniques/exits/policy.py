"""Who is sure enough to leave: entropy (DeeBERT, arXiv 2004.12993), confidence, patience (PABEE, arXiv 2006.04152).

Decisions are made row by row. While a model runs, on the rows that are still there; offline, on all heads' logits at
once: by the same code, so that a score found offline is the score of the running model.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ds_trainer.config.exit_specs import ExitPolicy


def entropy(logits: Tensor) -> Tensor:
    """Of the classes' distribution, in nats. (..., classes) -> (...), fp64: in fp32 all that are sure are alike."""
    return torch.special.entr(torch.softmax(logits.double(), -1)).sum(-1)


def confidence(logits: Tensor) -> Tensor:
    """The likeliest class's probability. (..., classes) -> (...), fp64."""
    return torch.softmax(logits.double(), -1).amax(-1)


class Decisions:
    """Who leaves at each head, asked in the order of the heads; remembers what patience needs."""

    def __init__(self, policy: ExitPolicy, regression: bool) -> None:
        self.policy, self.regression = policy, regression
        self._last: Tensor | None = None
        self._agreed: Tensor | None = None

    def sure(self, head: int, logits: Tensor) -> Tensor:
        """(rows,) whether to leave at this head, from 0 and never the own one, by its logits (rows, classes)."""
        if self.policy.criterion == "entropy":
            return entropy(logits) < self.policy.thresholds[head]
        if self.policy.criterion == "confidence":
            return confidence(logits) > self.policy.thresholds[head]
        return self._patient(head, logits)

    def one_is_sure(self, head: int, logits: Tensor) -> bool:
        """`sure` of a single row (1, classes): on so few values, plain arithmetic takes a fraction of tensors' time."""
        if self.policy.criterion == "patience":
            return bool(self.sure(head, logits))
        (row,) = logits.tolist()
        top = max(row)
        weights = [math.exp(value - top) for value in row]
        total, limit = sum(weights), self.policy.thresholds[head]
        if self.policy.criterion == "confidence":
            return 1 / total > limit
        mean = sum(weight * (value - top) for weight, value in zip(weights, row, strict=True) if weight) / total
        return math.log(total) - mean < limit

    def keep(self, rows: Tensor) -> None:
        """Forget all but these of the rows of the last call."""
        if self._last is not None and self._agreed is not None:
            self._last, self._agreed = self._last[rows], self._agreed[rows]

    def _patient(self, head: int, logits: Tensor) -> Tensor:
        answer = logits.float().squeeze(-1) if self.regression else logits.argmax(-1)
        if self._last is None or self._agreed is None:
            self._agreed = torch.zeros(len(answer), dtype=torch.int64, device=answer.device)
        else:
            same = (
                (answer - self._last).abs() < self.policy.thresholds[head] if self.regression else answer == self._last
            )
            self._agreed = (self._agreed + 1) * same
        self._last = answer
        assert self.policy.patience is not None, "a policy of patience has one"
        return self._agreed >= self.policy.patience


def exit_heads(policy: ExitPolicy, logits: Tensor, regression: bool) -> Tensor:
    """Where each row leaves, (rows,) index of a head, by all heads' logits (heads, rows, classes), the own one last."""
    decisions = Decisions(policy, regression)
    last = len(logits) - 1
    found = torch.full((logits.shape[1],), last, device=logits.device)
    for head in range(last):
        sure = decisions.sure(head, logits[head])
        found = torch.where(sure & (found == last), head, found)
    return found
