"""Which samples leave at a head: by entropy (DeeBERT, arXiv 2004.12993), confidence or patience (arXiv 2006.04152).

With p the probabilities of head j, t_j its threshold and y_j its answer, a sample leaves at the first head where

    entropy      -sum_c p_c ln p_c < t_j
    confidence   max_c p_c > t_j
    patience     y_j = y_{j-1} = ... = y_{j-patience}; for a regression each |y_i - y_{i-1}| < t_i

so that its exit depends on its own logits alone. A head of tokens has p and y for each token: a sequence leaves once
its least certain token would (arXiv 2105.13878), or by the mean over its tokens; by patience once all their y agree.

Each criterion is a doubt that must fall below a threshold. The running model computes it for the samples that are still
in its batch, calibration for all samples and heads. Both use this code, and so the running model has the scores that
calibration has found.
"""

import math

import torch
from torch import Tensor

from ds_trainer.config.exit_specs import Criterion, ExitPolicy, SequenceUncertainty


def entropy(logits: Tensor) -> Tensor:
    """Return the entropy of the predicted classes in nats: (..., classes) -> (...), fp64.

    In fp32 the entropies of all confident samples would be equal.
    """
    return torch.special.entr(torch.softmax(logits.double(), -1)).sum(-1)


def confidence(logits: Tensor) -> Tensor:
    """Return the probability of the likeliest class: (..., classes) -> (...), fp64."""
    return torch.softmax(logits.double(), -1).amax(-1)


def doubt(
    criterion: Criterion, over: SequenceUncertainty, logits: Tensor, before: Tensor | None, counted: Tensor | None
) -> Tensor:
    """Return the doubt of a head about each sample: (batch, classes) or (batch, length, classes) -> (batch,), fp64.

    It is the entropy, the negative confidence, or by patience the distance from the answer of the head before, whose
    logits are `before`; classes are 0 or 1 apart, and at the first head it is infinite. `counted` (batch, length) has
    the tokens whose doubts count; None where logits are of whole samples.
    """
    if criterion == "entropy":
        values = entropy(logits)
    elif criterion == "confidence":
        values = -confidence(logits)
    elif before is None:
        values = logits.new_full(logits.shape[:-1], math.inf, dtype=torch.float64)
    elif logits.shape[-1] == 1:
        values = (logits.double() - before.double()).squeeze(-1).abs()
    else:
        values = (logits.argmax(-1) != before.argmax(-1)).double()
    if counted is not None and over == "mean" and criterion != "patience":
        return values.where(counted, 0.0).sum(-1) / counted.sum(-1)
    return values if counted is None else values.where(counted, -math.inf).amax(-1)


def doubts_of_all(criterion: Criterion, over: SequenceUncertainty, logits: Tensor, counted: Tensor | None) -> Tensor:
    """Return the doubts of all exit heads, (heads - 1, batch), by the logits of all heads, the model's own last.

    NaN, by which no sample leaves, becomes infinity.
    """
    pairs = zip(logits[:-1], [None, *logits], strict=False)
    doubts = torch.stack([doubt(criterion, over, one, before, counted) for one, before in pairs])
    return torch.where(doubts.isnan(), math.inf, doubts)


class RunningPolicy:
    """A policy applied to one batch, head after head. It remembers for how long the heads agree, as patience needs."""

    def __init__(self, policy: ExitPolicy) -> None:
        self.policy = policy
        self._before: Tensor | None = None  # the logits of the head before
        self._streak: Tensor | int = 0  # (batch,) heads in a row that agreed with the one before

    def sure(self, head: int, logits: Tensor, counted: Tensor | None = None) -> Tensor:
        """Return (batch,) booleans: which samples leave at this head, by its logits and its `counted` tokens.

        Heads are counted from 0, and this is called for each exit head in order; at the model's own all others leave.
        """
        policy, before = self.policy, self._before
        if policy.criterion == "patience":
            self._before = logits
        return self.leave(head, doubt(policy.criterion, policy.sequence_uncertainty, logits, before, counted))

    def leave(self, head: int, doubts: Tensor) -> Tensor:
        """Return which examples leave at this head, (batch,), by how much it doubts each of them."""
        limit = self.policy.thresholds[head] if self.policy.thresholds else 1.0  # classes that differ are 1 apart
        below = doubts < (-limit if self.policy.criterion == "confidence" else limit)
        if self.policy.criterion != "patience":
            return below
        assert self.policy.patience is not None, "a policy of patience has one"
        self._streak = (self._streak + 1) * below
        return self._streak >= self.policy.patience

    def one_is_sure(self, head: int, logits: Tensor, counted: Tensor | None = None) -> bool:
        """Return `sure` for a single sample (1, classes), where plain arithmetic is several times faster than tensors.

        With w_c = exp(x_c - max x) and W = sum w_c, the confidence is 1 / W, and the entropy
        ln W - sum_c w_c (x_c - max x) / W.
        """
        if self.policy.criterion == "patience" or counted is not None:
            return bool(self.sure(head, logits, counted))
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
        if self._before is not None and isinstance(self._streak, Tensor):
            self._before, self._streak = self._before[staying], self._streak[staying]


def exit_at(policy: ExitPolicy, doubts: Tensor) -> Tensor:
    """Return (samples,) the index of the head at which each sample leaves, by the doubts (exit heads, samples)."""
    running, last = RunningPolicy(policy), len(doubts)
    exits = torch.full(doubts.shape[1:], last, device=doubts.device)
    for head, one in enumerate(doubts):
        exits = torch.where(running.leave(head, one) & (exits == last), head, exits)
    return exits
