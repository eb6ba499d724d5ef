"""Write zeros in the linear layers of a trained model, and let the weights that are kept make up for them.

Single weights, blocks, or two of every four: a model of the same shape with fewer weights, for compact files, for
kernels that skip blocks, or to be trained further (`keep_zeros`, or `prune` from these masks). Matrices are cut in the
order in which the model computes them, each on the inputs that it gets from those that are cut already.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ds_trainer.config.cut_specs import CutSpec
from ds_trainer.models.cut.fisher import fisher_diagonals
from ds_trainer.models.cut.fitting import CutRecord, Fitting, Replacement
from ds_trainer.models.cut.layerwise import Calibration, Gram, Layerwise
from ds_trainer.models.cut.sparse import Pattern, masked_least_squares, surgeon_mask
from ds_trainer.models.layers import AnyLinear, encoder_linears, in_features, rows_of
from ds_trainer.ranks import distributed
from ds_trainer.ranks.failures import UserError


@torch.no_grad()
def cut_weights(model: Any, calibration: Calibration, spec: CutSpec, device: torch.device) -> list[CutRecord]:
    """Write the zeros of a spec in the linear layers of the encoder, in place; collective.

    The model is on the CPU and in evaluation mode. Layers that it never computes stay whole, and have no record.
    UserError where the spec's pattern does not fit a layer.
    """
    linears = cut_linears(model, spec)
    fisher = fisher_diagonals(model, linears, calibration, device) if spec.method == "fisher" else {}
    shares = _shares(linears, fisher, spec)
    layerwise, records = Layerwise(model, calibration, device), []
    for layer in layerwise:
        inside = {*layer.modules()}
        of_layer = {name: linear for name, linear in linears.items() if linear in inside}
        for group in layerwise.input_groups(of_layer):
            gram = layerwise.grams({group[0]: of_layer[group[0]]})[group[0]]
            for name in group:
                solve = partial(_solved, of_layer[name], gram, shares[name], spec, fisher.get(name))
                cut = distributed.on_main(solve)
                cut.write(of_layer[name])
                records.append(CutRecord(name, cut.weight.numel(), int(cut.weight.count_nonzero()), cut.error))
    return records


def cut_linears(model: Any, spec: CutSpec) -> dict[str, AnyLinear]:
    """Return the linear layers that a spec writes zeros in. UserError where 2:4 does not fit one."""
    linears = encoder_linears(model)
    for name, linear in linears.items() if spec.granularity == "2:4" else ():
        if in_features(linear) % 4:
            raise UserError(
                f"cut: {name} has {in_features(linear)} inputs, which are no multiple of 4, as 2:4 needs: set "
                "granularity to weight or block"
            )
    return linears


def _pattern(spec: CutSpec, features: int) -> Pattern:
    """Return the pattern for a matrix of so many inputs. Wanda compares the weights of one output with each other."""
    if spec.granularity == "block":
        return Pattern(block=(spec.block_shape[0], spec.block_shape[1]))
    if spec.granularity == "2:4":
        return Pattern(group=4)
    return Pattern(group=features if spec.method == "wanda" else None)


def _shares(linears: Mapping[str, AnyLinear], fisher: Mapping[str, Tensor], spec: CutSpec) -> dict[str, float]:
    """Return the share that each matrix keeps: the same or, by comparable scores, that of the largest over all."""
    assert isinstance(spec.keep, float), "the recipe makes one phase of each step"
    if spec.uniform or spec.granularity == "2:4" or spec.method not in ("magnitude", "fisher"):
        return dict.fromkeys(linears, spec.keep)
    scores = {}
    for name, linear in linears.items():
        pattern = _pattern(spec, in_features(linear))
        scores[name] = pattern.means(_scores(_rows(linear).double(), fisher.get(name))).flatten().float()
    joined = torch.cat(list(scores.values()))
    largest = torch.zeros_like(joined, dtype=torch.bool)
    largest[joined.topk(round(spec.keep * len(joined)), sorted=False).indices] = True
    parts = largest.split([len(of_matrix) for of_matrix in scores.values()])
    return {name: float(part.double().mean()) for name, part in zip(scores, parts, strict=True)}


def _solved(linear: AnyLinear, gram: Gram, share: float, spec: CutSpec, fisher: Tensor | None) -> Replacement:
    """Return what becomes of a linear layer that keeps a share of its weights."""
    fitting = Fitting(linear, gram, spec.damping)
    dense, pattern = fitting.weight, _pattern(spec, fitting.weight.shape[1])
    if spec.method == "obs":
        mask, values = surgeon_mask(dense, fitting.damped, share, pattern)
    elif spec.method == "wanda":
        mask, values = pattern.mask(_scores(dense, fitting.moments.diagonal()), share), dense
    else:
        mask, values = pattern.mask(_scores(dense, fisher), share), dense
    if not spec.update_weights:
        return fitting.replacement(dense * mask)
    return fitting.replacement(masked_least_squares(dense, fitting.damped, mask, values))


def _scores(weight: Tensor, importance: Tensor | None) -> Tensor:
    """Return the squares of the weights, times an importance that broadcasts to them."""
    return weight.square() if importance is None else weight.square() * importance.to(weight)


def _rows(linear: AnyLinear) -> Tensor:
    return rows_of(linear.weight.detach(), type(linear))
