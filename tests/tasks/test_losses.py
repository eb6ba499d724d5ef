"""Distillation terms against closed forms, and what they hold in memory."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from ds_trainer.tasks import losses
from ds_trainer.tasks.losses import PAD_LOGIT, attention_mse, distillation_kl, hidden_cosine, hidden_mse, logit_mse


def logits(rows: int, classes: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    student = (3 * torch.randn(rows, classes, generator=generator)).requires_grad_()
    return student, 3 * torch.randn(rows, classes, generator=generator)


def plain_kl(student, teacher, temperature):
    log_student = F.log_softmax(student.float() / temperature, -1)
    return F.kl_div(log_student, F.softmax(teacher.float() / temperature, -1), reduction="batchmean") * temperature**2


def test_kl_of_two_classes_by_hand():
    """Teacher (3/4, 1/4), student (1/2, 1/2): 3/4 log 3/2 + 1/4 log 1/2; then at T = 2."""
    by_hand = 0.75 * math.log(1.5) + 0.25 * math.log(0.5)
    teacher = torch.tensor([[math.log(3.0), 0.0]])
    assert float(distillation_kl(torch.zeros(1, 2), teacher, 1.0)) == pytest.approx(by_hand)
    assert float(distillation_kl(torch.zeros(1, 2), 2 * teacher, 2.0)) == pytest.approx(4 * by_hand)


@pytest.mark.parametrize("temperature", [1.0, 2.5])
@pytest.mark.parametrize("chunk", [1, 17, 1 << 18])
def test_kl_and_its_gradient_equal_the_plain_form(temperature, chunk, monkeypatch):
    """Value and gradient, whatever the chunks, and with a slope other than 1 (a loss weight, a loss scale)."""
    monkeypatch.setattr(losses, "_CHUNK", {"cpu": chunk})
    student, teacher = logits(7, 5)
    expected = plain_kl(student, teacher, temperature)
    (expected_gradient,) = torch.autograd.grad(3.5 * expected, student)
    found = distillation_kl(student, teacher.clone(), temperature)
    (gradient,) = torch.autograd.grad(3.5 * found, student)
    assert float(found.detach()) == pytest.approx(float(expected.detach()), rel=1e-6)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_kl_in_half_precision(dtype):
    """Gradients come in the student's dtype; small ones survive a loss scale in fp16."""
    student, teacher = logits(6, 9)
    half = student.detach().to(dtype).requires_grad_()
    scale = 1024.0
    (found,) = torch.autograd.grad(scale * distillation_kl(half, teacher.to(dtype), 2.0), half)
    (expected,) = torch.autograd.grad(scale * plain_kl(half, teacher.to(dtype), 2.0), half)
    assert found.dtype == dtype
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=1e-2)


def test_kl_ignores_places_that_are_no_class():
    """Padding an answer's positions changes neither value nor gradient."""
    student, teacher = logits(3, 6)
    padded = [F.pad(values.detach(), (0, 4), value=PAD_LOGIT) for values in (student, teacher)]
    wide = padded[0].requires_grad_()
    with torch.no_grad():
        found = float(distillation_kl(wide, padded[1].clone(), 2.0))
        assert found == pytest.approx(float(plain_kl(student, teacher, 2.0)))
    (gradient,) = torch.autograd.grad(distillation_kl(wide, padded[1], 2.0), wide)
    assert gradient[:, 6:].abs().max() == 0


def test_kl_holds_two_tensors_of_a_vocabulary_a_row():
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

    losses_chunk = losses._CHUNK["cpu"]
    losses._CHUNK["cpu"] = 3000
    try:
        with NothingLarge() as mode:
            loss = distillation_kl(student, teacher, 2.0)
            (gradient,) = torch.autograd.grad(loss, student)
    finally:
        losses._CHUNK["cpu"] = losses_chunk
    assert mode.largest <= student.nbytes / 16
    assert gradient.data_ptr() == teacher.data_ptr()


def test_kl_leaves_the_teacher_alone_where_nothing_is_differentiated():
    """At evaluation the teacher's logits are still what it said."""
    student, teacher = logits(4, 3)
    before = teacher.clone()
    distillation_kl(student.detach(), teacher, 2.0)
    assert torch.equal(teacher, before)


def test_logit_mse_counts_real_places_only():
    """1 + 4 over the real places of the one row; padding has no part in it."""
    student = torch.tensor([[1.0, 2.0, PAD_LOGIT]])
    teacher = torch.tensor([[0.0, 4.0, PAD_LOGIT]])
    assert float(logit_mse(student, teacher)) == pytest.approx(5.0)


def test_cosine_of_states_under_a_mask():
    """Parallel 0, orthogonal 1, opposite 2; a masked position has no part in the mean."""
    student = torch.tensor([[[1.0, 0.0], [1.0, 0.0], [1.0, 0.0], [9.0, 9.0]]])
    teacher = torch.tensor([[[5.0, 0.0], [0.0, 2.0], [-1.0, 0.0], [-9.0, 9.0]]])
    assert float(hidden_cosine(student, teacher, torch.tensor([[1, 1, 1, 0]]))) == pytest.approx(1.0)
    assert float(hidden_cosine(student, teacher, torch.tensor([[1, 0, 0, 0]]))) == pytest.approx(0.0, abs=1e-6)


def test_mse_of_states_and_of_attention_under_a_mask():
    """States: (1 + 9) / 2 over the width of the one real position; maps: over real pairs, heads averaged if unequal."""
    student = torch.tensor([[[1.0, 3.0], [7.0, 7.0]]])
    mask = torch.tensor([[1, 0]])
    assert float(hidden_mse(student, torch.zeros(1, 2, 2), mask)) == pytest.approx(5.0)
    two_heads = torch.tensor([[[[0.2, 0.8], [9.0, 9.0]], [[0.6, 0.4], [9.0, 9.0]]]])
    assert float(attention_mse(two_heads, torch.zeros(1, 2, 2, 2), mask)) == pytest.approx((0.04 + 0.36) / 2)
    assert float(attention_mse(two_heads, torch.zeros(1, 1, 2, 2), mask)) == pytest.approx(0.16)
