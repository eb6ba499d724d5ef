"""Which layers of a model go: by the loss that their absence adds, or by how little they change what they are given."""

import contextlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ds_trainer.config.cut_specs import CutSpec
from ds_trainer.models.cut.layerwise import Calibration, finite, observe
from ds_trainer.models.layers import encoder_layers
from ds_trainer.models.student import can_keep
from ds_trainer.ranks import distributed
from ds_trainer.ranks.failures import UserError
from ds_trainer.ranks.progress import progress


@torch.no_grad()
def remaining_layers(
    model: Any, count: int, calibration: Calibration, spec: CutSpec, device: torch.device
) -> list[int]:
    """Return the numbers of the `count` layers that stay, rising; collective. The model is on the device afterwards.

    By loss, layers go one at a time, each time the one without which the answers diverge least from the dense model's.
    By cosine those go that change their input least (ShortGPT, arXiv 2403.03853). Layers that follow one another go
    together, by the divergence without them all or by the angle between what the first is given and the last gives
    (arXiv 2403.17887). Layers stay without which the family's class cannot be built, such as ModernBERT's first.
    """
    layers = list(encoder_layers(model.to(device)).values())
    numbers, gone = range(len(layers)), len(layers) - count
    # layers that are all of the same form can take any place
    alike = len({tuple((name, weight.shape) for name, weight in layer.named_parameters()) for layer in layers}) == 1
    loss = _loss_without(model, gone, calibration, spec, device)

    def best(choices: list[tuple[int, ...]]) -> tuple[int, ...]:
        possible = [lost for lost in choices if alike or can_keep(model, [n for n in numbers if n not in lost])]
        if not possible:
            raise UserError(
                f"cut: {gone} layers of a {type(model).__name__} cannot go, since its layers differ by their place: "
                "keep another number of layers, or cut width or neurons"
            )
        return min(progress(possible, "trying the model without some layers", "choice"), key=loss)

    dropped: tuple[int, ...] = ()
    if spec.contiguous:
        dropped = best([tuple(range(first, first + gone)) for first in range(count + 1)])
    while len(dropped) < gone:
        dropped = best([(*dropped, number) for number in numbers if number not in dropped])
    if not alike and 0 not in dropped and not can_keep(model, numbers[1:]):
        distributed.info(f"cut: layer 0 of a {type(model).__name__} stays, since the others cannot take its place")
    return [number for number in numbers if number not in dropped]


def _loss_without(
    model: Any, gone: int, calibration: Calibration, spec: CutSpec, device: torch.device
) -> Callable[[Sequence[int]], float]:
    """Return a function that says how much is lost without some layers, the last of which is chosen last."""
    if spec.layer_criterion == "cosine":
        distances = _distances(model, calibration, gone if spec.contiguous else 1, device)
        return lambda dropped: distances[dropped[0] if spec.contiguous else dropped[-1]]
    layers, dense = list(encoder_layers(model).values()), calibration.answers(model)

    def loss(dropped: Sequence[int]) -> float:
        with contextlib.ExitStack() as hooks:
            for number in dropped:
                hooks.enter_context(layers[number].register_forward_hook(_skip))
            answers = calibration.answers(model)
        return calibration.divergence(dense, answers)

    return loss


def _skip(_: nn.Module, given: tuple[Any, ...], out: Any) -> Any:
    """Let a layer return what it was given, in the form in which it returns what it has computed."""
    return (given[0], *out[1:]) if isinstance(out, tuple) else given[0]


def _distances(model: Any, calibration: Calibration, span: int, device: torch.device) -> list[float]:
    """Return how far what each run of `span` layers gives is from what it is given, a mean over tokens; collective.

    It is 1 - cosine for a single layer, and the angle as a share of a half turn for several.
    """
    layers, states = encoder_layers(model), list[Tensor]()
    sums = torch.zeros(len(layers) - span + 1, dtype=torch.float64, device=device)
    tokens = torch.zeros(1, dtype=torch.float64, device=device)

    def add(_: str, given: Tensor, out: Tensor) -> None:
        states.append(given)
        if len(states) < len(layers):
            return
        states.append(out)
        for first in range(len(sums)):
            cosine = torch.cosine_similarity(states[first].float(), states[first + span].float(), dim=1).clamp(-1, 1)
            sums[first] += (1 - cosine if span == 1 else cosine.arccos() / math.pi).sum()
        tokens.add_(len(out))
        states.clear()

    observe(model, layers, calibration, device, add)
    return list((finite(distributed.total(sums), "the hidden states") / distributed.total(tokens)).tolist())
