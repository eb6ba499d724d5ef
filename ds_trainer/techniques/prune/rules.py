"""Rules: which scores a step's masks keep, layer by layer or chosen over all layers together.

A rule finds its layer's mask in the layer's next forward, where ZeRO-3 has gathered the scores. A choice over all
layers is made at once, one layer gathered at a time: every rank takes part.
"""

import math
from collections.abc import Iterator, Mapping
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor
from transformers.pytorch_utils import Conv1D

from ds_trainer.config.prune_specs import BY_SHARE, WHOLE_BLOCKS, PruneSpec
from ds_trainer.models.layers import gathered
from ds_trainer.tasks.losses import L0_KEPT_ABOVE
from ds_trainer.techniques.prune import selection
from ds_trainer.techniques.prune.masked import MaskedLinear
from ds_trainer.techniques.prune.masks import CountedMask, GateMask, HardMask, Mask, Rule, SoftMask
from ds_trainer.techniques.prune.selection import AllowedCounts
from ds_trainer.techniques.prune.sites import Site

Masked: TypeAlias = Mapping[str, MaskedLinear]
Sites: TypeAlias = Mapping[str, Site]
"""Both by the names of the linear layers that are masked."""

_LEAST_SHARE = 0.005
"""The share of a matrix's weights or decisions that a threshold keeps at least. Heads and neurons may all fall."""


def largest_weights(scores: Tensor, count: int) -> Mask:
    """Keep the `count` largest scores; of equal ones the first in memory.

    On a CPU the cutoff is found without a stored mask. A GPU would stand still at each of its comparisons.
    """
    if scores.is_cuda:
        return CountedMask(selection.largest_on_device(scores, count), count)
    return HardMask(selection.select_largest(lambda: [scores], [scores.numel()], count)[0])


def weights_above(scores: Tensor, threshold: float) -> Mask:
    """Keep the scores above a threshold, and never fewer than 0.5% of the matrix."""
    return HardMask(selection.cutoff_at(scores, threshold, at_least=math.ceil(_LEAST_SHARE * scores.numel())))


def largest_decisions(scores: Tensor, count: int | Tensor, allowed: AllowedCounts) -> Mask:
    """Keep the allowed count nearest to `count`, of the largest scores; of equal ones the first.

    Unlike a cutoff through scores this never waits for the device: decisions are few enough to be sorted there.
    """
    if not isinstance(count, Tensor):
        count = torch.full((), count, device=scores.device)  # filled there: a copy from the host would wait
    return GateMask(selection.ranks(scores) < allowed.nearest(count, scores.numel()))


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

    The inputs lie along dimension `inputs_at` of the weight. A weight is kept where fewer than `count` of the other
    three come before it: a sort of every four would take seconds for ten million, six comparisons of matrices do not.
    """
    four = scores.unflatten(inputs_at, (-1, 4)).unbind(inputs_at + 1)
    leads = {(i, j): four[i] >= four[j] for j in range(4) for i in range(j)}
    gates = []
    for place in range(4):
        before = [leads[i, place] for i in range(place)] + [~leads[place, j] for j in range(place + 1, 4)]
        gates.append(sum(one.byte() for one in before) < count)
    return GateMask(torch.stack(gates, inputs_at + 1).view(scores.shape))


def set_rules(layers: Masked, sites: Sites, spec: PruneSpec, threshold: float, moment: tuple[int, int]) -> None:
    """Have each layer find its mask by its own scores in its next forward. `moment` is the run's seed and the step."""
    if spec.pruning_method == "sigmoied_threshold":
        # comparing with the score whose sigmoid it is spares the sigmoid of every score
        threshold = float(torch.tensor(threshold, dtype=torch.float64).clamp(0, 1).logit())
    if spec.uniform and spec.pruning_method not in BY_SHARE:
        _set_same_counts(layers, sites, threshold)
        return
    for index, (name, layer) in enumerate(layers.items()):
        # every layer and step has its own noise, the same in a resumed run
        layer.set_rule(_rule(spec, sites[name], threshold, hash((*moment, index)) & (2**62 - 1)))


def choose_weights(layers: Masked, share: float) -> None:
    """Mask all layers by one cutoff through the scores of all weights."""
    sizes = [layer.weight_size for layer in layers.values()]

    def chunks() -> Iterator[Tensor]:
        for layer in layers.values():
            with gathered(layer.score_source):
                yield layer.scores()

    cutoffs = selection.select_largest(chunks, sizes, round(share * sum(sizes)))
    for layer, cutoff in zip(layers.values(), cutoffs, strict=True):
        layer.hold(HardMask(cutoff))


def choose_decisions(layers: Masked, sites: Sites, costs: Mapping[str, Tensor], budget: float) -> None:
    """Keep the decisions of the largest scores, whatever they are about, until their costs add up to the budget.

    Scores of several granularities are each standardised over all layers first. A score sums the movement of its
    decision's weights, and a head has a hundred times as many as a neuron: otherwise one kind would be kept whole
    before any decision of the other is.
    """
    scores = {name: _scores_now(layer) for name, layer in layers.items()}
    kinds = {site.granularity for site in sites.values()}
    for kind in kinds if len(kinds) > 1 else ():
        names = [name for name in scores if sites[name].granularity == kind]
        scores |= zip(names, selection.standardised([scores[name] for name in names]), strict=True)
    allowed = [sites[name].allowed for name in layers]
    gates = selection.largest_within(list(scores.values()), [costs[name] for name in layers], allowed, budget)
    for layer, of_layer in zip(layers.values(), gates, strict=True):
        layer.hold_gates(of_layer)


def _rule(spec: PruneSpec, site: Site, threshold: float, seed: int) -> Rule:
    if spec.pruning_method == "l0":
        return partial(open_gates, seed=seed)
    if site.granularity == "2:4":
        inputs_at = 0 if isinstance(site.linear, Conv1D) else 1
        return partial(largest_of_four, count=math.ceil(4 * threshold), inputs_at=inputs_at)
    if spec.pruning_method in BY_SHARE:
        count = round(threshold * site.count)
        if site.grain is None:
            return partial(largest_weights, count=count)
        # of any share at least one decision, since half of a layer's only head is not nothing
        return partial(largest_decisions, count=max(1, count) if threshold else 0, allowed=site.allowed)
    if site.grain is None:
        return partial(weights_above, threshold=threshold)
    return partial(decisions_above, threshold=threshold, at_least=_least_share(site), allowed=site.allowed)


def _set_same_counts(layers: Masked, sites: Sites, threshold: float) -> None:
    """Keep in all layers, for each role, the mean of the counts that a threshold would keep, rounded."""
    counts = {
        name: count_above(_scores_now(layer), threshold, _least_share(sites[name])) for name, layer in layers.items()
    }
    for name, layer in layers.items():
        of_role = [count for other, count in counts.items() if sites[other].role == sites[name].role]
        mean = torch.stack(of_role).double().mean().round().long()
        layer.set_rule(partial(largest_decisions, count=mean, allowed=sites[name].allowed))


def _least_share(site: Site) -> float:
    return 0 if site.granularity in WHOLE_BLOCKS else _LEAST_SHARE


def _scores_now(layer: MaskedLinear) -> Tensor:
    """Return a layer's whole scores between forwards, also under ZeRO-3; collective."""
    if layer.magnitudes is not None:
        return layer.magnitudes
    with gathered(layer.score_source):
        return layer.scores().clone()
