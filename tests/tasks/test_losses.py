"""Divergences of logits against closed forms, and what they hold in memory."""

from __future__ import annotations

from types import SimpleNamespace
from typing import get_args

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from ds_trainer.tasks import losses
from ds_trainer.tasks.losses import PAD_LOGIT, Kind, TopK, divergence, soft_target_loss


def logits(rows: int, classes: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    student = (3 * torch.randn(rows, classes, generator=generator)).requires_grad_()
    return student, 3 * torch.randn(rows, classes, generator=generator)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_kl_in_half_precision(dtype):
    """Gradients come in the student's dtype; small ones survive a loss scale in fp16."""
    student, teacher = (one.detach().to(dtype) for one in logits(6, 9))
    single = student.float().requires_grad_()
    (expected,) = torch.autograd.grad(1024.0 * divergence(single, teacher.float(), 2.0), single)
    student.requires_grad_()
    (found,) = torch.autograd.grad(1024.0 * divergence(student, teacher, 2.0), student)
    assert found.dtype == dtype
    torch.testing.assert_close(found.float(), expected, rtol=2e-2, atol=1e-2)


def test_kl_ignores_places_that_are_no_class():
    """Padding an answer's positions changes neither value nor gradient; at evaluation the teacher is left alone."""
    student, teacher = (one.detach() for one in logits(3, 6))
    wide, padded = (F.pad(values, (0, 4), value=PAD_LOGIT) for values in (student, teacher))
    before = padded.clone()
    assert float(divergence(wide, padded, 2.0)) == pytest.approx(float(divergence(student, teacher, 2.0)))
    assert torch.equal(padded, before)
    (gradient,) = torch.autograd.grad(divergence(wide.requires_grad_(), padded, 2.0), wide)
    assert gradient[:, 6:].abs().max() == 0


def plain(log_student, log_teacher, kind):
    """The definition, over any outcomes: (rows, outcomes) log-probabilities in fp64."""
    p, q = log_teacher.exp(), log_student.exp()
    middle = ((p + q) / 2).log()
    values = {
        "forward": p * (log_teacher - log_student),
        "reverse": q * (log_student - log_teacher),
        "js": (p * (log_teacher - middle) + q * (log_student - middle)) / 2,
    }
    return values[kind].sum(-1).mean()


@pytest.mark.parametrize("temperature", [1.0, 2.5])
@pytest.mark.parametrize("k", [0, 1, 4])
@pytest.mark.parametrize("kind", get_args(Kind))
def test_every_divergence_and_its_gradient_equal_their_definition(kind, k, temperature, monkeypatch):
    """Over all classes (k = 0), or the teacher's k likeliest and all others together, in chunks of three rows."""
    monkeypatch.setattr(losses, "_CHUNK", {"cpu": 33})
    student, teacher = logits(7, 11)
    double = student.detach().double().requires_grad_()
    log_student, log_teacher = ((one / temperature).log_softmax(-1) for one in (double, teacher.double()))
    kept = TopK.of(teacher, k, temperature) if k else teacher.clone()
    if k:
        others = torch.ones(7, 11, dtype=torch.bool).scatter(-1, log_teacher.topk(k).indices, False)
        log_student, log_teacher = (
            torch.cat([one[~others].view(7, k), one.masked_fill(~others, -torch.inf).logsumexp(-1, True)], -1)
            for one in (log_student, log_teacher)
        )
    expected = temperature**2 * plain(log_student, log_teacher, kind)
    (expected_gradient,) = torch.autograd.grad(3.5 * expected, double)
    found = divergence(student, kept, temperature, kind)
    (gradient,) = torch.autograd.grad(3.5 * found, student)
    assert float(found.detach()) == pytest.approx(float(expected.detach()), rel=1e-5)
    torch.testing.assert_close(gradient, expected_gradient.float(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", get_args(Kind))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_masses_too_small_for_their_precision_keep_gradients_finite(dtype, kind):
    """A student and a teacher who are sure of one class, the same or another: value and gradient are finite."""
    sure = torch.zeros(2, 50, dtype=dtype)
    sure[0, 3], sure[1, 4] = 200, 200
    student, teacher = sure.requires_grad_(), TopK.of(sure.detach()[:1].repeat(2, 1), 5, 1.0)
    value = divergence(student, teacher, 1.0, kind)
    (gradient,) = torch.autograd.grad(value, student)
    assert value.isfinite()
    assert gradient.isfinite().all()
    assert gradient[0].abs().max() < 1e-6


def test_kl_holds_two_tensors_of_a_vocabulary_a_row(monkeypatch):
    """From its start to the end of its backward no op makes a tensor of the size of the logits, in either direction."""
    student, teacher = logits(64, 3000)

    class NothingLarge(TorchDispatchMode):
        largest = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            known = {student.data_ptr(), teacher.data_ptr()}
            if isinstance(out, torch.Tensor) and out.untyped_storage().data_ptr() not in known:
                self.largest = max(self.largest, out.untyped_storage().nbytes())
            return out

    monkeypatch.setattr(losses, "_CHUNK", {"cpu": 3000})
    with NothingLarge() as mode:
        (gradient,) = torch.autograd.grad(divergence(student, teacher, 2.0), student)
    assert mode.largest <= student.nbytes / 16
    assert gradient.data_ptr() == teacher.data_ptr()


@pytest.mark.parametrize("kind", get_args(Kind))
def test_soft_targets_of_several_labels_compare_every_class_alone(kind):
    """The divergence of two Bernoulli distributions at a temperature, mean over rows and classes, and its gradient."""
    student, teacher = logits(5, 3)
    shares = ((one.double() / 2).sigmoid() for one in (student, teacher))
    pairs = [torch.stack([share, 1 - share], -1).log() for share in shares]
    by_hand = 4 * plain(*(pair.flatten(0, 1) for pair in pairs), kind)
    (expected,) = torch.autograd.grad(by_hand, student)
    found = soft_target_loss(SimpleNamespace(regression=False, multi_label=True), student, teacher.clone(), 2.0, kind)
    assert found.item() == pytest.approx(by_hand.item(), rel=1e-5)
    torch.testing.assert_close(torch.autograd.grad(found, student)[0], expected, rtol=1e-4, atol=1e-6)
