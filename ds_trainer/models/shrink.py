"""Cut heads and neurons that contribute nothing out of a model. Masks must be folded first.

A decision (a head with its key and value, or a neuron) contributes nothing where the block's outer matrix multiplies
its outputs by zeros, or where its outputs are the same for every token. Attention whose value has no weights returns
the value's bias, since attention weights sum to one; a neuron without weights returns its activated bias. Such
constants are added to the outer layer's bias, if it has one. The model's outputs stay the same, up to rounding.
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

from ds_trainer.models import shrunk_model
from ds_trainer.models.layers import FIELD, SIZES_OF, Block, blocks_of, layers_of, rows_of
from ds_trainer.ranks.failures import UserError

_ACTIVATIONS = ("intermediate_act_fn", "activation", "act", "act_fn")
"""The names of the activation in the cores of feed-forward blocks."""
_NEURON_FIELDS = ("intermediate_size", "hidden_dim", "n_inner", "ffn_dim")
"""The names in configs of the number of neurons of a layer."""


class NothingToCutError(UserError):
    """No head and no neuron is wholly zero."""


@dataclass(frozen=True)
class _Cut:
    """The decisions that a block keeps, in order, and the constant that the others add to the outer layer's bias."""

    layer: str
    block: Block
    whole: int
    keep: Tensor
    constant: Tensor | None

    def name(self, module: str) -> str:
        return f"{self.layer}.{module}"


def check_known(model: Any) -> None:
    """Raise UserError where the model's family cannot be cut, weights are shared, or a layer to cut is not linear."""
    base = shrunk_model.whole_class(model)
    if getattr(transformers, base.__name__, None) is not base:
        raise UserError(f"{base.__name__} is no class of transformers: only its own models can be cut")
    owners: dict[int, str] = {}
    for prefix, layer in layers_of(model).items():
        for block in blocks_of(layer):
            emptied = shrunk_model.is_emptied(layer.get_submodule(block.core))
            for name in () if emptied else (*block.inner, block.outer):
                _check_linear(f"{prefix}.{name}", layer.get_submodule(name), owners)
    shrunk_model.sizes_of(model)  # raises for an unknown family; last, since it counts the inputs of linear layers


@torch.no_grad()
def kept(model: Any) -> dict[str, list[list[int]]]:
    """Return the numbers of the heads (groups that share a key and a value) and neurons that contribute.

    {"heads": a list for each layer, "neurons": likewise}. UserError where the model's family is unknown.
    """
    check_known(model)
    return _kept(model, _cuts(model))


@torch.no_grad()
def shrink(model: Any) -> Any:
    """Return a new model that holds only the heads and neurons that contribute; the given one stays as it is.

    Outputs are the same, up to rounding, for tokens that are not padding. A decoder's padding on the left attends to
    nothing, and there "sdpa" returns zeros and not the value's bias: these outputs differ, and nothing reads them.

    The new model has the plain class of transformers where that family's config can express the sizes. Otherwise the
    config lists them in `shrunk`, and the class is one of `shrunk_model.py`. NothingToCutError where everything
    contributes; UserError where the model's family is unknown.
    """
    check_known(model)
    cuts = _cuts(model)
    sizes = {name: [len(numbers) for numbers in layers] for name, layers in _kept(model, cuts).items()}
    if sizes == shrunk_model.sizes_of(model):
        raise NothingToCutError(
            "nothing to cut: no head and no neuron is wholly zero. Prune with the granularity head, neuron or hybrid; "
            "what is pruned weight by weight is made small by --compact"
        )
    shrunk = _unfilled(model, sizes)
    _fill(shrunk, model, {name: weight for cut in cuts for name, weight in _changed(model, cut)})
    if model.can_generate():
        shrunk.generation_config = copy.deepcopy(model.generation_config)
    return shrunk.train(model.training)


def _cuts(model: Any) -> list[_Cut]:
    """Return the cut of each block that is not empty already, in order."""
    return [
        _cut(name, layer, block, model.config)
        for name, layer in layers_of(model).items()
        for block in blocks_of(layer)
        if not shrunk_model.is_emptied(layer.get_submodule(block.core))
    ]


def _kept(model: Any, cuts: Iterable[_Cut]) -> dict[str, list[list[int]]]:
    by_block = {(cut.layer, cut.block.kind): cut.keep.tolist() for cut in cuts}
    numbers: dict[str, list[list[int]]] = {name: [] for name in SIZES_OF.values()}
    for name, layer in layers_of(model).items():
        cuttable = {block.kind for block in blocks_of(layer)}
        for kind, size in SIZES_OF.items():
            never_cut = list(range(shrunk_model.whole_heads(model.config)))
            numbers[size].append(by_block.get((name, kind), []) if kind in cuttable else never_cut)
    return numbers


