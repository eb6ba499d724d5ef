"""What a model's layers cost: floating-point operations by arithmetic, and seconds that are measured on this device.

Operations are two for each multiply-add of a forward's products, as papers count them: the linear layers, the
attention's two products over all pairs of tokens, and DeBERTa's products with relative positions; no elementwise
operations, embeddings or heads. For a family whose blocks are unknown only the linear layers are counted.
"""

import copy
import statistics
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
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
    shrunk_class,
    whole_class,
)
from ds_trainer.ranks.machine import seconds

_OF_POSITIONS = ("pos_key_proj", "pos_query_proj", "pos_proj", "pos_q_proj")
_ROUNDS = 15
_LEAST = 0.01
"""All decisions of a block are taken to cost at least this share of a layer's time: measurements are noisy."""


def encoder_flops(model: Any, tokens: int) -> int:
    """Count the operations of all layers for one example of this many tokens.

    It is a batch by itself: DeBERTa's projections of positions, which a batch shares, are counted whole.
    """
    return sum(layer_flops(layer, tokens) for layer in layers_of(model).values())


def decision_flops(block: Block, layer: nn.Module, config: Any, tokens: int) -> float:
    """Count the operations of one head (group that shares a key and a value) or neuron of a block, for one example."""
    linears: list[Any] = [layer.get_submodule(name) for name in (*block.inner, block.outer)]
    weights = sum(linear.weight.numel() for linear in linears)
    return (2 * tokens * weights + _attention_flops(block, layer, tokens)) / decisions_of(block, layer, config)


def layer_flops(layer: nn.Module, tokens: int) -> int:
    """Count the operations of one layer for one example of this many tokens."""
    linears = {name: module for name, module in layer.named_modules() if isinstance(module, nn.Linear | Conv1D)}
    # DeBERTa's projections of relative positions do not run over tokens
    weights = sum(linear.weight.numel() for name, linear in linears.items() if not name.endswith(_OF_POSITIONS))
    products = sum(_attention_flops(block, layer, tokens) for block in blocks_of(layer))
    disentangled = [module for module in layer.modules() if hasattr(module, "pos_att_type")]
    return 2 * tokens * weights + products + sum(_disentangled_flops(module, tokens) for module in disentangled)


def _attention_flops(block: Block, layer: nn.Module, tokens: int) -> int:
    """Count queries times keys, and attention weights times values."""
    if block.kind != "attention" or is_emptied(layer.get_submodule(block.core)):
        return 0
    return 4 * tokens**2 * in_features(layer.get_submodule(block.outer))


def _disentangled_flops(core: Any, tokens: int) -> int:
    """Count DeBERTa's attention (arXiv 2006.03654): tokens times tokens, and times projected relative positions."""
    width = core.all_head_size
    products = 4 * tokens**2 * width
    if not core.relative_attention:
        return products
    if hasattr(core, "in_proj"):  # the first DeBERTa, whose positions reach as far as the text
        names, reach, shared = {"c2p": "pos_proj", "p2c": "pos_q_proj"}, min(tokens, core.max_relative_positions), False
    else:
        names, reach, shared = {"c2p": "pos_key_proj", "p2c": "pos_query_proj"}, core.pos_ebd_size, core.share_att_key
    used = [name for kind, name in names.items() if kind in core.pos_att_type]
    # with shared projections the library computes both, whether used or not
    projections = ("key_proj", "query_proj") if shared else used
    weights = sum(core.get_submodule(name).weight.numel() for name in projections)
    return products + 4 * reach * (tokens * width * len(used) + weights)


def measured_seconds(model: Any, tokens: int, device: torch.device) -> tuple[dict[str, float], float]:
    """Measure what one decision of each kind of block costs, and the whole encoder, in seconds for one example.

    One layer of random weights runs in fp32, whole and with half the decisions of each kind; medians of wall seconds
    count. The encoder's layers may differ in their decisions, and cost the same beside them.
    """
    base = getattr(model, "base_model", model)
    build = partial(_one_layer, whole_class(base), base.config)
    with torch.random.fork_rng(devices=[]):
        whole = build({})
        layer = next(iter(layers_of(whole).values()))
        count = {block.kind: decisions_of(block, layer, whole.config) for block in blocks_of(layer)}
        halves = {kind: build(count | {kind: most // 2}) for kind, most in count.items()}
    calls = {name: _layer_call(one.to(device).eval(), tokens) for name, one in {"": whole, **halves}.items()}
    times: dict[str, list[float]] = {name: [] for name in calls}
    with torch.inference_mode():
        for _ in range(_ROUNDS + 1):
            for name, call in calls.items():  # in turns: a slow moment of the machine then hits all alike
                times[name].append(seconds(call, device))
    median = {name: statistics.median(series[1:]) for name, series in times.items()}
    decision = {
        kind: max((median[""] - median[kind]) / (most - most // 2), _LEAST * median[""] / most)
        for kind, most in count.items()
    }
    rest = max(0.0, median[""] - sum(count[kind] * cost for kind, cost in decision.items()))
    total = sum(
        rest + sum(decision[block.kind] * decisions_of(block, one, model.config) for block in blocks_of(one))
        for one in layers_of(model).values()
    )
    return decision, total


def _one_layer(base: Any, config: Any, count: Mapping[str, int]) -> Any:
    """Build the model with its first layer only, with `count` decisions of each kind if given, and few embeddings."""
    small = copy.deepcopy(config)
    small.num_hidden_layers, small.use_cache = 1, False
    if getattr(small, "layer_types", None):
        small.layer_types = small.layer_types[:1]
    special = [value for name, value in small.to_dict().items() if name.endswith("token_id") and isinstance(value, int)]
    small.vocab_size = 1 + max([0, *special])
    setattr(small, FIELD, {name: [count.get(kind, 0)] for kind, name in SIZES_OF.items()} if count else None)
    return (shrunk_class(base) if count else base)(small)


def _layer_call(model: Any, tokens: int) -> Callable[[], object]:
    """Return a call of the model's only layer, with the arguments that the model gives it for one example."""
    (layer,) = layers_of(model).values()
    arguments: list[Any] = []
    hook = layer.register_forward_pre_hook(lambda _, *given: arguments.append(given), with_kwargs=True)
    # at most as many tokens as the model has positions for; some families count theirs from 2
    most = getattr(model.config, "max_position_embeddings", None) or tokens
    ids = torch.zeros(1, max(1, min(tokens, most - 2)), dtype=torch.int64, device=next(model.parameters()).device)
    with torch.inference_mode():
        model(input_ids=ids, attention_mask=torch.ones_like(ids))
    hook.remove()
    ((positional, named),) = arguments
    return lambda: layer(*positional, **named)
