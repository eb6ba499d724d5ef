"""What decisions cost: weights, floating-point operations, or seconds measured on this device."""

import copy
import statistics
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ds_trainer.config.prune_specs import PruneSpec
from ds_trainer.models.flops import decision_flops, encoder_flops
from ds_trainer.models.layers import FIELD, SIZES_OF, blocks_of, decisions_of, layers_of
from ds_trainer.models.shrunk_model import shrunk_class, whole_class
from ds_trainer.ranks import distributed
from ds_trainer.ranks.failures import UserError
from ds_trainer.ranks.timing import seconds
from ds_trainer.techniques.prune.sites import Site

_ROUNDS = 15
_LEAST = 0.01
"""The share of a layer's time that all decisions of a block are taken to cost at least, since measuring has noise."""


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


@dataclass(frozen=True)
class LayerSeconds:
    """The seconds of one whole layer, and of one decision of each kind of block."""

    layer: float
    decision: Mapping[str, float]
    count: Mapping[str, int]
    """How many decisions the whole layer had."""


def flops_costs(model: Any, sites: Mapping[str, Site], tokens: int) -> Costs:
    """Cost each decision at the floating-point operations of one example; sites must be of whole blocks."""
    layers, blocks = layers_of(model), {name: site.block for name, site in sites.items() if site.block}
    of_one = {name: decision_flops(block, layers[at], model.config, tokens) for name, (at, block) in blocks.items()}
    return _costs_within(encoder_flops(model, tokens), sites, of_one)


def seconds_costs(measured: LayerSeconds, counted: Counter[str], sites: Mapping[str, Site]) -> Costs:
    """Cost each decision at its seconds, of an encoder as `count_decisions` counts it; all layers take the same."""
    rest = measured.layer - sum(measured.count[kind] * cost for kind, cost in measured.decision.items())
    total = counted["layers"] * max(0.0, rest) + sum(counted[kind] * cost for kind, cost in measured.decision.items())
    return _costs_within(total, sites, {name: measured.decision[site.role] for name, site in sites.items()})


def _costs_within(total: float, sites: Mapping[str, Site], of_one: Mapping[str, float]) -> Costs:
    """Cost all decisions of a site the same, and all that no decision removes at the remainder of the total."""
    each = _uniform(sites, of_one)
    return Costs(each, max(0.0, total - Costs(each, 0.0).total))


def _uniform(sites: Mapping[str, Site], of_one: Mapping[str, float]) -> dict[str, Tensor]:
    return {name: torch.full(site.shape, of_one[name], dtype=torch.float64) for name, site in sites.items()}


def count_decisions(model: Any) -> Counter[str]:
    """Count a model's layers ("layers") and the decisions of each kind of block."""
    counts = Counter(layers=len(layers_of(model)))
    for layer in layers_of(model).values():
        for block in blocks_of(layer):
            counts[block.kind] += decisions_of(block, layer, model.config)
    return counts


def layer_seconds(base: type[Any], config: Any, tokens: int, device: torch.device) -> LayerSeconds:
    """Measure a layer of random weights, in fp32, for one example: whole, and with half the decisions of each kind.

    Takes medians of wall seconds. `base` is the class of the model without a head.
    """
    base = getattr(base, "resizes", base)  # a class that resizes would need sizes of every layer
    with torch.random.fork_rng(devices=[]):
        whole = _one_layer(base, config, {})
        layer = next(iter(layers_of(whole).values()))
        count = {block.kind: decisions_of(block, layer, whole.config) for block in blocks_of(layer)}
        halves = {kind: _one_layer(base, config, count | {kind: most // 2}) for kind, most in count.items()}
    calls = {name: _layer_call(model.to(device).eval(), tokens) for name, model in {"": whole, **halves}.items()}
    times: dict[str, list[float]] = {name: [] for name in calls}
    with torch.inference_mode():
        for _ in range(_ROUNDS + 1):
            for name, call in calls.items():  # in turns: a slow moment of the machine then hits all alike
                times[name].append(seconds(call, device))
    median = {name: statistics.median(series[1:]) for name, series in times.items()}
    decision = {
        kind: max((median[""] - median[kind]) / (most - most // 2), _LEAST * median[""] / most)
        for kind, most in count.items()
    }
    return LayerSeconds(median[""], decision, count)


def _one_layer(base: Any, config: Any, count: Mapping[str, int]) -> Any:
    """Build the model with its first layer only, with `count` decisions of each kind if given, and few embeddings."""
    small = copy.deepcopy(config)
    small.num_hidden_layers, small.use_cache = 1, False
    if getattr(small, "layer_types", None):
        small.layer_types = small.layer_types[:1]
    special = [value for name, value in small.to_dict().items() if name.endswith("token_id") and isinstance(value, int)]
    small.vocab_size = 1 + max([0, *special])
    setattr(small, FIELD, {name: [count.get(kind, 0)] for kind, name in SIZES_OF.items()} if count else None)
    return (shrunk_class(base) if count else base)(small)


def _layer_call(model: Any, tokens: int) -> Callable[[], object]:
    """Return a call of the model's only layer, with the arguments that the model gives it for one example."""
    (layer,) = layers_of(model).values()
    arguments: list[Any] = []
    hook = layer.register_forward_pre_hook(lambda _, *given: arguments.append(given), with_kwargs=True)
    # at most as many tokens as the model has positions for; some families count theirs from 2
    most = getattr(model.config, "max_position_embeddings", None) or tokens
    ids = torch.zeros(1, max(1, min(tokens, most - 2)), dtype=torch.int64, device=next(model.parameters()).device)
    with torch.inference_mode():
        model(input_ids=ids, attention_mask=torch.ones_like(ids))
    hook.remove()
    ((positional, named),) = arguments
    return lambda: layer(*positional, **named)
