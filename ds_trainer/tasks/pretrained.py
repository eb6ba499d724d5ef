"""Model folders and hub names: tokenizer, config and weights, and what is wrong with them, for every kind of head.

Works for every architecture that the `transformers` auto class of a head knows, from safetensors alone.
"""

from __future__ import annotations

import inspect
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    MODEL_FOR_QUESTION_ANSWERING_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)

from ds_trainer import distributed

_POSITION_TABLES = ("position_embeddings", "wpe", "embed_positions")


@dataclass(frozen=True)
class HeadKind:
    """What sits on top of the encoder: its name in messages, and the auto class that builds it."""

    name: str
    auto_class: Any
    mapping: Any

    def trained_in(self, config: Any) -> bool:
        """Whether the folder of this config holds a head of this kind."""
        model_class = self.mapping.get(type(config), None)
        classes = model_class if isinstance(model_class, tuple) else (model_class,)
        return bool({c.__name__ for c in classes if c} & set(config.architectures or []))


CLASSIFIER = HeadKind(
    "sequence classifier", AutoModelForSequenceClassification, MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING
)
ANSWERER = HeadKind("question answering head", AutoModelForQuestionAnswering, MODEL_FOR_QUESTION_ANSWERING_MAPPING)
MASKED_LM = HeadKind("masked language model", AutoModelForMaskedLM, MODEL_FOR_MASKED_LM_MAPPING)
CAUSAL_LM = HeadKind("causal language model", AutoModelForCausalLM, MODEL_FOR_CAUSAL_LM_MAPPING)


def load_tokenizer(source: str | Path) -> Any:
    """The tokenizer of a model folder or hub name; ValueError says why there is none."""
    _check_exists(source)
    try:
        return AutoTokenizer.from_pretrained(str(source))
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"{source} has no tokenizer that transformers can load: {_first_line(error)}") from error


def load_config(source: str | Path, kind: HeadKind) -> Any:
    """The config of a model folder or hub name; ValueError says why no model with such a head comes of it."""
    _check_exists(source)
    if Path(source).is_dir() and not (Path(source) / "config.json").is_file():
        raise ValueError(f"the model folder {source} has no config.json: it is not a transformers model")
    try:
        config = AutoConfig.from_pretrained(str(source))
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"the config of {source} cannot be read: {_first_line(error)}") from error
    if type(config) not in kind.mapping:
        raise ValueError(f"{source} is a {config.model_type} model: transformers has no {kind.name} for it")
    return config


def input_names(config: Any, kind: HeadKind) -> set[str]:
    """The tensors that the model of this config takes; token types only where it tells two texts by them."""
    model_class = kind.mapping[type(config)]
    model_class = model_class[0] if isinstance(model_class, tuple) else model_class
    names = set(inspect.signature(model_class.forward).parameters)
    return names if getattr(config, "type_vocab_size", 0) > 1 else names - {"token_type_ids"}


def from_pretrained(source: str | Path, config: Any, kind: HeadKind, keep_head: bool) -> tuple[Any, dict[str, Any]]:
    folder = Path(source)
    if folder.is_dir() and not any(folder.glob("*.safetensors*")):
        found = ", ".join(sorted(path.name for path in folder.glob("*.bin"))) or "no weights at all"
        raise ValueError(f"the model folder {source} has no .safetensors weights (found: {found})")
    try:
        return kind.auto_class.from_pretrained(
            str(source),
            config=config,
            dtype=torch.float32,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=not keep_head,
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise ValueError(f"the weights of {source} cannot be loaded: {_first_line(error)}") from error


def load_with_head(source: str | Path, kind: HeadKind) -> Any:
    """The model of a folder or hub name with such a head, in fp32, on the CPU. A head that is new is told."""
    config = load_config(source, kind)
    trained = kind.trained_in(config)
    model, info = from_pretrained(source, config, kind, keep_head=trained)
    check_encoder_is_whole(source, model, info)
    if not trained:
        distributed.info(f"{source}: a new head; the model is no {kind.name}")
    return model


def check_encoder_is_whole(source: str | Path, model: Any, info: dict[str, Any]) -> None:
    """Only what sits on top of the encoder (pooler, head) may be new."""
    prefix = f"{model.base_model_prefix}."
    mismatched = {entry[0] for entry in info["mismatched_keys"]}
    new = sorted(
        name for name in {*info["missing_keys"], *mismatched} if name.startswith(prefix) and "pooler" not in name
    )
    if new:
        raise ValueError(
            f"the weights of {source} do not fit its config.json: {len(new)} of the encoder are missing or of "
            f"another shape, {new[0]} the first"
        )


def check_fits(model: Any, vocabulary: int, max_seq_length: int) -> None:
    """Refuse sequences longer than the model has positions for, and tokens it has no embedding for."""
    positions = _positions(model)
    if positions is not None and max_seq_length > positions:
        raise ValueError(f"max_seq_length is {max_seq_length}, and the model has {positions} positions: lower it")
    embeddings = model.get_input_embeddings().num_embeddings
    if vocabulary > embeddings:
        raise ValueError(
            f"the tokenizer has {vocabulary} tokens and the model embeds {embeddings}: they do not belong together"
        )


def pad_token_id(tokenizer: Any) -> int:
    if tokenizer.pad_token_id is None:
        if tokenizer.eos_token_id is None:
            raise ValueError("the tokenizer has neither a padding token nor an end of text: give it a pad_token")
        tokenizer.pad_token = tokenizer.eos_token
    return int(tokenizer.pad_token_id)


def tokenizer_state(tokenizer: Any) -> Any:
    """All that decides what a text becomes. Truncation and padding are left out: calls leave them in the object."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        state: Any = [sorted(tokenizer.get_vocab().items()), repr(sorted(tokenizer.init_kwargs.items(), key=str))]
    else:
        state = json.loads(backend.to_str()) | {"truncation": None, "padding": None}
    return [type(tokenizer).__name__, sorted(tokenizer.model_input_names), tokenizer.truncation_side, state]


def _check_exists(source: str | Path) -> None:
    """A name with at most one slash may be the hub's; anything else must be a folder."""
    name = str(source)
    if not Path(name).is_dir() and (name.count("/") > 1 or name.startswith((".", "/", "~")) or Path(name).exists()):
        raise ValueError(f"the model folder {name} does not exist")


def _positions(model: Any) -> int | None:
    """How long a sequence may be; None where the model only knows relative positions."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and name.rpartition(".")[2] in _POSITION_TABLES:
            # RoBERTa counts from behind its padding index
            return module.num_embeddings - (0 if module.padding_idx is None else module.padding_idx + 1)
    if getattr(model.config, "relative_attention", False):
        return None
    return getattr(model.config, "max_position_embeddings", None)


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