def _cut(name: str, layer: nn.Module, block: Block, config: Any) -> _Cut:
    outer: Any = layer.get_submodule(block.outer)
    whole = shrunk_model.decisions_of(block, layer, config)
    columns = rows_of(outer.weight, type(outer))
    constants = _constants(block, layer, whole)
    known = ~constants.isnan() if outer.bias is not None else constants == 0
    gone = ((columns == 0).all(0) | known).view(whole, -1).all(1)
    lost = gone.repeat_interleave(columns.shape[1] // whole) & known & (constants != 0)
    constant = columns[:, lost].double() @ constants[lost].double() if lost.any() else None
    return _Cut(name, block, whole, (~gone).nonzero().flatten(), constant)


def _check_linear(name: str, module: nn.Module, owners: dict[int, str]) -> None:
    """Raise UserError where a module is not linear, or has the weight of another. `owners` collects names by weight."""
    if not isinstance(module, nn.Linear | Conv1D):
        kind = type(module).__name__
        raise UserError(f"{name} is a {kind}, and only linear layers are cut: fold or merge it first")
    if (other := owners.setdefault(id(module.weight), name)) != name:
        raise UserError(f"{name} and {other} share their weight: give each a copy, since each is cut by itself")


def _constants(block: Block, layer: nn.Module, whole: int) -> Tensor:
    """Return each input of the outer layer that is the same for every token, and NaN for the others."""
    inner = [layer.get_submodule(name) for name in block.inner]
    parts = [part for linear in inner for part in _constant_parts(linear, block.parts)]
    if block.kind == "attention":
        values = parts[-1].view(whole, 1, -1)  # one value of a group, which all its heads read
        shared = shrunk_model.in_features(layer.get_submodule(block.outer)) // parts[-1].numel()
        return values.expand(-1, shared, -1).flatten()
    core = layer.get_submodule(block.core)
    activation = next((getattr(core, name) for name in _ACTIVATIONS if hasattr(core, name)), None)
    activated = torch.full_like(parts[0], math.nan) if activation is None else activation(parts[0])
    if len(parts) == 1:
        return activated
    gated = activated * parts[1]
    return torch.where((activated == 0) | (parts[1] == 0), 0.0, gated)


def _constant_parts(linear: Any, parts: int) -> tuple[Tensor, ...]:
    """Return the bias of a linear layer where an output has no weights, and NaN for other outputs; in fp32."""
    rows = rows_of(linear.weight, type(linear))
    bias = rows.new_zeros(len(rows)) if linear.bias is None else linear.bias
    return torch.where((rows == 0).all(1), bias.float(), math.nan).chunk(parts)


def _changed(model: Any, cut: _Cut) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights of a block that a cut changes, by name."""
    outer = model.get_submodule(cut.name(cut.block.outer))
    if cut.constant is not None:
        yield cut.name(f"{cut.block.outer}.bias"), (outer.bias + cut.constant).to(outer.bias.dtype)
    if len(cut.keep) in (0, cut.whole):
        return
    for name in cut.block.inner:
        linear = model.get_submodule(cut.name(name))
        places = _places(cut, shrunk_model.out_features(linear), cut.block.parts)
        yield cut.name(f"{name}.weight"), linear.weight.index_select(int(isinstance(linear, Conv1D)), places)
        if linear.bias is not None:
            yield cut.name(f"{name}.bias"), linear.bias.index_select(0, places)
    places = _places(cut, shrunk_model.in_features(outer), 1)
    yield cut.name(f"{cut.block.outer}.weight"), outer.weight.index_select(int(isinstance(outer, nn.Linear)), places)


def _places(cut: _Cut, features: int, parts: int) -> Tensor:
    """Return the places of the inputs or outputs that a linear layer keeps."""
    return torch.arange(features, device=cut.keep.device).view(parts, cut.whole, -1)[:, cut.keep].flatten()


def _unfilled(model: Any, sizes: Mapping[str, Sequence[int]]) -> Any:
    """Build a model of these sizes on the "meta" device: a plain one where its config can express them."""
    base, config = shrunk_model.whole_class(model), copy.deepcopy(model.config)
    setattr(config, FIELD, {name: list(numbers) for name, numbers in sizes.items()})
    with torch.device("meta"):
        shrunk = shrunk_model.shrunk_class(base)(config)
        plain_config = _plain_config(config, sizes)
        if plain_config is None:
            return shrunk
        plain = base(plain_config)
    return plain if _shapes(plain) == _shapes(shrunk) else shrunk


def _plain_config(config: Any, sizes: Mapping[str, Sequence[int]]) -> Any:
    """Return a plain config of these sizes; None where layers differ or are empty, or transformers refuses it."""
    if any(len(set(numbers)) > 1 or 0 in numbers for numbers in sizes.values()):
        return None
    plain = copy.deepcopy(config)
    for name in (FIELD, "auto_map"):
        if hasattr(plain, name):
            delattr(plain, name)
    heads, whole = sizes["heads"][0], shrunk_model.whole_heads(config)
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
    except (ValueError, StrictDataclassError):  # for example heads that do not divide the width
        return None
    return plain


def _shapes(model: Any) -> Any:
    """Return what must agree for weights to mean the same: their shapes, and the width of a head."""
    layers = [dict(layer.named_modules()) for layer in layers_of(model).values()]
    cores = [modules.get(block.core) for modules in layers for block in blocks_of(modules[""])]
    widths = [getattr(core, "head_dim", None) or getattr(core, "attention_head_size", None) for core in cores]
    return {name: weight.shape for name, weight in model.state_dict().items()}, widths


def _fill(target: Any, source: Any, changed: Mapping[str, Tensor]) -> None:
    """Copy the source's weights into the target, `changed` ones instead where given. Tied weights stay tied."""
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
        # the empty matrix of a block that this cut has emptied is no buffer of the source
        values = buffers[name].detach().clone() if name in buffers else torch.empty_like(empty, device=device)
        _owner(target, name)._buffers[name.rpartition(".")[2]] = values


def _owner(model: nn.Module, name: str) -> nn.Module:
    return model.get_submodule(name.rpartition(".")[0])
