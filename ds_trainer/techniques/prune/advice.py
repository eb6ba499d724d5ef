"""What pruning warns of: a phase that is too short, a start that is not dense, an end far from what the recipe says."""

import math

import torch

from ds_trainer.config.prune_specs import BY_SHARE, PruneSpec
from ds_trainer.tasks.losses import hard_concrete

_FEW_STEPS = "lower initial_warmup or final_warmup: the threshold has no step to move in"
_LEAST_TRAVEL = 0.3
"""Movement with less has failed: MiniLM, pruned to 15% on SST-2, ends at chance with 0.011 and 0.077 (765 steps at 3e-5
and 2e-4), and with 0.21 (2,105 at 2e-4) at chance or 15 points below the dense model, by the seed. With 0.39 the
quickstart's small model loses 1.2 points; the published runs (arXiv 2005.07683) have 0.83 and 1.1."""
_START_DENSE = {
    "topK": _FEW_STEPS,
    "magnitude": _FEW_STEPS,
    "threshold": 'set mask_init to "constant", and mask_scale above initial_threshold by many steps of '
    "mask_scores_learning_rate",
    "sigmoied_threshold": "lower initial_threshold, or raise mask_scale",
    "l0": 'set mask_init to "constant" and mask_scale to 2.197',
}
"""What to change, by method, where training does not start dense."""


def of_length(spec: PruneSpec, steps: int, travel: float) -> str | None:
    """Warn where a phase is too short for the scores of single weights to tell the weights apart.

    `travel` is about the farthest that a weight can move, the sum of the learning rates of all steps.
    """
    learned = spec.pruning_method in ("topK", "threshold", "sigmoied_threshold") and spec.train_weights
    if not learned or travel >= _LEAST_TRAVEL or "weight" not in spec.choices.values():
        return None
    return (
        f"prune: {spec.pruning_method} learns from their movement which single weights to keep, and {steps:,} steps at "
        f"these rates move a weight by {travel:.2g} at most, where published runs have 0.8 or more: train longer or at "
        f'a higher learning_rate, or take pruning_method "magnitude" on a fine-tuned model, or a cut'
    )


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
