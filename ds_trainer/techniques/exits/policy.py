"""Which samples leave at a head: by entropy (DeeBERT, arXiv 2004.12993), confidence or patience (arXiv 2006.04152).

With p the probabilities of head j, t_j its threshold and y_j its answer, a sample leaves at the first head where

    entropy      -sum_c p_c ln p_c < t_j
    confidence   max_c p_c > t_j
    patience     y_j = y_{j-1} = ... = y_{j-patience}; for a regression each |y_i - y_{i-1}| < t_i

so that its exit depends on its own logits alone. The running model applies this to the samples that are still in its
batch, calibration to the logits of all heads at once. Both use this code: a score computed from logits is the score of
the running model.
"""

import math

import torch
from torch import Tensor

from ds_trainer.config.exit_specs import ExitPolicy


def entropy(logits: Tensor) -> Tensor:
    """Return the entropy of the predicted classes in nats: (..., classes) -> (...), fp64.

    In fp32 the entropies of all confident samples would be equal.
    """
    return torch.special.entr(torch.softmax(logits.double(), -1)).sum(-1)


def confidence(logits: Tensor) -> Tensor:
    """Return the probability of the likeliest class: (..., classes) -> (...), fp64."""
    return torch.softmax(logits.double(), -1).amax(-1)


class RunningPolicy:
    """A policy applied to one batch, head after head. It remembers for how long the heads agree, as patience needs."""

    def __init__(self, policy: ExitPolicy, regression: bool) -> None:
        self.policy, self.regression = policy, regression
        self._last: Tensor | None = None  # (batch,) answers of the head before
        self._streak: Tensor  # (batch,) heads in a row that agreed with the one before

    def sure(self, head: int, logits: Tensor) -> Tensor:
        """Return (batch,) booleans: which samples leave at this head, by its logits (batch, classes).

        Heads are counted from 0, and this is called for each exit head in order; at the model's own all others leave.
        """
        if self.policy.criterion == "entropy":
            return entropy(logits) < self.policy.thresholds[head]
        if self.policy.criterion == "confidence":
            return confidence(logits) > self.policy.thresholds[head]
        answer = logits.float().squeeze(-1) if self.regression else logits.argmax(-1)
        if self._last is None:
            self._streak = torch.zeros(len(answer), dtype=torch.int64, device=answer.device)
        elif self.regression:
            self._streak = (self._streak + 1) * ((answer - self._last).abs() < self.policy.thresholds[head])
        else:
            self._streak = (self._streak + 1) * (answer == self._last)
        self._last = answer
        assert self.policy.patience is not None, "a policy of patience has one"
        return self._streak >= self.policy.patience

    def one_is_sure(self, head: int, logits: Tensor) -> bool:
        """Return `sure` for a single sample (1, classes), where plain arithmetic is several times faster than tensors.

        With w_c = exp(x_c - max x) and W = sum w_c, the confidence is 1 / W, and the entropy
        ln W - sum_c w_c (x_c - max x) / W.
        """
        if self.policy.criterion == "patience":
            return bool(self.sure(head, logits))
        (row,) = logits.tolist()
        top = max(row)
        weights = [math.exp(value - top) for value in row]
        total, threshold = sum(weights), self.policy.thresholds[head]
        if self.policy.criterion == "confidence":
            return 1 / total > threshold
        mean = sum(weight * (value - top) for weight, value in zip(weights, row, strict=True) if weight) / total
        return math.log(total) - mean < threshold

    def keep(self, staying: Tensor) -> None:
        """Go on with these samples of the last call, by their indices, and forget the others."""
        if self._last is not None:
            self._last, self._streak = self._last[staying], self._streak[staying]


def exit_at(policy: ExitPolicy, logits: Tensor, regression: bool) -> Tensor:
    """Return (samples,) the index of the head at which each sample leaves.

    `logits` is (heads, samples, classes) of all heads, the model's own last.
    """
    running = RunningPolicy(policy, regression)
    last = len(logits) - 1
    exits = torch.full((logits.shape[1],), last, device=logits.device)
    for head in range(last):
        sure = running.sure(head, logits[head])
        exits = torch.where(sure & (exits == last), head, exits)
    return exits
