"""Sites: the linear layers of a model that pruning masks, and the decisions that mask each.

A decision is about whatever is kept or dropped as one: a weight, a row, a column, a block, a head, a neuron.

A head or neuron has weights in all matrices of its block, and what it computes enters the block's outer matrix alone:
out = sum_h O[:, h] f(x; Q_h, K_h, V_h) for the heads of an attention, out = sum_n D[:, n] f(U_n x) for the neurons of a
feed-forward block. With its columns of O or D masked it has no influence, and its other weights get no gradient. So
training masks these columns only, and `clear` writes the zeros of the inner matrices at the end.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from ds_trainer.models.layers import AnyLinear, encoder_linears, gathered, rows_of
from ds_trainer.models.shrunk_model import blocks_of, decisions_of, in_features, layers_of, out_features
from ds_trainer.ranks.failures import UserError
from ds_trainer.recipe.technique_specs import KINDS, WHOLE_BLOCKS, PruneSpec
from ds_trainer.techniques.prune.masked import GateMask, Grain


@dataclass(frozen=True)
class Site:
    """A linear layer that is masked, made before the engine takes the model: ZeRO-3 leaves empty weights.

    `grain` is None where a decision is a single weight. For heads and neurons `block` is the name under which the kept
    ones are reported, and `inner` has the block's other linear layers by name, each of which holds `parts` matrices.
    """

    linear: AnyLinear
    granularity: str
    grain: Grain | None
    weights: int  # how many weights its decisions are about, in all their matrices
    block: str | None = None
    inner: Mapping[str, AnyLinear] = field(default_factory=dict)
    parts: int = 1

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the scores."""
        return tuple(self.linear.weight.shape) if self.grain is None else self.grain.shape

    @property
    def sizes(self) -> Tensor:
        """Count the weights that each decision is about, in all its matrices: of the scores' shape, on the CPU."""
        assert self.grain is not None
        return self.grain.sizes * self.weights // (self.grain.out_features * self.grain.in_features)

    def gated(self, gates: Tensor) -> GateMask:
        """Return the mask that keeps these decisions, bools in any shape."""
        return GateMask(gates.view(self.shape).to(self.linear.weight.device), grain=self.grain)

    def magnitudes(self, outer: Tensor) -> Tensor:
        """Return the root mean square of each decision's weights in all its matrices, in the scores' shape.

        `outer` is the masked weight. Every rank takes part where the engine has partitioned the model.
        """
        assert self.grain is not None
        with gathered(outer) as weight:
            total = self.grain.sums(weight.float().square())
        for linear in self.inner.values():
            with gathered(linear.weight) as weight:
                total = total + self._by_decision(linear, weight).float().square().sum((0, 2, 3))
        return (total / self.sizes.to(total.device)).sqrt()

    def clear(self, model: nn.Module, closed: Tensor) -> None:
        """Write zeros in the inner linear layers of a whole model where decisions are `closed`: (decisions,), bool."""
        for name in self.inner:
            linear: Any = model.get_submodule(name)
            self._by_decision(linear, linear.weight.detach())[:, closed] = 0
            if linear.bias is not None:
                linear.bias.detach().view(self.parts, len(closed), -1)[:, closed] = 0

    def _by_decision(self, linear: AnyLinear, weight: Tensor) -> Tensor:
        """View an inner weight as (parts, decisions, rows of one decision, in)."""
        return rows_of(weight, type(linear)).unflatten(0, (self.parts, *self.shape, -1))


def sites_of(model: Any, spec: PruneSpec) -> dict[str, Site]:
    """Return the sites by names of linear layers, in the model's order. UserError where a key cannot hold."""
    linears, keys = encoder_linears(model, spec.modules), dict[str, str]()
    blocks = [(prefix, layer, block) for prefix, layer in layers_of(model).items() for block in blocks_of(layer)]
    # layers whose attention is of an unknown form (DeBERTa) have a feed-forward block alone: all else is attention
    kinds = dict.fromkeys(linears, "attention") if blocks else {}
    kinds |= {f"{prefix}.{name}": block.kind for prefix, _, block in blocks for name in (*block.inner, block.outer)}
    for name in linears:
        matching = (key for key in spec.choices if (kinds.get(name) == key if key in KINDS else fnmatchcase(name, key)))
        if key := next(matching, None):
            keys[name] = key
    sites = {}
    for prefix, layer, block in blocks:
        granularity, count = spec.choices.get(block.kind), decisions_of(block, layer, model.config)
        names = [f"{prefix}.{name}" for name in (*block.inner, block.outer)]
        others = [name for name in names if keys.get(name) != block.kind]
        if granularity not in WHOLE_BLOCKS or not count or len(others) == len(names):
            continue
        if others:
            raise UserError(
                f"granularity: {granularity} is of all matrices of {prefix}'s {block.kind}, and modules or another key "
                f"of granularity takes {', '.join(others)} out: name all of them, or none"
            )
        inner: dict[str, Any] = {name: model.get_submodule(name) for name in names}
        weights = sum(linear.weight.numel() for linear in inner.values())
        name, outer = inner.popitem()
        head_or_neuron = _grain(outer, None, in_features(outer) // count)
        sites[name] = Site(outer, granularity, head_or_neuron, weights, f"{prefix}.{block.kind}", inner, block.parts)
    for name, key in keys.items():
        granularity = spec.choices[key]
        if granularity not in WHOLE_BLOCKS:
            sides = {"row": (1, None), "column": (None, 1)}.get(granularity, spec.block_shape)
            grain = None if granularity == "weight" else _grain(linears[name], *sides)
            sites[name] = Site(linears[name], granularity, grain, linears[name].weight.numel())
    granularities = {site.granularity for site in sites.values()}
    for key, granularity in spec.choices.items():
        if key not in keys.values() or granularity not in granularities:
            raise UserError(
                f'granularity: "{key}" prunes nothing of {type(model).__name__} by {granularity}: no linear layer '
                "matches it that modules names and no earlier key matches, or its blocks are of an unknown form, or "
                "its heads share projections. Put it first, write a name pattern of linear layers, choose block, row, "
                "column or weight for it, or drop it"
            )
    return {name: sites[name] for name in linears if name in sites}


def _grain(linear: Any, rows: int | None, columns: int | None) -> Grain:
    return Grain(out_features(linear), in_features(linear), rows, columns, turned=isinstance(linear, Conv1D))
