"""Cut out of a model what contributes nothing: heads and neurons of which pruning left no path through their block.

A decision (a head with its key and value, or a neuron) is gone where all that the block's outer matrix reads of it is
multiplied by zeros, or is the same for every token: attention gives the value's bias where the value has no weights,
since its weights sum to one, and a feed-forward block what its activation makes of the biases. Such constants go into
the outer layer's bias, if it has one. Outputs stay as they are, up to rounding. Masks are folded first.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from ds_trainer.models.layers import (
    FIELD,
    SIZES_OF,
    Block,
    blocks_of,
    decisions_of,
    in_features,
    is_emptied,
    layers_of,
    out_features,
    rows_of,
    sizes_of,
    whole_class,
    whole_heads,
)
from ds_trainer.models.shrunk_model import shrunk_class
from ds_trainer.ranks.failures import UserError

_ACTIVATIONS = ("intermediate_act_fn", "activation", "act", "act_fn")
"""What cores of feed-forward blocks call theirs."""
_NEURON_FIELDS = ("intermediate_size", "hidden_dim", "n_inner", "ffn_dim")
"""What configs call the neurons of a layer."""


class NothingToCutError(UserError):
    """No head and no neuron is wholly zero."""


@dataclass(frozen=True)
class _Cut:
    """What is left of a block: the decisions kept, in order, and what the others add to the outer layer's bias."""

    layer: str
    block: Block
    whole: int
    keep: Tensor
    constant: Tensor | None

    def name(self, module: str) -> str:
        return f"{self.layer}.{module}"


def check_known(model: Any) -> None:
    """ValueError where the model is of a family that cannot be cut, shares weights, or has other than linear layers."""
    base = whole_class(model)
    if getattr(transformers, base.__name__, None) is not base:
        raise UserError(f"{base.__name__} is no class of transformers: only models of its own are cut")
    owners: dict[int, str] = {}
    for name, layer in layers_of(model).items():
        for block in blocks_of(layer):
            _check_linear(name, layer, block)
            _check_own(name, layer, block, owners)
    sizes_of(model)


@torch.no_grad()
def kept(model: Any) -> dict[str, list[list[int]]]:
    """The heads (groups that share a key and a value) and neurons of each layer that contribute, by their numbers.

    {"heads": a list for each layer, "neurons": likewise}. ValueError where the model is of an unknown family.
    """
    check_known(model)
    return _kept(model, _cuts(model))


@torch.no_grad()
def shrink(model: Any) -> Any:
    """A new model that holds only what contributes, its weights copied; the given one, shrunk or not, stays as it is.

    Outputs stay those of the given one, up to rounding, for tokens that are not padding. At padding to the left, which
    a decoder's tokens have nothing before to attend to, attention by "sdpa" gives zeros and not the value's bias: there
    they differ, and nothing reads them.

    It is of the plain class of transformers where that family's config can say the sizes; else the config has them in
    `shrunk`, and the class is one of `shrunk_model.py`. NothingToCutError, a ValueError, where all contributes;
    ValueError where the model is of an unknown family.
    """
    check_known(model)
    cuts = _cuts(model)
    sizes = {name: [len(left) for left in layers] for name, layers in _kept(model, cuts).items()}
    if sizes == sizes_of(model):
        raise NothingToCutError(
            "nothing to cut: no head and no neuron is wholly zero. Prune with the granularity head, neuron or hybrid; "
            "what is pruned weight by weight is made small by --compact"
        )
    shrunk = _unfilled(model, sizes)
    _fill(shrunk, model, {name: weight for cut in cuts for name, weight in _left(model, cut)})
    if model.can_generate():
        shrunk.generation_config = copy.deepcopy(model.generation_config)
    return shrunk.train(model.training)


def _cuts(model: Any) -> list[_Cut]:
    """For each block that is not empty by now, in order."""
    return [
        _cut(name, layer, block, model.config)
        for name, layer in layers_of(model).items()
        for block in blocks_of(layer)
        if not is_emptied(layer.get_submodule(block.core))
    ]


