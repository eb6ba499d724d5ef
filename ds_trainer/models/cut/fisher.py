"""The diagonal of the empirical Fisher matrix: how much the loss of the task depends on each weight.

If a weight w of a trained model is removed, the loss grows by about w^2 F / 2, where F is the mean over examples of the
squared derivative of an example's loss (Kwon et al., arXiv 2204.09656). These costs are comparable over all layers.
"""

import contextlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ds_trainer.models.cut.layerwise import Calibration, by_example, finite
from ds_trainer.models.layers import AnyLinear, in_features, out_features
from ds_trainer.ranks import distributed
from ds_trainer.ranks.progress import progress
from ds_trainer.ranks.stopping import in_step


@torch.enable_grad()
def fisher_diagonals(
    model: Any, linears: Mapping[str, AnyLinear], calibration: Calibration, device: torch.device
) -> dict[str, Tensor]:
    """Return, for the weight of each linear layer, (out, in), the sums over all examples of its squared derivatives.

    Where the examples of a batch share an input, as DeBERTa's do its relative positions, the derivative of the batch is
    squared: the same in expectation. The whole model is on the device meanwhile. The sums are in fp32 on the CPU;
    collective.
    """
    model.to(device)
    squares = {
        name: torch.zeros(out_features(linear), in_features(linear), device=device) for name, linear in linears.items()
    }
    # a zero that is added to the outputs of all layers: its derivative needs theirs, and none of a weight
    zero = torch.zeros((), device=device, requires_grad=True)
    batches = in_step(enumerate(calibration.attended), len(calibration.attended))
    for index, attended in progress(batches, "squaring derivatives", "batch", len(calibration.attended)):
        with contextlib.ExitStack() as hooks:
            for name, linear in linears.items():
                hooks.enter_context(linear.register_forward_hook(_adding_to(squares[name], zero, attended.shape)))
            torch.autograd.grad(calibration.loss(model, index), zero)
    model.cpu()
    return {name: finite(distributed.total(sums), f"the derivatives of {name}").cpu() for name, sums in squares.items()}


def _adding_to(squares: Tensor, zero: Tensor, tokens: torch.Size) -> Any:
    """Return a hook of a linear layer that adds the squared derivatives of its weight, of each example by itself."""

    def hook(_: nn.Module, given: tuple[Tensor, ...], output: Tensor) -> Tensor:
        inputs, output = given[0].detach(), output + zero
        output.register_hook(lambda gradient: add(inputs, gradient))
        return output

    @torch.no_grad()
    def add(inputs: Tensor, gradient: Tensor) -> None:
        for x, slope in zip(by_example(inputs, tokens), by_example(gradient, tokens), strict=True):
            squares.add_((slope.flatten(0, -2).T @ x.flatten(0, -2)).square())

    return hook
