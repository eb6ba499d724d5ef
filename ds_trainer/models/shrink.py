"""Cut heads and neurons that contribute nothing out of a model. Masks must be folded first.

A decision (a head with its key and value, or a neuron) contributes nothing where the block's outer matrix multiplies
its outputs by zeros, or where its outputs are the same for every token: a head whose value has only zeros as weights
returns the value's bias, since attention weights sum to one, and a neuron without weights returns its activated bias.
Such constants are added to the outer layer's bias, if it has one. The model's outputs stay the same, up to rounding.
"""

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
from ds_trainer.models.layers import FIELD, SIZES_OF, Block, blocks_of, layers_of, rows_of, without_pooler_of
from ds_trainer.ranks.failures import UserError

_ACTIVATIONS = ("intermediate_act_fn", "activation", "act", "act_fn")
"""The names of the activation in the cores of feed-forward blocks."""
_NEURON_FIELDS = ("intermediate_size", "hidden_dim", "n_inner", "ffn_dim")
"""The names in configs of the number of neurons of a layer."""


class NothingToCutError(UserError):
    """No head and no neuron is wholly zero."""


@dataclass(frozen=True)
class _Selection:
    """The decisions that a block keeps, in order, and the constant that the others add to the outer layer's bias."""

    layer: str
    block: Block
    whole: int
    keep: Tensor
    constant: Tensor | None

    def name(self, module: str) -> str:
        return f"{self.layer}.{module}"

    def places(self, features: int, parts: int) -> Tensor:
        """Return the places of the inputs or outputs that a linear layer of so many `features` keeps."""
        places = torch.arange(features, device=self.keep.device)
        return places.view(parts, self.whole, -1)[:, self.keep].flatten()


def check_known(model: Any) -> None:
    """Raise UserError where the model's family cannot be cut."""
    base = shrunk_model.whole_class(model)
    if getattr(transformers, base.__name__, None) is not base:
        raise UserError(f"{base.__name__} is no class of transformers: only its own models can be cut")
    try:
        shrunk_model.sizes_of(model)
    except shrunk_model.ShrunkSizesError as error:  # that file stands alone, and has no UserError
        raise UserError(str(error)) from None


@torch.no_grad()
def kept(model: Any) -> dict[str, list[list[int]]]:
    """Return the numbers of the heads (groups that share a key and a value) and neurons that contribute.

    {"heads": a list for each layer, "neurons": likewise}. UserError where the model's family is unknown.
    """
    check_known(model)
    return _kept(shrunk_model.sizes_of(model), _selections(model))


@torch.no_grad()
def shrink(model: Any) -> Any:
    """Return a new model that holds only the heads and neurons that contribute; the given one stays as it is.

    Outputs are the same, up to rounding, for tokens that are not padding. Those of padding on the left of a decoder's
    text differ: padding attends to nothing, and "sdpa" then returns zeros instead of the value's bias. Nothing reads
    these outputs.

    The new model has the plain class of transformers where that family's config can express the sizes. Otherwise the
    config lists them in `shrunk`, and the class is one of `shrunk_model.py`. NothingToCutError where everything
    contributes; UserError where the model's family is unknown.
    """
    check_known(model)
    selections = list(_selections(model))
    before = shrunk_model.sizes_of(model)
    sizes = {name: [len(numbers) for numbers in layers] for name, layers in _kept(before, selections).items()}
    if sizes == before:
        raise NothingToCutError(
            "nothing to cut: no head and no neuron is wholly zero. Prune with the granularity head, neuron or hybrid; "
            "what is pruned weight by weight is made small by --compact"
        )
    shrunk = without_pooler_of(model, _unfilled(model, sizes))
    _fill(shrunk, model, dict(change for _, selection in selections for change in _changed(model, selection)))
    if model.can_generate():
        shrunk.generation_config = copy.deepcopy(model.generation_config)
    return shrunk.train(model.training)


def _selections(model: Any) -> Iterator[tuple[int, _Selection]]:
    """Yield the selection of each block that is not empty already, with the number of its layer."""
    for index, (name, layer) in enumerate(layers_of(model).items()):
        for block in blocks_of(layer):
            if not shrunk_model.is_emptied(layer.get_submodule(block.core)):
                yield index, _selection(name, layer, block, model.config)


def _kept(
    sizes: Mapping[str, Sequence[int]], selections: Iterable[tuple[int, _Selection]]
) -> dict[str, list[list[int]]]:
    """Return the numbers that remain of each layer's `sizes`: all of them in a block that cannot be cut."""
    numbers = {name: [list(range(size)) for size in layers] for name, layers in sizes.items()}
    for index, selection in selections:
        numbers[SIZES_OF[selection.block.kind]][index] = selection.keep.tolist()
    return numbers


