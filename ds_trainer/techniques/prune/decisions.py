"""Which decisions pruning has to take on a model: by granularity, what each is about, and what is cut where it falls.

A decision on a head or a neuron is about all matrices of its block. What it computes enters the block's outer matrix
alone: with that matrix's columns masked it has no influence, and all its other weights no gradient. So these columns
are all that is masked in training, and `clear` writes the other zeros at the end.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from ds_trainer.config.prune_specs import KINDS, WHOLE_BLOCKS, PruneSpec
from ds_trainer.files.messages import listed
from ds_trainer.models.layers import (
    AnyLinear,
    Block,
    blocks_of,
    decisions_of,
    encoder_linears,
    gathered,
    in_features,
    layers_of,
    out_features,
    rows_of,
)
from ds_trainer.ranks.failures import UserError
from ds_trainer.techniques.prune.grains import Blocks, Columns, Grain, Rows, Turned


@dataclass(frozen=True)
class Site:
    """A linear layer that is masked, and what the decisions are that mask it. To be asked before the engine has it.

    `block` is the layer's place in the model and its block, where a decision is about all matrices of that; `inner`,
    by name, are then the block's other linear layers.
    """

    name: str
    linear: AnyLinear
    granularity: str
    grain: Grain | None
    role: str
    """What it has in common with those of other layers."""
    block: tuple[str, Block] | None
    inner: Mapping[str, AnyLinear]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the scores."""
        return tuple(self.linear.weight.shape) if self.grain is None else self.grain.shape

    @property
    def block_name(self) -> str:
        """Of what the kept decisions are counted in."""
        return self.name if self.block is None else f"{self.block[0]}.{self.block[1].kind}"

    def sizes(self) -> Tensor:
        """How many weights each decision is about: in the scores' shape, int64, on the CPU."""
        assert self.grain is not None
        own = self.grain.sizes()
        return own + sum(linear.weight.numel() for linear in self.inner.values()) // own.numel()

    def magnitudes(self, outer: Tensor) -> Tensor:
        """The root mean square of each decision's weights in all its matrices: (decisions,).

        `outer` is the masked weight. Every rank takes part, also once the engine has the model.
        """
        assert self.grain is not None
        with gathered(outer) as weight:
            total, count = self.grain.sums(weight.float().square()), weight.numel()
        for linear in self.inner.values():
            with gathered(linear.weight) as weight:
                total = total + self._rows_of(linear, weight).float().square().sum((0, 2, 3))
                count += weight.numel()
        return (total * (len(total) / count)).sqrt()

    def clear(self, model: nn.Module, closed: Tensor) -> None:
        """Write zeros in the inner linear layers of a whole model where decisions are `closed`: (decisions,), bool."""
        for name in self.inner:
            linear: Any = model.get_submodule(name)
            self._rows_of(linear, linear.weight.detach())[:, closed] = 0
            if linear.bias is not None:
                linear.bias.detach().view(self._parts, len(closed), -1)[:, closed] = 0

    @property
    def _parts(self) -> int:
        return 1 if self.block is None else self.block[1].parts

    def _rows_of(self, linear: AnyLinear, weight: Tensor) -> Tensor:
        """A view of an inner weight: (parts, decisions, rows of one, in)."""
        rows = rows_of(weight, type(linear))
        assert self.grain is not None
        return rows.unflatten(0, (self._parts, *self.grain.shape, -1))


def sites_of(model: nn.Module, spec: PruneSpec) -> dict[str, Site]:
    """What is masked, by names of linear layers, in the model's order. ValueError where it cannot be, or is none."""
    linears = encoder_linears(model, spec.modules)
    kinds = {name: kind for name, kind, _ in _members(model)}
    chosen = {name: key for name in linears if (key := _key_of(name, kinds, spec.choices)) is not None}
    for key in spec.choices:
        # heads and neurons of an unknown family, or of blocks that are emptied, are the concern of `_blocks`
        if key not in chosen.values() and (key in kinds.values() or spec.choices[key] not in WHOLE_BLOCKS):
            raise UserError(f"granularity: {_idle(key, model, kinds, chosen)}")
    sites = {}
    for name, key in chosen.items():
        granularity = spec.choices[key]
        if granularity not in WHOLE_BLOCKS:
            sites[name] = _site_of(name, linears[name], granularity, spec)
    for site in _blocks(model, spec, chosen):
        sites[site.name] = site
    if not sites:
        raise UserError(
            f"granularity: {', '.join(spec.choices)} match nothing of {type(model).__name__} that can be pruned"
        )
    order = list(encoder_linears(model))
    found = dict(sorted(sites.items(), key=lambda item: order.index(item[0])))
    _check(found, spec, len(layers_of(model)))
    return found


def _key_of(name: str, kinds: Mapping[str, str], choices: Mapping[str, str]) -> str | None:
    return next((key for key in choices if _matches(name, kinds, key)), None)


def _matches(name: str, kinds: Mapping[str, str], key: str) -> bool:
    return kinds.get(name) == key if key in KINDS else fnmatchcase(name, key)


