"""What decisions on heads and neurons cost: floating-point operations, or seconds measured on this device."""

from __future__ import annotations

import copy
import math
import statistics
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ds_trainer.models.flops import decision_flops, encoder_flops
from ds_trainer.models.layers import FIELD, SIZES_OF, blocks_of, decisions_of, layers_of
from ds_trainer.models.shrink import shrunk_class
from ds_trainer.ranks.failures import UserError
from ds_trainer.ranks.timing import seconds
from ds_trainer.techniques.prune.decisions import Site

_ROUNDS = 15
_LEAST = 0.01
"""Share of a layer's time that all decisions of a block are taken to cost at the least: what is measured has noise."""


@dataclass(frozen=True)
class Costs:
    """Of each decision, by site and in the scores' shape, and of all of the encoder that no decision removes."""

    each: Mapping[str, Tensor]
    fixed: float

    @property
    def total(self) -> float:
        return self.fixed + sum(float(cost.sum()) for cost in self.each.values())

    def share(self, open_gates: Mapping[str, Tensor]) -> float:
        """Of the total that is kept."""
        kept = sum(float(cost[open_gates[name].cpu()].sum()) for name, cost in self.each.items())
        return (self.fixed + kept) / self.total

    def check(self, target: float, name: str, lowest: Mapping[str, int]) -> None:
        """ValueError where not even dropping all reaches the target, or all but the `lowest` number of each site."""
        least = self.fixed / self.total
        if target < least:
            raise UserError(
                f"{name} is {target}, and what no decision removes is {least:.3f} of the encoder: raise it, or prune "
                "more of the model"
            )
        kept = sum(float(cost.flatten().sort().values[: lowest[site]].sum()) for site, cost in self.each.items())
        least = (self.fixed + kept) / self.total
        if target < least:
            raise UserError(
                f"{name} is {target}, and what min_heads keeps is, with what no decision removes, {least:.3f} of the "
                "encoder: raise the one or lower the other"
            )


@dataclass(frozen=True)
class LayerSeconds:
    """Of one layer as its config has it: all of it, and one decision of each kind of block."""

    layer: float
    decision: Mapping[str, float]
    count: Mapping[str, int]
    """How many decisions it was measured with."""


def weight_costs(sites: Mapping[str, Site]) -> Costs:
    """How many weights each decision is about."""
    return Costs({name: site.sizes().double() for name, site in sites.items()}, 0.0)


def flops_costs(model: Any, sites: Mapping[str, Site], tokens: int) -> Costs:
    """Floating-point operations of one example of so many tokens; sites must be of whole blocks."""
    layers = layers_of(model)
    each = {}
    for name, site in sites.items():
        assert site.block is not None
        prefix, block = site.block
        cost = decision_flops(block, layers[prefix], model.config, tokens)
        each[name] = torch.full(site.shape, cost, dtype=torch.float64)
    return Costs(each, encoder_flops(model, tokens) - sum(float(cost.sum()) for cost in each.values()))


def seconds_costs(measured: LayerSeconds, layers: Counter[str], sites: Mapping[str, Site]) -> Costs:
    """Of an encoder of so many layers and decisions of each kind, all layers taken to be like the one measured."""
    rest = measured.layer - sum(measured.count[kind] * cost for kind, cost in measured.decision.items())
    total = layers["layers"] * max(0.0, rest) + sum(layers[kind] * cost for kind, cost in measured.decision.items())
    of_one = {name: measured.decision[site.role] for name, site in sites.items()}
    removable = sum(math.prod(site.shape) * of_one[name] for name, site in sites.items())
    return alike_costs({name: site.shape for name, site in sites.items()}, of_one, max(0.0, total - removable))


def alike_costs(shapes: Mapping[str, tuple[int, ...]], of_one: Mapping[str, float], fixed: float) -> Costs:
    """Where a site's decisions cost the same."""
    each = {name: torch.full(shape, of_one[name], dtype=torch.float64) for name, shape in shapes.items()}
    return Costs(each, fixed)


def counted(model: Any) -> Counter[str]:
    """How many layers a model has ("layers"), and how many decisions of each kind of block."""
    found = Counter(layers=len(layers_of(model)))
    for layer in layers_of(model).values():
        for block in blocks_of(layer):
            found[block.kind] += decisions_of(block, layer, model.config)
    return found


def layer_seconds(base: type[Any], config: Any, tokens: int, device: torch.device) -> LayerSeconds:
    """Median wall seconds of a layer of random weights, in fp32, for one example: whole, and with half its decisions.

    `base` is the class of the model without a head. All variants are called in turns.
    """
    base = getattr(base, "resizes", base)  # a class that resizes would want sizes of every layer
    with torch.random.fork_rng(devices=[]):
        whole = _one_layer(base, config, {})
        layer = next(iter(layers_of(whole).values()))
        count = {block.kind: decisions_of(block, layer, whole.config) for block in blocks_of(layer)}
        halves = {kind: _one_layer(base, config, count | {kind: most // 2}) for kind, most in count.items()}
    calls = {name: _call(model.to(device).eval(), tokens) for name, model in {"": whole, **halves}.items()}
    times: dict[str, list[float]] = {name: [] for name in calls}
    with torch.inference_mode():
        for _ in range(_ROUNDS + 1):
            for name, call in calls.items():
                times[name].append(seconds(call, device))
    middle = {name: statistics.median(found[1:]) for name, found in times.items()}
    decision = {
        kind: max((middle[""] - middle[kind]) / (most - most // 2), _LEAST * middle[""] / most)
        for kind, most in count.items()
    }
    return LayerSeconds(middle[""], decision, count)


def _one_layer(base: type[Any], config: Any, count: Mapping[str, int]) -> nn.Module:
    """The model with its first layer alone, of so many decisions where they are said, and a small vocabulary."""
    small = copy.deepcopy(config)
    small.num_hidden_layers, small.use_cache = 1, False
    if getattr(small, "layer_types", None):
        small.layer_types = small.layer_types[:1]
    special = [value for name, value in small.to_dict().items() if name.endswith("token_id") and isinstance(value, int)]
    small.vocab_size = 1 + max([0, *special])
    setattr(small, FIELD, None)
    if not count:
        return base(small)
    setattr(small, FIELD, {name: [count.get(kind, 0)] for kind, name in SIZES_OF.items()})
    resized: Any = shrunk_class
    return resized(base)(small)


def _call(model: nn.Module, tokens: int) -> Any:
    """A call of the model's only layer, with what it is given for one example."""
    (layer,) = layers_of(model).values()
    found: list[Any] = []
    hook = layer.register_forward_pre_hook(lambda _, given, named: found.append((given, named)), with_kwargs=True)
    ids = torch.zeros(1, _length(model, tokens), dtype=torch.int64, device=next(model.parameters()).device)
    with torch.inference_mode():
        model(input_ids=ids, attention_mask=torch.ones_like(ids))
    hook.remove()
    ((given, named),) = found
    return lambda: layer(*given, **named)


def _length(model: Any, tokens: int) -> int:
    """As many tokens as asked, or as the model has positions for; some count theirs from 2."""
    most = getattr(model.config, "max_position_embeddings", None) or tokens
    return max(1, min(tokens, most - 2))
