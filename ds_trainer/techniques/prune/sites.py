"""Sites: the linear layers of a model that pruning masks, and the decisions that mask each.

A decision is about whatever is kept or dropped as one: a weight, a row, a column, a block, a head, a neuron.

A head or neuron has weights in all matrices of its block, and what it computes enters the block's outer matrix alone:
out = sum_h O[:, h] f(x; Q_h, K_h, V_h) for the heads of an attention, out = sum_n D[:, n] f(U_n x) for the neurons of a
feed-forward block. With its columns of O or D masked it has no influence, and its other weights get no gradient. So
training masks these columns only, and `clear` writes the zeros of the inner matrices at the end.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from ds_trainer.config.prune_specs import COUNTED, KINDS, WHOLE_BLOCKS, PruneSpec
from ds_trainer.files.messages import listed
from ds_trainer.models.layers import AnyLinear, encoder_linears, gathered, rows_of
from ds_trainer.models.shrunk_model import Block, blocks_of, decisions_of, in_features, layers_of, out_features
from ds_trainer.ranks.failures import UserError
from ds_trainer.techniques.prune.grains import Grain
from ds_trainer.techniques.prune.selection import AllowedCounts


@dataclass(frozen=True)
class Site:
    """A linear layer that is masked, made before the engine takes the model.

    A site whose decisions are about a whole block has its prefix and `Block`, and in `inner` the block's other linear
    layers by name.
    """

    name: str
    linear: AnyLinear
    granularity: str
    grain: Grain | None
    """None where a decision is a single weight."""
    shape: tuple[int, ...]
    """The shape of the scores."""
    role: str
    """The part of the name that the same matrix of every layer shares, or the kind of block."""
    allowed: AllowedCounts
    """How many of its decisions may be kept."""
    block: tuple[str, Block] | None = None
    inner: Mapping[str, AnyLinear] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """How many decisions it has."""
        return math.prod(self.shape)

    @property
    def block_name(self) -> str:
        """The name under which its kept decisions are reported."""
        return self.name if self.block is None else f"{self.block[0]}.{self.block[1].kind}"

    @property
    def weights(self) -> int:
        """How many weights its decisions are about, in all its matrices."""
        return sum(linear.weight.numel() for linear in (self.linear, *self.inner.values()))

    def sizes(self) -> Tensor:
        """Count each decision's weights, in all its matrices: int64 of the scores' shape, on the CPU."""
        assert self.grain is not None
        return self.grain.sizes * self.weights // self.linear.weight.numel()

    def nonzero(self) -> Tensor:
        """Return which decisions have a weight other than zero: bools of the scores' shape. The weight is whole."""
        nonzero = self.linear.weight.detach() != 0
        return nonzero if self.grain is None else self.grain.sums(nonzero.float()) > 0

    def magnitudes(self, outer: Tensor) -> Tensor:
        """Return the root mean square of each decision's weights in all its matrices: (decisions,).

        `outer` is the masked weight. Every rank takes part where the engine has partitioned the model.
        """
        assert self.grain is not None
        with gathered(outer) as weight:
            total, count = self.grain.sums(weight.float().square()), weight.numel()
        for linear in self.inner.values():
            with gathered(linear.weight) as weight:
                total = total + self._by_decision(linear, weight).float().square().sum((0, 2, 3))
                count += weight.numel()
        return (total * (len(total) / count)).sqrt()

    def clear(self, model: nn.Module, closed: Tensor) -> None:
        """Write zeros in the inner linear layers of a whole model where decisions are `closed`: (decisions,), bool."""
        for name in self.inner:
            linear: Any = model.get_submodule(name)
            self._by_decision(linear, linear.weight.detach())[:, closed] = 0
            if linear.bias is not None:
                linear.bias.detach().view(self._parts, len(closed), -1)[:, closed] = 0

    @property
    def _parts(self) -> int:
        return 1 if self.block is None else self.block[1].parts

    def _by_decision(self, linear: AnyLinear, weight: Tensor) -> Tensor:
        """View an inner weight as (parts, decisions, rows of one decision, in)."""
        return rows_of(weight, type(linear)).unflatten(0, (self._parts, *self.shape, -1))


def sites_of(model: nn.Module, spec: PruneSpec) -> dict[str, Site]:
    """Return the sites by names of linear layers, in the model's order. UserError where a key or bound cannot hold."""
    linears = encoder_linears(model, spec.modules)
    kinds = _kinds_of_linears(model)
    chosen = {name: key for name in linears if (key := _key_of(name, kinds, spec.choices)) is not None}
    sites = {site.name: site for site in _block_sites(model, spec, chosen)}
    for name, key in chosen.items():
        if spec.choices[key] not in WHOLE_BLOCKS:
            sites[name] = _matrix_site(name, linears[name], spec.choices[key], spec)
    granularities = {site.granularity for site in sites.values()}
    for key, granularity in spec.choices.items():
        if granularity not in granularities and (key in chosen.values() or key in set(KINDS) - set(kinds.values())):
            raise UserError(
                f'granularity: "{key}" of {type(model).__name__} cannot be pruned by {granularity}, since its blocks '
                "are of an unknown form (then write name patterns of linear layers), or its heads share projections "
                "(then choose block, row, column or weight)"
            )
        if key not in chosen.values():
            raise UserError(
                f'granularity: "{key}" decides nothing: no linear layer of {type(model).__name__} matches it that '
                "modules names and no earlier key matches. Put it first, write another name pattern, or drop it"
            )
    in_order = {name: sites[name] for name in linears if name in sites}
    _check_bounds(in_order, spec, len(layers_of(model)))
    return in_order


