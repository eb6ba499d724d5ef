"""What decisions cost: weights, floating-point operations, or seconds measured on this device."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ds_trainer.config.prune_specs import PruneSpec
from ds_trainer.models.flops import decision_flops, encoder_flops
from ds_trainer.models.layer_seconds import LayerSeconds, count_decisions, layer_seconds
from ds_trainer.models.layers import layers_of
from ds_trainer.models.shrunk_model import whole_class
from ds_trainer.ranks import distributed
from ds_trainer.ranks.failures import UserError
from ds_trainer.techniques.prune.sites import Site


@dataclass(frozen=True)
class Costs:
    """The cost of each decision, by site and in the scores' shape, and of all that no decision removes."""

    each: Mapping[str, Tensor]
    fixed: float

    @property
    def total(self) -> float:
        return self.fixed + sum(float(cost.sum()) for cost in self.each.values())

    def share(self, gates: Mapping[str, Tensor]) -> float:
        """Return the share of the total that is kept, by bools of each site."""
        kept = sum(float(cost[gates[name].cpu()].sum()) for name, cost in self.each.items())
        return (self.fixed + kept) / self.total

    def check(self, target: float, name: str, sites: Mapping[str, Site]) -> None:
        """Raise UserError where the decisions that each site must keep at least cost more than the target."""
        lowest = {name: site.allowed.lowest(site.count) for name, site in sites.items()}
        cheapest = (cost.flatten().sort().values[: lowest[site]] for site, cost in self.each.items())
        least = (self.fixed + sum(float(cost.sum()) for cost in cheapest)) / self.total
        if target < least:
            raise UserError(
                f"{name} is {target}, and what must be kept is {least:.3f} of the encoder (min_heads, and what no "
                "decision removes): raise it, lower min_heads, or prune more of the model"
            )


class Budget:
    """What decisions cost in the units of the recipe, which a choice over all layers adds up.

    `costs` counts FLOPs with `target_flops`, seconds with `target_latency`, and weights with `global_topk`. It is None
    until seconds are measured, and where there is nothing to count: each weight costs the same. `flops` is for the log.
    """

    def __init__(self, model: Any, sites: Mapping[str, Site], spec: PruneSpec) -> None:
        self.sites, self.spec = sites, spec
        self.costs: Costs | None = None
        self.flops: Costs | None = None
        self._measured: Callable[[torch.device], Costs] | None = None
        if all(site.block for site in sites.values()):
            self.flops = flops_costs(model, sites, spec.cost_tokens)
        if spec.target_flops is not None and self.flops is not None:
            self.costs = self.flops
            self.costs.check(spec.target_flops, "target_flops", sites)
        elif spec.target_latency is not None:
            base = getattr(model, "base_model", model)
            of_layer = partial(layer_seconds, whole_class(base), base.config, spec.cost_tokens)
            counted = count_decisions(model)
            self._measured = lambda device: seconds_costs(of_layer(device), counted, sites)
        elif spec.global_topk and all(site.grain for site in sites.values()):
            self.costs = Costs({name: site.sizes().double() for name, site in sites.items()}, 0.0)

    def measure(self, device: torch.device) -> None:
        """Measure seconds, on one rank for all, unless the run that this one continues has measured them."""
        if self._measured is None or self.costs is not None:
            return
        self.costs = distributed.on_main(partial(self._measured, device))
        assert self.spec.target_latency is not None
        self.costs.check(self.spec.target_latency, "target_latency", self.sites)

    def state(self) -> dict[str, Any] | None:
        """Return the measured seconds, which a resumed run must not measure anew: all of a site's are the same."""
        if self._measured is None or self.costs is None:
            return None
        each = {name: float(cost.flatten()[0]) for name, cost in self.costs.each.items()}
        return {"each": each, "fixed": self.costs.fixed}

    def resume(self, state: Mapping[str, Any] | None) -> None:
        """Take over the seconds that `state` returned."""
        if state is not None:
            self.costs = Costs(_uniform(self.sites, state["each"]), state["fixed"])


def flops_costs(model: Any, sites: Mapping[str, Site], tokens: int) -> Costs:
    """Cost each decision at the floating-point operations of one example; sites must be of whole blocks."""
    layers, blocks = layers_of(model), {name: site.block for name, site in sites.items() if site.block}
    of_one = {name: decision_flops(block, layers[at], model.config, tokens) for name, (at, block) in blocks.items()}
    return _costs_within(encoder_flops(model, tokens), sites, of_one)


def seconds_costs(measured: LayerSeconds, counted: Counter[str], sites: Mapping[str, Site]) -> Costs:
    """Cost each decision at its seconds, of an encoder as `count_decisions` counts it; all layers take the same."""
    of_one = {name: measured.decision[site.role] for name, site in sites.items()}
    return _costs_within(measured.encoder(counted), sites, of_one)


def _costs_within(total: float, sites: Mapping[str, Site], of_one: Mapping[str, float]) -> Costs:
    """Cost all decisions of a site the same, and all that no decision removes at the remainder of the total."""
    each = _uniform(sites, of_one)
    return Costs(each, max(0.0, total - Costs(each, 0.0).total))


def _uniform(sites: Mapping[str, Site], of_one: Mapping[str, float]) -> dict[str, Tensor]:
    return {name: torch.full(site.shape, of_one[name], dtype=torch.float64) for name, site in sites.items()}