def _idle(key: str, model: nn.Module, kinds: Mapping[str, str], chosen: Mapping[str, str]) -> str:
    """Why a key is the first match of no linear layer that is pruned."""
    if key in KINDS and key not in kinds.values():
        return f'of {type(model).__name__} it is not known what is "{key}": write name patterns instead'
    shadows = sorted({other for name, other in chosen.items() if _matches(name, kinds, key)})
    if shadows:
        return f'"{key}" decides nothing, since {listed(shadows)} before it match all it does: put it first, or drop it'
    if any(_matches(name, kinds, key) for name in encoder_linears(model)):
        return f'"{key}" matches no linear layer that modules names: name them there, or drop the key'
    return f'"{key}" matches no linear layer that is pruned: change or drop it'


def _members(model: nn.Module) -> Iterator[tuple[str, str, Block | None]]:
    """The linear layers of layers of a known family: name, kind of block, and block, where it has one.

    Where only the feed-forward block can be cut by decisions, all else is attention.
    """
    for prefix, layer in layers_of(model).items():
        blocks = blocks_of(layer)
        known = {name: block for block in blocks for name in (*block.inner, block.outer)}
        modules = dict(layer.named_modules())
        for name, module in modules.items() if blocks else ():
            if isinstance(module, AnyLinear):
                block = known.get(name)
                yield f"{prefix}.{name}", block.kind if block else "attention", block


def _blocks(model: nn.Module, spec: PruneSpec, chosen: Mapping[str, str]) -> Iterator[Site]:
    """Those of whole blocks that are pruned by heads or neurons, and that have any left."""
    kinds = {kind: name for name, kind in WHOLE_BLOCKS.items() if name in spec.choices.values()}
    for kind, granularity in kinds.items():
        places = [
            (prefix, layer, block)
            for prefix, layer in layers_of(model).items()
            for block in blocks_of(layer)
            if block.kind == kind
        ]
        if not places:
            raise UserError(_no_blocks(model, granularity))
        for prefix, layer, block in places:
            names = [f"{prefix}.{name}" for name in (*block.inner, block.outer)]
            asked = [name for name in names if chosen.get(name) == kind]
            count = decisions_of(block, layer, model.config)
            if not count or not asked:
                continue
            if len(asked) < len(names):
                others = ", ".join(name for name in names if name not in asked)
                raise UserError(
                    f"granularity: {granularity} is of all matrices of {prefix}'s {kind}, and modules or another key "
                    f"of granularity takes {others} out: name all of them, or none"
                )
            linears = {name: model.get_submodule(name) for name in names}
            outer: Any = linears[names[-1]]
            grain = _turned(Columns(out_features(outer), in_features(outer), in_features(outer) // count), outer)
            inner: dict[str, Any] = {name: linears[name] for name in names[:-1]}
            yield Site(names[-1], outer, granularity, grain, kind, (prefix, block), inner)


def _no_blocks(model: nn.Module, granularity: str) -> str:
    if any(block for layer in layers_of(model).values() for block in blocks_of(layer)):
        return (
            f"granularity: {granularity} cannot be cut out of {type(model).__name__}, whose heads share projections: "
            'prune its attention by block, row, column or weight, e.g. {"attention": "block", "feed_forward": "neuron"}'
        )
    return (
        f"granularity: {granularity} needs a model whose blocks are known, and {type(model).__name__} is none: "
        "choose row, column, block or weight"
    )


def _site_of(name: str, linear: AnyLinear, granularity: str, spec: PruneSpec) -> Site:
    """Of decisions about one matrix."""
    sizes = out_features(linear), in_features(linear)
    if granularity == "2:4" and sizes[1] % 4:
        raise UserError(
            f"granularity 2:4: {name} has {sizes[1]} inputs, which are no multiple of 4: leave it out of modules, or "
            "choose another granularity for it"
        )
    grains: dict[str, Grain] = {
        "row": Rows(*sizes),
        "column": Columns(*sizes),
        "block": Blocks(*sizes, *spec.block_shape),
    }
    grain = grains.get(granularity)
    role = re.split(r"(?:^|\.)\d+\.", name, maxsplit=1)[-1]
    return Site(name, linear, granularity, grain and _turned(grain, linear), role, None, {})


def _turned(grain: Grain, linear: AnyLinear) -> Grain:
    return Turned(grain) if isinstance(linear, Conv1D) else grain


def _check(sites: Mapping[str, Site], spec: PruneSpec, layers: int) -> None:
    """What the spec promises of numbers can be kept on this model."""
    for site in sites.values():
        if site.granularity == "head" and site.shape[0] < spec.min_heads:
            raise UserError(f"min_heads is {spec.min_heads}, and {site.block_name} has {site.shape[0]}: lower it")
    if not spec.uniform:
        return
    alike: dict[str, list[Site]] = {}
    for site in sites.values():
        alike.setdefault(site.role, []).append(site)
    for role, group in alike.items():
        if len(group) < layers or len({site.shape for site in group}) > 1:
            shapes = ", ".join(sorted({"x".join(map(str, site.shape)) for site in group}))
            raise UserError(
                f"uniform: {role} is pruned in {len(group)} of {layers} layers, of {shapes} decisions: prune it in all "
                "layers, of a model whose layers are of one size, or set uniform to false"
            )
