"""Kwon et al., "A fast post-training pruning framework for transformers" (arXiv 2204.09656), for a BERT.

Every head and neuron has a mask of 1, and what the loss rises without some of them is estimated by the Fisher
information of the masks. (1) Those stay whose own information is largest; for each number of heads the budget says how
many neurons. It counts weights here, in place of operations, as the other methods do. (2) Within each block, what goes
is exchanged for what stays where the block's whole Fisher matrix says that less is lost. (3) Block by block, the masks
become the numbers with which the outputs come nearest to the dense model's, by damped least squares.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from worker import batches_of, dense_model

from ds_trainer.models.shrink import shrink

DAMPING, LARGEST_MASK = 1.0, 10.0
"""The paper's: the damping of least squares, and the mask beyond which a block, and those after it, are not tuned."""


@dataclass(frozen=True)
class Block:
    """Attention or feed-forward of a layer; its norm gets the sum of the block's input and of what `outer` gives."""

    outer: nn.Linear
    norm: nn.LayerNorm
    masks: int
    weights: int
    """Those of one head or neuron."""

    def over_masks(self, values: Tensor, dim: int = 0) -> Tensor:
        """Sum values of the inputs of `outer` over those that one mask multiplies."""
        return values.unflatten(dim, (self.masks, -1)).sum(dim + 1)

    def multiply(self, masks: Tensor) -> None:
        self.outer.weight *= masks.repeat_interleave(self.outer.in_features // self.masks)


def cut(request: dict[str, Any]) -> Any:
    dense, batches = dense_model(request).requires_grad_(False), batches_of(request)
    model = copy.deepcopy(dense)
    blocks = [block for layer in model.base_model.encoder.layer for block in blocks_of(layer, model.config)]
    gradients = mask_gradients(model, blocks, batches)
    found = search(blocks, [each.square().sum(0) for each in gradients], request["share"])
    for block, masks, each in zip(blocks, found, gradients, strict=True):
        block.multiply(rearranged(masks, each))
    tune(model, dense, batches)
    return shrink(model).state_dict()


def blocks_of(layer: Any, config: Any) -> tuple[Block, Block]:
    one, other, heads = layer.attention.output, layer.output, config.num_attention_heads
    return (
        Block(one.dense, one.LayerNorm, heads, 4 * config.hidden_size**2 // heads),
        Block(other.dense, other.LayerNorm, config.intermediate_size, 2 * config.hidden_size),
    )


def mask_gradients(model: Any, blocks: list[Block], batches: list[dict[str, Tensor]]) -> list[Tensor]:
    """Return the gradients of each example's loss by the masks of each block, (examples, masks)."""
    masks, rows = dict[nn.Linear, Tensor](), []

    def multiply(outer: nn.Linear, inputs: tuple[Tensor]) -> tuple[Tensor]:
        count = next(block.masks for block in blocks if block.outer is outer)
        masks[outer] = torch.ones(len(inputs[0]), 1, count, requires_grad=True)
        return (inputs[0] * masks[outer].repeat_interleave(outer.in_features // count, dim=2),)

    hooks = [block.outer.register_forward_pre_hook(multiply) for block in blocks]
    for batch in batches:
        loss = model(**batch).loss * len(batch["input_ids"])
        rows.append(torch.autograd.grad(loss, [masks[block.outer] for block in blocks]))
    for hook in hooks:
        hook.remove()
    return [torch.cat(of_block).squeeze(1) for of_block in zip(*rows, strict=True)]


def search(blocks: list[Block], fisher: list[Tensor], share: float) -> list[Tensor]:
    """Return the masks, 0 or 1, whose information is largest among those whose weights fit the share."""
    budget = int(share * sum(block.masks * block.weights for block in blocks))
    heads, neurons = torch.cat(fisher[::2]), torch.cat(fisher[1::2])
    falling = [each.sort(descending=True).values for each in (heads, neurons)]
    counts = [(n, (budget - n * blocks[0].weights) // blocks[1].weights) for n in range(len(heads) + 1)]
    counts = [(n, min(m, len(neurons))) for n, m in counts if m >= 0]
    best = max(counts, key=lambda count: sum(float(each[:n].sum()) for each, n in zip(falling, count, strict=True)))
    masks = []
    for values, count in zip((heads, neurons), best, strict=True):
        kept = torch.zeros(len(values)).index_fill(0, values.topk(count).indices, 1.0)
        masks.append(kept.chunk(len(blocks) // 2))
    return [mask for pair in zip(*masks, strict=True) for mask in pair]


def rearranged(masks: Tensor, gradients: Tensor) -> Tensor:
    """Exchange each 0 for the 1 with which the estimated loss falls most, if it falls."""
    fisher, gone = gradients.T @ gradients, 1 - masks
    pull, half = fisher @ gone, fisher.diagonal() / 2
    for one in gone.nonzero().flatten() if masks.any() else ():
        change = (pull + half - fisher[one]) - (pull - half)[one]
        other = change.masked_fill(gone.bool(), torch.inf).argmin()
        if change[other] < 0:
            gone[one], gone[other] = 0.0, 1.0
            pull += fisher[other] - fisher[one]
    return 1 - gone


@torch.no_grad()
def tune(model: Any, dense: Any, batches: list[dict[str, Tensor]]) -> None:
    """Multiply the weights of each block, first to last, by the masks that least squares gives."""
    seen: dict[nn.Module, Tensor] = {}
    for module in (*model.modules(), *dense.modules()):
        if isinstance(module, nn.Linear | nn.LayerNorm):
            module.register_forward_pre_hook(lambda module, inputs: seen.update({module: inputs[0]}))
    attended = [batch["attention_mask"].bool() for batch in batches]
    hidden = [torch.where(each, 0.0, torch.finfo().min)[:, None, None] for each in attended]
    types = [batch.get("token_type_ids") for batch in batches]
    ours = [dense.base_model.embeddings(batch["input_ids"], each) for batch, each in zip(batches, types, strict=True)]
    theirs = list(ours)
    layers = (each.base_model.encoder.layer for each in (model, dense))
    for layer, dense_layer in zip(*layers, strict=True):
        for block, target in zip(*(blocks_of(each, model.config) for each in (layer, dense_layer)), strict=True):
            weight, gram, moved = block.outer.weight, torch.zeros(()), torch.zeros(())
            for number, tokens in enumerate(attended):
                layer(ours[number], hidden[number])
                dense_layer(theirs[number], hidden[number])
                inputs = seen[block.outer][tokens]
                gram = gram + inputs.T @ inputs
                moved = moved + inputs.T @ (seen[target.norm] - seen[block.norm])[tokens]
            products = block.over_masks(block.over_masks(gram * (weight.T @ weight)), 1).double()
            stay = products.diagonal() > 0  # the others have no weights any more
            gain = block.over_masks((moved * weight.T).sum(1))[stay].double()
            products = products[stay][:, stay] + DAMPING * torch.eye(len(gain))
            masks = torch.ones(block.masks).masked_scatter(stay, (1 + torch.linalg.solve(products, gain)).float())
            if masks.abs().max() > LARGEST_MASK:
                return
            block.multiply(masks)
        ours = [layer(*each) for each in zip(ours, hidden, strict=True)]
        theirs = [dense_layer(*each) for each in zip(theirs, hidden, strict=True)]
