"""The library's own models: find their layers, swap modules, count weights, write a model folder.

No model code is copied: what is done to a model is done to the modules that `transformers` built.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from ds_trainer.files.messages import quoted
from ds_trainer.files.whole_file import content_hash
from ds_trainer.models.loading import as_user_error
from ds_trainer.models.shrunk_model import FIELD, layers_of, sizes_of, whole_class
from ds_trainer.ranks.failures import UserError

AnyLinear: TypeAlias = nn.Linear | Conv1D
"""GPT-2 writes its linear layers as `Conv1D`: the same, with a weight of (in, out)."""


def rows_of(weight: Tensor, kind: type[nn.Module]) -> Tensor:
    """The weight of a linear layer of such a class as (out, in): of a `Conv1D` a view."""
    return weight.t() if issubclass(kind, Conv1D) else weight


def encoder_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The model's layers by name, first to last: the longest `nn.ModuleList` of one class. ValueError without one."""
    layers = layers_of(model)
    if not layers:
        raise UserError(
            f"{type(model).__name__} has no list of equal layers: it is not a transformer this library knows"
        )
    return layers


def encoder_linears(model: nn.Module, patterns: Sequence[str] | None = None) -> dict[str, AnyLinear]:
    """The linear layers inside the model's layers, by name; those that match a pattern, where patterns are given.

    Embeddings, pooler and heads are never among them. A pattern that matches none is a ValueError.
    """
    found = _linears(model)
    if not found:
        raise UserError(f"the layers of {type(model).__name__} hold no linear layer: there is nothing to mask")
    for pattern in patterns or ():
        if not any(fnmatchcase(name, pattern) for name in found):
            raise UserError(
                f'modules: "{pattern}" matches no linear layer of the encoder. Those of the first layer are: '
                + ", ".join(_of_one_layer(model, found))
            )
    if patterns is None:
        return found
    return {name: module for name, module in found.items() if any(fnmatchcase(name, p) for p in patterns)}


def swap(model: nn.Module, modules: Mapping[str, nn.Module]) -> None:
    """Put each module in the place of the one with its name."""
    for name, module in modules.items():
        model.set_submodule(name, module)


@contextlib.contextmanager
def gathered(parameter: Tensor) -> Iterator[Tensor]:
    """The whole parameter, read only, also where ZeRO-3 has partitioned it. Every rank must take part."""
    if not hasattr(parameter, "ds_id"):
        yield parameter.detach()
        return
    import deepspeed

    with deepspeed.zero.GatheredParameters([parameter]):
        yield parameter.detach()


def whole_state_dict(model: nn.Module, keep: bool) -> dict[str, Tensor]:
    """Every parameter and buffer, whole, on the CPU, one gathered at a time; empty where `keep` is false.

    Tied parameters appear under each of their names. Every rank must take part.
    """
    state: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        with gathered(parameter) as values:
            if keep:
                state[name] = values.cpu().clone()
    if keep:
        persistent = model.state_dict(keep_vars=True).keys()
        state |= {name: b.detach().cpu().clone() for name, b in model.named_buffers() if name in persistent}
    return state


def count_weights(model: nn.Module) -> dict[str, Any]:
    """Remaining (non-zero) and total weights of each linear layer of the encoder, of the encoder, of the model.

    The encoder counts the matrices of its linear layers, as papers on pruning do; the model counts every parameter.
    Of a model whose config has `shrunk`: also the `sizes` of its layers, and the totals `before` it was cut.
    """
    layers = {name: _kept(linear.weight) for name, linear in _linears(model).items()}
    total: Counter[str] = Counter(kept=0, total=0)
    for of_layer in layers.values():
        total.update(of_layer)
    everything: Counter[str] = Counter()
    for parameter in model.parameters():
        everything.update(_kept(parameter))
    counts: dict[str, Any] = {"layers": layers, "encoder": dict(total), "model": dict(everything)}
    if getattr(getattr(model, "config", None), FIELD, None):
        counts |= {"sizes": sizes_of(model), "before": whole_totals(model)}
    return counts


def total_weights(model: nn.Module) -> dict[str, Any]:
    """`count_weights` without a line for each matrix, which is more than the report of a folder wants."""
    weights = count_weights(model)
    for counts in (weights, weights.get("before", {})):
        counts.pop("layers", None)
    return weights


def whole_totals(model: Any) -> dict[str, Any]:
    """Weights of each linear layer of the encoder, of the encoder and the model, zeros too; of a shrunk one before."""
    if getattr(model.config, FIELD, None):
        config = copy.deepcopy(model.config)
        delattr(config, FIELD)
        with torch.device("meta"):
            model = whole_class(model)(config)
    layers = {name: linear.weight.numel() for name, linear in _linears(model).items()}
    everything = sum(parameter.numel() for parameter in model.parameters())
    return {"layers": layers, "encoder": sum(layers.values()), "model": everything}


