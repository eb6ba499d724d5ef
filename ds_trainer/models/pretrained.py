"""Model folders and hub names: tokenizer, config and weights, and what is wrong with them, for every kind of head.

Works for every architecture that the `transformers` auto class of a head knows, from safetensors alone. A folder may
come from anywhere: what is told of it is one ValueError, and what it asks for beyond its own weights is not allocated.
`trust.py` says what else the user permits: code that a config names, and pickles, which are read as weights only.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
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
from transformers.dynamic_module_utils import get_class_from_dynamic_module

from ds_trainer.config.trust import trust_in_force
from ds_trainer.models.compact import unpacked
from ds_trainer.models.layers import FIELD
from ds_trainer.models.loading import check_cut, most_allocated, told
from ds_trainer.models.model_folder import (
    config_mistakes,
    folder_mistakes,
    has_safetensors,
    held_weights,
    is_compact,
    text_mistakes,
)
from ds_trainer.models.shrink import shrunk_class
from ds_trainer.ranks import distributed
from ds_trainer.ranks.failures import UserError

_NOT_OF_ANY_TEXT = ("big_bird", "bigbird_pegasus", "canine", "funnel", "longformer")
"""Models that fail at a text of two tokens, or are set to another kind of attention by it for good."""
_POSITION_TABLES = ("position_embeddings", "wpe", "embed_positions")


@dataclass(frozen=True)
class HeadKind:
    """What sits on top of the encoder: its name in messages, and the auto class that builds it."""

    name: str
    auto_class: Any
    mapping: Any
    others: frozenset[str] = frozenset()
    """Further classes that hold such a head, beside another one."""

    def trained_in(self, config: Any) -> bool:
        """Whether this config says that its folder holds a head of this kind; loading tells whether it does."""
        model_class = self.mapping.get(type(config), None)
        classes = model_class if isinstance(model_class, tuple) else (model_class,)
        return bool(({c.__name__ for c in classes if c} | self.others) & set(config.architectures or []))


CLASSIFIER = HeadKind(
    "sequence classifier", AutoModelForSequenceClassification, MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING
)
ANSWERER = HeadKind("question answering head", AutoModelForQuestionAnswering, MODEL_FOR_QUESTION_ANSWERING_MAPPING)
_WITH_SENTENCE_HEAD = frozenset(
    f"{family}ForPreTraining" for family in ("Albert", "Bert", "BigBird", "Ernie", "FNet", "MegatronBert", "MobileBert")
)  # not Electra, whose pre-training has a discriminator
MASKED_LM = HeadKind(
    "masked language model", AutoModelForMaskedLM, MODEL_FOR_MASKED_LM_MAPPING, others=_WITH_SENTENCE_HEAD
)
CAUSAL_LM = HeadKind("causal language model", AutoModelForCausalLM, MODEL_FOR_CAUSAL_LM_MAPPING)


def load_tokenizer(source: str | Path) -> Any:
    """The tokenizer of a model folder or hub name; ValueError says why there is none."""
    _check_exists(source)
    _tell(text_mistakes(Path(source), trust_in_force()) if os.path.isdir(source) else [])
    what = f"{source} has no tokenizer that transformers can load"
    trusted = trust_in_force().trust_remote_code
    tokenizer = told(what, lambda: AutoTokenizer.from_pretrained(str(source), trust_remote_code=trusted))
    added = {str(token) for token in tokenizer.added_tokens_decoder.values()}
    if not tokenizer.get_vocab().keys() - added - set(tokenizer.all_special_tokens):
        # what transformers makes of a folder without one: every text is unknown to it
        raise UserError(f"{what}: it has no words, as where its files (tokenizer.json, vocab.txt, ...) are missing")
    return tokenizer


def load_config(source: str | Path, kind: HeadKind) -> Any:
    """The config of a model folder or hub name; ValueError says why no model with such a head comes of it."""
    config = _config(source)
    _learn_own_class(source, config, kind)
    if type(config) not in kind.mapping:
        raise UserError(f"{source} is a {config.model_type} model: transformers has no {kind.name} for it")
    return config


def _config(source: str | Path) -> Any:
    _check_exists(source)
    _tell(config_mistakes(Path(source), trust_in_force()) if os.path.isdir(source) else [])
    return told(
        f"the config of {source} cannot be read",
        lambda: AutoConfig.from_pretrained(str(source), trust_remote_code=trust_in_force().trust_remote_code),
    )


def _tell(mistakes: list[str]) -> None:
    if mistakes:
        raise UserError("\n".join(mistakes))


def _learn_own_class(source: str | Path, config: Any, kind: HeadKind) -> None:
    """Have transformers know the class that the folder's own code has for a head, if the user trusts that code."""
    own = getattr(config, "auto_map", None) or {}
    name = own.get(kind.auto_class.__name__) if isinstance(own, dict) else None
    if name is None or type(config) in kind.mapping or not trust_in_force().trust_remote_code:
        return
    model_class = told(
        f"the code of {source} cannot be loaded", lambda: get_class_from_dynamic_module(name, str(source))
    )
    kind.auto_class.register(type(config), model_class, exist_ok=True)


