"""Load tokenizers, configs and models from folders or the hub, for every kind of head, from safetensors.

A folder may come from anywhere. Each fault in it is one UserError that names the folder, and weights that are missing
or do not fit the config are never replaced by random ones in silence. By default no code of a folder is run and no
pickle is read; `recipe/jobs.py` describes how a user permits them.
"""

import inspect
import json
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers.dynamic_module_utils import get_class_from_dynamic_module

from ds_trainer.files.reading import folder_hash
from ds_trainer.models.compact import read_compact
from ds_trainer.models.folders import (
    COMPACT_FILE,
    as_user_error,
    check_folder,
    has_safetensors,
    is_compact,
    is_hub_name,
    read_config,
)
from ds_trainer.models.layers import FIELD
from ds_trainer.models.sentence_files import has_sentence_files
from ds_trainer.models.shrunk_model import PREFIX, shrunk_class
from ds_trainer.ranks import distributed
from ds_trainer.ranks.failures import UserError
from ds_trainer.recipe.jobs import trust_in_force

_POSITION_TABLES = ("position_embeddings", "wpe", "embed_positions")


@dataclass(frozen=True)
class HeadKind:
    """What sits on top of the encoder: its name in messages, and the auto class that builds it."""

    name: str
    auto_class: Any
    mapping: Any
    """From config class to model class, or to several."""
    others: frozenset[str] = frozenset()
    """Further classes that hold such a head beside another one."""

    def classes(self, config: Any) -> tuple[Any, ...]:
        """The classes that hold such a head for a config; none where transformers has none."""
        known = self.mapping.get(type(config), ())
        return known if isinstance(known, tuple) else (known,)

    def trained_in(self, config: Any) -> bool:
        """Return whether this config claims that its folder holds a trained head of this kind."""
        names = self.others | {known.__name__ for known in self.classes(config)}
        return not names.isdisjoint(config.architectures or [])


def _kind(name: str, auto_class: Any, others: Iterable[str] = ()) -> HeadKind:
    return HeadKind(name, auto_class, auto_class._model_mapping, frozenset(others))


HEADLESS = _kind("model without a head", transformers.AutoModel)
CLASSIFIER = _kind("sequence classifier", transformers.AutoModelForSequenceClassification)
ANSWERER = _kind("question answering head", transformers.AutoModelForQuestionAnswering)
# pre-training adds a sentence head in these families; Electra's has a discriminator, and is none of them
_PRE_TRAINED = ("Albert", "Bert", "BigBird", "Ernie", "FNet", "MegatronBert", "MobileBert")
MASKED_LM = _kind(
    "masked language model", transformers.AutoModelForMaskedLM, (f"{name}ForPreTraining" for name in _PRE_TRAINED)
)
CAUSAL_LM = _kind("causal language model", transformers.AutoModelForCausalLM)
TOKEN_CLASSIFIER = _kind("token classifier", transformers.AutoModelForTokenClassification)
TRAINED = (CLASSIFIER, ANSWERER, MASKED_LM, CAUSAL_LM, TOKEN_CLASSIFIER, HEADLESS)
"""The heads that this library trains; a model without one gives embeddings."""


def load_tokenizer(source: str | Path) -> Any:
    """Load the tokenizer of a model folder or hub name; UserError says why there is none."""
    _check_folder(source)
    what = f"{source} has no tokenizer that transformers can load"
    with as_user_error(what):
        trusted = trust_in_force().trust_remote_code
        tokenizer = transformers.AutoTokenizer.from_pretrained(str(source), trust_remote_code=trusted)
        added = {str(token) for token in tokenizer.added_tokens_decoder.values()}
        words = tokenizer.get_vocab().keys() - added - set(tokenizer.all_special_tokens)
    if not words:  # transformers makes such a tokenizer of a folder without one
        raise UserError(f"{what}: it has no words, as where its files (tokenizer.json, vocab.txt, ...) are missing")
    return tokenizer


def load_config(source: str | Path, kind: HeadKind) -> Any:
    """Load the config of a model folder or hub name; UserError where no model with such a head can be made of it."""
    config = _load_any_config(source)
    _learn_own_class(source, config, kind)
    if type(config) not in kind.mapping:
        raise UserError(f"{source} is a {config.model_type} model: transformers has no {kind.name} for it")
    return config


def dtype_of(source: str | Path) -> torch.dtype:
    """Return the precision of a folder's weights; fp32 for compact ones, since no narrower type holds them all."""
    dtype = None if is_compact(Path(source)) else _load_any_config(source).dtype
    return dtype if isinstance(dtype, torch.dtype) else torch.float32


def identity_of(source: str | Path) -> str:
    """Return a hash of a model folder's files, or the commit of a hub name's: what is made of it stands for these."""
    if not is_hub_name(str(source)):
        return folder_hash(Path(source))
    commit: str | None = getattr(_load_any_config(source), "_commit_hash", None)
    if commit is None:
        raise UserError(f"the hub does not report the version of {source}: give a folder")
    return commit


