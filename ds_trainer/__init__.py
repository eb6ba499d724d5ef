"""Make transformer models small and fast: pruning, early exit and distillation, trained on DeepSpeed."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn

__version__ = "0.1.0"


def load_model(folder: str | Path, *, allow_pickle: bool = False, trust_remote_code: bool = False) -> nn.Module:
    """The model of a folder that a run left, in evaluation mode, in fp32.

    With exit heads in the folder, its forward exits early: `logits` (rows, classes), and `exit_layers` (rows,), the
    layers that each sample went through. Raises ValueError where the folder holds no trained model. By default weights
    are safetensors, and no code of the folder is run; `trust.py` says what the two permissions are.
    """
    from ds_trainer.config.trust import Trust, trusting
    from ds_trainer.techniques.exits import early_exit

    with trusting(Trust(allow_pickle, trust_remote_code)):
        return early_exit.load_for_inference(folder)
