"""Loss terms of distillation, as functions of tensors that compute in fp32.

They are the cosine of hidden states (DistilBERT, arXiv 1910.01108), the MSE of hidden states (TinyBERT, arXiv
1909.10351) and of logits, and divergences of a student's probabilities from a teacher's, both softened by a
temperature T:

| kind | value | source |
|---|---|---|
| "forward" | KL(teacher || student) | arXiv 1503.02531 |
| "reverse" | KL(student || teacher) | MiniLLM, arXiv 2306.08543 |
| "js" | half of KL(teacher || M) + KL(student || M), M being the mean of both | GKD with beta = 0.5, arXiv 2306.13649 |

Each is a sum over outcomes. The outcomes are all classes, or the k that are likeliest by the teacher and, as one more
outcome, all others together (`TopK`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ds_trainer.tasks.task import PAD_LOGIT, Batch, Task

Kind = Literal["forward", "reverse", "js"]

_CHUNK = {"cpu": 1 << 18, "cuda": 1 << 24}
"""How many logits are processed at a time: as many as fit into a core's cache, or keep a GPU busy."""
_SMALLEST = 1e-30
"""The least probability of an outcome by the student, which is divided by."""


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


def similarity_divergence(student: Tensor, teacher: Tensor, temperature: float, kind: Kind = "forward") -> Tensor:
    """Return the `divergence` of each text's softened similarities to the others of the batch, mean over the texts.

    Vectors are (texts, width), and the two models may differ in width. A similarity is 20 times the cosine.
    """
    logits = []
    for vectors in (student, teacher):
        unit = F.normalize(vectors.float())
        logits.append((20 * unit @ unit.T).fill_diagonal_(PAD_LOGIT))
    return divergence(logits[0], logits[1], temperature, kind)


def margin_mse(student: Tensor, teacher: Tensor, batch: Batch) -> Tensor:
    """Return the squared difference of the two models' margins (arXiv 2010.02666), mean over queries.

    A margin is the score of a document that answers a query less that of one which does not. Of a query with several,
    it is the mean over all such pairs; one without any counts 0. Scores are (documents, 1); see `Task.by_query`.
    """
    answers, query = batch.labels.unbind(1)
    difference = (student.float() - teacher.float()).squeeze(-1)
    pairs = (query[:, None] == query) & (answers[:, None] > answers)
    in_query = (query[:, None] == query).float() @ pairs.sum(1, dtype=torch.float32)
    squares = (difference[:, None] - difference).square() * pairs / in_query.clamp(min=1)[:, None]
    return squares.sum() / len(batch.ids)


def yes_and_no(logits: Tensor) -> Tensor:
    """Return logits (rows * classes, 2), whose softmax is sigmoid of these logits (rows, classes) and the rest to 1."""
    return torch.stack([logits, torch.zeros_like(logits)], -1).flatten(0, 1)


@dataclass(frozen=True)
class TopK:
    """What is kept of a teacher's softened probabilities: those of the k likeliest classes and of the others together.

    `ids` are (rows, k) int64, the likeliest class first. `log_probs` are (rows, k + 1) fp32, the last column being the
    others'.
    """

    ids: Tensor
    log_probs: Tensor

    @classmethod
    def of(cls, logits: Tensor, k: int, temperature: float) -> TopK:
        """Reduce logits (rows, classes), any dtype; k is smaller than the number of classes."""
        scaled = logits.float() / temperature
        top, ids = scaled.topk(k)
        log_sum = scaled.logsumexp(-1, keepdim=True)
        rest = scaled.scatter_(-1, ids, -torch.inf).logsumexp(-1, keepdim=True)
        return cls(ids, torch.cat([top, rest], -1) - log_sum)


def divergence(student: Tensor, teacher: Tensor | TopK, temperature: float, kind: Kind = "forward") -> Tensor:
    """Return the divergence, mean over rows, times T**2; 0 without rows. Logits (rows, classes), any dtype.

    The gradient is computed in the same pass. With a teacher's logits it is written into their memory, so that no third
    tensor of this size exists at any time. The result can be differentiated once.
    """
    if isinstance(teacher, TopK):
        return _TopKDivergence.apply(student, teacher.ids, teacher.log_probs, temperature, kind)
    return _Divergence.apply(student, teacher, temperature, kind)