def input_names(config: Any, kind: HeadKind) -> set[str]:
    """The tensors that the model of this config takes; token types only where it tells two texts by them."""
    model_class = kind.mapping[type(config)]
    model_class = model_class[0] if isinstance(model_class, tuple) else model_class
    names = set(inspect.signature(model_class.forward).parameters)
    return names if getattr(config, "type_vocab_size", 0) > 1 else names - {"token_type_ids"}


def from_pretrained(source: str | Path, config: Any, kind: HeadKind, keep_head: bool) -> tuple[Any, dict[str, Any]]:
    """The model in fp32, and what loading found missing or mismatched; with `keep_head` a mismatch is an error.

    A config that asks for more than its weights can fill, or than this host can hold, is a ValueError before any of it
    is allocated. Weights may be in a compact file.
    """
    if not is_compact(Path(source)):
        return _from_whole(source, config, kind, keep_head)
    with unpacked(Path(source)) as whole:
        return _from_whole(whole, config, kind, keep_head)


def _from_whole(source: str | Path, config: Any, kind: HeadKind, keep_head: bool) -> tuple[Any, dict[str, Any]]:
    folder, trust = Path(source), trust_in_force()
    is_folder = folder.is_dir()
    _tell(folder_mistakes(folder, trust) if is_folder else [])
    held = held_weights(folder) if is_folder else None
    safetensors = has_safetensors(folder) if is_folder else not trust.allow_pickle
    what, shrunk = f"the weights of {source} cannot be loaded", _shrunk_class(config, kind)
    if shrunk is not None:
        told(what, lambda: check_cut(str(source), held, lambda: shrunk(copy.deepcopy(config))))
    # which is built whole at first: not by its numbers then
    with contextlib.nullcontext() if shrunk else most_allocated(str(source), held):
        return told(
            what,
            lambda: (shrunk or kind.auto_class).from_pretrained(
                str(source),
                config=config,
                dtype=torch.float32,
                use_safetensors=True if safetensors else None,
                weights_only=True,
                trust_remote_code=trust.trust_remote_code,
                output_loading_info=True,
                ignore_mismatched_sizes=not keep_head,
            ),
        )


def _shrunk_class(config: Any, kind: HeadKind) -> Any:
    """Ours, for a config with sizes of layers that were cut, of a family of transformers; never that of the folder."""
    if getattr(config, FIELD, None) is None or not type(config).__module__.startswith("transformers."):
        return None
    base = kind.mapping[type(config)]
    return shrunk_class(base[0] if isinstance(base, tuple) else base)


def load_with_head(source: str | Path, kind: HeadKind) -> Any:
    """The model of a folder or hub name with such a head, in fp32, on the CPU. A head that is new is told.

    ValueError where the config claims a trained one, and the weights do not hold all of it.
    """
    config = load_config(source, kind)
    # mismatches are told by their names, below
    model, info = from_pretrained(source, config, kind, keep_head=False)
    check_encoder_is_whole(source, model, info)
    if kind.trained_in(config):
        check_head_is_whole(source, model, info)
    else:
        distributed.info(f"{source}: a new head; the model is no {kind.name}")
    _check_runs(source, model, kind)
    return model


@torch.no_grad()
def _check_runs(source: str | Path, model: Any, kind: HeadKind) -> None:
    """Refuse a model whose weights fit its config, and which fails at any input all the same."""
    if model.config.model_type in _NOT_OF_ANY_TEXT:
        return
    was_training = model.training
    model.eval()
    # an end of text, which encoder-decoders look for to pool it
    end = getattr(model.config, "eos_token_id", None)
    tokens = torch.tensor([[0, end if isinstance(end, int) and 0 <= end < _embedded(model) else 0]])
    given = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    names = input_names(model.config, kind)
    with torch.random.fork_rng(devices=[]):  # Reformer's attention draws numbers outside of training, too
        told(
            f"the model of {source} cannot be run",
            lambda: model(**{name: value for name, value in given.items() if name in names}),
        )
    model.train(was_training)


def _embedded(model: Any) -> int:
    return int(model.get_input_embeddings().num_embeddings)


