"""Which layers of a model go: by the loss that their absence adds, or by how little they change what they are given."""

import contextlib
from typing import Any

import torch
from torch import Tensor, nn

from ds_trainer.cuts.layerwise import Calibration, finite, observe
from ds_trainer.models.layers import encoder_layers
from ds_trainer.models.student import can_keep
from ds_trainer.ranks import distributed
from ds_trainer.ranks.failures import UserError
from ds_trainer.ranks.progress import progress
from ds_trainer.recipe.cut_specs import CutSpec


@torch.no_grad()
def remaining_layers(model: Any, count: int, calibration: Calibration, spec: CutSpec) -> list[int]:
    """Return the numbers of the `count` layers that stay, rising; collective. The model is on the device afterwards.

    Layers go one at a time: by loss, each time the one without which the answers diverge least from the dense model's;
    by cosine, those that change their input least (ShortGPT, arXiv 2403.03853). Layers stay without which the family's
    class cannot be built, such as ModernBERT's first.
    """
    layers = list(encoder_layers(model.to(calibration.device)).values())
    kept = list(range(len(layers)))
    # layers that are all of the same form can take any place
    alike = len({tuple((name, weight.shape) for name, weight in layer.named_parameters()) for layer in layers}) == 1
    by_loss = spec.layer_criterion == "loss"
    dense = calibration.answers(model) if by_loss else None
    changes = [] if by_loss else _changes(model, calibration)

    def loss(number: int) -> float:
        if not by_loss:
            return changes[number]
        with contextlib.ExitStack() as skipped:
            for other, layer in enumerate(layers):
                if other == number or other not in kept:
                    skipped.enter_context(layer.register_forward_hook(_skip))
            answers = calibration.answers(model)
        return calibration.divergence(dense, answers)

    while len(kept) > count:
        choices = [one for one in kept if alike or can_keep(model, [other for other in kept if other != one])]
        if not choices:
            raise UserError(
                f"cut: {len(kept) - count} more layers of a {type(model).__name__} cannot go, since its layers differ "
                "by their place: keep another number of layers, or cut width or neurons"
            )
        kept.remove(min(progress(choices, "trying the model without some layers", "choice"), key=loss))
    if not alike and 0 in kept and not can_keep(model, range(1, len(layers))):
        distributed.info(f"cut: layer 0 of a {type(model).__name__} stays, since the others cannot take its place")
    return kept


def _skip(_: nn.Module, given: tuple[Any, ...], out: Any) -> Any:
    """Let a layer return what it was given, in the form in which it returns what it has computed."""
    return (given[0], *out[1:]) if isinstance(out, tuple) else given[0]


def _changes(model: Any, calibration: Calibration) -> list[float]:
    """Return 1 - cosine between what each layer is given and what it gives, a mean over tokens; collective."""
    layers = encoder_layers(model)
    sums = {name: torch.zeros(2, dtype=torch.float64, device=calibration.device) for name in layers}

    def add(name: str, given: Tensor, out: Tensor) -> None:
        cosine = torch.cosine_similarity(given.float(), out.float(), dim=1).clamp(-1, 1)
        sums[name] += torch.stack(((1 - cosine).sum(), cosine.new_tensor(len(cosine))))

    observe(model, layers, calibration, add)
    totals = [finite(distributed.total(of_layer), "the hidden states").tolist() for of_layer in sums.values()]
    return [change / tokens for change, tokens in totals]
