"""The diagonal of the empirical Fisher matrix: how much the loss of the task depends on each weight.

If a weight w of a trained model is removed, the loss grows by about w^2 F / 2, where F is the mean over examples of the
squared derivative of an example's loss (Kwon et al., arXiv 2204.09656). These costs are comparable over all layers.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ds_trainer.models.cut.layerwise import Calibration
from ds_trainer.models.layers import AnyLinear, in_features, out_features
from ds_trainer.ranks import distributed


@torch.enable_grad()
def fisher_diagonals(
    model: Any, linears: Mapping[str, AnyLinear], calibration: Calibration, device: torch.device
) -> dict[str, Tensor]:
    """Return, for the weight of each linear layer, (out, in), the sums over all examples of its squared derivatives.

    The whole model is on the device meanwhile. The sums are in fp32 on the CPU; collective.
    """
    model.to(device)
    squares = {name: torch.zeros(_shape(linear), device=device) for name, linear in linears.items()}
    handles = [linear.register_forward_hook(_adding_to(squares[name])) for name, linear in linears.items()]
    embeddings = model.get_input_embeddings().weight
    try:
        for index in range(len(calibration.inputs)):
            # the derivative of the embeddings alone: it passes the outputs of all layers, and computes none of a weight
            torch.autograd.grad(calibration.loss(model, index), embeddings)
    finally:
        for handle in handles:
            handle.remove()
    model.cpu()
    return {name: distributed.total(sums).cpu() for name, sums in squares.items()}


def _shape(linear: AnyLinear) -> tuple[int, int]:
    return out_features(linear), in_features(linear)


def _adding_to(squares: Tensor) -> Any:
    """Return a hook of a linear layer that adds the squared derivatives of its weight, of each example by itself."""

    def hook(_: nn.Module, given: tuple[Tensor, ...], output: Tensor) -> None:
        inputs = given[0].detach()
        output.register_hook(lambda gradient: add(inputs, gradient))

    @torch.no_grad()
    def add(inputs: Tensor, gradient: Tensor) -> None:
        for x, slope in zip(inputs, gradient, strict=True):
            squares.add_((slope.flatten(0, -2).T @ x.flatten(0, -2)).square())

    return hook
