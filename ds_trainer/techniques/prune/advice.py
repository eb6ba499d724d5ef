"""What pruning warns of at its start, where training is not dense, and at its end, far from what the recipe says."""

import math

import torch

from ds_trainer.config.prune_specs import BY_SHARE, PruneSpec
from ds_trainer.tasks.losses import hard_concrete

_FEW_STEPS = "lower initial_warmup or final_warmup: the threshold has no step to move in"
_START_DENSE = {
    "topK": _FEW_STEPS,
    "magnitude": _FEW_STEPS,
    "threshold": 'set mask_init to "constant", and mask_scale above initial_threshold by many steps of '
    "mask_scores_learning_rate",
    "sigmoied_threshold": "lower initial_threshold, or raise mask_scale",
    "l0": 'set mask_init to "constant" and mask_scale to 2.197',
}
"""What to change, by method, where training does not start dense."""


def of_start(spec: PruneSpec, step: int, density: float) -> str | None:
    """Warn, after one of the first two steps, where training did not start as dense as the recipe asks."""
    by_share = spec.pruning_method in BY_SHARE
    if spec.target is not None or (by_share and step > 0):  # the share moves after the first step
        return None
    expected, measured = (by_share and spec.initial_threshold) or 1.0, "the density is"
    if spec.pruning_method == "l0":  # a density counts half-open gates as open
        constant, measured = spec.mask_init == "constant", "the gates are open by"
        density = float(hard_concrete(torch.tensor(spec.mask_scale), None)) if constant else 0.5
    if density >= expected - 0.1:
        return None
    advice = _START_DENSE[spec.pruning_method]
    return f"prune: at step {step} {measured} {density:.1%}, and training should start with {expected:.0%}: {advice}"


def of_none_left(spec: PruneSpec, kind: str) -> str:
    """Warn where no layer keeps a head or a neuron."""
    more = "lower final_threshold or final_lambda, or raise mask_scale"
    if spec.pruning_method in BY_SHARE:
        more = f"raise {'final_threshold' if spec.target is None else 'the target'}"
    return f"prune: no {kind} is left in any layer: {more}"


def of_end(spec: PruneSpec, density: float) -> str | None:
    """Warn where the density at the end is far from the share to keep or, with a threshold, is nearly 1 or 0."""
    if spec.target is not None:
        return None
    why = None
    if spec.pruning_method in BY_SHARE and not math.isclose(density, spec.final_threshold, rel_tol=0.2):
        why = (
            f"and final_threshold is {spec.final_threshold:.1%}: min_heads, multiple_of or the size of a decision "
            "allow nothing nearer; lower them, or choose a finer granularity"
        )
    elif spec.pruning_method not in BY_SHARE and density > 0.99:
        why = "next to no pruning: set regularization, and raise final_lambda"
    elif spec.pruning_method not in BY_SHARE and density < 0.01:
        why = "next to nothing: lower final_lambda or final_threshold, or raise mask_scale"
    return why and f"prune: the run ends at a density of {density:.1%}, {why}"
