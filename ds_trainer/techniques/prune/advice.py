"""What pruning warns of: a phase that is too short, a start that is not dense, an end far from what the recipe says."""

import math

import torch

from ds_trainer.recipe.prune_specs import BY_SHARE, PruneSpec
from ds_trainer.tasks.losses import hard_concrete

# Movement with less has failed: MiniLM, pruned to 15% on SST-2, ends at chance with 0.011 and 0.077 (765 steps at 3e-5
# and 2e-4), and with 0.21 (2,105 at 2e-4) at chance or 15 points below the dense model, by the seed. With 0.39 the
# quickstart's small model loses 1.2 points; the published runs (arXiv 2005.07683) have 0.83 and 1.1.
_LEAST_TRAVEL = 0.3


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
    method, by_share = spec.pruning_method, spec.pruning_method in BY_SHARE
    if by_share and step > 0:  # the share moves after the first step
        return None
    expected = (by_share and spec.initial_threshold) or 1.0
    if method == "l0":  # a density counts half-open gates as open
        density = float(hard_concrete(torch.tensor(spec.mask_scale if spec.mask_init == "constant" else 0.0), None))
    if density >= expected - 0.1:
        return None
    way = "leave out mask_init, mask_scale and initial_threshold, whose defaults start dense"
    if by_share:
        way = "lower initial_warmup or final_warmup: the threshold has no step to move in"
    return f"prune: at step {step} the masks let {density:.1%} through, and should start with {expected:.0%}: {way}"


def of_end(spec: PruneSpec, density: float) -> str | None:
    """Warn where the density at the end is far from the share to keep or, with a threshold, is nearly 1 or 0."""
    if spec.pruning_method in BY_SHARE:
        right = math.isclose(density, spec.final_threshold, rel_tol=0.2)
        why = f"and final_threshold is {spec.final_threshold:.1%}: choose a finer granularity"
    else:
        right = 0.01 <= density <= 0.99
        why = "next to nothing: lower final_lambda or final_threshold, or raise mask_scale"
        if density > 0.99:
            why = "next to no pruning: set regularization, and raise final_lambda"
    return None if right else f"prune: the run ends at a density of {density:.1%}, {why}"
