"""What a cut of heads and neurons will cost, from the shapes of a model, whose weights are not read."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ds_trainer.cuts.allocation import MEASURED
from ds_trainer.cuts.blocks import cut_places
from ds_trainer.cuts.sizes import planned_sizes, sizes_now
from ds_trainer.cuts.surgeon import removal
from ds_trainer.models.costs import encoder_flops, layer_flops
from ds_trainer.models.layers import SIZES_OF, in_features, layers_of, out_features
from ds_trainer.ranks import distributed
from ds_trainer.ranks.machine import seconds
from ds_trainer.recipe.cut_specs import CutSpec

_PRODUCT, _REMOVED = 1024, 384
"""The size of the matrices by whose product a device is measured, and how many inputs are removed to measure that."""


@dataclass(frozen=True)
class BatchSize:
    """The examples of a batch, their padded length, and the number of tokens that are attended."""

    rows: int
    length: int
    tokens: int


def cut_costs(
    model: Any, spec: CutSpec, batches: Sequence[BatchSize], probes: Sequence[BatchSize], device: torch.device
) -> dict[str, Any]:
    """Return the peak `bytes` of a cut by arithmetic, and `estimated_seconds`, as JSON values.

    The model may be on the meta device. The seconds count the operations as if every block were cut. Each layer runs
    over the calibration examples once for each of its blocks, and once more for the layer after it. A choice over all
    layers does so twice, and runs the whole model on a few examples (`probes`) for each size that it tries. The runs by
    which a cut to sizes of the whole model chooses layers and channels are left out. How fast the device is at products
    and removals is measured. The seconds may be wrong by a factor of two.
    """
    layers, places = list(layers_of(model).values()), list(cut_places(model, spec).values())
    sweeps, tried = 1 if spec.uniform else 2, 0 if spec.uniform else 1 + len(MEASURED) * len(places)
    if spec.sizes:
        now, sizes = sizes_now(model), planned_sizes(model, spec)
        smaller = {unit for unit in SIZES_OF.values() if getattr(sizes, unit) < getattr(now, unit)}
        places = [place for place in places if SIZES_OF[place.block.kind] in smaller]
        sweeps, tried = 1, 0
    shapes = [(in_features(place.outer), out_features(place.outer)) for place in places]
    passes = sum(
        batch.rows * layer_flops(layer, batch.length)
        for layer in (*layers, *(place.layer for place in places))
        for batch in batches
    )
    grams = sum(2 * batch.tokens * width**2 for batch in batches for width, _ in shapes)
    probed = sum(batch.rows * encoder_flops(model, batch.length) for batch in probes)
    matrix = torch.rand(_PRODUCT, _PRODUCT, device=device)
    product = min(seconds(lambda: matrix @ matrix, device) for _ in range(3)) / (2 * _PRODUCT**3)
    estimated = (sweeps * (passes + grams) + tried * probed) * product / distributed.world_size()
    if places and spec.method == "obs":  # all blocks are cut on the first rank
        inputs, out = min(_REMOVED, shapes[0][0]), shapes[0][1]
        weight, moments = torch.rand(out, inputs, device=device), torch.eye(inputs, device=device)
        removed = seconds(lambda: removal(weight, moments, 1), device) / _removal_operations(inputs, out)
        estimated += removed * sweeps * sum(_removal_operations(*shape) for shape in shapes)
    padded = sum(batch.rows * batch.length for batch in batches)
    held = {
        "model": 4 * sum(parameter.numel() for parameter in model.parameters()),
        "largest_layer": 4 * max(sum(p.numel() for p in layer.parameters()) for layer in layers),
        "gram_matrices": 6
        * 8
        * max((width for width, _ in shapes), default=0) ** 2,  # the surgeon holds six matrices of this size
        # those that a layer gets, and those that it gives
        "hidden_states": 2 * 4 * padded * model.config.hidden_size // distributed.world_size(),
        "weights_tried": 0 if not tried else 4 * len(MEASURED) * sum(w * o for w, o in shapes),
    }
    return {"bytes": held | {"total": sum(held.values())}, "estimated_seconds": round(estimated, 1)}


def _removal_operations(width: int, out: int) -> int:
    """Count the inversion and the removals of all inputs of a layer (out, width)."""
    return 8 * width**3 // 3 + 2 * width**2 * out
