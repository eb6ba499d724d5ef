"""Cut heads and neurons of a trained model, and refit the weights that are kept.

Each block (attention, feed-forward) has an outer linear layer, whose inputs are the outputs of its heads or neurons.
The cut removes inputs of this layer by optimal brain surgeon, solves its weight and bias for the inputs that are kept,
and writes zeros for the others; `models/shrink.py` then makes the smaller model. Blocks are cut in the order in which
the model computes them, each on the inputs that it gets from the blocks that are cut already.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ds_trainer.cuts.calibration import Calibration
from ds_trainer.cuts.layerwise import with_grams
from ds_trainer.cuts.surgeon import CutRecord, Fitting, Gram, Replacement, least_squares, removal
from ds_trainer.models.layers import SIZES_OF, Block, blocks_of, decisions_of, is_emptied, layers_of, rows_of
from ds_trainer.models.shrink import check_known
from ds_trainer.ranks import distributed
from ds_trainer.ranks.failures import UserError
from ds_trainer.recipe.cut_specs import CutSpec

KINDS = {"head": ("attention",), "neuron": ("feed_forward",)}
"""The kinds of blocks that a granularity cuts; the others cut both."""


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
    order: Sequence[int] = ()
    """The order in which decisions go, where it is known before the block is cut."""

    @property
    def outer(self) -> Any:
        return self.layer.get_submodule(self.block.outer)

    @property
    def linears(self) -> list[Any]:
        """The linear layers of the block, the outer one last."""
        return [self.layer.get_submodule(name) for name in (*self.block.inner, self.block.outer)]


def cut_places(model: Any, spec: CutSpec) -> dict[str, CutBlock]:
    """Return the blocks that the spec cuts, in the model's order. UserError where the model has none of them."""
    check_known(model)
    places = {}
    for layer_name, layer in layers_of(model).items():
        for block in blocks_of(layer):
            if block.kind in KINDS.get(spec.granularity, SIZES_OF) and not is_emptied(layer.get_submodule(block.core)):
                name, count = f"{layer_name}.{block.outer}", decisions_of(block, layer, model.config)
                lowest = min(count, spec.min_heads) if block.kind == "attention" else 0
                places[name] = CutBlock(name, block, layer, count, lowest)
    if not places:
        raise UserError(f"cut: {type(model).__name__} has nothing of the granularity {spec.granularity} to cut")
    return places


def uniform_counts(places: Mapping[str, CutBlock], keep: float) -> dict[str, int]:
    """Return how many decisions each block keeps if all keep the same share: at least one. UserError where all stay."""
    counts = {name: max(1, place.lowest, round(keep * place.count)) for name, place in places.items()}
    if all(counts[name] == place.count for name, place in places.items()):
        raise UserError(f"cut: a share of {keep} and min_heads leave all heads and neurons: lower them")
    return counts


class OuterCut:
    """The outer linear layer of a block, the order in which its inputs go, and its weights with fewer of them.

    A block that has an order keeps it, and there are no errors of each removal.
    """

    def __init__(self, place: CutBlock, gram: Gram, spec: CutSpec) -> None:
        self.count, self.spec = place.count, spec
        self.fitting = Fitting(place.outer, gram, spec.damping)
        if place.order:
            self.order = place.order
        elif spec.method == "obs":
            width = self.fitting.weight.shape[1] // place.count
            self.order, self.errors = removal(self.fitting.weight, self.fitting.damped, width)
        else:  # the smallest goes first; the errors are not known
            self.order, self.errors = _magnitudes(place).argsort().tolist(), [1.0] * place.count

    def keeping(self, count: int) -> Replacement:
        """Return the layer's weight and bias for `count` decisions."""
        dense = self.fitting.weight
        decisions = torch.ones(self.count, dtype=torch.bool, device=dense.device)
        decisions[self.order[: self.count - count]] = False
        columns = decisions.repeat_interleave(dense.shape[1] // self.count)
        # the updates of the removals would give the same weights; one solve has less rounding
        fitted = least_squares(dense, self.fitting.damped, columns) if self.spec.update_weights else dense[:, columns]
        return self.fitting.replacement(fitted, columns.cpu())


def cut_blocks(
    model: Any, places: Mapping[str, CutBlock], counts: Mapping[str, int], calibration: Calibration, spec: CutSpec
) -> list[CutRecord]:
    """Cut each block of `cut_places` to its count, in place: removed heads and neurons are zeros of the outer weight.

    The model is on the CPU and in evaluation mode. Every rank must take part, and gets the same weights.
    """
    records = []
    outers = {name: place.outer for name, place in places.items() if counts[name] < place.count}
    for name, gram in with_grams(model, outers, calibration, "cutting heads and neurons"):
        place, kept = places[name], counts[name]
        replacement = distributed.on_main(lambda: OuterCut(place, gram, spec).keeping(kept))  # noqa: B023
        replacement.write(place.outer)
        unit: Any = SIZES_OF[place.block.kind]
        records.append(CutRecord(name, unit, place.count, kept, replacement.error))
    return records


def _magnitudes(place: CutBlock) -> Tensor:
    """Return the sum of squares of each decision's weights, over all matrices of the block: (count,)."""
    *inner, outer = place.linears
    total = rows_of(outer.weight, type(outer)).square().sum(0).view(place.count, -1).sum(1)
    for linear in inner:
        squares = rows_of(linear.weight, type(linear)).square().sum(1)
        total = total + squares.view(place.block.parts, place.count, -1).sum((0, 2))
    return total.detach()
