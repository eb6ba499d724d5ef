"""Tiny sequence classifiers of every architecture that exits are made for, with heads that disagree, and texts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForSequenceClassification

from ds_trainer.models.layers import encoder_layers
from ds_trainer.recipe.exit_specs import ExitPolicy
from ds_trainer.techniques.exits.early_exit import EarlyExitModel, EarlyExitOutput, doubts_of_all, exit_at, new_heads

WIDTH, LAYERS, BUCKETS = 32, 4, 8
SMALL = {
    "vocab_size": 99,
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
}
DEBERTA = SMALL | {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": BUCKETS}
MODERN = SMALL | {
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "cls_token_id": 1,
    "sep_token_id": 2,
    "global_attn_every_n_layers": 2,
    "local_attention": 8,
}
DISTIL = {"dim": WIDTH, "n_layers": LAYERS, "n_heads": 4, "hidden_dim": 48}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("bert", SMALL),
    "roberta": ("roberta", SMALL | {"pad_token_id": 1}),
    "distilbert": ("distilbert", DISTIL | {"vocab_size": 99, "max_position_embeddings": 64}),
    "electra": ("electra", SMALL | {"embedding_size": 16}),
    "deberta": ("deberta-v2", DEBERTA | {"norm_rel_ebd": "layer_norm", "share_att_key": True, "type_vocab_size": 0}),
    "deberta-conv": ("deberta-v2", DEBERTA | {"conv_kernel_size": 3, "position_biased_input": False}),
    "modernbert": ("modernbert", MODERN),
    "modernbert-mean": ("modernbert", MODERN | {"classifier_pooling": "mean"}),
}
NEVER = ExitPolicy(criterion="entropy", thresholds=[0.0] * 3)
AT_ONCE = ExitPolicy(criterion="entropy", thresholds=[9.0] * 3)


def classifier(family: str, num_labels: int = 3, auto: Any = AutoModelForSequenceClassification, **fields: Any) -> Any:
    """A model whose answers depend on every token: weights are large for its size."""
    kind, settings = FAMILIES[family]
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, num_labels=num_labels, **settings | fields)
    return randomise(auto.from_config(config), 0.25).eval()


def randomise(module: Any, width: float) -> Any:
    """Draw all its matrices anew."""
    for parameter in module.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=width)
    return module


def early_exit(model: Any, policy: ExitPolicy, layers: tuple[int, ...] = (1, 2, 3)) -> EarlyExitModel:
    """The model with heads after these layers that answer otherwise than its own."""
    torch.manual_seed(1)
    return EarlyExitModel(model, randomise(new_heads(model, layers, None), 0.5), policy).eval()


def made(family: str, criterion: str = "entropy", layers: tuple[int, ...] = (1, 2, 3), **fields: Any) -> EarlyExitModel:
    """That, with thresholds by which about a third of the texts leave at each head, none of them near one."""
    regression = criterion == "regression"
    model = early_exit(classifier(family, num_labels=1 if regression else 3, **fields), NEVER, layers)
    kind: Any = "patience" if regression else criterion
    limits: list[float] = []
    if criterion != "patience":
        doubts = doubts_of_all(kind, model.all_logits(*texts(padding=pad_of(family))), None)
        limits = [abs(between(values[values.isfinite()], 0.35)) for values in doubts]
    model.policy = ExitPolicy(criterion=kind, thresholds=limits, patience=1 if kind == "patience" else None)
    return model


def texts(rows: int = 16, length: int = 12, padding: int = 0) -> tuple[Tensor, Tensor]:
    """(rows, length) token ids, padded behind, and their mask: texts of 4 to `length` tokens."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(5, 99, (rows, length), generator=generator)
    sizes = 4 + torch.arange(rows) % (length - 3)
    mask = (torch.arange(length) < sizes[:, None]).long()
    return ids * mask + padding * (1 - mask), mask


def pad_of(family: str) -> int:
    return FAMILIES[family][1].get("pad_token_id", 0)


def left_at(policy: ExitPolicy, logits: Tensor, counted: Tensor | None = None) -> Tensor:
    """The index of the head at which each sample leaves, by the logits of all heads."""
    return exit_at(policy, doubts_of_all(policy.criterion, logits, counted))


def between(values: Tensor, share: float) -> float:
    """The middle of the widest gap near a quantile."""
    ordered = values.sort().values
    start = round(share * (len(ordered) - 1))
    near = ordered[max(0, start - 2) : start + 3]
    if len(near) < 2:
        return 0.0
    place = int(near.diff().argmax())
    return float((near[place] + near[place + 1]) / 2)


def check_same(out: EarlyExitOutput, expected: EarlyExitOutput, rows: Any = slice(None)) -> None:
    """Compare the layers and logits with those of these rows."""
    assert out.exit_layers.tolist() == expected.exit_layers[rows].tolist()
    torch.testing.assert_close(out.logits, expected.logits[rows], atol=1e-4, rtol=0)


def layers_of(model: EarlyExitModel) -> list[Any]:
    return list(encoder_layers(model.model).values())
