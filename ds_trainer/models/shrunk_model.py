"""Models of `transformers` from which heads and neurons were cut out, so that their layers differ in size.

The field `shrunk` of the config lists how many heads and neurons each layer keeps: {"heads": [...], "neurons": [...]}.
Heads are counted in groups that share a key and a value. All other fields describe the model before the cut. A block
that keeps nothing is skipped. ds_trainer copies this file into the folder of every such model, and the config's
`auto_map` and `architectures` name the file's classes: `Shrunk` + the name of the class of transformers that is
resized. A program that goes by `architectures`, as the converter to GGUF does, does not know them. It would read one
size for all layers if it took the model for a whole one. The file needs only torch and transformers, so that the folder
can be loaded without ds_trainer.
"""

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
PREFIX = "Shrunk"
SIZES_OF = {"attention": "heads", "feed_forward": "neurons"}
"""The key in `shrunk` of each kind of block."""


@dataclass(frozen=True)
class Block:
    """The modules of a block, attention or feed-forward, that change where it is cut. Names begin inside the layer.

    A decision is a head with its key and value, or a neuron. Each one has an equal share of the outputs of the `inner`
    linear layers, in each of the `parts` that are stacked in them, and of the inputs of the `outer` linear layer. The
    module `core` computes what lies between them, and need not run where no decision remains.
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
# the first part of ModernBERT's Wi goes through the activation, the second is its gate
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
"""The blocks that can be cut, by the name of a layer's class. For each class it was tested that cutting zeros out
changes no output. Names and shapes of the modules do not decide it: classes that are not listed have the same ones, but
heads that work in pairs or attend without a softmax."""
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
    """The config's `shrunk` does not fit its model."""


def layers_of(model: nn.Module) -> dict[str, nn.Module]:
    """Return the model's layers by name, first to last: the longest `nn.ModuleList` of one class; empty without one."""
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
    """Return the blocks of a layer that can be cut, also those that are empty; none where its class is not listed.

    Attention cannot be cut where its heads depend on each other (a norm over all of them) or its values on positions.
    """
    modules = dict(layer.named_modules())

    def holds(block: Block) -> bool:
        if block.outer not in modules or block.core not in modules:
            return False
        if is_emptied(modules[block.core]):
            return True
        return set(block.inner) <= modules.keys() and _are_apart(block, modules[block.core])

    blocks = tuple(block for block in LAYOUT_OF.get(type(layer).__name__, ()) if holds(block))
    return blocks if any(block.kind == "feed_forward" for block in blocks) else ()


def decisions_of(block: Block, layer: nn.Module, config: Any) -> int:
    """Count the heads (groups that share a key and a value) or neurons that a block has now."""
    core, outer = layer.get_submodule(block.core), layer.get_submodule(block.outer)
    if is_emptied(core):
        return 0
    if block.kind == "feed_forward":
        return in_features(outer)
    groups = whole_heads(config)
    return in_features(outer) // (_head_width(core) * (config.num_attention_heads // groups))


def whole_heads(config: Any) -> int:
    """Count the heads of a layer before any cut, in groups that share a key and a value.

    ShrunkSizesError where the config has no such field, as that of a model composed of several.
    """
    heads = getattr(config, "num_key_value_heads", None) or getattr(config, "num_attention_heads", None)
    if heads is None:
        raise ShrunkSizesError(f"a {type(config).__name__} has no num_attention_heads: only text models can be cut")
    return int(heads)


def sizes_of(model: Any) -> dict[str, list[int]]:
    """Count each layer's heads and neurons, in the form of `shrunk`. Heads that cannot be cut are counted as whole.

    ShrunkSizesError where the class of a layer is not listed.
    """
    sizes: dict[str, list[int]] = {name: [] for name in SIZES_OF.values()}
    for layer in layers_of(model).values():
        counts = {block.kind: decisions_of(block, layer, model.config) for block in _known_blocks(model, layer)}
        sizes["heads"].append(counts.get("attention", whole_heads(model.config)))
        sizes["neurons"].append(counts["feed_forward"])
    if not sizes["neurons"]:
        raise ShrunkSizesError(f"{type(model).__name__} has no list of equal layers: it has no sizes to change")
    return sizes


def resize(model: Any, sizes: Mapping[str, Sequence[int]]) -> None:
    """Resize each layer's linear layers. Those that change have undefined weights.

    ShrunkSizesError, before anything is changed, where a size is not between 0 and the model's.
    """
    _check_sizes(sizes, sizes_of(model))
    for index, layer in enumerate(layers_of(model).values()):
        for block in blocks_of(layer):
            _resize_block(block, layer, model.config, sizes[SIZES_OF[block.kind]][index], index)


