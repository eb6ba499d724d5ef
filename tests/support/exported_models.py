"""Small models with heads and neurons that are wholly zero, in folders, and what to feed them."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForQuestionAnswering, AutoModelForSequenceClassification

from ds_trainer.models.folders import save_folder, train_tokenizer
from ds_trainer.models.shrink import shrink

TEXTS = ["the old apple", "a hammer and a saw and a drill", "some wren finch crow owl", "plum pear fig new file"]
KINDS = {"cls": AutoModelForSequenceClassification, "qa": AutoModelForQuestionAnswering}


def tokenizer() -> Any:
    return train_tokenizer(TEXTS, 96, True)


def emptied(kind: str) -> Any:
    """A BERT of two layers: one of two heads and half of the neurons are zero, and a whole feed-forward block."""
    tokens = tokenizer()
    labels = {"id2label": {0: "bird", 1: "fruit", 2: "tool"}} if kind == "cls" else {}
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    sizes |= {"max_position_embeddings": 64, "vocab_size": len(tokens)}
    config = AutoConfig.for_model("bert", **sizes, pad_token_id=tokens.pad_token_id, **labels)
    torch.manual_seed(0)
    model = KINDS[kind].from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
        first, second = model.bert.encoder.layer
        first.attention.output.dense.weight[:, :16] = 0
        first.output.dense.weight[:, ::2] = 0
        second.output.dense.weight.zero_()
        second.attention.output.dense.weight.zero_()
    return model


def save(kind: str, folder: Path, cut: bool = False) -> Path:
    model = emptied(kind)
    save_folder(shrink(model) if cut else model, tokenizer(), folder)
    return folder


def inputs(rows: int, length: int) -> dict[str, Tensor]:
    """Random tokens; every row but the first is padded."""
    generator = torch.Generator().manual_seed(rows * 100 + length)
    ids = torch.randint(5, 30, (rows, length), generator=generator)
    mask = torch.ones_like(ids)
    for row in range(1, rows):
        mask[row, max(1, length - row) :] = 0
    return {"input_ids": ids * mask, "attention_mask": mask, "token_type_ids": torch.zeros_like(ids)}
