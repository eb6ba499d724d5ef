"""Cut heads and neurons out of a trained model, and let those that are kept make up for them.

Each block (attention, feed-forward) has an outer linear layer, whose inputs are the outputs of its heads or neurons. The
cut removes inputs of this layer by optimal brain surgeon, solves its weight and bias for the inputs that are kept, and
writes zeros for the others; `models/shrink.py` then makes the smaller model. Blocks are cut in the order in which the
model computes them, each on the inputs that the blocks cut before give it.
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ds_trainer.config.cut_specs import CutSpec
from ds_trainer.models.cut.layerwise import Calibration, Gram, Layerwise
from ds_trainer.models.cut.surgeon import Removal, least_squares, magnitude_removal, output_error, removal
from ds_trainer.models.layers import AnyLinear, Block, blocks_of, decisions_of, is_emptied, layers_of, rows_of
from ds_trainer.models.shrink import check_known
from ds_trainer.ranks import distributed
from ds_trainer.ranks.failures import UserError

KIND_OF = {"hybrid": ("attention", "feed_forward"), "head": ("attention",), "neuron": ("feed_forward",)}
"""The kinds of blocks that each granularity cuts."""


@dataclass(frozen=True)
class CutBlock:
    """A block that is to be cut: where it is, and how many heads (groups that share a key and value) or neurons it has."""

    layer: int
    name: str
    """Of its outer linear layer, in the model."""
    block: Block
    count: int


@dataclass(frozen=True)
class BlockRecord:
    """What a cut did to one block."""

    name: str
    kind: str
    count: int
    kept: int
    error: float
    """The mean squared error of the block's outputs on the calibration examples, as a share of their variance."""


def cut_places(model: Any, spec: CutSpec) -> dict[str, CutBlock]:
    """Return the blocks that the spec cuts, by the names of their outer layers. UserError where the family has none."""
    check_known(model)
    places = {}
    for index, (name, layer) in enumerate(layers_of(model).items()):
        for block in blocks_of(layer):
            if block.kind in KIND_OF[spec.granularity] and not is_emptied(layer.get_submodule(block.core)):
                count = decisions_of(block, layer, model.config)
                places[f"{name}.{block.outer}"] = CutBlock(index, f"{name}.{block.outer}", block, count)
    if not places:
        raise UserError(f"cut: {type(model).__name__} has nothing of the granularity {spec.granularity} to cut")
    return places


def uniform_counts(places: Mapping[str, CutBlock], spec: CutSpec) -> dict[str, int]:
    """Return how many decisions each block keeps of its own: the same share in every layer, and at least one."""
    assert isinstance(spec.keep, float), "the recipe has divided a cut in steps"
    counts = {}
    for name, place in places.items():
        lowest = spec.min_heads if place.block.kind == "attention" else 0
        counts[name] = min(place.count, max(1, lowest, round(spec.keep * place.count)))
    return counts


@torch.no_grad()
def cut_blocks(
    model: Any, counts: Mapping[str, int], calibration: Calibration, spec: CutSpec, device: torch.device
) -> list[BlockRecord]:
    """Cut each block of `cut_places` to its count, in place: removed heads and neurons are zeros of the outer weight.

    The model is on the CPU and in evaluation mode. Every rank must take part, and gets the same weights.
    """
    places, records = cut_places(model, spec), []
    layerwise = Layerwise(model, calibration, device)
    for layer_name, layer in layerwise:
        for block in blocks_of(layer):
            place = places.get(f"{layer_name}.{block.outer}")
            if place is None or counts[place.name] == place.count:
                continue
            outer: Any = layer.get_submodule(block.outer)
            gram = layerwise.grams({place.name: outer})[place.name]
            record, weight, bias = distributed.on_main(partial(_solved, layer, place, counts[place.name], gram, spec))
            rows_of(outer.weight, type(outer)).copy_(weight)
            if outer.bias is not None:
                outer.bias.copy_(bias)
            records.append(record)
    return records


def _solved(
    layer: nn.Module, place: CutBlock, kept: int, gram: Gram, spec: CutSpec
) -> tuple[BlockRecord, Tensor, Tensor | None]:
    """Return what becomes of a block's outer layer if it keeps so many decisions: its weight, zeros in it, and bias."""
    outer: Any = layer.get_submodule(place.block.outer)
    weight = rows_of(outer.weight, type(outer)).double()
    centred = outer.bias is not None
    moments, damped = gram.second_moments(centred, 0.0), gram.second_moments(centred, spec.damping)
    width = weight.shape[1] // place.count
    removed = ordered(layer, place.block, weight, damped, width, spec).order[: place.count - kept]
    columns = torch.ones(place.count, dtype=torch.bool, device=weight.device)
    columns[removed] = False
    columns = columns.repeat_interleave(width)
    cut = torch.zeros_like(weight)
    cut[:, columns] = least_squares(weight, damped, columns) if spec.update_weights else weight[:, columns]
    error = output_error(weight, moments, cut) / max(output_error(weight, moments, torch.zeros_like(cut)), 1e-300)
    bias = (outer.bias + (weight - cut) @ gram.mean).float().cpu() if centred else None
    record = BlockRecord(place.name, place.block.kind, place.count, kept, error)
    return record, cut.float().cpu(), bias


def ordered(layer: nn.Module, block: Block, weight: Tensor, moments: Tensor, width: int, spec: CutSpec) -> Removal:
    """Return the order in which the spec's method removes a block's decisions."""
    if spec.method == "obs":
        return removal(weight, moments, width)
    return magnitude_removal(_magnitudes(layer, block, weight.shape[1] // width))


def _magnitudes(layer: nn.Module, block: Block, count: int) -> Tensor:
    """Return the sum of squares of each decision's weights, over all matrices of the block: (count,)."""
    outer: Any = layer.get_submodule(block.outer)
    total = rows_of(outer.weight, type(outer)).square().sum(0).view(count, -1).sum(1)
    for name in block.inner:
        linear: Any = layer.get_submodule(name)
        squares = rows_of(linear.weight, type(linear)).square().sum(1)
        total = total + squares.view(block.parts, count, -1).sum((0, 2))
    return total