def auto_map(config: Any) -> dict[str, str]:
    """Return the classes of this file that the auto classes of transformers build from such a config."""
    classes = {}
    for auto_class, mapping in _AUTO_CLASSES.items():
        base = getattr(transformers, mapping).get(type(config), None)
        base = base[0] if isinstance(base, tuple) else base
        if base is not None:
            classes[auto_class] = f"{Path(__file__).stem}.{PREFIX}{base.__name__}"
    return classes


def whole_class(model: Any) -> Any:
    """Return the class of transformers that a model has, or had before it was cut."""
    return getattr(model, "resizes", type(model))


def is_emptied(core: Any) -> bool:
    """Return whether the block of this core is empty. Compares names, since every folder brings a copy of the class."""
    return any(base.__name__ == "Emptied" for base in type(core).__mro__)


def in_features(linear: Any) -> int:
    return int(linear.weight.shape[0] if isinstance(linear, Conv1D) else linear.weight.shape[1])


def out_features(linear: Any) -> int:
    return int(linear.weight.shape[1] if isinstance(linear, Conv1D) else linear.weight.shape[0])


class Constant(nn.Module):
    """A linear layer without inputs: its output is its bias, for every token.

    Its empty matrix makes loading fail where a shrunk model meets the class of a whole one. Without it, transformers
    would fill what was cut with random numbers, and say nothing.
    """

    weight: Tensor
    bias: nn.Parameter | None

    def __init__(self, linear: Any) -> None:
        super().__init__()
        weight = linear.weight.detach()
        self.features = out_features(linear)
        # a buffer: engines that partition parameters over ranks expect no empty ones
        self.register_buffer("weight", (weight[:0] if isinstance(linear, Conv1D) else weight[:, :0]).clone())
        bias = None if linear.bias is None else nn.Parameter(weight.new_zeros(self.features))
        self.register_parameter("bias", bias)

    def forward(self, hidden: Tensor) -> Tensor:
        shape = (*hidden.shape[:-1], self.features)
        return hidden.new_zeros(shape) if self.bias is None else self.bias.expand(shape)


class Emptied(nn.Module):
    """Stands for the core of an empty block, and calls the outer layer where that was inside the core."""

    def __init__(self, outer_name: str | None, outer: nn.Module | None) -> None:
        super().__init__()
        self.outer_name = outer_name
        if outer_name is not None:
            self.add_module(outer_name, outer)

    def _output(self, hidden: Tensor) -> Tensor:
        if self.outer_name is None:
            return hidden
        outer: Any = self.get_submodule(self.outer_name)
        output: Tensor = outer(hidden)
        return output


class EmptiedFeedForward(Emptied):
    def forward(self, hidden: Tensor) -> Tensor:
        return self._output(hidden)


class EmptiedAttention(Emptied):
    """Returns no attention weights. It enters its tokens in a cache, since models count those of the first layer."""

    def __init__(self, outer_name: str | None, outer: nn.Module | None, layer_index: int) -> None:
        super().__init__(outer_name, outer)
        self.layer_index = layer_index

    def forward(self, hidden_states: Tensor, *_: Any, past_key_values: Any = None, **__: Any) -> tuple[Tensor, None]:
        if past_key_values is not None:
            # one number per token: a cache that holds nothing reports no tokens
            seen = hidden_states.new_zeros(hidden_states.shape[0], 1, hidden_states.shape[1], 1)
            past_key_values.update(seen, seen, self.layer_index)
        return self._output(hidden_states), None


