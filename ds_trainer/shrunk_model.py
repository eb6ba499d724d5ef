"""Models of `transformers` whose layers have sizes of their own: heads and neurons are cut out, empty blocks skipped.

The config's `shrunk` says how many each layer keeps: {"heads": [...], "neurons": [...]}, heads counted in groups that
share a key and a value. All else in the config is that of the model before the cut. Written by ds_trainer into the
folders of such models: this file needs torch and transformers alone, and `auto_map` names classes of it as
`Shrunk` + the class of transformers that it resizes. A folder that such a model is saved to gets a copy of the file.
"""

from __future__ import annotations

import functools
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

FIELD = "shrunk"
SIZES_OF = {"attention": "heads", "feed_forward": "neurons"}
"""What the sizes of each kind of block are called."""


@dataclass(frozen=True)
class Block:
    """Where one block of a layer can be cut, by names inside the layer.

    A decision (a head with its key and value, or a neuron) is an equal share of the outputs of the `inner` linear
    layers, in each of the `parts` that are stacked in them, and of the inputs of the `outer` one. `core` is what need
    not run where no decision is left.
    """

    kind: str  # "attention" or "feed_forward"
    inner: tuple[str, ...]
    outer: str
    core: str
    parts: int = 1


def _attention(core: str, inner: Sequence[str], outer: str, parts: int = 1) -> Block:
    return Block("attention", tuple(f"{core}.{name}" for name in inner), outer, core, parts)


_LAYOUTS = (
    (  # BERT, RoBERTa, ELECTRA and their kin
        _attention("attention.self", ("query", "key", "value"), "attention.output.dense"),
        Block("feed_forward", ("intermediate.dense",), "output.dense", "intermediate"),
    ),
    (  # DeBERTa, whose heads also share projections of the positions: they are not cut
        Block("feed_forward", ("intermediate.dense",), "output.dense", "intermediate"),
    ),
    (  # DistilBERT
        _attention("attention", ("q_lin", "k_lin", "v_lin"), "attention.out_lin"),
        Block("feed_forward", ("ffn.lin1",), "ffn.lin2", "ffn"),
    ),
    (  # ModernBERT: the first part of Wi goes through the activation, the second is its gate
        _attention("attn", ("Wqkv",), "attn.Wo", parts=3),
        Block("feed_forward", ("mlp.Wi",), "mlp.Wo", "mlp", parts=2),
    ),
    (  # GPT-2
        _attention("attn", ("c_attn",), "attn.c_proj", parts=3),
        Block("feed_forward", ("mlp.c_fc",), "mlp.c_proj", "mlp"),
    ),
    (  # Llama, Mistral, Qwen, Gemma and their kin
        _attention("self_attn", ("q_proj", "k_proj", "v_proj"), "self_attn.o_proj"),
        Block("feed_forward", ("mlp.gate_proj", "mlp.up_proj"), "mlp.down_proj", "mlp"),
    ),
    (  # OLMo 2, whose norms go over all heads at once
        Block("feed_forward", ("mlp.gate_proj", "mlp.up_proj"), "mlp.down_proj", "mlp"),
    ),
)
_AUTO_CLASSES = {
    "AutoModel": "MODEL_MAPPING",
    "AutoModelForSequenceClassification": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING",
    "AutoModelForTokenClassification": "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING",
    "AutoModelForQuestionAnswering": "MODEL_FOR_QUESTION_ANSWERING_MAPPING",
    "AutoModelForMultipleChoice": "MODEL_FOR_MULTIPLE_CHOICE_MAPPING",
    "AutoModelForMaskedLM": "MODEL_FOR_MASKED_LM_MAPPING",
    "AutoModelForCausalLM": "MODEL_FOR_CAUSAL_LM_MAPPING",
}


class ShrunkSizesError(ValueError):
    """The config's `shrunk` does not go with its model."""


def layers_of(model: nn.Module) -> dict[str, nn.Module]:
    """The model's layers by name, first to last: the longest `nn.ModuleList` of one class; empty without one."""
    lists = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len({type(layer) for layer in module}) == 1
    }
    if not lists:
        return {}
    name = max(lists, key=lambda key: len(lists[key]))
    return {f"{name}.{index}": layer for index, layer in enumerate(lists[name])}


def blocks_of(layer: nn.Module) -> tuple[Block, ...]:
    """The attention and the feed-forward block of a layer, emptied ones too; none where its family is unknown here.

    A block is also unknown where its core has weights of its own that span several decisions, as a norm over all heads.
    """
    modules = dict(layer.named_modules())

    def holds(block: Block) -> bool:
        if block.outer not in modules or block.core not in modules:
            return False
        if is_emptied(modules[block.core]):
            return True
        return set(block.inner) <= modules.keys() and not _spans_decisions(block, modules[block.core])

    return next((layout for layout in _LAYOUTS if all(map(holds, layout))), ())


