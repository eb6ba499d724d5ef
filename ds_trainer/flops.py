"""Floating-point operations of an encoder's forward: two for each multiply-add of its products, as papers count them.

Counted are the linear layers and the attention's two products, over all pairs of tokens; not what is elementwise, and
neither embeddings nor heads.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers.pytorch_utils import Conv1D

from ds_trainer.shrunk_model import Block, Emptied, blocks_of, decisions_of, in_features, layers_of


def encoder_flops(model: Any, tokens: int) -> int:
    """Of one example of so many tokens, through all layers."""
    return sum(_layer_flops(layer, tokens) for layer in layers_of(model).values())


def decision_flops(block: Block, layer: nn.Module, config: Any, tokens: int) -> float:
    """Of one head (group that shares a key and a value) or neuron of a block, for one example."""
    linears: list[Any] = [layer.get_submodule(name) for name in (*block.inner, block.outer)]
    weights = sum(linear.weight.numel() for linear in linears)
    return (2 * tokens * weights + _attention_flops(block, layer, tokens)) / decisions_of(block, layer, config)


def _layer_flops(layer: nn.Module, tokens: int) -> int:
    linears = [module for module in layer.modules() if isinstance(module, nn.Linear | Conv1D)]
    products = sum(_attention_flops(block, layer, tokens) for block in blocks_of(layer))
    return 2 * tokens * sum(linear.weight.numel() for linear in linears) + products


def _attention_flops(block: Block, layer: nn.Module, tokens: int) -> int:
    """Queries with keys, and their weights with values."""
    if block.kind != "attention" or isinstance(layer.get_submodule(block.core), Emptied):
        return 0
    return 4 * tokens**2 * in_features(layer.get_submodule(block.outer))
