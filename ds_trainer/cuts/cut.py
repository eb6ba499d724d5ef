"""Cut a trained model as a spec says: heads and neurons, or single weights, from a calibration set."""

from collections.abc import Iterable
from typing import Any

import torch

from ds_trainer.cuts.allocation import allocate, check_budget, prices_of
from ds_trainer.cuts.blocks import cut_blocks, cut_places, uniform_counts
from ds_trainer.cuts.fitting import CutRecord
from ds_trainer.cuts.layerwise import Calibration
from ds_trainer.cuts.weights import cut_linears, cut_weights
from ds_trainer.models.layers import AnyLinear, in_features, rows_of
from ds_trainer.models.shrink import shrink
from ds_trainer.ranks import distributed
from ds_trainer.ranks.failures import UserError
from ds_trainer.recipe.cut_specs import STRUCTURED, CutSpec


def cut_model(model: Any, calibration: Calibration, spec: CutSpec) -> tuple[Any, list[CutRecord]]:
    """Return the cut model, on the CPU, and what was done where; collective. The given model is changed.

    UserError where the model's family is unknown, its weights are not finite, or the spec keeps less than must stay,
    or everything.
    """
    check_sound(model, calibration)
    model.eval().cpu()
    if spec.granularity not in STRUCTURED:
        check_tokens(cut_linears(model, spec).values(), calibration, spec)
        return model, cut_weights(model, calibration, spec)
    places = cut_places(model, spec)
    if spec.uniform:
        counts = uniform_counts(places, spec.share)
    else:
        counts = allocate(model, places, prices_of(model, places, spec, calibration.device), calibration, spec)
    check_tokens([place.outer for place in places.values()], calibration, spec)
    records = cut_blocks(model, places, counts, calibration, spec)
    return shrink(model), records


@torch.no_grad()
def outline(model: Any, spec: CutSpec) -> Any:
    """Return a model of about the shape that a cut gives, made without calibration examples.

    Where the spec chooses over all layers, the layers of the cut model differ from these, which keep about its share.
    UserError where a cut is sure to fail.
    """
    if spec.granularity not in STRUCTURED:
        for linear in cut_linears(model, spec).values():
            linear.weight[:, ::2] = 0
        return model
    places = cut_places(model, spec)
    counts = uniform_counts(places, spec.share) if spec.uniform else {}
    if not spec.uniform and spec.target_latency is None:  # seconds are measured by the cut itself
        check_budget(places, prices_of(model, places, spec, torch.device("cpu")), spec)
    for name, place in places.items():
        # a choice over all layers removes something, also where the share of each one would round to all of it
        kept = counts.get(name, max(place.lowest, min(1, place.count - 1), int(spec.share * place.count)))
        rows_of(place.outer.weight, type(place.outer))[:, in_features(place.outer) // place.count * kept :] = 0
    return shrink(model)


def check_sound(model: Any, calibration: Calibration) -> None:
    """Raise UserError where a weight is not finite, or no example has a token to fit anything to; collective."""
    broken = next((name for name, weight in model.named_parameters() if not weight.isfinite().all()), None)
    if broken is not None:
        raise UserError(
            f"cut: {broken} holds values that are not finite (NaN or infinity): train the model of start_from again, "
            "with a lower learning rate, or in bf16 instead of fp16"
        )
    if not _count_tokens(calibration):
        raise UserError(
            "cut: the calibration examples have no token that is attended: the training texts are empty, or the "
            "tokenizer makes nothing of them"
        )


def check_tokens(linears: Iterable[AnyLinear], calibration: Calibration, spec: CutSpec) -> None:
    """Warn where a layer that is fitted has more inputs than the calibration examples have tokens; collective."""
    tokens, widest = _count_tokens(calibration), max(map(in_features, linears))
    if tokens < widest and (spec.method == "obs" or spec.update_weights):
        distributed.warn(
            f"cut: the cut of {widest:,} inputs is fitted to {tokens:,} tokens, too few to fit it: damping decides "
            "the rest; raise calibration_examples, if there are more examples"
        )


def _count_tokens(calibration: Calibration) -> int:
    """Count the attended tokens of all ranks; collective."""
    here = sum(int(attended.sum()) for attended in calibration.attended)
    return sum(count for (count,) in distributed.numbers_of_all([here]))
