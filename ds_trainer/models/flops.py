"""Floating-point operations of an encoder's forward: two for each multiply-add of its products, as papers count them.

Counts the linear layers, the attention's two products over all pairs of tokens, and DeBERTa's products with relative
positions; no elementwise operations, embeddings or heads. For a family whose blocks are unknown it counts only the
linear layers.
"""

from typing import Any

from torch import nn
from transformers.pytorch_utils import Conv1D

from ds_trainer.models.layers import Block, blocks_of, decisions_of, in_features, is_emptied, layers_of


def encoder_flops(model: Any, tokens: int) -> int:
    """Count the operations of one example of so many tokens through all layers.

    It is a batch by itself: DeBERTa's projections of positions, which a batch shares, are counted whole.
    """
    return sum(layer_flops(layer, tokens) for layer in layers_of(model).values())


def decision_flops(block: Block, layer: nn.Module, config: Any, tokens: int) -> float:
    """Count the operations of one head (group that shares a key and a value) or neuron of a block, for one example."""
    linears: list[Any] = [layer.get_submodule(name) for name in (*block.inner, block.outer)]
    weights = sum(linear.weight.numel() for linear in linears)
    return (2 * tokens * weights + _attention_flops(block, layer, tokens)) / decisions_of(block, layer, config)


def layer_flops(layer: nn.Module, tokens: int) -> int:
    """Count the operations of one layer for one example of so many tokens."""
    linears = {name: module for name, module in layer.named_modules() if isinstance(module, nn.Linear | Conv1D)}
    weights = sum(linear.weight.numel() for name, linear in linears.items() if not _of_positions(name))
    products = sum(_attention_flops(block, layer, tokens) for block in blocks_of(layer))
    disentangled = [module for module in layer.modules() if hasattr(module, "pos_att_type")]
    return 2 * tokens * weights + products + sum(_disentangled_flops(module, tokens) for module in disentangled)


def _of_positions(name: str) -> bool:
    """Whether a linear layer runs over relative positions, not over tokens."""
    return name.rpartition(".")[2] in ("pos_key_proj", "pos_query_proj")


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
    names = {"c2p": "key_proj", "p2c": "query_proj"}
    used = [name for kind, name in names.items() if kind in core.pos_att_type]
    # with shared projections the library computes both, whether used or not
    projections = [*names.values()] if core.share_att_key else [f"pos_{name}" for name in used]
    weights = sum(core.get_submodule(name).weight.numel() for name in projections)
    positions = 2 * core.pos_ebd_size
    return products + 2 * positions * (tokens * width * len(used) + weights)