def save_folder(model: Any, tokenizer: Any, folder: Path, finish: Callable[[Path], None] = lambda _: None) -> None:
    """Write a `transformers` folder (safetensors): aside, then finished, then put in its place file by file.

    A shrunk model brings the code that its `auto_map` names. Files of other names that are in the folder stay there.
    `finish`, given the folder aside, may add to it and check it: if it raises, nothing changes.
    """
    aside = folder.with_name(f".{folder.name}.{os.getpid()}")
    try:
        model.save_pretrained(aside)
        tokenizer.save_pretrained(aside)
        finish(aside)
        folder.mkdir(exist_ok=True)
        for path in aside.iterdir():
            path.replace(folder / path.name)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def folder_hash(folder: Path) -> str:
    """Hash of a model folder's config and weights."""
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted([folder / "config.json", *folder.glob("*.safetensors")]):
        digest.update(content_hash(path))
    return digest.hexdigest()


def create_folder(config: Mapping[str, Any], tokenizer: Any, folder: Path, seed: int) -> None:
    """Write the folder of a new model with random weights: a `transformers` config and a trained tokenizer.

    The vocabulary is the tokenizer's where the config does not say more; ValueError where it says less, or describes no
    model, or one that this host cannot hold.
    """
    from transformers import CONFIG_MAPPING, AutoConfig, AutoModel

    kind = config["model_type"]
    if kind not in CONFIG_MAPPING:
        import difflib

        near = difflib.get_close_matches(str(kind), list(CONFIG_MAPPING), n=1)
        raise UserError(
            f"config: model_type {quoted(kind)} is unknown" + (f': did you mean "{near[0]}"?' if near else "")
        )
    if FIELD in config:
        raise UserError(f"config: {FIELD} is written where a trained model is cut: a new one is whole, remove it")
    fields = {"vocab_size": len(tokenizer), **config, "pad_token_id": tokenizer.pad_token_id}
    del fields["model_type"]
    torch.manual_seed(seed)
    with as_user_error(f"config: transformers makes no {kind} model of it"):
        model = AutoModel.from_config(AutoConfig.for_model(kind, **fields))
    embedded = model.get_input_embeddings().num_embeddings
    if embedded < len(tokenizer):
        raise UserError(
            f"config: vocab_size is {embedded}, and the tokenizer has {len(tokenizer)} tokens: raise it or drop it"
        )
    save_folder(model, tokenizer, folder)


def train_tokenizer(texts: Sequence[str], vocab_size: int, lowercase: bool) -> Any:
    """A WordPiece tokenizer in BERT's form, trained on `texts`; the same texts give the same vocabulary."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    special = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
    normalizer, pre_tokenizer = normalizers.BertNormalizer(lowercase=lowercase), pre_tokenizers.BertPreTokenizer()
    words = {word for text in texts for word, _ in pre_tokenizer.pre_tokenize_str(normalizer.normalize_str(text))}
    # The trainer numbers the characters inside words as it meets them, in an order that differs from run to run, and
    # breaks ties of merges by number: told them beforehand, it has nothing left to chance.
    inside = sorted({f"##{character}" for word in words for character in word[1:]})
    learner = Tokenizer(models.WordPiece(unk_token=special["unk"]))
    learner.normalizer, learner.pre_tokenizer = normalizer, pre_tokenizer
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size, special_tokens=[*special.values(), *inside], show_progress=False
    )
    learner.train_from_iterator(texts, trainer)

    ids = learner.get_vocab()
    tokenizer = Tokenizer(models.WordPiece(ids, unk_token=special["unk"]))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizer, pre_tokenizer
    tokenizer.decoder = decoders.WordPiece()
    sep, cls = ((special[name], ids[special[name]]) for name in ("sep", "cls"))
    tokenizer.post_processor = processors.BertProcessing(sep, cls)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
        **{f"{name}_token": token for name, token in special.items()},
    )


def _linears(model: nn.Module) -> dict[str, AnyLinear]:
    return {
        f"{prefix}.{name}": module
        for prefix, layer in encoder_layers(model).items()
        for name, module in layer.named_modules()
        if isinstance(module, AnyLinear)
    }


def _of_one_layer(model: nn.Module, names: Iterable[str]) -> list[str]:
    """Those of the first layer that has any."""
    of_layers = ([name for name in names if name.startswith(f"{layer}.")] for layer in encoder_layers(model))
    return next(filter(None, of_layers), [])


def _kept(weight: Tensor) -> dict[str, int]:
    return {"kept": int(weight.count_nonzero()), "total": weight.numel()}
