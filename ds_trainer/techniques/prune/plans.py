"""How the masks of an optimizer step are planned: each layer by a rule of its own, or all by one choice.

A rule finds its layer's mask in the layer's next forward, where ZeRO-3 has the scores at hand. What is chosen over all
layers is found at once, a layer gathered at a time: every rank takes part.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor
from transformers.pytorch_utils import Conv1D

from ds_trainer.config.prune_specs import BY_SHARE, COUNTED, WHOLE_BLOCKS, PruneSpec
from ds_trainer.models.layers import gathered
from ds_trainer.techniques.prune.costs import Costs
from ds_trainer.techniques.prune.decisions import Site
from ds_trainer.techniques.prune.masked import MaskedLinear
from ds_trainer.techniques.prune.masks import (
    KeepAbove,
    KeepCut,
    KeepGates,
    KeepLargest,
    KeepOfFour,
    KeepPassing,
    KeepShare,
    MaskRule,
    OpenGates,
)
from ds_trainer.techniques.prune.selection import Sizes, largest_within, select_largest, standardised

_LEAST_PASSING = 0.005
"""Share of a matrix's weights, or decisions, that a threshold leaves at the least; blocks may be emptied."""

Layers = Mapping[str, MaskedLinear]
Sites = Mapping[str, Site]


def plan_each(layers: Layers, sites: Sites, spec: PruneSpec, threshold: float, moment: tuple[int, int]) -> None:
    """Each layer by its own scores; `moment` is the run's seed and the step, for gates with noise."""
    rules = {
        name: _rule(spec, sites[name], threshold, hash((*moment, index)) & (2**62 - 1))
        for index, name in enumerate(layers)
    }
    if spec.uniform and spec.pruning_method not in BY_SHARE:
        rules = _alike(layers, sites, rules)
    for name, layer in layers.items():
        layer.plan(rules[name])


def plan_weights_together(layers: Layers, share: float) -> None:
    """One cut through the scores of all weights."""
    sizes = [layer.weight_size for layer in layers.values()]

    def chunks() -> Iterator[Tensor]:
        for layer in layers.values():
            with gathered(layer.weight if layer.mask_scores is None else layer.mask_scores):
                yield layer.scores()

    cuts = select_largest(chunks, sizes, round(share * sum(sizes)))
    for layer, cut in zip(layers.values(), cuts, strict=True):
        layer.plan(KeepCut(cut))


def plan_decisions_together(layers: Layers, sites: Sites, spec: PruneSpec, costs: Costs, share: float) -> None:
    """The decisions of the largest scores, whatever they are about, until they cost this share of the total."""
    scores = _comparable({name: _scores_now(layer) for name, layer in layers.items()}, sites)
    gates = largest_within(
        [scores[name] for name in layers],
        [costs.each[name] for name in layers],
        [sizes_of(spec, sites[name]) for name in layers],
        share * costs.total - costs.fixed,
    )
    for layer, own in zip(layers.values(), gates, strict=True):
        layer.plan(KeepGates(own))


def sizes_of(spec: PruneSpec, site: Site) -> Sizes:
    """Which numbers of a site's decisions may be kept."""
    least = spec.min_heads if site.granularity == "head" else 0
    return Sizes(least, spec.multiple_of if site.granularity in COUNTED else 1)


def _comparable(scores: Mapping[str, Tensor], sites: Sites) -> dict[str, Tensor]:
    """Scores of one granularity as they are; of several, each standardised over all layers.

    A score sums the movement of its decision's weights, of which a head has a hundred times as many as a neuron: as
    they are, the one kind would be kept whole before the other is looked at.
    """
    kinds: dict[str, list[str]] = {}
    for name in scores:
        kinds.setdefault(sites[name].granularity, []).append(name)
    if len(kinds) == 1:
        return dict(scores)
    found = [zip(names, standardised([scores[name] for name in names]), strict=True) for names in kinds.values()]
    return {name: values for kind in found for name, values in kind}


def _rule(spec: PruneSpec, site: Site, threshold: float, seed: int) -> MaskRule:
    method, of_sigmoid = spec.pruning_method, spec.pruning_method == "sigmoied_threshold"
    if method == "l0":
        return OpenGates(seed)
    if site.granularity == "2:4":
        return KeepOfFour(math.ceil(4 * threshold), inputs_at=0 if isinstance(site.linear, Conv1D) else 1)
    if site.grain is None:
        return KeepShare(threshold) if method in BY_SHARE else KeepAbove(threshold, of_sigmoid)
    sizes = sizes_of(spec, site)
    if method in BY_SHARE:
        return KeepLargest(_of_share(threshold, math.prod(site.grain.shape)), sizes)
    return KeepPassing(threshold, of_sigmoid, 0 if site.granularity in WHOLE_BLOCKS else _LEAST_PASSING, sizes)


def _of_share(share: float, whole: int) -> int:
    """How many of so many decisions: of any share at least one, since half of a layer's only head is not nothing."""
    return max(1, round(share * whole)) if share else 0


def _alike(layers: Layers, sites: Sites, rules: Mapping[str, MaskRule]) -> dict[str, MaskRule]:
    """For the sites of each role, the mean of the numbers that their thresholds would keep, rounded."""
    counts: dict[str, list[Tensor]] = {}
    for name, layer in layers.items():
        rule = rules[name]
        assert isinstance(rule, KeepPassing)
        counts.setdefault(sites[name].role, []).append(rule.count(_scores_now(layer)))
    means = {role: torch.stack(found).double().mean().round().long() for role, found in counts.items()}
    return {
        name: KeepLargest(means[sites[name].role], rule.sizes)
        for name, rule in rules.items()
        if isinstance(rule, KeepPassing)
    }


def _scores_now(layer: MaskedLinear) -> Tensor:
    if layer.worth is not None:
        return layer.worth
    with gathered(layer.weight if layer.mask_scores is None else layer.mask_scores):
        return layer.scores().clone()