def _selection(name: str, layer: nn.Module, block: Block, config: Any) -> _Selection:
    outer: Any = layer.get_submodule(block.outer)
    whole = shrunk_model.decisions_of(block, layer, config)
    columns = rows_of(outer.weight, type(outer))
    constants = _constants(block, layer, whole)
    # an outer layer without a bias can take in no constant but zero
    known = ~constants.isnan() if outer.bias is not None else constants == 0
    gone = ((columns == 0).all(0) | known).view(whole, -1).all(1)
    lost = gone.repeat_interleave(columns.shape[1] // whole) & known & (constants != 0)
    # in fp64: the sum over thousands of neurons is rounded only once, when it is added to the bias
    constant = columns[:, lost].double() @ constants[lost].double() if lost.any() else None
    return _Selection(name, block, whole, (~gone).nonzero().flatten(), constant)


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
    # a factor of zero makes the product zero, also where the other one, which is NaN here, differs per token
    return torch.where((activated == 0) | (parts[1] == 0), 0.0, gated)


def _constant_parts(linear: Any, parts: int) -> tuple[Tensor, ...]:
    """Return the bias of a linear layer where an output has no weights, and NaN for other outputs; in fp32."""
    rows = rows_of(linear.weight, type(linear))
    bias = rows.new_zeros(len(rows)) if linear.bias is None else linear.bias
    return torch.where((rows == 0).all(1), bias.float(), math.nan).chunk(parts)


def _changed(model: Any, selection: _Selection) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights of a block that a selection changes, by name."""
    block = selection.block
    outer = model.get_submodule(selection.name(block.outer))
    if selection.constant is not None:
        yield selection.name(f"{block.outer}.bias"), (outer.bias + selection.constant).to(outer.bias.dtype)
    if len(selection.keep) in (0, selection.whole):  # an empty block has no matrices
        return
    for name in block.inner:
        linear = model.get_submodule(selection.name(name))
        places = selection.places(shrunk_model.out_features(linear), block.parts)
        yield selection.name(f"{name}.weight"), linear.weight.index_select(int(isinstance(linear, Conv1D)), places)
        if linear.bias is not None:
            yield selection.name(f"{name}.bias"), linear.bias.index_select(0, places)
    places = selection.places(shrunk_model.in_features(outer), 1)
    yield selection.name(f"{block.outer}.weight"), outer.weight.index_select(int(isinstance(outer, nn.Linear)), places)


def _unfilled(model: Any, sizes: Mapping[str, Sequence[int]]) -> Any:
    """Build a model of these sizes on the "meta" device: a plain one where its config can express them."""
    config = copy.deepcopy(model.config)
    setattr(config, FIELD, {name: list(counts) for name, counts in sizes.items()})
    return on_meta(shrunk_model.whole_class(model), config)


def on_meta(base: Any, config: Any) -> Any:
    """Build the model of a config with `shrunk` on the "meta" device, as the plain class `base` where it can be one."""
    with torch.device("meta"):
        shrunk = shrunk_model.shrunk_class(base)(config)
        said = plain_config(config, getattr(config, FIELD))
        if said is None:
            return shrunk
        try:
            plain = base(said)
        except ValueError:  # BERT's heads, for example, must divide the width
            return shrunk
    # some families read the sizes otherwise: BERT's heads become wider where there are fewer of them
    return plain if _shapes(plain) == _shapes(shrunk) else shrunk


def plain_config(config: Any, sizes: Mapping[str, Sequence[int]]) -> Any:
    """Return a plain config of these sizes; None where layers differ or are empty, or transformers refuses it."""
    if any(len(set(counts)) > 1 or 0 in counts for counts in sizes.values()):
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
        # assigned, not copied: the target lies on the "meta" device and has no memory to copy into
        _owner(target, name)._parameters[name.rpartition(".")[2]] = made[id(weight)]
    buffers = dict(source.named_buffers(remove_duplicate=False))
    device = next(iter(weights.values())).device
    for name, empty in list(target.named_buffers(remove_duplicate=False)):
        # the empty matrix of a block that this cut has emptied is no buffer of the source
        values = buffers[name].detach().clone() if name in buffers else torch.empty_like(empty, device=device)
        _owner(target, name)._buffers[name.rpartition(".")[2]] = values


def _owner(model: nn.Module, name: str) -> nn.Module:
    return model.get_submodule(name.rpartition(".")[0])