class _Divergence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, student: Tensor, teacher: Tensor, temperature: float, kind: Kind) -> Tensor:
        gradient = _gradient_memory(student, teacher) if ctx.needs_input_grad[0] else None
        rows, total = max(1, len(student)), torch.zeros((), device=student.device)
        for part in _chunks(student):
            student_log = torch.log_softmax(student[part].float() / temperature, -1)
            teacher_log = torch.log_softmax(teacher[part].float() / temperature, -1)
            value, slopes = _compared(student_log, teacher_log, kind)
            total += value
            if gradient is not None:
                # through the softmax: slope - probability * (sum of slopes); T**2 * value by logits / T leaves one T
                sums = slopes.sum(-1, keepdim=True)
                gradient[part] = slopes.addcmul_(student_log.exp_(), sums, value=-1).mul_(temperature / rows)
        ctx.gradient = gradient
        return total * (temperature**2 / rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None, None, None]:
        gradient, ctx.gradient = ctx.gradient, None
        assert gradient is not None, "differentiated once already"
        return gradient.mul_(slope), None, None, None


class _TopKDivergence(torch.autograd.Function):
    """With q the student's probabilities, Q their sum over the other classes, the gradient by the logit of a class is

    slope - q * (sum of slopes)                           for each of the k classes, and
    q * (slope of the others / Q - sum of slopes)         for each of the others.

    The latter is q times a number for each row: `forward` keeps q, and `backward` multiplies it.
    """

    @staticmethod
    def forward(ctx: Any, student: Tensor, ids: Tensor, teacher_log: Tensor, temperature: float, kind: Kind) -> Tensor:
        shares = _gradient_memory(student) if ctx.needs_input_grad[0] else None
        held = shares if shares is not None and shares.dtype == torch.float32 else None
        rows, outcomes = max(1, len(student)), torch.empty_like(teacher_log)
        for part in _chunks(student):
            logits = student[part].float()
            scaled = logits if temperature == 1 else logits / temperature
            own = torch.softmax(scaled, -1, out=None if held is None else held[part])
            outcomes[part, :-1] = own.gather(-1, ids[part])
            own.scatter_(-1, ids[part], 0)  # so that the small mass of the others is no difference
            outcomes[part, -1] = own.sum(-1)
            if shares is not None and held is None:
                shares[part] = own
        outcomes.clamp_(min=_SMALLEST)
        value, slopes = _compared(outcomes.log(), teacher_log.clone(), kind)
        if shares is not None:
            sums, scale = slopes.sum(-1, keepdim=True), temperature / rows
            of_top, of_others = (slopes - outcomes * sums)[:, :-1], slopes[:, -1:] / outcomes[:, -1:] - sums
            ctx.save_for_backward(ids, of_top * scale, of_others * scale)
        ctx.shares = shares
        return value * (temperature**2 / rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None, None, None, None]:
        gradient, ctx.shares = ctx.shares, None
        assert gradient is not None, "differentiated once already"
        ids, of_top, of_others = ctx.saved_tensors
        gradient.mul_(of_others * slope).scatter_(-1, ids, (of_top * slope).to(gradient.dtype))
        return gradient, None, None, None, None


def _compared(student_log: Tensor, teacher_log: Tensor, kind: Kind) -> tuple[Tensor, Tensor]:
    """Return the divergence summed over all rows, and its slopes by `student_log`, both (rows, outcomes).

    The slopes may lack a multiple of the student's probabilities, one factor per row. It cancels in the gradient by the
    logits, slope - probability * (sum of slopes). May overwrite `teacher_log`.
    """
    if kind == "forward":
        share = teacher_log.exp()
        return torch.sum(share * teacher_log.sub_(student_log)), share.neg_()
    own = student_log.exp()
    if kind == "reverse":
        slopes = own.mul_(student_log - teacher_log)
        return slopes.sum(), slopes
    mean_log = torch.logaddexp(student_log, teacher_log) - math.log(2)
    slopes = own.mul_(student_log - mean_log).mul_(0.5)
    return slopes.sum() + 0.5 * torch.sum(teacher_log.exp() * (teacher_log - mean_log)), slopes


def _chunks(logits: Tensor) -> list[slice]:
    size = max(1, _CHUNK.get(logits.device.type, _CHUNK["cpu"]) // logits.shape[1])
    return [slice(start, start + size) for start in range(0, max(1, len(logits)), size)]


def _gradient_memory(student: Tensor, teacher: Tensor | None = None) -> Tensor:
    """Return memory for the student's gradient: that of the teacher's logits, where it has the right type."""
    # in fp16 the gradient would vanish, since it is multiplied by the loss scale only in the backward
    dtype = torch.float32 if student.dtype == torch.float16 else student.dtype
    return teacher if teacher is not None and teacher.dtype == dtype else torch.empty_like(student, dtype=dtype)