def decisions_of(block: Block, layer: nn.Module, config: Any) -> int:
    """How many heads (groups that share a key and a value) or neurons a block has, as it is."""
    core, outer = layer.get_submodule(block.core), layer.get_submodule(block.outer)
    if is_emptied(core):
        return 0
    if block.kind == "feed_forward":
        return in_features(outer)
    return in_features(outer) // (_head_width(core) * (config.num_attention_heads // whole_heads(config)))


def whole_heads(config: Any) -> int:
    """The heads of a layer before any cut, counted in groups that share a key and a value."""
    return int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)


def sizes_of(model: Any) -> dict[str, list[int]]:
    """How many heads and neurons each layer has, as `shrunk` says it; all heads where a family's cannot be cut.

    ShrunkSizesError where a layer is of a family that is unknown here.
    """
    sizes: dict[str, list[int]] = {name: [] for name in SIZES_OF.values()}
    for layer in layers_of(model).values():
        found = {block.kind: decisions_of(block, layer, model.config) for block in _known_blocks(model, layer)}
        sizes["heads"].append(found.get("attention", whole_heads(model.config)))
        sizes["neurons"].append(found["feed_forward"])
    if not sizes["neurons"]:
        raise ShrunkSizesError(f"{type(model).__name__} has no list of equal layers: it has no sizes to change")
    return sizes


def resize(model: Any, sizes: Mapping[str, Sequence[int]]) -> None:
    """Give each layer linear layers of its own sizes, of undefined weights where the size is another.

    ShrunkSizesError, before anything is changed, where they are not at most those that the model has.
    """
    _check_sizes(sizes, sizes_of(model))
    for index, layer in enumerate(layers_of(model).values()):
        for block in blocks_of(layer):
            _resize_block(block, layer, model.config, sizes[SIZES_OF[block.kind]][index], index)


def auto_map(config: Any) -> dict[str, str]:
    """The classes of this file that the auto classes of transformers make of such a config."""
    found = {}
    for auto_class, mapping in _AUTO_CLASSES.items():
        base = getattr(transformers, mapping).get(type(config), None)
        base = base[0] if isinstance(base, tuple) else base
        if base is not None:
            found[auto_class] = f"{Path(__file__).stem}.Shrunk{base.__name__}"
    return found


def whole_class(model: Any) -> Any:
    """The class of transformers that a model is of, or was before it was cut."""
    return getattr(model, "resizes", type(model))


def is_emptied(core: Any) -> bool:
    """Whether nothing is left of a block whose core this is; by its name, since each folder has a copy of its class."""
    return any(base.__name__ == "Emptied" for base in type(core).__mro__)


def in_features(linear: Any) -> int:
    return int(linear.weight.shape[0] if isinstance(linear, Conv1D) else linear.weight.shape[1])


def out_features(linear: Any) -> int:
    return int(linear.weight.shape[1] if isinstance(linear, Conv1D) else linear.weight.shape[0])


class Constant(nn.Module):
    """What a linear layer gives that has no inputs left: its bias, for every token."""

    bias: nn.Parameter | None

    def __init__(self, features: int, bias: bool) -> None:
        super().__init__()
        self.features = features
        self.register_parameter("bias", nn.Parameter(torch.zeros(features)) if bias else None)

    def forward(self, hidden: Tensor) -> Tensor:
        shape = (*hidden.shape[:-1], self.features)
        return hidden.new_zeros(shape) if self.bias is None else self.bias.expand(shape)


class Emptied(nn.Module):
    """In the place of a block's core of which nothing is left; calls the outer layer where that was inside it."""

    def __init__(self, outer_name: str | None, outer: nn.Module | None) -> None:
        super().__init__()
        self.outer_name = outer_name
        if outer_name is not None:
            self.add_module(outer_name, outer)

    def _given(self, hidden: Tensor) -> Tensor:
        if self.outer_name is None:
            return hidden
        outer: Any = self.get_submodule(self.outer_name)
        given: Tensor = outer(hidden)
        return given


class EmptiedFeedForward(Emptied):
    def forward(self, hidden: Tensor) -> Tensor:
        return self._given(hidden)


class EmptiedAttention(Emptied):
    """Gives no attention weights. Tells a cache how far it has come: models count the tokens of its first layer."""

    def __init__(self, outer_name: str | None, outer: nn.Module | None, layer_index: int) -> None:
        super().__init__(outer_name, outer)
        self.layer_index = layer_index

    def forward(self, hidden_states: Tensor, *_: Any, past_key_values: Any = None, **__: Any) -> tuple[Tensor, None]:
        if past_key_values is not None:
            nothing = hidden_states.new_empty(hidden_states.shape[0], 0, hidden_states.shape[1], 1)
            past_key_values.update(nothing, nothing, self.layer_index)
        return self._given(hidden_states), None


