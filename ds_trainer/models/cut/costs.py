"""What a cut of heads and neurons will cost, from the shapes of a model, whose weights are not read.

Operations are counted as `models/flops.py` counts them, for all ranks together. Every layer runs over the calibration
examples once for each of its blocks, up to the inputs of the block's outer layer, and once more, whole, for the layer
after it. A cut that chooses over all layers does so twice, and runs the whole model on a few examples for each size of
each block that it tries. A cut to sizes of the whole model repeats this for each candidate. It also runs the whole
model on a few examples for each layer that may go, and twice on all to choose channels.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ds_trainer.config.cut_specs import CutSpec
from ds_trainer.models.cut.allocation import MEASURED
from ds_trainer.models.cut.blocks import CutBlock, cut_places, unused_linears
from ds_trainer.models.cut.sizes import planned_sizes, sizes_now
from ds_trainer.models.cut.surgeon import removal_seconds
from ds_trainer.models.flops import encoder_flops, layer_flops
from ds_trainer.models.layers import SIZES_OF, in_features, layers_of, out_features
from ds_trainer.ranks import distributed
from ds_trainer.ranks.timing import seconds

_PRODUCT = 1024
"""The size of the matrices by whose product a device is measured."""


@dataclass(frozen=True)
class BatchSize:
    """The examples of a batch, their padded length, and the number of tokens that are attended."""

    rows: int
    length: int
    tokens: int


def cut_costs(
    model: Any, spec: CutSpec, batches: Sequence[BatchSize], probes: Sequence[BatchSize], device: torch.device
) -> dict[str, Any]:
    """Return the `operations` and the `bytes` of a cut by arithmetic, and `estimated_seconds`, as JSON values.

    The model may be on the meta device. The seconds follow from a product of matrices and from a few removals that are
    measured on the device. Elementwise operations are not counted: they may be wrong by a factor of two.
    """
    places = _places(model, spec)
    operations = cut_operations(model, spec, batches, probes)
    matrix = torch.rand(_PRODUCT, _PRODUCT, device=device)
    product = min(seconds(lambda: matrix @ matrix, device) for _ in range(3)) / (2 * _PRODUCT**3)
    in_fp32 = (operations["passes"] + operations["gram_matrices"]) * product / distributed.world_size()
    return {
        "operations": operations,
        "bytes": _bytes(model, places, spec, batches),
        "estimated_seconds": round(in_fp32 + _surgeon_seconds(model, places, spec, device), 1),
    }


def cut_operations(
    model: Any, spec: CutSpec, batches: Sequence[BatchSize], probes: Sequence[BatchSize]
) -> dict[str, int]:
    """Count the operations of a cut as if every block were cut.

    Those of `passes` and `gram_matrices` are in fp32, those of the `surgeon` in fp64.
    """
    places, layers = _places(model, spec), list(layers_of(model).values())
    passes = 0
    for batch in batches:
        partial_runs = sum(_flops_up_to(place, batch.length) for place in places)
        passes += batch.rows * (partial_runs + sum(layer_flops(layer, batch.length) for layer in layers[:-1]))
    tokens = sum(batch.tokens for batch in batches)
    gram = sum(2 * tokens * in_features(place.outer) ** 2 for place in places)
    surgeon = sum(_surgeon_operations(in_features(place.outer), out_features(place.outer), spec) for place in places)
    tried = whole_runs = 0
    if spec.cuts_sizes:
        tried, whole_runs = _runs_for_sizes(model, spec)
    elif not spec.uniform:
        tried = 1 + len(MEASURED) * len(places)
    probed, whole = (
        sum(batch.rows * encoder_flops(model, batch.length) for batch in some) for some in (probes, batches)
    )
    sweeps = _sweeps(model, spec)
    passes = sweeps * passes * bool(places) + tried * probed + whole_runs * whole
    return {"passes": passes, "gram_matrices": sweeps * gram, "surgeon": sweeps * surgeon}


def _places(model: Any, spec: CutSpec) -> list[CutBlock]:
    """Return the blocks that a cut makes smaller."""
    places = list(cut_places(model, spec).values())
    if not spec.cuts_sizes:
        return places
    now, planned = sizes_now(model), planned_sizes(model, spec)
    cut = {kind for kind, name in SIZES_OF.items() for sizes in planned if getattr(sizes, name) < getattr(now, name)}
    return [place for place in places if place.block.kind in cut]


def _runs_for_sizes(model: Any, spec: CutSpec) -> tuple[int, int]:
    """Count the runs of the whole model on a few examples, and on all of them, as if it were always the dense one."""
    now, planned = sizes_now(model), planned_sizes(model, spec)
    tried, runs = (1 + len(planned)) * (len(planned) > 1), 0
    for sizes in planned:
        gone = now.layers - sizes.layers
        runs += 2 * (sizes.width < now.width)
        if gone and spec.layer_criterion == "cosine":
            runs += 1
        elif gone:
            tried += 1 + (sizes.layers + 1 if spec.contiguous else sum(now.layers - number for number in range(gone)))
    return tried, runs


def _flops_up_to(place: CutBlock, tokens: int) -> int:
    """Count the operations of one example that lead to the inputs of a block's outer layer."""
    unused = sum(linear.weight.numel() for linear in unused_linears(place))
    return layer_flops(place.layer, tokens) - 2 * tokens * unused


def _sweeps(model: Any, spec: CutSpec) -> int:
    if spec.cuts_sizes:
        return len(planned_sizes(model, spec))
    return 1 if spec.uniform else 2


def _surgeon_operations(width: int, out: int, spec: CutSpec) -> int:
    """Count the inversion and the removals of all inputs of a layer (out, width), and new weights for half of them."""
    ordering = 8 * width**3 // 3 + 2 * width**2 * out if spec.method == "obs" else 0
    return ordering + (width**3 // 12 + 3 * width**2 * out // 2 if spec.update_weights else 0)


def _surgeon_seconds(model: Any, places: Sequence[CutBlock], spec: CutSpec, device: torch.device) -> float:
    """Measure a few removals of each shape, on every rank; all blocks are cut on the first one."""
    if spec.method != "obs":
        return 0.0
    shapes = Counter((out_features(p.outer), in_features(p.outer), in_features(p.outer) // p.count) for p in places)
    return _sweeps(model, spec) * sum(times * removal_seconds(*shape, device) for shape, times in shapes.items())


def _bytes(model: Any, places: Sequence[CutBlock], spec: CutSpec, batches: Sequence[BatchSize]) -> dict[str, int]:
    """Count what is held at the peak: the moments of a block's inputs are in six matrices of the surgeon.

    The hidden states of all examples are those that a layer gets, and those that it gives.
    """
    widest = max((in_features(place.outer) for place in places), default=0)
    padded = sum(batch.rows * batch.length for batch in batches)
    outer = sum(in_features(place.outer) * out_features(place.outer) for place in places)
    sizes = {
        "model": 4 * sum(parameter.numel() for parameter in model.parameters()),
        "largest_layer": 4 * max(sum(p.numel() for p in layer.parameters()) for layer in layers_of(model).values()),
        "gram_matrices": 6 * 8 * widest**2,
        "hidden_states": 2 * 4 * padded * model.config.hidden_size // distributed.world_size(),
        "weights_tried": 0 if spec.uniform or spec.cuts_sizes else 4 * len(MEASURED) * outer,
    }
    return sizes | {"total": sum(sizes.values())}