def input_names(config: Any, kind: HeadKind) -> set[str]:
    """Return the names of the tensors that the model takes; token types only where it tells two texts apart by them."""
    names = set(inspect.signature(kind.classes(config)[0].forward).parameters)
    return names if getattr(config, "type_vocab_size", 0) > 1 else names - {"token_type_ids"}


def from_pretrained(source: str | Path, config: Any, kind: HeadKind) -> tuple[Any, dict[str, Any]]:
    """Build the model of a folder or hub name in fp32 on the CPU; returns it and transformers' loading info.

    Weights that are missing or do not fit are random, and listed in the info: every caller must check it, by
    `unfilled_weights`. Weights may be in a compact file.
    """
    folder, trust = Path(source), trust_in_force()
    is_folder = not is_hub_name(str(source))
    if is_folder:
        check_folder(folder, trust)
    options = {
        "config": config,
        "dtype": torch.float32,
        "weights_only": True,
        "output_loading_info": True,
        "ignore_mismatched_sizes": True,
    }
    model_class = _shrunk_class(config, kind)
    with as_user_error(f"the weights of {source} cannot be loaded"):
        if is_folder and is_compact(folder):
            # without a name transformers takes the config and these weights as they are
            state = read_compact(folder / COMPACT_FILE)
            model, info = (model_class or kind.classes(config)[0]).from_pretrained(None, state_dict=state, **options)
            if model.can_generate() and (folder / "generation_config.json").is_file():
                model.generation_config = transformers.GenerationConfig.from_pretrained(folder)
            return model, info
        safe_alone = has_safetensors(folder) if is_folder else not trust.allow_pickle
        model, info = (model_class or kind.auto_class).from_pretrained(
            str(source),
            use_safetensors=True if safe_alone else None,
            trust_remote_code=trust.trust_remote_code,
            **options,
        )
    return model, info


def load_with_head(source: str | Path, kind: HeadKind) -> Any:
    """Load the model of a folder or hub name with such a head, in fp32, on the CPU. A new head is logged.

    UserError where the config claims a trained head, and the weights do not hold all of it.
    """
    config = load_config(source, kind)
    model, info = from_pretrained(source, config, kind)
    check_encoder_is_whole(source, model, info)
    if kind is HEADLESS and getattr(model, "pooler", None) is not None:
        model.pooler = None  # its tanh is for classifiers: no embedding is made by it
    if kind.trained_in(config):
        check_head_is_whole(source, model, info)
    elif kind is not HEADLESS:
        distributed.info_once(f"{source}: a new head; the model is no {kind.name}")
    return model


def load_trained(source: str | Path) -> Any:
    """Load the model of a folder or hub name with the head that it was trained with, in fp32, on the CPU."""
    if not is_hub_name(str(source)) and has_sentence_files(source):
        return load_with_head(source, HEADLESS)  # whichever head its config names
    config = _load_any_config(source)
    for kind in TRAINED:
        _learn_own_class(source, config, kind)
        if type(config) in kind.mapping and kind.trained_in(config):
            return load_with_head(source, kind)
    raise UserError(f"{source} holds no trained {', '.join(kind.name for kind in TRAINED[:-1])} or {TRAINED[-1].name}")


def unfilled_weights(info: dict[str, Any]) -> list[str]:
    """Return the names of the weights that are random, since they are missing in the folder or of another shape."""
    return sorted({*info["missing_keys"], *(entry[0] for entry in info["mismatched_keys"])})


def check_encoder_is_whole(source: str | Path, model: Any, info: dict[str, Any]) -> None:
    """Refuse weights that do not fill the encoder: only what sits on top of it (pooler, head) may be new.

    The weights of a shrunk model must also all have a place in it.
    """
    prefix = _prefix_of(model)
    over = info["unexpected_keys"] if getattr(model.config, FIELD, None) else []
    for names, fault in ((unfilled_weights(info), "are missing or of another shape"), (over, "have no place in it")):
        wrong = sorted(name for name in names if name.startswith(prefix) and "pooler" not in name)
        if wrong:
            raise UserError(
                f"the weights of {source} do not fit its config.json: {len(wrong)} of the encoder {fault}, {wrong[0]} "
                f"the first"
            )


def check_head_is_whole(source: str | Path, model: Any, info: dict[str, Any]) -> None:
    """Refuse a head that the config claims is trained and the weights hold in part or not at all."""
    prefix = _prefix_of(model)
    new = [name for name in unfilled_weights(info) if not name.startswith(prefix)]
    if new:
        architecture = next(iter(model.config.architectures or []), type(model).__name__)
        raise UserError(
            f"the weights of {source} lack what its config.json claims: {', '.join(new)} of the head are missing or "
            f'of another shape. Give a folder that holds them, or take {architecture} out of "architectures" in '
            f"config.json to start with a new head"
        )


