"""Cut heads and neurons that contribute nothing out of a model. Masks must be folded first.

A decision (a head with its key and value, or a neuron) contributes nothing where the block's outer matrix multiplies
its outputs by zeros, or where its outputs are the same for every token: a head whose value has only zeros as weights
returns the value's bias, since attention weights sum to one, and a neuron without weights returns its activated bias.
Such constants are added to the outer layer's bias, if it has one. The model's outputs stay the same, up to rounding.
"""

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from ds_trainer.models import shrunk_model
from ds_trainer.models.layers import FIELD, SIZES_OF, Block, blocks_of, build_like, layers_of, rows_of
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

    index: int
    layer: str
    block: Block
    whole: int
    keep: Tensor
    constant: Tensor | None

    def places(self, features: int, parts: int) -> Tensor:
        """Return which of its `features`, inputs or outputs, a linear layer keeps."""
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
def shrink(model: Any) -> Any:
    """Return a new model that holds only the heads and neurons that contribute; the given one stays as it is.

    Outputs are the same, up to rounding, for tokens that are not padding. Those of padding on the left of a decoder's
    text differ: padding attends to nothing, and "sdpa" then returns zeros instead of the value's bias. Nothing reads
    these outputs.

    The new model has the plain class of transformers where that family's config can express the sizes. Otherwise the
    config lists them in `shrunk`, and the class is one of `shrunk_model.py`. NothingToCutError where everything
    contributes; UserError where the model's family is unknown.
    """
    selections, sizes = _selections(model), shrunk_model.sizes_of(model)
    if all(len(selection.keep) == selection.whole for selection in selections):
        raise NothingToCutError(
            "nothing to cut: no head and no neuron is wholly zero. Prune with the granularity head, neuron or hybrid; "
            "what is pruned weight by weight is made small by --compact"
        )
    for selection in selections:
        sizes[SIZES_OF[selection.block.kind]][selection.index] = len(selection.keep)
    config = copy.deepcopy(model.config)
    setattr(config, FIELD, sizes)
    shrunk = build_like(model, simplest_config(model, config)).to(model.device)
    state = model.state_dict()
    for selection in selections:
        state |= _changed(model, selection)
    # a block that this cut empties keeps a matrix without entries, which the whole model does not have
    empty = {name: weight for name, weight in shrunk.state_dict().items() if not weight.numel()}
    shrunk.load_state_dict({name: state[name] for name in shrunk.state_dict() if name not in empty} | empty)
    if model.can_generate():
        shrunk.generation_config = copy.deepcopy(model.generation_config)
    return shrunk.train(model.training)


def simplest_config(model: Any, config: Any) -> Any:
    """Return a config with `shrunk` as a plain one, where a plain model of the family has the same shapes."""
    plain = plain_config(config, getattr(config, FIELD))
    if plain is None:
        return config
    with torch.device("meta"):
        try:
            whole = build_like(model, plain)
        except ValueError:  # BERT's heads, for example, must divide the width
            return config
        return plain if _shapes(whole) == _shapes(build_like(model, config)) else config


def plain_config(config: Any, sizes: Mapping[str, Sequence[int]]) -> Any | None:
    """Return a config without `shrunk` for these sizes; None where layers differ or are empty, or it is refused."""
    if any(len(set(counts)) > 1 or 0 in counts for counts in sizes.values()):
        return None
    plain = copy.deepcopy(config)
    for name in (FIELD, "auto_map"):
        if hasattr(plain, name):
            delattr(plain, name)
    heads, whole = sizes["heads"][0], shrunk_model.whole_heads(config)
    if heads != whole:
        plain.head_dim = head_width(config)
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


def head_width(config: Any) -> int:
    """Return the width of one head, which only some families' configs say."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _shapes(model: Any) -> Any:
    """Return what must agree for weights to mean the same: their shapes, and the width of a head."""
    layers = [dict(layer.named_modules()) for layer in layers_of(model).values()]
    cores = [modules.get(block.core) for modules in layers for block in blocks_of(modules[""])]
    widths = [getattr(core, "head_dim", None) or getattr(core, "attention_head_size", None) for core in cores]
    return {name: weight.shape for name, weight in model.state_dict().items()}, widths


def _selections(model: Any) -> list[_Selection]:
    """Return the selection of each block that is not empty already."""
    check_known(model)
    selections = []
    for index, (name, layer) in enumerate(layers_of(model).items()):
        for block in blocks_of(layer):
            if shrunk_model.is_emptied(layer.get_submodule(block.core)):
                continue
            outer: Any = layer.get_submodule(block.outer)
            whole = shrunk_model.decisions_of(block, layer, model.config)
            columns = rows_of(outer.weight, type(outer))
            constants = _constants(block, layer, whole)
            # an outer layer without a bias can take in no constant but zero
            known = ~constants.isnan() if outer.bias is not None else constants == 0
            gone = ((columns == 0).all(0) | known).view(whole, -1).all(1)
            lost = gone.repeat_interleave(columns.shape[1] // whole) & known & (constants != 0)
            # in fp64: the sum over thousands of neurons is rounded only once, when it is added to the bias
            constant = columns[:, lost].double() @ constants[lost].double() if lost.any() else None
            selections.append(_Selection(index, name, block, whole, (~gone).nonzero().flatten(), constant))
    return selections


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


def _changed(model: Any, selection: _Selection) -> dict[str, Tensor]:
    """Return the weights of a block that a selection changes, by name."""
    block, changed = selection.block, dict[str, Tensor]()
    outer_name = f"{selection.layer}.{block.outer}"
    outer = model.get_submodule(outer_name)
    if selection.constant is not None:
        changed[f"{outer_name}.bias"] = (outer.bias + selection.constant).to(outer.bias.dtype)
    if len(selection.keep) in (0, selection.whole):  # an empty block has no matrices
        return changed
    for name in (f"{selection.layer}.{inner}" for inner in block.inner):
        linear = model.get_submodule(name)
        places = selection.places(shrunk_model.out_features(linear), block.parts)
        changed[f"{name}.weight"] = linear.weight.index_select(int(isinstance(linear, Conv1D)), places)
        if linear.bias is not None:
            changed[f"{name}.bias"] = linear.bias.index_select(0, places)
    places = selection.places(shrunk_model.in_features(outer), 1)
    changed[f"{outer_name}.weight"] = outer.weight.index_select(int(isinstance(outer, nn.Linear)), places)
    return changed
