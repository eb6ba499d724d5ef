"""Loss terms of distillation and penalties on mask scores, as pure functions of tensors that compute in fp32.

Distillation: KL with temperature (arXiv 1503.02531), cosine of hidden states (DistilBERT, arXiv 1910.01108), MSE of
hidden states and attention maps (TinyBERT, arXiv 1909.10351).
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ds_trainer.tasks.task import PAD_LOGIT

_CHUNK = {"cpu": 1 << 18, "cuda": 1 << 24}
"""How many logits are processed at a time: as many as fit into a core's cache, or keep a GPU busy."""

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
    return _stretched(_concrete(log_alpha, uniform)).clamp(0, 1)


def hard_concrete_slope(log_alpha: Tensor, uniform: Tensor | None) -> Tensor:
    """Return the elementwise derivative of `hard_concrete` by log-alpha; it is 0 where a gate is clamped."""
    concrete = _concrete(log_alpha, uniform)
    gates = _stretched(concrete)
    between = (gates > 0) & (gates < 1)
    del gates  # each of these is as large as a matrix in fp32
    return (1 - concrete).mul_(concrete).mul_(_scale(uniform) * (HIGH - LOW)).mul_(between)


def _concrete(log_alpha: Tensor, uniform: Tensor | None) -> Tensor:
    if uniform is None:
        return torch.sigmoid(log_alpha)
    return torch.logit(uniform).add_(log_alpha).mul_(_scale(uniform)).sigmoid_()


def _scale(uniform: Tensor | None) -> float:
    return 1.0 if uniform is None else 1 / TEMPERATURE


def _stretched(concrete: Tensor) -> Tensor:
    return concrete * (HIGH - LOW) + LOW


def distillation_kl(student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """Return KL(teacher || student), mean over rows, times T**2; 0 without rows. Logits (rows, classes), any dtype.

    The gradient is computed in the same pass and written into the memory of `teacher`, so that no third tensor of this
    size exists at any time. The result can be differentiated once.
    """
    return _DistillationKl.apply(student, teacher, temperature)


class _DistillationKl(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
        needs_gradient = ctx.needs_input_grad[0]
        gradient = _gradient_memory(student, teacher) if needs_gradient else None
        rows, classes = max(1, len(student)), student.shape[1]
        size = max(1, _CHUNK.get(student.device.type, _CHUNK["cpu"]) // classes)
        total = torch.zeros((), device=student.device)
        for start in range(0, rows, size):
            part = slice(start, start + size)
            student_log = torch.log_softmax(student[part].float() / temperature, -1)
            teacher_log = torch.log_softmax(teacher[part].float() / temperature, -1)
            share = teacher_log.exp()
            total += torch.sum(share * teacher_log.sub_(student_log))
            if gradient is not None:
                gradient[part] = student_log.exp_().sub_(share).mul_(temperature / rows)
        ctx.gradient = gradient
        return total * (temperature**2 / rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None, None]:
        gradient, ctx.gradient = ctx.gradient, None
        assert gradient is not None, "differentiated once already"
        return gradient.mul_(slope), None, None


def _gradient_memory(student: Tensor, teacher: Tensor) -> Tensor:
    """Return a tensor to write the gradient into: the teacher's logits, if their precision allows it."""
    if student.dtype == torch.float16:
        # in fp16 the gradient would vanish, since it is multiplied by the loss scale only in the backward
        return torch.empty_like(student, dtype=torch.float32)
    return teacher if teacher.dtype == student.dtype else torch.empty_like(student)


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


def attention_mse(student: Tensor, teacher: Tensor, mask: Tensor) -> Tensor:
    """Return the squared difference of attention maps (rows, heads, length, length), mean over heads and token pairs.

    The maps of models with different numbers of heads are averaged over their heads first. A model in training returns
    its maps after dropout: set attention_probs_dropout_prob to 0 in its config to avoid that noise.
    """
    if student.shape[1] != teacher.shape[1]:
        student, teacher = student.mean(1, keepdim=True), teacher.mean(1, keepdim=True)
    difference = (student.float() - teacher.float()).square().mean(1)
    pairs = mask[:, :, None] * mask[:, None, :]
    return (difference * pairs).sum() / pairs.sum()
