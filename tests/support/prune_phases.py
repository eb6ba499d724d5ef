"""The technique that prunes, as a phase builds it."""

from __future__ import annotations

import torch
from torch import nn

from ds_trainer.config.recipe import PruneSpec
from ds_trainer.techniques.prune.prune import Prune
from ds_trainer.techniques.technique import PhaseLength

SMALL = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 48, "vocab_size": 64}


FAMILIES = {
    "bert": SMALL,
    "roberta": SMALL,
    "electra": SMALL | {"embedding_size": 16},
    "distilbert": {"dim": 32, "n_layers": 3, "n_heads": 2, "hidden_dim": 48, "vocab_size": 64},
    "deberta-v2": SMALL,
    "modernbert": SMALL
    | {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2},
}


def make_model(family: str) -> nn.Module:
    from transformers import AutoConfig, AutoModelForSequenceClassification

    torch.manual_seed(0)
    config = AutoConfig.for_model(family, num_labels=3, **FAMILIES[family])
    return AutoModelForSequenceClassification.from_config(config).eval()


def make_prune(total: int = 10, **spec) -> Prune:
    return Prune(
        PruneSpec(**({"initial_warmup": 0, "final_warmup": 0} | spec)), PhaseLength(total, 0, seed=3), task=None
    )
