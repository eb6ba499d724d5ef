"""Tiny models of every family that can be cut, and how to make zeros of their heads and neurons."""

from typing import Any

import torch
import transformers

from ds_trainer.models.layers import SIZES_OF, blocks_of, decisions_of, layers_of, rows_of, sizes_of

VOCABULARY = 64
_SMALL = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 24}
_ENDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}
_GROUPED = _SMALL | {"num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
ENCODERS: dict[str, dict[str, Any]] = {
    "bert": _SMALL,
    "roberta": _SMALL,
    "electra": _SMALL | {"embedding_size": 16},
    "distilbert": {"dim": 32, "n_layers": 3, "n_heads": 4, "hidden_dim": 24},
    "modernbert": _SMALL | _ENDS,
    "deberta-v2": _SMALL | {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "max_position_embeddings": 40},
}
DECODERS: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 40, "bos_token_id": 1, "eos_token_id": 2},
    "llama": _GROUPED,
    "qwen2": _GROUPED,
    "qwen3": _GROUPED | {"head_dim": 8},
    "olmo2": _SMALL | {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}
FAMILIES = ENCODERS | DECODERS
_NARROW = _GROUPED | {"head_dim": 8}
_WHOLE_HEADS = (
    *("camembert", "ernie", "megatron-bert", "rembert", "splinter", "roformer", "xlm-roberta", "xlm-roberta-xl"),
    *("data2vec-text", "layoutlm", "roc_bert", "bert-generation", "deberta", "nystromformer", "convbert", "eurobert"),
    *("nomic_bert", "olmo", "olmo3"),
)
KIN: dict[str, dict[str, Any]] = {
    **FAMILIES,
    **dict.fromkeys(_WHOLE_HEADS, _SMALL | _ENDS),
    **dict.fromkeys(("mistral", "ministral3", "cohere", "cohere2", "granite", "exaone4", "ernie4_5"), _GROUPED),
    **dict.fromkeys(("gemma", "gemma2", "gemma3_text", "vaultgemma", "helium", "smollm3", "seed_oss"), _NARROW),
    "hunyuan_v1_dense": _NARROW,
    "luke": _SMALL | {"entity_vocab_size": 8, "entity_emb_size": 8},
    "gpt_bigcode": DECODERS["gpt2"],
}
"""These, and one of each other class of layers that is cut as theirs are."""


def model_of(family: str, **fields: Any) -> Any:
    """A classifier, or a decoder with its language-model head; weights and biases large enough that each matters."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **{"vocab_size": VOCABULARY} | FAMILIES[family] | fields)
    auto = transformers.AutoModelForCausalLM if family in DECODERS else transformers.AutoModelForSequenceClassification
    return randomised(auto.from_config(config))


def bare_of(family: str, **fields: Any) -> Any:
    """A model of the same kind without a head."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **{"vocab_size": VOCABULARY} | KIN[family] | fields)
    return randomised(transformers.AutoModel.from_config(config))


@torch.no_grad()
def randomised(model: Any) -> Any:
    for parameter in model.parameters():
        parameter.add_(torch.randn_like(parameter) * 0.3)
    return model.eval()


@torch.no_grad()
def empty(model: Any, sizes: dict[str, list[int]], where: str = "both") -> Any:
    """Leave so many heads and neurons of each layer, others at random zero: weights `inner`, `outer` or both."""
    for index, layer in enumerate(layers_of(model).values()):
        for block in blocks_of(layer):
            whole = decisions_of(block, layer, model.config)
            gone = torch.randperm(whole)[sizes[SIZES_OF[block.kind]][index] :]
            if not whole:
                continue
            if where != "inner":
                columns = _rows(layer.get_submodule(block.outer)).t()
                columns.view(1, whole, -1, columns.shape[1])[:, gone] = 0
            for name in block.inner if where != "outer" else ():
                rows = _rows(layer.get_submodule(name))
                for part in rows.chunk(block.parts):
                    part.unflatten(0, (whole, -1))[gone] = 0
    return model


def uneven(model: Any) -> dict[str, list[int]]:
    """No head in the first layer, one in the second, all in the third; neurons 7, none and all."""
    whole = sizes_of(model)
    cuttable = len(blocks_of(next(iter(layers_of(model).values())))) == 2
    heads = [0, 1, whole["heads"][2]] if cuttable else whole["heads"]
    return {"heads": heads, "neurons": [7, 0, whole["neurons"][2]]}


def inputs_of(seed: int = 1) -> dict[str, torch.Tensor]:
    """Two rows, one of them padded."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(3, VOCABULARY, (2, 9), generator=generator)
    mask = torch.ones_like(tokens)
    mask[1, 6:] = 0
    return {"input_ids": tokens, "attention_mask": mask}


@torch.no_grad()
def states_of(model: Any) -> torch.Tensor:
    """The last hidden states of tokens that are not padding."""
    inputs = inputs_of()
    states: torch.Tensor = model(**inputs).last_hidden_state
    return states[inputs["attention_mask"].bool()]


@torch.no_grad()
def logits_of(model: Any, seed: int = 1) -> torch.Tensor:
    """Those of tokens that are not padding, or of rows."""
    inputs = inputs_of(seed)
    logits = model(**inputs).logits
    return logits[inputs["attention_mask"].bool()] if logits.dim() == 3 else logits


def _rows(linear: Any) -> torch.Tensor:
    return rows_of(linear.weight, type(linear))