@functools.cache
def shrunk_class(base: type[Any]) -> type[Any]:
    """Return a subclass of `base` whose models are resized to the `shrunk` of their config.

    It has the name of `base`, by which transformers chooses losses and checks pipelines.
    """

    def initialise(self: Any, config: Any, *arguments: Any, **options: Any) -> None:
        base.__init__(self, config, *arguments, **options)
        resize(self, getattr(config, FIELD, None))  # type: ignore[arg-type]

    def initialize_weights(self: Any) -> None:
        for module in self.modules():
            # transformers marks what it has loaded; a bias without the mark was in no file
            if isinstance(module, Constant) and not getattr(module.bias, "_is_hf_initialized", module.bias is None):
                nn.init.zeros_(module.bias)  # type: ignore[arg-type]
        base.initialize_weights(self)

    def save_pretrained(
        self: Any, save_directory: Any, is_main_process: bool = True, *arguments: Any, **options: Any
    ) -> None:
        if options.get("push_to_hub"):
            raise ValueError("push_to_hub: transformers would upload before the config is whole: call push_to_hub()")
        self.config.auto_map = auto_map(self.config)
        if is_main_process:
            Path(save_directory).mkdir(parents=True, exist_ok=True)
            shutil.copyfile(__file__, Path(save_directory) / Path(__file__).name)
        base.save_pretrained(self, save_directory, is_main_process, *arguments, **options)
        if is_main_process:  # transformers has put the name of the whole class into the config
            self.config.architectures = [f"{PREFIX}{base.__name__}"]
            self.config.save_pretrained(save_directory)

    members = {
        "__init__": initialise,
        "__module__": __name__,
        "__qualname__": f"{PREFIX}{base.__name__}",
        "__doc__": base.__doc__,
        "resizes": base,
        "initialize_weights": initialize_weights,
        "save_pretrained": save_pretrained,
        # or transformers would copy the file once more, and write another `auto_map`
        "register_for_auto_class": classmethod(lambda cls, auto_class="AutoModel": None),
    }
    return type(base.__name__, (base,), members)


def __getattr__(name: str) -> Any:
    """Make the class `ShrunkX` for a class X of transformers when `auto_map` names it."""
    base = getattr(transformers, name.removeprefix(PREFIX), None) if name.startswith(PREFIX) else None
    if base is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return shrunk_class(base)


def _head_width(core: Any) -> int:
    return int(getattr(core, "head_dim", None) or core.attention_head_size)


def _are_apart(block: Block, core: Any) -> bool:
    """Return whether each decision can be cut by itself: other weights than the linear layers' must be one head's."""
    linears = tuple(f"{name.removeprefix(f'{block.core}.')}." for name in (*block.inner, block.outer))
    others = [weight for name, weight in core.named_parameters() if not name.startswith(linears)]
    if block.kind == "feed_forward":
        return not others
    turned = getattr(core, "rotary_value", False)  # RoFormer can turn values by position: a bias then differs per token
    return not turned and all(weight.numel() == _head_width(core) for weight in others)


def _known_blocks(model: Any, layer: nn.Module) -> tuple[Block, ...]:
    blocks = blocks_of(layer)
    if not blocks:
        raise ShrunkSizesError(
            f"the layers of {type(model).__name__} are of a family whose heads and neurons cannot be cut: "
            f"{type(layer).__name__}. Known are BERT, RoBERTa, ELECTRA, DistilBERT, DeBERTa, ModernBERT, GPT-2, Llama, "
            f"Qwen, Mistral, Gemma and some of their kin ({Path(__file__).name} lists all), without experts. Prune by "
            f"row, column, block or weight, where these are in linear layers, and export with --compact"
        )
    return blocks


def _check_sizes(sizes: Any, whole: Mapping[str, Sequence[int]]) -> None:
    for name, most in whole.items():
        counts: Any = sizes.get(name) if isinstance(sizes, Mapping) else None
        listed = isinstance(counts, list | tuple) and len(counts) == len(most)
        if not listed or not all(type(n) is int and 0 <= n <= limit for n, limit in zip(counts, most, strict=True)):
            raise ShrunkSizesError(
                f"the config's {FIELD}.{name} must list a size for each of {len(most)} layers, from 0 to {max(most)}, "
                f"and is {repr(counts)[:80]}"
            )


def _resize_block(block: Block, layer: nn.Module, config: Any, kept: int, index: int) -> None:
    outer = layer.get_submodule(block.outer)
    whole = decisions_of(block, layer, config)
    if kept == whole:
        return
    if kept == 0:
        _empty(block, layer, index)
        return
    for name in block.inner:
        linear = layer.get_submodule(name)
        layer.set_submodule(name, _linear_like(linear, in_features(linear), out_features(linear) // whole * kept))
    layer.set_submodule(block.outer, _linear_like(outer, in_features(outer) // whole * kept, out_features(outer)))
    if block.kind == "attention":
        _count_heads(layer.get_submodule(block.core), whole, kept, in_features(layer.get_submodule(block.outer)))


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


def _count_heads(core: Any, whole: int, kept: int, width: int) -> None:
    """Correct the counts that attention modules hold. Most go by the widths of their linear layers."""
    for name in ("num_attention_heads", "num_heads", "n_heads", "num_key_value_heads"):
        if isinstance(getattr(core, name, None), int):
            setattr(core, name, getattr(core, name) // whole * kept)
    for name in ("all_head_size", "split_size"):
        if isinstance(getattr(core, name, None), int):
            setattr(core, name, width)