@functools.cache
def shrunk_class(base: type[Any]) -> type[Any]:
    """The class of models like `base`, resized as their config says.

    It has the name of `base`, by which transformers chooses losses, checks pipelines and fills `architectures`.
    """

    def initialise(self: Any, config: Any, *arguments: Any, **options: Any) -> None:
        base.__init__(self, config, *arguments, **options)
        resize(self, getattr(config, FIELD, None))  # type: ignore[arg-type]

    def save_pretrained(self: Any, save_directory: Any, *arguments: Any, **options: Any) -> None:
        self.config.auto_map = auto_map(self.config)
        Path(save_directory).mkdir(parents=True, exist_ok=True)
        shutil.copyfile(__file__, Path(save_directory) / Path(__file__).name)
        base.save_pretrained(self, save_directory, *arguments, **options)

    members = {
        "__init__": initialise,
        "__module__": __name__,
        "__qualname__": f"Shrunk{base.__name__}",
        "__doc__": base.__doc__,
        "resizes": base,
        "save_pretrained": save_pretrained,
        # else transformers would copy the file once more, and write its own line of `auto_map`
        "register_for_auto_class": classmethod(lambda cls, auto_class="AutoModel": None),
    }
    return type(base.__name__, (base,), members)


def __getattr__(name: str) -> Any:
    """`ShrunkX` for a class X of transformers: what `auto_map` asks for."""
    base = getattr(transformers, name.removeprefix("Shrunk"), None) if name.startswith("Shrunk") else None
    if base is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return shrunk_class(base)


def _head_width(core: Any) -> int:
    return int(getattr(core, "head_dim", None) or core.attention_head_size)


def _spans_decisions(block: Block, core: nn.Module) -> bool:
    """Whether weights of the core, beside its linear layers, are not those of a single head's width."""
    linears = [f"{name.removeprefix(f'{block.core}.')}." for name in (*block.inner, block.outer)]
    own = [weight for name, weight in core.named_parameters() if not name.startswith(tuple(linears))]
    return any(block.kind == "feed_forward" or weight.shape[-1] != _head_width(core) for weight in own)


def _known_blocks(model: Any, layer: nn.Module) -> tuple[Block, ...]:
    blocks = blocks_of(layer)
    if not blocks:
        raise ShrunkSizesError(
            f"the layers of {type(model).__name__} are of a family whose heads and neurons cannot be cut: known are "
            f"BERT, RoBERTa, ELECTRA, DistilBERT, DeBERTa, ModernBERT, GPT-2, Llama and their kin, without experts"
        )
    return blocks


def _check_sizes(sizes: Any, whole: Mapping[str, Sequence[int]]) -> None:
    if not isinstance(sizes, Mapping):
        raise ShrunkSizesError(f"the config's {FIELD} is a {type(sizes).__name__}: it must be an object of lists")
    for name, most in whole.items():
        found = sizes.get(name)
        if not isinstance(found, list | tuple) or len(found) != len(most):
            raise ShrunkSizesError(f"the config's {FIELD}.{name} must list {len(most)} sizes, one a layer")
        for index, (size, limit) in enumerate(zip(found, most, strict=True)):
            if type(size) is not int or not 0 <= size <= limit:
                raise ShrunkSizesError(
                    f"the config's {FIELD}.{name} is {str(size)[:40]!r} for layer {index}: allowed are 0 to {limit}"
                )


def _resize_block(block: Block, layer: nn.Module, config: Any, left: int, index: int) -> None:
    outer = layer.get_submodule(block.outer)
    whole = decisions_of(block, layer, config)
    if left == whole:
        return
    if left == 0:
        _empty(block, layer, index)
        return
    for name in block.inner:
        linear = layer.get_submodule(name)
        layer.set_submodule(name, _linear_like(linear, in_features(linear), out_features(linear) // whole * left))
    layer.set_submodule(block.outer, _linear_like(outer, in_features(outer) // whole * left, out_features(outer)))
    if block.kind == "attention":
        _count_heads(layer.get_submodule(block.core), whole, left, in_features(layer.get_submodule(block.outer)))


def _empty(block: Block, layer: nn.Module, index: int) -> None:
    outer: Any = layer.get_submodule(block.outer)
    constant = Constant(out_features(outer), outer.bias is not None)
    name = block.outer.removeprefix(f"{block.core}.") if block.outer.startswith(f"{block.core}.") else None
    inside = constant if name else None
    emptied = EmptiedAttention(name, inside, index) if block.kind == "attention" else EmptiedFeedForward(name, inside)
    layer.set_submodule(block.core, emptied)
    if name is None:
        layer.set_submodule(block.outer, constant)


def _linear_like(linear: Any, inputs: int, outputs: int) -> nn.Module:
    weight = linear.weight
    options = {"device": weight.device, "dtype": weight.dtype}
    if isinstance(linear, Conv1D):
        return Conv1D(outputs, inputs).to(**options)
    return nn.Linear(inputs, outputs, bias=linear.bias is not None, **options)


def _count_heads(core: Any, whole: int, left: int, width: int) -> None:
    """What attention modules note of their own heads; most go by the widths of their linear layers."""
    for name in ("num_attention_heads", "num_heads", "n_heads", "num_key_value_heads"):
        if isinstance(getattr(core, name, None), int):
            setattr(core, name, getattr(core, name) // whole * left)
    for name in ("all_head_size", "split_size"):
        if isinstance(getattr(core, name, None), int):
            setattr(core, name, width)
