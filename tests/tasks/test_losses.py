"""Distillation terms on logits, and states against closed forms."""

from __future__ import annotations

import pytest
import torch

from ds_trainer.tasks.losses import PAD_LOGIT, hidden_cosine, hidden_mse, logit_mse


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


def test_mse_of_states_under_a_mask():
    """(1 + 9) / 2 over the width of the one real position."""
    student = torch.tensor([[[1.0, 3.0], [7.0, 7.0]]])
    assert float(hidden_mse(student, torch.zeros(1, 2, 2), torch.tensor([[1, 0]]))) == pytest.approx(5.0)
