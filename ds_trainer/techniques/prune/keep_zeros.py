"""Train a pruned model further while its zeros stay: they get no gradient.

For unstructured models, since what a structured cut leaves is dense. A weight that is zero and never has a gradient
stays zero under every optimizer that works elementwise, its moments and its weight decay included.
"""

from typing import ClassVar

import torch
from torch import nn

from ds_trainer.models.layers import encoder_linears
from ds_trainer.ranks.failures import UserError
from ds_trainer.techniques.technique import Technique

# in lower case, as DeepSpeed reads them
_MIXING_OPTIMIZERS = {"muon", "onebitadam", "onebitlamb", "zerooneadam"}


class KeepZeros(Technique):
    """Keeps the zeros that the linear layers of the encoder have at the start."""

    name: ClassVar[str] = "keep_zeros"
    Spec = bool

    density = 1.0

    def attach(self, model: nn.Module) -> nn.Module:
        kept = total = 0
        for linear in encoder_linears(model).values():
            mask = linear.weight.detach() != 0
            kept, total = kept + int(mask.count_nonzero()), total + mask.numel()
            linear.register_buffer("nonzero", mask, persistent=False)  # a buffer, so that the engine moves it
            linear.weight.register_hook(lambda g, linear=linear: torch.where(linear.get_buffer("nonzero"), g, 0))
        self.density = kept / total
        return model

    def check(self, optimizer: str, travel: float) -> None:
        """Raise UserError for an optimizer that moves a weight by the gradients of other weights."""
        if optimizer.lower() in _MIXING_OPTIMIZERS:
            raise UserError(
                f"keep_zeros: optimizer.type is {optimizer}, whose steps are not made weight by weight, so zeros would "
                "not stay: use AdamW, Adam, Adagrad or SGD"
            )

    def start(self, device: torch.device) -> None:
        """Raise UserError where the model has no zeros. `attach` cannot: it also runs on stand-ins for later models."""
        if self.density == 1:
            raise UserError(
                "keep_zeros: the linear layers of the model's encoder have no zeros to keep: start from a pruned "
                "model, or drop it"
            )

    def rehearse(self, device: torch.device) -> None:
        pass

    def readings(self) -> dict[str, float]:
        return {"keep_zeros/density": self.density}
