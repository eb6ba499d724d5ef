"""Models pruned by heads, neurons and blocks."""

from __future__ import annotations

import torch
from support.prune_phases import make_prune
from torch import Tensor, nn

SMALL = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": 64}


SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}


GROUPED = SMALL | {"num_key_value_heads": 2, "head_dim": 8}


FAMILIES = {
    "bert": SMALL,
    "roberta": SMALL,
    "electra": SMALL | {"embedding_size": 16},
    "distilbert": {"dim": 32, "n_layers": 3, "n_heads": 4, "hidden_dim": 48, "vocab_size": 64},
    "modernbert": SMALL | SPECIAL,
    "gpt2": {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_inner": 48, "n_positions": 32, "vocab_size": 64},
    "llama": GROUPED,
    "qwen3": GROUPED,
    "deberta-v2": SMALL | {"max_position_embeddings": 40},
}


DECODERS = ("gpt2", "llama", "qwen3")


NEURONS_ALONE = {"attention": "block", "feed_forward": "neuron"}


def make_model(family: str = "bert") -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **FAMILIES[family])
    model = (AutoModelForCausalLM if family in DECODERS else AutoModelForSequenceClassification).from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.1)
    return model.eval()


def run(model: nn.Module) -> Tensor:
    ids = torch.arange(18).view(2, 9) % 50 + 5
    return model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits


def pruned(family: str = "bert", **spec):
    """The technique at its last step on a model, with that model."""
    prune = make_prune(**({"granularity": "hybrid", "final_threshold": 0.5, "mask_init": "kaiming"} | spec))
    model = prune.attach(make_model(family)).eval()
    prune.start(torch.device("cpu"))
    prune.on_step(10)
    return prune, model


def kept_of(prune, kind: str) -> list[int]:
    return [int(value) for name, value in prune.readings().items() if name.startswith("prune/kept/") and kind in name]
