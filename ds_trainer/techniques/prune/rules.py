"""Rules: which scores a step's masks keep, layer by layer or chosen over all layers together.

A rule finds its layer's mask in the layer's next forward, where ZeRO-3 has gathered the scores. A choice over all
layers is made at once, one layer gathered at a time: every rank takes part.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor
from transformers.pytorch_utils import Conv1D

from ds_trainer.config.prune_specs import BY_SHARE, COUNTED, WHOLE_BLOCKS, PruneSpec
from ds_trainer.models.layers import gathered
from ds_trainer.tasks.losses import L0_KEPT_ABOVE
from ds_trainer.techniques.prune import selection
from ds_trainer.techniques.prune.costs import Costs
from ds_trainer.techniques.prune.masked import MaskedLinear
from ds_trainer.techniques.prune.masks import GateMask, HardMask, Mask, Rule, SoftMask
from ds_trainer.techniques.prune.selection import AllowedCounts, cut_at, ranks, select_largest
from ds_trainer.techniques.prune.sites import Site

Masked: TypeAlias = Mapping[str, MaskedLinear]
Sites: TypeAlias = Mapping[str, Site]
"""Both by the names of the linear layers that are masked."""

_LEAST_SHARE = 0.005
"""The share of a matrix's weights or decisions that a threshold keeps at least. Heads and neurons may all fall."""


def largest_weights(scores: Tensor, count: int) -> Mask:
    """Keep the `count` largest scores; of equal ones the first in memory."""
    return HardMask(select_largest(lambda: [scores], [scores.numel()], count)[0])


def weights_above(scores: Tensor, threshold: float) -> Mask:
    """Keep the scores above a threshold, and never fewer than 0.5% of the matrix."""
    return HardMask(cut_at(scores, threshold, at_least=math.ceil(_LEAST_SHARE * scores.numel())))


def largest_decisions(scores: Tensor, count: int | Tensor, allowed: AllowedCounts) -> Mask:
    """Keep the allowed count nearest to `count`, of the largest scores; of equal ones the first.

    Unlike a cut through scores this never waits for the device: decisions are few enough to be sorted there.
    """
    if not isinstance(count, Tensor):
        count = torch.full((), count, device=scores.device)  # filled there: a copy from the host would wait
    return GateMask(ranks(scores) < allowed.nearest(count, scores.numel()))


def decisions_above(scores: Tensor, threshold: float, at_least: float, allowed: AllowedCounts) -> Mask:
    """Keep the scores above a threshold, and at least a share of them, rounded to the nearest count that is allowed."""
    return largest_decisions(scores, count_above(scores, threshold, at_least), allowed)


def count_above(scores: Tensor, threshold: float, at_least: float) -> Tensor:
    """Count the scores above a threshold, or return a share of them if that is more: a scalar on their device."""
    return (scores > threshold).count_nonzero().clamp(min=math.ceil(at_least * scores.numel()))


def open_gates(scores: Tensor, seed: int) -> Mask:
    """Give every score a hard-concrete gate with noise from `seed`."""
    return SoftMask(seed, (scores > L0_KEPT_ABOVE).count_nonzero())


def largest_of_four(scores: Tensor, count: int, inputs_at: int) -> Mask:
    """Keep the weights of the `count` largest scores of every four neighbouring inputs; of equal ones the first.

    The inputs lie along dimension `inputs_at` of the weight.
    """
    four = scores.unflatten(inputs_at, (-1, 4)).unbind(inputs_at + 1)
    leads = {(i, j): four[i] >= four[j] for j in range(4) for i in range(j)}
    gates = []
    for place in range(4):  # six comparisons of whole matrices: sorting ten million fours takes seconds
        ahead = [leads[i, place] for i in range(place)] + [~leads[place, j] for j in range(place + 1, 4)]
        gates.append(sum(one.byte() for one in ahead) < count)
    return GateMask(torch.stack(gates, inputs_at + 1).view(scores.shape))


def set_rules(layers: Masked, sites: Sites, spec: PruneSpec, threshold: float, moment: tuple[int, int]) -> None:
    """Have each layer find its mask by its own scores in its next forward. `moment` is the run's seed and the step."""
    cutoff = _logit(threshold) if spec.pruning_method == "sigmoied_threshold" else threshold
    if spec.uniform and spec.pruning_method not in BY_SHARE:
        _set_same_counts(layers, sites, spec, cutoff)
        return
    for index, (name, layer) in enumerate(layers.items()):
        # every layer and step has its own noise, the same in a resumed run
        layer.set_rule(_rule(spec, sites[name], cutoff, hash((*moment, index)) & (2**62 - 1)))


