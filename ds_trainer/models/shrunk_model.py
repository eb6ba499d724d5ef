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


_BERT = _attention("attention.self", ("query", "key", "value"), "attention.output.dense")
_INTERMEDIATE = Block("feed_forward", ("intermediate.dense",), "output.dense", "intermediate")
_DISTILBERT = _attention("attention", ("q_lin", "k_lin", "v_lin"), "attention.out_lin")
# of ModernBERT's Wi the first part goes through the activation, the second is its gate
_MODERNBERT = _attention("attn", ("Wqkv",), "attn.Wo", parts=3)
_GPT2 = _attention("attn", ("c_attn",), "attn.c_proj", parts=3)
_C_FC = Block("feed_forward", ("mlp.c_fc",), "mlp.c_proj", "mlp")
_LLAMA = _attention("self_attn", ("q_proj", "k_proj", "v_proj"), "self_attn.o_proj")
_GATED = Block("feed_forward", ("mlp.gate_proj", "mlp.up_proj"), "mlp.down_proj", "mlp")
_LAYOUTS = {
    (_BERT, _INTERMEDIATE): (
        *("BertLayer", "RobertaLayer", "XLMRobertaLayer", "XLMRobertaXLLayer", "CamembertLayer", "ElectraLayer"),
        *("ErnieLayer", "MegatronBertLayer", "RoFormerLayer", "RemBertLayer", "SplinterLayer", "Data2VecTextLayer"),
        *("RoCBertLayer", "BertGenerationLayer", "LayoutLMLayer"),
    ),
    (_DISTILBERT, Block("feed_forward", ("ffn.lin1",), "ffn.lin2", "ffn")): ("TransformerBlock",),
    (_MODERNBERT, Block("feed_forward", ("mlp.Wi",), "mlp.Wo", "mlp", parts=2)): ("ModernBertEncoderLayer",),
    (_GPT2, _C_FC): ("GPT2Block",),
    (_LLAMA, _GATED): (
        *("LlamaDecoderLayer", "MistralDecoderLayer", "Ministral3DecoderLayer", "Qwen2DecoderLayer"),
        *("Qwen3DecoderLayer", "GemmaDecoderLayer", "Gemma2DecoderLayer", "Gemma3DecoderLayer"),
        *("VaultGemmaDecoderLayer", "CohereDecoderLayer", "Cohere2DecoderLayer", "GraniteDecoderLayer"),
        *("HeliumDecoderLayer", "SmolLM3DecoderLayer", "Exaone4DecoderLayer", "Ernie4_5DecoderLayer"),
        *("SeedOssDecoderLayer", "HunYuanDenseV1DecoderLayer", "EuroBertDecoderLayer", "NomicBertLayer"),
    ),
    # heads that share more than keys and values: DeBERTa's projections of the positions, a convolution, norms over all
    # heads (OLMo 2), a clipped value (OLMo), one key and value that are not a third of the matrix (GPTBigCode)
    (_INTERMEDIATE,): ("DebertaLayer", "DebertaV2Layer", "NystromformerLayer", "ConvBertLayer", "LukeLayer"),
    (_C_FC,): ("GPTBigCodeBlock",),
    (_GATED,): ("OlmoDecoderLayer", "Olmo2DecoderLayer", "Olmo3DecoderLayer"),
}
LAYOUT_OF = {name: layout for layout, names in _LAYOUTS.items() for name in names}
"""The blocks that can be cut, by the class of a layer: those of which it was tried that what is cut out is not missed.

By names and shapes alone others look like them whose heads work in pairs, say, or attend without a softmax.
"""
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
    """The attention and the feed-forward block of a layer, emptied ones too; none where its class is unknown here.

    Attention is left out whose heads are not independent: a norm over all of them, values turned by their positions.
    """
    modules = dict(layer.named_modules())

    def holds(block: Block) -> bool:
        if block.outer not in modules or block.core not in modules:
            return False
        if is_emptied(modules[block.core]):
            return True
        return set(block.inner) <= modules.keys() and _are_apart(block, modules[block.core])

    found = tuple(block for block in LAYOUT_OF.get(type(layer).__name__, ()) if holds(block))
    return found if any(block.kind == "feed_forward" for block in found) else ()


def decisions_of(block: Block, layer: nn.Module, config: Any) -> int:
    """How many heads (groups that share a key and a value) or neurons a block has, as it is."""
    core, outer = layer.get_submodule(block.core), layer.get_submodule(block.outer)
    if is_emptied(core):
        return 0
    if block.kind == "feed_forward":
        return in_features(outer)
    groups = whole_heads(config)
    return in_features(outer) // (_head_width(core) * (config.num_attention_heads // groups))


