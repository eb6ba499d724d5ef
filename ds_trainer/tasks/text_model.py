"""Sequence classifiers of `transformers`: load one with the head a task needs, and tell what is wrong with a folder.

Works for every architecture that `AutoModelForSequenceClassification` knows, from safetensors alone.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import (
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)

from ds_trainer import distributed

_POSITION_TABLES = ("position_embeddings", "wpe", "embed_positions")


def load_tokenizer(source: str | Path) -> Any:
    """The tokenizer of a model folder or hub name; ValueError says why there is none."""
    _check_exists(source)
    try:
        return AutoTokenizer.from_pretrained(str(source))
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"{source} has no tokenizer that transformers can load: {_first_line(error)}") from error


def load_config(source: str | Path) -> Any:
    """The config of a model folder or hub name; ValueError says why it is none of a sequence classifier."""
    _check_exists(source)
    if Path(source).is_dir() and not (Path(source) / "config.json").is_file():
        raise ValueError(f"the model folder {source} has no config.json: it is not a transformers model")
    try:
        config = AutoConfig.from_pretrained(str(source))
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"the config of {source} cannot be read: {_first_line(error)}") from error
    if type(config) not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        raise ValueError(f"{source} is a {config.model_type} model: transformers has no sequence classifier for it")
    return config


def trained_head(config: Any) -> tuple[str, ...] | None:
    """The class names, in order, of the classifier that a folder holds; None for a model without one."""
    architectures = config.architectures or []
    if not any(name.endswith("ForSequenceClassification") for name in architectures):
        return None
    return tuple(str(config.id2label[index]) for index in range(config.num_labels))


def label_order(task_labels: Sequence[str], head: Sequence[str] | None) -> tuple[str, ...]:
    """The task's labels in the order of a trained head that has the same ones; in their own order otherwise."""
    by_name = {_folded(name): name for name in task_labels}
    if head is None or len(head) != len(task_labels) or {_folded(name) for name in head} != set(by_name):
        return tuple(task_labels)
    return tuple(by_name[_folded(name)] for name in head)


def unnamed(head: Sequence[str]) -> bool:
    """Whether the classes carry the placeholders of transformers, LABEL_0 and so on."""
    return all(re.fullmatch(r"LABEL_\d+", name) for name in head)


def takes_token_types(config: Any) -> bool:
    """Whether a second text is told to the model by token types, whatever the tokenizer gives."""
    forward = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING[type(config)].forward
    return getattr(config, "type_vocab_size", 0) > 1 and "token_type_ids" in inspect.signature(forward).parameters


def load_model(source: str | Path, labels: Sequence[str], pad_token_id: int) -> nn.Module:
    """A sequence classifier over `labels` in this order (none: regression), in fp32.

    A trained head of the same classes is kept, its rows put in this order; so is one with as many classes of other
    names, with a warning. One with another number of classes is replaced.
    """
    config = load_config(source)
    head = trained_head(config)
    size = max(1, len(labels))
    _configure(config, labels, pad_token_id)
    keep = head is not None and len(head) == size
    model, info = _from_pretrained(source, config, keep)
    _check_encoder_is_whole(source, model, info)
    if head is None or not keep:
        _tell_new_head(source, head, size)
    elif labels:
        _adopt_head(source, model, head, labels)
    return model


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


def _check_exists(source: str | Path) -> None:
    """A name with at most one slash may be the hub's; anything else must be a folder."""
    name = str(source)
    if not Path(name).is_dir() and (name.count("/") > 1 or name.startswith((".", "/", "~")) or Path(name).exists()):
        raise ValueError(f"the model folder {name} does not exist")


def _configure(config: Any, labels: Sequence[str], pad_token_id: int) -> None:
    config.num_labels = max(1, len(labels))
    if labels:
        config.id2label = dict(enumerate(labels))
        config.label2id = {name: index for index, name in enumerate(labels)}
    config.problem_type = "single_label_classification" if labels else "regression"
    if config.pad_token_id is None:
        config.pad_token_id = pad_token_id


def _from_pretrained(source: str | Path, config: Any, keep_head: bool) -> tuple[Any, dict[str, Any]]:
    folder = Path(source)
    if folder.is_dir() and not any(folder.glob("*.safetensors*")):
        found = ", ".join(sorted(path.name for path in folder.glob("*.bin"))) or "no weights at all"
        raise ValueError(f"the model folder {source} has no .safetensors weights (found: {found})")
    try:
        return AutoModelForSequenceClassification.from_pretrained(
            str(source),
            config=config,
            dtype=torch.float32,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=not keep_head,
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise ValueError(f"the weights of {source} cannot be loaded: {_first_line(error)}") from error


def _check_encoder_is_whole(source: str | Path, model: Any, info: dict[str, Any]) -> None:
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


def _tell_new_head(source: str | Path, head: Sequence[str] | None, size: int) -> None:
    why = "has none" if head is None else f"has one of {len(head)} classes ({', '.join(head)})"
    distributed.info(f"{source}: a new head of {size} output{'s' if size > 1 else ''}; the model {why}")


def _adopt_head(source: str | Path, model: Any, head: Sequence[str], labels: Sequence[str]) -> None:
    folded = [_folded(name) for name in head]
    wanted = [_folded(name) for name in labels]
    if sorted(folded) != sorted(wanted):
        names = "are unnamed" if unnamed(head) else f"are {', '.join(head)}"
        distributed.warn(f"{source}: the head's classes {names}; they are taken for {', '.join(labels)}, in order")
    elif folded != wanted:
        _reorder(model, [folded.index(name) for name in wanted])


@torch.no_grad()
def _reorder(model: Any, order: Sequence[int]) -> None:
    """Permute the outputs of the classifier's last linear layer."""
    prefix = f"{model.base_model_prefix}."
    heads = [
        module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and not name.startswith(prefix) and module.out_features == len(order)
    ]
    assert heads, f"{type(model).__name__} has no linear head"
    last, rows = heads[-1], list(order)
    last.weight.copy_(last.weight[rows].clone())
    if last.bias is not None:
        last.bias.copy_(last.bias[rows].clone())


def _positions(model: Any) -> int | None:
    """How long a sequence may be; None where the model only knows relative positions."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and name.rpartition(".")[2] in _POSITION_TABLES:
            # RoBERTa counts from behind its padding index
            return module.num_embeddings - (0 if module.padding_idx is None else module.padding_idx + 1)
    if getattr(model.config, "relative_attention", False):
        return None
    return getattr(model.config, "max_position_embeddings", None)


def _folded(name: str) -> str:
    return re.sub(r"[\s_-]+", "_", name.casefold())


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