def load_trained(source: str | Path) -> Any:
    """The model of a folder or hub name with the head that it was trained with, in fp32, on the CPU."""
    kinds = (CLASSIFIER, ANSWERER, MASKED_LM, CAUSAL_LM)
    config = _config(source)
    for kind in kinds:
        _learn_own_class(source, config, kind)
        if type(config) in kind.mapping and kind.trained_in(config):
            return load_with_head(source, kind)
    raise UserError(f"{source} holds no trained {', '.join(kind.name for kind in kinds[:-1])} or {kinds[-1].name}")


def check_encoder_is_whole(source: str | Path, model: Any, info: dict[str, Any]) -> None:
    """Only what sits on top of the encoder (pooler, head) may be new; a cut one leaves nothing over."""
    prefix = f"{model.base_model_prefix}."
    new = [name for name in _new_weights(info) if name.startswith(prefix) and "pooler" not in name]
    if new:
        raise UserError(
            f"the weights of {source} do not fit its config.json: {len(new)} of the encoder are missing or of "
            f"another shape, {new[0]} the first"
        )
    over = sorted(name for name in info["unexpected_keys"] if name.startswith(prefix) and "pooler" not in name)
    if over and getattr(model.config, FIELD, None):
        raise UserError(
            f"the weights of {source} do not fit its config.json: {len(over)} of the encoder have no place in it, "
            f"{over[0]} the first"
        )


def check_head_is_whole(source: str | Path, model: Any, info: dict[str, Any]) -> None:
    """Refuse a head that the config claims is trained and the weights hold in part or not at all."""
    prefix = f"{model.base_model_prefix}."
    new = [name for name in _new_weights(info) if not name.startswith(prefix)]
    if new:
        architecture = next(iter(model.config.architectures or []), type(model).__name__)
        raise UserError(
            f"the weights of {source} lack what its config.json claims: {', '.join(new)} of the head are missing or "
            f'of another shape. Give a folder that holds them, or take {architecture} out of "architectures" in '
            f"config.json to start with a new head"
        )


def _new_weights(info: dict[str, Any]) -> list[str]:
    """The weights that loading left random, by name; tied ones are not among them."""
    return sorted({*info["missing_keys"], *(entry[0] for entry in info["mismatched_keys"])})


def check_fits(model: Any, tokenizer: Any, max_seq_length: int) -> None:
    """Refuse sequences longer than the model has positions for, and tokens it has no embedding for."""
    positions = positions_of(model)
    if positions is not None and max_seq_length > positions:
        raise UserError(f"max_seq_length is {max_seq_length}, and the model has {positions} positions: lower it")
    embeddings = _embedded(model)
    largest = max(tokenizer.get_vocab().values())
    if largest >= embeddings:
        raise UserError(
            f"the tokenizer's largest token id is {largest} and the model embeds {embeddings} tokens, from 0: they do "
            f"not belong together"
        )


def pad_token_id(tokenizer: Any) -> int:
    if tokenizer.pad_token_id is None:
        if tokenizer.eos_token_id is None:
            raise UserError("the tokenizer has neither a padding token nor an end of text: give it a pad_token")
        tokenizer.pad_token = tokenizer.eos_token
    return int(tokenizer.pad_token_id)


def tokenizer_state(tokenizer: Any) -> Any:
    """All that decides what a text becomes. Truncation and padding are left out: calls leave them in the object."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        state: Any = [sorted(tokenizer.get_vocab().items()), repr(sorted(tokenizer.init_kwargs.items(), key=str))]
    else:
        state = json.loads(backend.to_str()) | {"truncation": None, "padding": None}
    # not all of them are in the backend: which token ends a text, say, which decides how documents are closed
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    return [type(tokenizer).__name__, sorted(tokenizer.model_input_names), tokenizer.truncation_side, special, state]


def _check_exists(source: str | Path) -> None:
    """A name with at most one slash may be the hub's; anything else must be a folder."""
    name = str(source)
    # os.path, since pathlib raises where a name is too long to be one
    if not os.path.isdir(name) and (name.count("/") > 1 or name.startswith((".", "/", "~")) or os.path.exists(name)):
        raise UserError(f"the model folder {name} does not exist")


def positions_of(model: Any) -> int | None:
    """How long a sequence may be; None where the model only knows relative positions."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and name.rpartition(".")[2] in _POSITION_TABLES:
            # RoBERTa counts from behind its padding index
            return module.num_embeddings - (0 if module.padding_idx is None else module.padding_idx + 1)
    if getattr(model.config, "relative_attention", False):
        return None
    limit = getattr(model.config, "max_position_embeddings", None)
    return limit if limit is None or limit > 0 else None  # XLNet says -1
