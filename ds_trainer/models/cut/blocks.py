"""Cut heads and neurons of a trained model, and let those that are kept make up for them.

Each block (attention, feed-forward) has an outer linear layer, whose inputs are the outputs of its heads or neurons.
The cut removes inputs of this layer by optimal brain surgeon, solves its weight and bias for the inputs that are kept,
and writes zeros for the others; `models/shrink.py` then makes the smaller model. Blocks are cut in the order in which
the model computes them, each on the inputs that it gets from the blocks that are cut already.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ds_trainer.config.cut_specs import CutSpec
from ds_trainer.models.cut.fitting import CutRecord, Fitting, Replacement
from ds_trainer.models.cut.layerwise import Calibration, Gram, Layerwise, without_products
from ds_trainer.models.cut.surgeon import least_squares, magnitude_removal, removal
from ds_trainer.models.layers import SIZES_OF, Block, blocks_of, decisions_of, is_emptied, layers_of, rows_of
from ds_trainer.models.shrink import check_known
from ds_trainer.ranks import distributed
from ds_trainer.ranks.failures import UserError

_BOTH = ("attention", "feed_forward")
KINDS = {"hybrid": _BOTH, "model": _BOTH, "head": ("attention",), "neuron": ("feed_forward",)}
"""The kinds of blocks that each granularity cuts."""


@dataclass(frozen=True)
class CutBlock:
    """A block that can be cut, and how many heads (groups that share a key and a value) or neurons it has."""

    name: str
    """The name of its outer linear layer in the model."""
    block: Block
    layer: nn.Module
    count: int
    lowest: int
    """The number of decisions that it keeps in any case."""

    @property
    def outer(self) -> Any:
        return self.layer.get_submodule(self.block.outer)

    @property
    def weights(self) -> int:
        """The number of weights in the matrices of the block."""
        linears: list[Any] = [self.layer.get_submodule(name) for name in (*self.block.inner, self.block.outer)]
        return sum(linear.weight.numel() for linear in linears)


def cut_places(model: Any, spec: CutSpec) -> dict[str, CutBlock]:
    """Return the blocks that the spec cuts, in the model's order. UserError where the model has none of them."""
    check_known(model)
    places = {}
    for layer_name, layer in layers_of(model).items():
        for block in blocks_of(layer):
            if block.kind in KINDS[spec.granularity] and not is_emptied(layer.get_submodule(block.core)):
                name, count = f"{layer_name}.{block.outer}", decisions_of(block, layer, model.config)
                lowest = min(count, spec.min_heads) if block.kind == "attention" else 0
                places[name] = CutBlock(name, block, layer, count, lowest)
    if not places:
        raise UserError(f"cut: {type(model).__name__} has nothing of the granularity {spec.granularity} to cut")
    return places


def uniform_counts(places: Mapping[str, CutBlock], keep: float) -> dict[str, int]:
    """Return how many decisions each block keeps if all keep the same share: at least one. UserError where all stay."""
    counts = {name: max(1, place.lowest, round(keep * place.count)) for name, place in places.items()}
    if all(place.count <= max(1, place.lowest) for place in places.values()):
        raise UserError("cut: every layer has only the heads that must stay, which are one and min_heads: cut neurons")
    if all(counts[name] == place.count for name, place in places.items()):
        raise UserError(f"cut: a share of {keep} rounds to all heads and neurons: lower it")
    return counts


class OuterCut:
    """The outer linear layer of a block, and what becomes of it if the block keeps fewer heads or neurons."""

    def __init__(self, place: CutBlock, gram: Gram, spec: CutSpec, check: Callable[[], None]) -> None:
        self.count, self.spec = place.count, spec
        self.fitting = fitting = Fitting(place.outer, gram, spec.damping)
        width, obs = fitting.weight.shape[1] // place.count, spec.method == "obs"
        if obs:
            self.removal = removal(fitting.weight, fitting.damped, width, check)
        else:
            self.removal = magnitude_removal(_magnitudes(place))

    def keeping(self, count: int) -> Replacement:
        """Return the layer's weight and bias for so many decisions, with zeros for those that are removed."""
        dense = self.fitting.weight
        decisions = torch.ones(self.count, dtype=torch.bool, device=dense.device)
        decisions[self.removal.order[: self.count - count]] = False
        columns = decisions.repeat_interleave(dense.shape[1] // self.count)
        weight = torch.zeros_like(dense)
        fitted = least_squares(dense, self.fitting.damped, columns) if self.spec.update_weights else dense[:, columns]
        weight[:, columns] = fitted
        return self.fitting.replacement(weight)


def cut_blocks(
    model: Any,
    places: Mapping[str, CutBlock],
    counts: Mapping[str, int],
    calibration: Calibration,
    spec: CutSpec,
    device: torch.device,
) -> list[CutRecord]:
    """Cut each block of `cut_places` to its count, in place: removed heads and neurons are zeros of the outer weight.

    The model is on the CPU and in evaluation mode. Every rank must take part, and gets the same weights.
    """
    records = []
    smaller = {name: place for name, place in places.items() if counts[name] < place.count}
    for place, gram in with_grams(model, smaller, calibration, device):
        cut = distributed.on_main(
            lambda: OuterCut(place, gram, spec, calibration.check_alone).keeping(counts[place.name])  # noqa: B023
        )
        cut.write(place.outer)
        unit: Any = SIZES_OF[place.block.kind]
        records.append(CutRecord(place.name, unit, place.count, counts[place.name], cut.error))
    return records


def with_grams(
    model: Any,
    places: Mapping[str, CutBlock],
    calibration: Calibration,
    device: torch.device,
    doing: str = "cutting heads and neurons",
) -> Iterator[tuple[CutBlock, Gram]]:
    """Yield each block, its layer on the device, with the sums of its outer layer's inputs.

    `doing` says what is done to them where the progress is shown.

    A block that is changed before the next one is taken changes the inputs of those that follow.
    """
    layerwise = Layerwise(model, calibration, device, doing)
    for layer in layerwise:
        for place in (place for place in places.values() if place.layer is layer):
            with without_products(unused_linears(place)):
                grams = layerwise.grams({place.name: place.outer})
            yield place, grams[place.name]


def unused_linears(place: CutBlock) -> Iterator[Any]:
    """Yield linear layers on which the inputs of a block's outer layer do not depend: itself, and what comes after."""
    yield place.outer
    for block in blocks_of(place.layer) if place.block.kind == "attention" else ():
        if block.kind == "feed_forward" and not is_emptied(place.layer.get_submodule(block.core)):
            yield from (place.layer.get_submodule(name) for name in (*block.inner, block.outer))


def _magnitudes(place: CutBlock) -> Tensor:
    """Return the sum of squares of each decision's weights, over all matrices of the block: (count,)."""
    outer, block = place.outer, place.block
    total = rows_of(outer.weight, type(outer)).square().sum(0).view(place.count, -1).sum(1)
    for name in block.inner:
        linear: Any = place.layer.get_submodule(name)
        squares = rows_of(linear.weight, type(linear)).square().sum(1)
        total = total + squares.view(block.parts, place.count, -1).sum((0, 2))
    return total.detach()