def _kinds_of_linears(model: nn.Module) -> dict[str, str]:
    """Return the kind of block of each linear layer, in layers of a known family.

    A layer whose attention is of an unknown form (DeBERTa) has a feed-forward block alone: its other linear layers are
    attention.
    """
    kinds = {}
    for prefix, layer in layers_of(model).items():
        blocks = blocks_of(layer)
        known = {name: block.kind for block in blocks for name in (*block.inner, block.outer)}
        for name, module in layer.named_modules() if blocks else ():
            if isinstance(module, AnyLinear):
                kinds[f"{prefix}.{name}"] = known.get(name, "attention")
    return kinds


def _key_of(name: str, kinds: Mapping[str, str], choices: Mapping[str, str]) -> str | None:
    """Return the first key of the granularities that matches a linear layer."""
    return next((key for key in choices if (kinds.get(name) == key if key in KINDS else fnmatchcase(name, key))), None)


def _block_sites(model: nn.Module, spec: PruneSpec, chosen: Mapping[str, str]) -> Iterator[Site]:
    """Yield the sites of blocks that are pruned by heads or neurons, and that have any."""
    by_kind = {kind: name for name, kind in WHOLE_BLOCKS.items() if name in spec.choices.values()}
    blocks = [(prefix, layer, block) for prefix, layer in layers_of(model).items() for block in blocks_of(layer)]
    for prefix, layer, block in blocks:
        names = [f"{prefix}.{name}" for name in (*block.inner, block.outer)]
        others = [name for name in names if chosen.get(name) != block.kind]
        count = decisions_of(block, layer, model.config)
        if block.kind not in by_kind or not count or len(others) == len(names):
            continue
        granularity = by_kind[block.kind]
        if others:
            raise UserError(
                f"granularity: {granularity} is of all matrices of {prefix}'s {block.kind}, and modules or another key "
                f"of granularity takes {', '.join(others)} out: name all of them, or none"
            )
        inner: dict[str, Any] = {name: model.get_submodule(name) for name in names[:-1]}
        outer: Any = model.get_submodule(names[-1])
        grain = _grain(outer, None, in_features(outer) // count)
        allowed = _allowed_counts(spec, granularity)
        yield Site(names[-1], outer, granularity, grain, grain.shape, block.kind, allowed, (prefix, block), inner)


def _matrix_site(name: str, linear: AnyLinear, granularity: str, spec: PruneSpec) -> Site:
    """Return a site whose decisions are about one matrix."""
    if granularity == "2:4" and in_features(linear) % 4:
        raise UserError(
            f"granularity 2:4: {name} has {in_features(linear)} inputs, which are no multiple of 4: leave it out of "
            "modules, or choose another granularity for it"
        )
    grain = None
    if granularity not in ("weight", "2:4"):
        grain = _grain(linear, *{"row": (1, None), "column": (None, 1)}.get(granularity, spec.block_shape))
    shape = tuple(linear.weight.shape) if grain is None else grain.shape
    role = re.split(r"(?:^|\.)\d+\.", name, maxsplit=1)[-1]
    return Site(name, linear, granularity, grain, shape, role, _allowed_counts(spec, granularity))


def _allowed_counts(spec: PruneSpec, granularity: str) -> AllowedCounts:
    least = spec.min_heads if granularity == "head" else 0
    return AllowedCounts(least, spec.multiple_of if granularity in COUNTED else 1)


def _grain(linear: Any, rows: int | None, columns: int | None) -> Grain:
    return Grain(out_features(linear), in_features(linear), rows, columns, turned=isinstance(linear, Conv1D))


def _check_bounds(sites: Mapping[str, Site], spec: PruneSpec, layers: int) -> None:
    """Raise UserError where `min_heads` or `uniform` cannot hold on this model."""
    for site in sites.values():
        if site.granularity == "head" and site.shape[0] < spec.min_heads:
            raise UserError(f"min_heads is {spec.min_heads}, and {site.block_name} has {site.shape[0]}: lower it")
    for role in dict.fromkeys(site.role for site in sites.values()) if spec.uniform else ():
        shapes = [site.shape for site in sites.values() if site.role == role]
        if len(shapes) < layers or len({*shapes}) > 1:
            raise UserError(
                f"uniform: {role} is pruned in {len(shapes)} of {layers} layers, with decisions of the shapes "
                f"{listed(sorted({*shapes}))}: prune it in all layers, all of one size, or set uniform to false"
            )
