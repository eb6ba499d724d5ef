"""Tiny models of every family, and the technique that prunes them, as a phase builds it."""

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.pytorch_utils import Conv1D

from ds_trainer.recipe.technique_specs import PruneSpec
from ds_trainer.techniques.prune.prune import Prune
from ds_trainer.techniques.technique import PhaseLength

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
UNIFORM = {"mask_init": "uniform", "mask_scale": 1.0}


def make_model(family: str = "bert") -> nn.Module:
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


def make_prune(total: int = 10, **spec) -> Prune:
    return Prune(
        PruneSpec(**({"initial_warmup": 0, "final_warmup": 0} | spec)), PhaseLength(total, 0, seed=3), task=None
    )


def pruned(family: str = "bert", step: int = 10, **spec) -> tuple[Prune, nn.Module]:
    """The technique on a model, by default at its last step and for half of the heads and neurons, with that model."""
    prune = make_prune(**({"granularity": "hybrid", "final_threshold": 0.5, "mask_init": "kaiming"} | spec))
    model = prune.attach(make_model(family)).eval()
    prune.start(torch.device("cpu"))
    prune.on_step(step)
    return prune, model


def rows_of(linear: nn.Module, values: Tensor | None = None) -> Tensor:
    """The weight, or values of its shape, as (outputs, inputs)."""
    values = linear.weight if values is None else values
    return values.t() if isinstance(linear, Conv1D) else values


def kept_of(prune: Prune, kind: str) -> list[int]:
    return [int(value) for name, value in prune.readings().items() if name.startswith("prune/kept/") and kind in name]