def _kept(model: Any, cuts: Iterable[_Cut]) -> dict[str, list[list[int]]]:
    by_block = {(cut.layer, cut.block.kind): cut.keep.tolist() for cut in cuts}
    found: dict[str, list[list[int]]] = {name: [] for name in SIZES_OF.values()}
    for name, layer in layers_of(model).items():
        cuttable = {block.kind for block in blocks_of(layer)}
        for kind, size in SIZES_OF.items():
            never_cut = list(range(whole_heads(model.config)))
            found[size].append(by_block.get((name, kind), []) if kind in cuttable else never_cut)
    return found


def _cut(name: str, layer: nn.Module, block: Block, config: Any) -> _Cut:
    outer: Any = layer.get_submodule(block.outer)
    whole = decisions_of(block, layer, config)
    columns = rows_of(outer.weight, type(outer))
    constants = _constants(block, layer, whole)
    known = ~constants.isnan() if outer.bias is not None else constants == 0
    gone = ((columns == 0).all(0) | known).view(whole, -1).all(1)
    lost = gone.repeat_interleave(columns.shape[1] // whole) & known & (constants != 0)
    constant = columns[:, lost].double() @ constants[lost].double() if lost.any() else None
    return _Cut(name, block, whole, (~gone).nonzero().flatten(), constant)


def _check_linear(name: str, layer: nn.Module, block: Block) -> None:
    emptied = is_emptied(layer.get_submodule(block.core))
    for module in () if emptied else (*block.inner, block.outer):
        if not isinstance(layer.get_submodule(module), nn.Linear | Conv1D):
            kind = type(layer.get_submodule(module)).__name__
            raise UserError(f"{name}.{module} is a {kind}, and only linear layers are cut: fold or merge it first")


def _check_own(name: str, layer: nn.Module, block: Block, owners: dict[int, str]) -> None:
    for module in (*block.inner, block.outer) if not is_emptied(layer.get_submodule(block.core)) else ():
        weight, own = layer.get_submodule(module).weight, f"{name}.{module}"
        if (other := owners.setdefault(id(weight), own)) != own:
            raise UserError(f"{own} and {other} share their weight: give each a copy, since each is cut by itself")


def _constants(block: Block, layer: nn.Module, whole: int) -> Tensor:
    """What the outer layer is given where that is the same for every token, else NaN: one number for each input."""
    inner = [layer.get_submodule(name) for name in block.inner]
    parts = [part for linear in inner for part in _constant_parts(linear, block.parts)]
    if block.kind == "attention":
        values = parts[-1].view(whole, 1, -1)  # of a group, whose heads all read the same
        shared = in_features(layer.get_submodule(block.outer)) // parts[-1].numel()
        return values.expand(-1, shared, -1).flatten()
    core = layer.get_submodule(block.core)
    activation = next((getattr(core, name) for name in _ACTIVATIONS if hasattr(core, name)), None)
    activated = torch.full_like(parts[0], math.nan) if activation is None else activation(parts[0])
    if len(parts) == 1:
        return activated
    gated = activated * parts[1]
    return torch.where((activated == 0) | (parts[1] == 0), 0.0, gated)


def _constant_parts(linear: Any, parts: int) -> tuple[Tensor, ...]:
    """The outputs of a linear layer that are its bias whatever it is given, and NaN for the others; in fp32."""
    rows = rows_of(linear.weight, type(linear))
    bias = rows.new_zeros(len(rows)) if linear.bias is None else linear.bias
    return torch.where((rows == 0).all(1), bias.float(), math.nan).chunk(parts)


def _left(model: Any, cut: _Cut) -> Iterator[tuple[str, Tensor]]:
    """The weights of a block that are no longer what they were, by name."""
    outer = model.get_submodule(cut.name(cut.block.outer))
    if cut.constant is not None:
        yield cut.name(f"{cut.block.outer}.bias"), (outer.bias + cut.constant).to(outer.bias.dtype)
    if len(cut.keep) in (0, cut.whole):
        return
    for name in cut.block.inner:
        linear = model.get_submodule(cut.name(name))
        places = _places(cut, out_features(linear), cut.block.parts)
        yield cut.name(f"{name}.weight"), linear.weight.index_select(int(isinstance(linear, Conv1D)), places)
        if linear.bias is not None:
            yield cut.name(f"{name}.bias"), linear.bias.index_select(0, places)
    places = _places(cut, in_features(outer), 1)
    yield cut.name(f"{cut.block.outer}.weight"), outer.weight.index_select(int(isinstance(outer, nn.Linear)), places)


def _places(cut: _Cut, features: int, parts: int) -> Tensor:
    """Which of a linear layer's inputs or outputs stay."""
    return torch.arange(features, device=cut.keep.device).view(parts, cut.whole, -1)[:, cut.keep].flatten()


def _unfilled(model: Any, sizes: Mapping[str, Sequence[int]]) -> Any:
    """A model of these sizes on the "meta" device: a plain one, where its config can say them."""
    base, config = whole_class(model), copy.deepcopy(model.config)
    setattr(config, FIELD, {name: list(numbers) for name, numbers in sizes.items()})
    with torch.device("meta"):
        shrunk = shrunk_class(base)(config)
        plain_config = _plain_config(config, sizes)
        if plain_config is None:
            return shrunk
        plain = base(plain_config)
    return plain if _shapes(plain) == _shapes(shrunk) else shrunk


def _plain_config(config: Any, sizes: Mapping[str, Sequence[int]]) -> Any:
    """A config that may say the same of all layers; None where they differ, are empty, or transformers refuses it."""
    if any(len(set(numbers)) > 1 or 0 in numbers for numbers in sizes.values()):
        return None
    plain = copy.deepcopy(config)
    for name in (FIELD, "auto_map"):
        if hasattr(plain, name):
            delattr(plain, name)
    heads, whole = sizes["heads"][0], whole_heads(config)
    if heads != whole:
        plain.head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        plain.num_attention_heads = config.num_attention_heads // whole * heads
        if getattr(config, "num_key_value_heads", None):
            plain.num_key_value_heads = heads
    for name in _NEURON_FIELDS:
        if hasattr(config, name):
            setattr(plain, name, sizes["neurons"][0])
    try:
        type(plain).from_dict(plain.to_dict())
    except (ValueError, StrictDataclassError):  # heads that do not divide the width, say
        return None
    return plain


def _shapes(model: Any) -> Any:
    """What must agree for weights to mean the same: their shapes, and how wide a head is."""
    layers = [dict(layer.named_modules()) for layer in layers_of(model).values()]
    cores = [modules.get(block.core) for modules in layers for block in blocks_of(modules[""])]
    widths = [getattr(core, "head_dim", None) or getattr(core, "attention_head_size", None) for core in cores]
    return {name: weight.shape for name, weight in model.state_dict().items()}, widths


def _fill(target: Any, source: Any, changed: Mapping[str, Tensor]) -> None:
    """Give the target copies of the source's weights, or what is left of them; what is tied in the source stays so."""
    made: dict[int, Any] = {}
    weights = dict(source.named_parameters(remove_duplicate=False))
    for name, _ in list(target.named_parameters(remove_duplicate=False)):
        weight = weights[name]
        if id(weight) not in made:
            values = changed[name] if name in changed else weight.detach().clone()
            made[id(weight)] = nn.Parameter(values, requires_grad=weight.requires_grad)
        _owner(target, name)._parameters[name.rpartition(".")[2]] = made[id(weight)]
    buffers = dict(source.named_buffers(remove_duplicate=False))
    device = next(iter(weights.values())).device
    for name, empty in list(target.named_buffers(remove_duplicate=False)):
        # what is left of a matrix in a block that is new as an empty one is no buffer of the source
        values = buffers[name].detach().clone() if name in buffers else torch.empty_like(empty, device=device)
        _owner(target, name)._buffers[name.rpartition(".")[2]] = values


def _owner(model: nn.Module, name: str) -> nn.Module:
    return model.get_submodule(name.rpartition(".")[0])
