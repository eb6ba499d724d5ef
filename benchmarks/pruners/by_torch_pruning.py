"""Torch-Pruning (CVPR 2023): whole heads, and neurons, by its group Taylor importance, over all layers, in rounds.

Its "isomorphic" ranking compares heads with heads and neurons with neurons: half of each is half of their weights. The
width of the residual stream stays, since the other methods leave it, too.
"""

from __future__ import annotations

from typing import Any

import torch_pruning
from torch import nn
from worker import batches_of, dense_model

ROUNDS = 4


def cut(request: dict[str, Any]) -> Any:
    model, batches, gone = dense_model(request), batches_of(request), 1 - request["share"]
    layers = model.base_model.encoder.layer
    projections = [getattr(layer.attention.self, name) for layer in layers for name in ("query", "key", "value")]
    pruned = {*projections, *(layer.intermediate.dense for layer in layers)}
    kinds = (nn.Linear, nn.LayerNorm, nn.Embedding)
    pruner = torch_pruning.pruner.BasePruner(
        model,
        example_inputs={name: batches[0][name] for name in ("input_ids", "attention_mask")},
        importance=torch_pruning.importance.GroupTaylorImportance(),
        global_pruning=True,
        isomorphic=True,
        pruning_ratio=gone,
        head_pruning_ratio=gone,
        iterative_steps=ROUNDS,
        num_heads=dict.fromkeys(projections, model.config.num_attention_heads),
        prune_num_heads=True,
        prune_head_dims=False,
        ignored_layers=[module for module in model.modules() if isinstance(module, kinds) and module not in pruned],
        output_transform=lambda out: sum(values.sum() for values in out.values()),
    )
    for _ in range(ROUNDS):
        model.zero_grad()
        for batch in batches:
            (model(**batch).loss * len(batch["input_ids"])).backward()
        pruner.step()
    return model.state_dict()
