"""What a cut of heads and neurons will cost, from the shapes of a model, whose weights are not read.

Every layer runs over the calibration examples once for each of its blocks, up to the inputs of the block's outer layer,
and once more, whole, for the layer after it. A cut that chooses over all layers does so twice, and runs the whole model
on a few examples for each size of each block that it tries. A cut to sizes of the whole model repeats this for each
candidate. It also runs the whole model on a few examples for each layer that may go, and twice on all to choose
channels.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ds_trainer.config.cut_specs import CutSpec
from ds_trainer.models.cut.allocation import MEASURED
from ds_trainer.models.cut.blocks import cut_places, unused_linears
from ds_trainer.models.cut.sizes import Sizes, planned_sizes, sizes_now
from ds_trainer.models.cut.surgeon import removal
from ds_trainer.models.flops import encoder_flops, layer_flops
from ds_trainer.models.layers import SIZES_OF, in_features, layers_of, out_features
from ds_trainer.ranks import distributed
from ds_trainer.ranks.timing import seconds

_PRODUCT = 1024
"""The size of the matrices by whose product a device is measured."""
_REMOVED = 384
"""About how many inputs are removed to measure how fast a device is at that."""


@dataclass(frozen=True)
class BatchSize:
    """The examples of a batch, their padded length, and the number of tokens that are attended."""

    rows: int
    length: int
    tokens: int


def cut_costs(
    model: Any, spec: CutSpec, batches: Sequence[BatchSize], probes: Sequence[BatchSize], device: torch.device
) -> dict[str, Any]:
    """Return the `operations` and the peak `bytes` of a cut by arithmetic, and `estimated_seconds`, as JSON values.

    The model may be on the meta device. The operations, of all ranks together, are counted as if every block were cut:
    those of `passes` and `gram_matrices` are in fp32, those of the `surgeon` in fp64. The seconds follow from a product
    of matrices and from a few removals that are measured on the device. Elementwise operations are not counted: they
    may be wrong by a factor of two.
    """
    layers, places = list(layers_of(model).values()), list(cut_places(model, spec).values())
    sweeps, few, all_examples = 1 if spec.uniform else 2, 0 if spec.uniform else 1 + len(MEASURED) * len(places), 0
    if spec.cuts_sizes:
        now, planned = sizes_now(model), planned_sizes(model, spec)
        smaller = {name for name in SIZES_OF.values() for sizes in planned if getattr(sizes, name) < getattr(now, name)}
        places = [place for place in places if SIZES_OF[place.block.kind] in smaller]
        sweeps, few = len(planned), (1 + len(planned)) * (len(planned) > 1)
        for sizes in planned:
            few += _runs_without_layers(now, sizes, spec)
            all_examples += 2 * (sizes.width < now.width)
            all_examples += sizes.layers < now.layers and spec.layer_criterion == "cosine"

    def runs(of: Sequence[BatchSize]) -> int:
        return sum(batch.rows * encoder_flops(model, batch.length) for batch in of)

    passes = gram = surgeon = widest = weights = 0
    tokens = sum(batch.tokens for batch in batches)
    for place in places:
        width, out = in_features(place.outer), out_features(place.outer)
        unused = sum(linear.weight.numel() for linear in unused_linears(place))
        passes += sum(
            batch.rows * (layer_flops(place.layer, batch.length) - 2 * batch.length * unused) for batch in batches
        )
        gram += 2 * tokens * width**2
        surgeon += _surgeon_operations(width, out, spec)
        widest, weights = max(widest, width), weights + width * out
    if places:
        passes += sum(batch.rows * layer_flops(layer, batch.length) for layer in layers[:-1] for batch in batches)
    operations = {
        "passes": sweeps * passes + few * runs(probes) + all_examples * runs(batches),
        "gram_matrices": sweeps * gram,
        "surgeon": sweeps * surgeon,
    }
    matrix = torch.rand(_PRODUCT, _PRODUCT, device=device)
    product = min(seconds(lambda: matrix @ matrix, device) for _ in range(3)) / (2 * _PRODUCT**3)
    estimated = (operations["passes"] + operations["gram_matrices"]) * product / distributed.world_size()
    if places and spec.method == "obs":  # all blocks are cut on the first rank
        inputs, out = min(_REMOVED, widest), out_features(places[0].outer)
        weight, moments = torch.rand(out, inputs, device=device), torch.eye(inputs, device=device)
        removed = seconds(lambda: removal(weight, moments, 1), device) / _surgeon_operations(inputs, out, spec)
        estimated += operations["surgeon"] * removed
    padded = sum(batch.rows * batch.length for batch in batches)
    held = {
        "model": 4 * sum(parameter.numel() for parameter in model.parameters()),
        "largest_layer": 4 * max(sum(p.numel() for p in layer.parameters()) for layer in layers),
        "gram_matrices": 6 * 8 * widest**2,  # the moments of a block's inputs are in six matrices of the surgeon
        # those that a layer gets, and those that it gives
        "hidden_states": 2 * 4 * padded * model.config.hidden_size // distributed.world_size(),
        "weights_tried": 0 if spec.uniform or spec.cuts_sizes else 4 * len(MEASURED) * weights,
    }
    return {
        "operations": operations,
        "bytes": held | {"total": sum(held.values())},
        "estimated_seconds": round(estimated, 1),
    }


def _runs_without_layers(now: Sizes, sizes: Sizes, spec: CutSpec) -> int:
    """Count the runs of the model on a few examples by which layers are chosen, as if it were always the dense one."""
    gone = now.layers - sizes.layers
    if not gone or spec.layer_criterion == "cosine":
        return 0
    return 1 + (sizes.layers + 1 if spec.contiguous else sum(now.layers - number for number in range(gone)))


def _surgeon_operations(width: int, out: int, spec: CutSpec) -> int:
    """Count the inversion and the removals of all inputs of a layer (out, width), and new weights for half of them."""
    ordering = 8 * width**3 // 3 + 2 * width**2 * out if spec.method == "obs" else 0
    return ordering + (width**3 // 12 + 3 * width**2 * out // 2 if spec.update_weights else 0)
