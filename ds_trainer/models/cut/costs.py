"""What a cut of heads and neurons costs, by arithmetic from the shapes of a model, whose weights are not read.

Operations are counted as `models/flops.py` counts them, for all ranks together: every layer runs over the calibration
examples once for each of its blocks, and once more for the layer after it. A cut that chooses over all layers does so
twice, and runs the whole model on a few examples for each size of each block that it tries.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ds_trainer.config.cut_specs import CutSpec
from ds_trainer.models.cut.allocation import MEASURED
from ds_trainer.models.cut.blocks import cut_places
from ds_trainer.models.cut.surgeon import removal
from ds_trainer.models.flops import encoder_flops, layer_flops
from ds_trainer.models.layers import in_features, layers_of, out_features
from ds_trainer.ranks.timing import seconds


@dataclass(frozen=True)
class BatchSize:
    """The examples of a batch, their padded length, and the tokens that are attended."""

    rows: int
    length: int
    tokens: int


@dataclass(frozen=True)
class CutOperations:
    """Floating-point operations of a cut: forward passes and Gram matrices in fp32, the surgeon in fp64."""

    passes: float
    gram_matrices: float
    surgeon: float

    def seconds_on(self, device: torch.device) -> float:
        """Estimate the seconds that one device takes, at its rates for a product of matrices and for a small surgeon.

        An estimate within a factor of two: elementwise operations and reading memory are in neither count.
        """
        size, width, out = 1024, 768, 192
        matrix, weight = torch.rand(size, size, device=device), torch.rand(out, width, device=device)
        inputs = torch.eye(width, dtype=torch.float64, device=device)
        product = min(seconds(lambda: matrix @ matrix, device) for _ in range(3)) / (2 * size**3)
        surgeon = min(seconds(lambda: removal(weight, inputs, 1), device) for _ in range(2))
        return (self.passes + self.gram_matrices) * product + self.surgeon * surgeon / _removal_operations(width, out)


def cut_costs(model: Any, spec: CutSpec, batches: Sequence[BatchSize], probes: Sequence[BatchSize]) -> dict[str, Any]:
    """Return the `operations` and the `bytes` of a cut by these calibration batches, as JSON values.

    The model may be on the meta device. Bytes are those of fp32 weights, of the largest layer and its matrices in fp64.
    """
    operations = cut_operations(model, spec, batches, probes)
    return {"operations": asdict(operations), "bytes": _bytes(model, spec, batches)}


def cut_operations(
    model: Any, spec: CutSpec, batches: Sequence[BatchSize], probes: Sequence[BatchSize]
) -> CutOperations:
    """Count the operations of a cut, as if every block that can be cut were cut."""
    places = list(cut_places(model, spec).values())
    layers = list(layers_of(model).values())
    runs = [sum(place.layer is layer for place in places) + (layer is not layers[-1]) for layer in layers]
    passes = sum(
        batch.rows * run * layer_flops(layer, batch.length)
        for batch in batches
        for layer, run in zip(layers, runs, strict=True)
    )
    tokens = sum(batch.tokens for batch in batches)
    gram = sum(2 * tokens * in_features(place.outer) ** 2 for place in places)
    removals = sum(_removal_operations(in_features(place.outer), out_features(place.outer)) for place in places)
    if spec.uniform:
        return CutOperations(passes, gram, removals)
    tried = 1 + len(MEASURED) * len(places)
    probed = tried * sum(batch.rows * encoder_flops(model, batch.length) for batch in probes)
    return CutOperations(2 * passes + probed, 2 * gram, 2 * removals)


def _removal_operations(width: int, out: int) -> float:
    """Count the operations of ordering the inputs of a layer, and of new weights for half of them."""
    ordering = 8 / 3 * width**3 + 2 * width**2 * out
    return ordering + width**3 / 12 + 1.5 * width**2 * out


def _bytes(model: Any, spec: CutSpec, batches: Sequence[BatchSize]) -> dict[str, int]:
    """Count what is held at once: the surgeon has a layer's matrix of moments in six forms.

    The hidden states of all batches are those that a layer gets, and those that it gives.
    """
    places = list(cut_places(model, spec).values())
    widest = max(in_features(place.outer) for place in places)
    padded = sum(batch.rows * batch.length for batch in batches)
    outer = sum(in_features(place.outer) * out_features(place.outer) for place in places)
    sizes = {
        "model": 4 * sum(parameter.numel() for parameter in model.parameters()),
        "one_layer": 4 * max(sum(p.numel() for p in layer.parameters()) for layer in layers_of(model).values()),
        "gram_matrices": 6 * 8 * widest**2,
        "hidden_states": 2 * 4 * padded * model.config.hidden_size,
        "weights_tried": 0 if spec.uniform else 4 * len(MEASURED) * outer,
    }
    return sizes | {"total": sum(sizes.values())}
