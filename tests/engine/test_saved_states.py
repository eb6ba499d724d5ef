"""What a file of a checkpoint may hold."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from deepspeed.runtime.fp16.loss_scaler import LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum

from ds_trainer.engine.saved_states import _read
from ds_trainer.ranks.failures import UserError


class ByGetattr:
    """Is pickled as `getattr` of two values, as Python 3.11.0 to 3.11.3 pickle the member of an enum."""

    def __init__(self, *values: Any) -> None:
        self.values = values

    def __reduce__(self) -> Any:
        return getattr, self.values


def test_the_member_of_an_enum_is_read_and_nothing_else_is_reached(tmp_path):
    """`getattr` of a class that is known could reach its functions."""
    for name, values in {"stage": (ZeroStageEnum, "weights"), "function": (LossScaler, "backward")}.items():
        torch.save({"value": ByGetattr(*values)}, tmp_path / name)
    assert _read(tmp_path / "stage") == {"value": ZeroStageEnum.weights}
    with pytest.raises(UserError, match="cannot be read"):
        _read(tmp_path / "function")