def _prefix_of(model: Any) -> str:
    """Return with what the names of the encoder's weights begin: with nothing where the model is the encoder."""
    prefix = model.base_model_prefix
    return f"{prefix}." if hasattr(model, prefix) else ""


def check_fits(model: Any, tokenizer: Any, max_seq_length: int) -> None:
    """Refuse sequences longer than the model has positions for, and tokens it has no embedding for."""
    positions = positions_of(model)
    if positions is not None and max_seq_length > positions:
        raise UserError(f"max_seq_length is {max_seq_length}, and the model has {positions} positions: lower it")
    embeddings = int(model.get_input_embeddings().num_embeddings)
    largest = max(tokenizer.get_vocab().values())
    if largest >= embeddings:
        raise UserError(
            f"the tokenizer's largest token id is {largest} and the model embeds {embeddings} tokens, from 0: they do "
            f"not belong together"
        )


def default_length(tokenizer: Any, config: Any, most: int | None = 512) -> int:
    """Return the tokens at which a model's texts are cut where nothing else says it: as many as it takes, or `most`."""
    positions = getattr(config, "max_position_embeddings", None)
    known = [length for length in (tokenizer.model_max_length, positions, most) if length and 0 < length < 10**9]
    return int(min(known, default=512))  # a tokenizer without a limit has an immense one


def pad_token_id(tokenizer: Any) -> int:
    """Return the id of the padding token; a tokenizer without one pads with its end of text from then on."""
    if tokenizer.pad_token_id is None:
        if tokenizer.eos_token_id is None:
            raise UserError("the tokenizer has neither a padding token nor an end of text: give it a pad_token")
        tokenizer.pad_token = tokenizer.eos_token
    return int(tokenizer.pad_token_id)


def set_padding(model: Any, token: int) -> None:
    """Name a padding token where the config has none: without one, a decoder classifies only one text at a time."""
    if model.config.pad_token_id is None:
        model.config.pad_token_id = token


def tokenizer_state(tokenizer: Any) -> Any:
    """All that decides which tokens a text becomes, as JSON; not truncation and padding, which every call changes."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:  # merges, for example, are in its files alone
        with tempfile.TemporaryDirectory() as folder:
            tokenizer.save_pretrained(folder)
            state: Any = folder_hash(Path(folder))
    else:
        state = json.loads(backend.to_str()) | {"truncation": None, "padding": None}
    # the backend does not hold all of them: the token that ends a text, for example, decides how documents are closed
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    return [type(tokenizer).__name__, sorted(tokenizer.model_input_names), tokenizer.truncation_side, special, state]


def positions_of(model: Any) -> int | None:
    """Return the number of tokens that a sequence may have; None where the model only knows relative positions."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and name.rpartition(".")[2] in _POSITION_TABLES:
            # RoBERTa counts from behind its padding index
            return module.num_embeddings - (0 if module.padding_idx is None else module.padding_idx + 1)
    if getattr(model.config, "relative_attention", False):
        return None
    limit = getattr(model.config, "max_position_embeddings", None)
    return limit if limit is None or limit > 0 else None  # XLNet has -1


def _load_any_config(source: str | Path) -> Any:
    _check_folder(source)
    hub = is_hub_name(str(source))
    what = "is no folder here, and no model that the hub gives" if hub else "has a config that cannot be read"
    with as_user_error(f"{source} {what}"):
        trusted = trust_in_force().trust_remote_code
        config = transformers.AutoConfig.from_pretrained(str(source), trust_remote_code=trusted)
    if getattr(config, FIELD, None):  # its class is named so that no other program takes it for a whole model
        config.architectures = [str(name).removeprefix(PREFIX) for name in config.architectures or []]
    return config


def _check_folder(source: str | Path) -> None:
    """Refuse a folder without a sound config; hub names are looked up by transformers."""
    if not is_hub_name(str(source)):
        read_config(Path(source), trust_in_force())


def _learn_own_class(source: str | Path, config: Any, kind: HeadKind) -> None:
    """Register the class for a head that is defined by code in the folder, if the user trusts that code."""
    name = (getattr(config, "auto_map", None) or {}).get(kind.auto_class.__name__)
    if name is None or type(config) in kind.mapping or not trust_in_force().trust_remote_code:
        return
    with as_user_error(f"the code of {source} cannot be loaded"):
        model_class = get_class_from_dynamic_module(name, str(source))
    kind.auto_class.register(type(config), model_class, exist_ok=True)


def _shrunk_class(config: Any, kind: HeadKind) -> Any:
    """Return the class of `shrunk_model.py` for a config with sizes of layers that were cut, None for any other config.

    The folder's copy of that file is never run.
    """
    if getattr(config, FIELD, None) is None or not type(config).__module__.startswith("transformers."):
        return None
    return shrunk_class(kind.classes(config)[0])
