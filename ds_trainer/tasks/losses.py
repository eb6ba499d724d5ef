"""Loss terms of distillation and penalties on mask scores, as pure functions of tensors that compute in fp32.

Distillation: cosine of hidden states (DistilBERT, arXiv 1910.01108), MSE of hidden states (TinyBERT,
arXiv 1909.10351). The losses on a teacher's probabilities are in `divergences.py`.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from ds_trainer.tasks.divergences import Kind, TopK, divergence
from ds_trainer.tasks.task import PAD_LOGIT, Task

# The hard-concrete distribution of arXiv 1712.01312: its temperature, and the interval to which (0, 1) is stretched.
TEMPERATURE = 2 / 3
LOW, HIGH = -0.1, 1.1

L0_SHIFT = -TEMPERATURE * math.log(-LOW / HIGH)
"""sigmoid(log-alpha + L0_SHIFT) is the probability that a hard-concrete gate is not 0 (eq. 12)."""

L0_KEPT_ABOVE = math.log(-LOW / HIGH)
"""A gate without noise is above 0 if log-alpha is above this value: sigmoid(x) * (HIGH - LOW) + LOW > 0."""

PENALTY_SHIFT = {"l1": 0.0, "l0": L0_SHIFT}


def score_penalty(scores: Tensor, kind: str) -> Tensor:
    """Return the mean of sigmoid(scores + shift) over one matrix, a scalar in [0, 1].

    "l1" is the L1 norm of sigmoid(scores), divided by the number of scores (arXiv 2005.07683, section 4). "l0" is the
    expected share of hard-concrete gates that are not 0.
    """
    return torch.sigmoid(scores.float() + PENALTY_SHIFT[kind]).mean()


def score_penalty_slope(scores: Tensor, kind: str) -> Tensor:
    """Return the gradient of `score_penalty` by the scores, in their shape and always in fp32.

    A gradient is at most 1 / (4 * number of scores). For a million scores fp16 cannot hold such a value accurately: the
    caller must multiply by the loss scale before it casts.
    """
    share = torch.sigmoid(scores.float() + PENALTY_SHIFT[kind])
    return (1 - share).mul_(share).div_(scores.numel())


def hard_concrete(log_alpha: Tensor, uniform: Tensor | None) -> Tensor:
    """Return gates in [0, 1], shaped like log-alpha; `uniform` is noise in (0, 1), None at evaluation (eq. 10-13)."""
    return (_concrete(log_alpha, uniform) * (HIGH - LOW) + LOW).clamp(0, 1)


def hard_concrete_slope(log_alpha: Tensor, uniform: Tensor | None) -> Tensor:
    """Return the elementwise derivative of `hard_concrete` by log-alpha; it is 0 where a gate is clamped."""
    concrete = _concrete(log_alpha, uniform)
    gates = concrete * (HIGH - LOW) + LOW
    between = (gates > 0) & (gates < 1)
    del gates  # each of these is as large as a matrix in fp32
    scale = HIGH - LOW if uniform is None else (HIGH - LOW) / TEMPERATURE
    return (1 - concrete).mul_(concrete).mul_(scale).mul_(between)


def _concrete(log_alpha: Tensor, uniform: Tensor | None) -> Tensor:
    if uniform is None:
        return torch.sigmoid(log_alpha)
    return torch.logit(uniform).add_(log_alpha).mul_(1 / TEMPERATURE).sigmoid_()


def logit_mse(student: Tensor, teacher: Tensor) -> Tensor:
    """Return the squared difference of logits (rows, classes), summed over classes, mean over rows, as in DistilBERT.

    Entries where the teacher's logit is `PAD_LOGIT` do not count.
    """
    difference = torch.where(teacher != PAD_LOGIT, student.float() - teacher.float(), 0.0)
    return difference.square().sum() / max(1, len(student))


def hidden_cosine(student: Tensor, teacher: Tensor, mask: Tensor) -> Tensor:
    """Return 1 - cos, mean over the tokens where mask (rows, length) is 1. States are (rows, length, width)."""
    distance = 1 - F.cosine_similarity(student.float(), teacher.float(), dim=-1)
    return (distance * mask).sum() / mask.sum()


def hidden_mse(student: Tensor, teacher: Tensor, mask: Tensor) -> Tensor:
    """Return the squared difference, mean over width and the tokens where mask (rows, length) is 1."""
    difference = (student.float() - teacher.float()).square().mean(-1)
    return (difference * mask).sum() / mask.sum()


def soft_target_loss(
    task: Task, student: Tensor, teacher: Tensor | TopK, temperature: float, kind: Kind = "forward"
) -> Tensor:
    """Return the divergence of class logits at a temperature, or the squared difference of a regression's values.

    Of several labels it is the divergence of each class's yes and no, mean over rows and classes. May overwrite
    `teacher`, to save memory.
    """
    if isinstance(teacher, Tensor) and task.regression:
        return logit_mse(student, teacher)
    if isinstance(teacher, Tensor) and task.multi_label:
        student, teacher = yes_and_no(student), yes_and_no(teacher)
    return divergence(student, teacher, temperature, kind)


def yes_and_no(logits: Tensor) -> Tensor:
    """Return logits (rows * classes, 2), whose softmax is sigmoid of these logits (rows, classes) and the rest to 1."""
    return torch.stack([logits, torch.zeros_like(logits)], -1).flatten(0, 1)