def choose_weights(layers: Masked, share: float) -> None:
    """Mask all layers by one cut through the scores of all weights."""
    sizes = [layer.weight_size for layer in layers.values()]

    def chunks() -> Iterator[Tensor]:
        for layer in layers.values():
            with gathered(layer.weight if layer.mask_scores is None else layer.mask_scores):
                yield layer.scores()

    cuts = select_largest(chunks, sizes, round(share * sum(sizes)))
    for layer, cut in zip(layers.values(), cuts, strict=True):
        layer.hold(HardMask(cut))


def choose_decisions(layers: Masked, sites: Sites, spec: PruneSpec, costs: Costs, share: float) -> None:
    """Keep the decisions of the largest scores, whatever they are about, until they cost this share of the total."""
    scores = _comparable({name: _scores_now(layer) for name, layer in layers.items()}, sites)
    gates = selection.largest_within(
        [scores[name] for name in layers],
        [costs.each[name] for name in layers],
        [allowed_counts(spec, sites[name]) for name in layers],
        share * costs.total - costs.fixed,
    )
    for layer, of_layer in zip(layers.values(), gates, strict=True):
        layer.hold_gates(of_layer)


def allowed_counts(spec: PruneSpec, site: Site) -> AllowedCounts:
    """Return how many of a site's decisions may be kept."""
    least = spec.min_heads if site.granularity == "head" else 0
    return AllowedCounts(least, spec.multiple_of if site.granularity in COUNTED else 1)


def _rule(spec: PruneSpec, site: Site, threshold: float, seed: int) -> Rule:
    if spec.pruning_method == "l0":
        return partial(open_gates, seed=seed)
    if site.granularity == "2:4":
        inputs_at = 0 if isinstance(site.linear, Conv1D) else 1
        return partial(largest_of_four, count=math.ceil(4 * threshold), inputs_at=inputs_at)
    by_share, allowed = spec.pruning_method in BY_SHARE, allowed_counts(spec, site)
    count = round(threshold * site.count) if by_share else 0
    if site.grain is None:
        return partial(largest_weights, count=count) if by_share else partial(weights_above, threshold=threshold)
    if by_share:
        # of any share at least one decision, since half of a layer's only head is not nothing
        return partial(largest_decisions, count=max(1, count) if threshold else 0, allowed=allowed)
    return partial(decisions_above, threshold=threshold, at_least=_least_share(site), allowed=allowed)


def _set_same_counts(layers: Masked, sites: Sites, spec: PruneSpec, threshold: float) -> None:
    """Keep in all layers, for each role, the mean of the counts that a threshold would keep, rounded."""
    counts = {
        name: count_above(_scores_now(layer), threshold, _least_share(sites[name])) for name, layer in layers.items()
    }
    for name, layer in layers.items():
        of_role = [count for other, count in counts.items() if sites[other].role == sites[name].role]
        mean = torch.stack(of_role).double().mean().round().long()
        layer.set_rule(partial(largest_decisions, count=mean, allowed=allowed_counts(spec, sites[name])))


def _least_share(site: Site) -> float:
    return 0 if site.granularity in WHOLE_BLOCKS else _LEAST_SHARE


def _comparable(scores: Mapping[str, Tensor], sites: Sites) -> dict[str, Tensor]:
    """Return scores of one granularity as they are; of several, each standardised over all layers.

    A score sums the movement of its decision's weights, and a head has a hundred times as many as a neuron: without
    this, one kind would be kept whole before any decision of the other is.
    """
    kinds = {sites[name].granularity for name in scores}
    if len(kinds) == 1:
        return dict(scores)
    comparable: dict[str, Tensor] = {}
    for kind in kinds:
        names = [name for name in scores if sites[name].granularity == kind]
        comparable |= zip(names, selection.standardised([scores[name] for name in names]), strict=True)
    return comparable


def _scores_now(layer: MaskedLinear) -> Tensor:
    """Copy a layer's scores between forwards, when ZeRO-3 has partitioned them; collective."""
    if layer.magnitudes is not None:
        return layer.magnitudes
    with gathered(layer.weight if layer.mask_scores is None else layer.mask_scores):
        return layer.scores().clone()


def _logit(share: float) -> float:
    """The score whose sigmoid is `share`: comparing with it spares the sigmoid of every score."""
    if 0 < share < 1:
        return math.log(share / (1 - share))
    return -math.inf if share <= 0 else math.inf