def whole_heads(config: Any) -> int:
    """The heads of a layer before any cut, counted in groups that share a key and a value.

    ShrunkSizesError where the config says none, as that of a model of several models.
    """
    heads = getattr(config, "num_key_value_heads", None) or getattr(config, "num_attention_heads", None)
    if heads is None:
        raise ShrunkSizesError(
            f"a {type(config).__name__} has no num_attention_heads: the model of texts alone can be cut, take it out"
        )
    return int(heads)


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
    """What a linear layer gives that has no inputs left: its bias, for every token.

    Of the matrix an empty one is left. Weights that are whole do not fit it, nor it a whole model: else transformers
    without this file would fill the places of what was cut at random, and not say so.
    """

    weight: Tensor
    bias: nn.Parameter | None

    def __init__(self, linear: Any) -> None:
        super().__init__()
        weight = linear.weight.detach()
        self.features = out_features(linear)
        # no parameter: engines that split parameters over ranks expect some
        self.register_buffer("weight", (weight[:0] if isinstance(linear, Conv1D) else weight[:, :0]).clone())
        bias = None if linear.bias is None else nn.Parameter(weight.new_zeros(self.features))
        self.register_parameter("bias", bias)

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
        # GPT-2 with cross attention has two caches in one
        past_key_values = getattr(past_key_values, "self_attention_cache", past_key_values)
        if past_key_values is not None:
            # a number for each token: caches that hold none say that they have seen no token
            seen = hidden_states.new_zeros(hidden_states.shape[0], 1, hidden_states.shape[1], 1)
            past_key_values.update(seen, seen, self.layer_index)
        return self._given(hidden_states), None


@functools.cache
def shrunk_class(base: type[Any]) -> type[Any]:
    """The class of models like `base`, resized as their config says.

    It has the name of `base`, by which transformers chooses losses, checks pipelines and fills `architectures`.
    """

    code = Path(__file__).name

    def initialise(self: Any, config: Any, *arguments: Any, **options: Any) -> None:
        base.__init__(self, config, *arguments, **options)
        resize(self, getattr(config, FIELD, None))  # type: ignore[arg-type]

    def initialize_weights(self: Any) -> None:
        for module in self.modules():
            # what no folder held; transformers knows by the mark what was loaded
            if isinstance(module, Constant) and not getattr(module.bias, "_is_hf_initialized", module.bias is None):
                nn.init.zeros_(module.bias)  # type: ignore[arg-type]
        base.initialize_weights(self)

    def save_pretrained(
        self: Any, save_directory: Any, is_main_process: bool = True, *arguments: Any, **options: Any
    ) -> None:
        self.config.auto_map = auto_map(self.config)
        if is_main_process:
            Path(save_directory).mkdir(parents=True, exist_ok=True)
            shutil.copyfile(__file__, Path(save_directory) / code)
        base.save_pretrained(self, save_directory, is_main_process, *arguments, **options)

    def files_before(self: Any, working_dir: Any) -> dict[str, float]:
        """What a push leaves out, as it was there before: not the copy of this file, which is by then."""
        return {name: time for name, time in base._get_files_timestamps(self, working_dir).items() if name != code}

    members = {
        "__init__": initialise,
        "__module__": __name__,
        "__qualname__": f"Shrunk{base.__name__}",
        "__doc__": base.__doc__,
        "resizes": base,
        "initialize_weights": initialize_weights,
        "save_pretrained": save_pretrained,
        "_get_files_timestamps": files_before,
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


def _are_apart(block: Block, core: Any) -> bool:
    """Whether all weights of the core, beside its linear layers, are those of one head, which all heads share."""
    linears = tuple(f"{name.removeprefix(f'{block.core}.')}." for name in (*block.inner, block.outer))
    own = [weight for name, weight in core.named_parameters() if not name.startswith(linears)]
    if block.kind == "feed_forward":
        return not own
    turned = getattr(core, "rotary_value", False)  # RoFormer's values, if asked: a bias is then not the same everywhere
    return not turned and all(weight.numel() == _head_width(core) for weight in own)


def _known_blocks(model: Any, layer: nn.Module) -> tuple[Block, ...]:
    blocks = blocks_of(layer)
    if not blocks:
        raise ShrunkSizesError(
            f"the layers of {type(model).__name__} are of a family whose heads and neurons cannot be cut: "
            f"{type(layer).__name__}. Known are BERT, RoBERTa, ELECTRA, DistilBERT, DeBERTa, ModernBERT, GPT-2, Llama, "
            f"Qwen, Mistral, Gemma and some of their kin ({Path(__file__).name} lists all), without experts. Prune by "
            f"row, column, block or weight, and export with --compact"
        )
    return blocks


def _said(found: Any) -> str:
    return f"it lists {len(found)}" if isinstance(found, list | tuple) else f"it is {repr(found)[:40]}"


def _check_sizes(sizes: Any, whole: Mapping[str, Sequence[int]]) -> None:
    if not isinstance(sizes, Mapping):
        raise ShrunkSizesError(f"the config's {FIELD} is a {type(sizes).__name__}: it must be an object of lists")
    for name, most in whole.items():
        found = sizes.get(name)
        if not isinstance(found, list | tuple) or len(found) != len(most):
            raise ShrunkSizesError(
                f"the config's {FIELD}.{name} must list {len(most)} sizes, one a layer: {_said(found)}"
            )
        for index, (size, limit) in enumerate(zip(found, most, strict=True)):
            if type(size) is not int or not 0 <= size <= limit:
                raise ShrunkSizesError(
                    f"the config's {FIELD}.{name} is {repr(size)[:40]} for layer {index}: allowed are 0 to {limit}"
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
    constant = Constant(outer)
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
