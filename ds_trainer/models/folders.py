"""Model folders: judge one by its files alone, write one, make one for a new model, train its tokenizer.

The checks of files run before torch is loaded, so that a missing folder or a file that was cut short is reported at
once. Weights are safetensors unless the user permits pickles, and a config that names code is refused unless the user
permits that code. Whether the weights fit the config shows when the model is built, in `pretrained.py`.
"""

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import safe_open

from ds_trainer.files.messages import listed, quoted
from ds_trainer.files.reading import read_value
from ds_trainer.files.writing import move_files
from ds_trainer.ranks.failures import UserError, first_line
from ds_trainer.recipe.jobs import Trust
from ds_trainer.recipe.saved_checkpoint import CHECKPOINT

COMPACT_FILE = "model.compact.safetensors"
"""The weights of a compact folder, which `compact.py` writes and reads."""
_SAFE, _PICKLE, _INDEX = "model.safetensors", "pytorch_model.bin", ".index.json"
_KERNEL_FIELDS = {"attn_implementation", "_attn_implementation", "experts_implementation", "_experts_implementation"}


@contextlib.contextmanager
def as_user_error(what: str) -> Iterator[None]:
    """Turn every error raised inside into a `UserError`: `what`, a colon, and the first line of the cause.

    This is the boundary around what other libraries do with the files of a folder: transformers takes these at their
    word in hundreds of places, and fails in each with another error.
    """
    try:
        yield
    except BaseException as error:
        # a panic inside the Rust code of tokenizers is no Exception
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        cause = first_line(error)[:300]
        if not (cause and isinstance(error, OSError | ValueError)):
            cause = f"{type(error).__name__}: {cause}".removesuffix(": ")
        if "trust_remote_code=True" in str(error):
            cause += "; give --trust_remote_code if you trust it"
        raise UserError(f"{what}: {cause}") from error


def save_folder(model: Any, tokenizer: Any, folder: Path, finish: Callable[[Path], None] = lambda _: None) -> None:
    """Write a `transformers` folder (safetensors) beside its place first, then move it there file by file.

    A shrunk model brings the code that its `auto_map` names. Files of other names that the folder has stay. `finish`,
    called with the folder beside its place, may add to it and check it: if it raises, nothing changes.
    """
    aside = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    try:
        model.save_pretrained(aside)
        if backend := getattr(tokenizer, "backend_tokenizer", None):
            # tokenising sets both: the file would depend on whether the data came from the cache
            backend.no_truncation()
            backend.no_padding()
        tokenizer.save_pretrained(aside)
        finish(aside)
        folder.mkdir(exist_ok=True)
        move_files(aside, folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def create_folder(config: Mapping[str, Any], tokenizer: Any, folder: Path, seed: int) -> None:
    """Write the folder of a new model with random weights, from a `transformers` config and a trained tokenizer.

    The vocabulary is the tokenizer's unless the config sets a larger one. UserError where it sets a smaller one, or
    describes no model.
    """
    import torch
    from transformers import AutoConfig, AutoModel

    from ds_trainer.models.shrunk_model import FIELD

    kind = config["model_type"]
    if FIELD in config:
        raise UserError(f"config: {FIELD} is written where a trained model is cut, and a new one is whole: remove it")
    fields = {"vocab_size": len(tokenizer), **config, "pad_token_id": tokenizer.pad_token_id}
    del fields["model_type"]
    torch.manual_seed(seed)
    with as_user_error(f"config: transformers makes no {kind} model of it"):
        model = AutoModel.from_config(AutoConfig.for_model(kind, **fields))
    embedded = model.get_input_embeddings().num_embeddings
    if embedded < len(tokenizer):
        raise UserError(
            f"config: vocab_size is {embedded}, and the tokenizer has {len(tokenizer)} tokens: raise it or remove it"
        )
    save_folder(model, tokenizer, folder)


def train_tokenizer(texts: Sequence[str], vocab_size: int, lowercase: bool) -> Any:
    """Train a WordPiece tokenizer in BERT's form on `texts`; the same texts give the same vocabulary."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    special = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
    normalizer, pre_tokenizer = normalizers.BertNormalizer(lowercase=lowercase), pre_tokenizers.BertPreTokenizer()
    words = {word for text in texts for word, _ in pre_tokenizer.pre_tokenize_str(normalizer.normalize_str(text))}
    # The trainer numbers the characters inside words in the order in which it meets them, which differs from run to
    # run, and breaks ties between merges by these numbers. Listed in advance and sorted, they leave nothing to chance.
    inside = sorted({f"##{character}" for word in words for character in word[1:]})
    learner = Tokenizer(models.WordPiece(unk_token=special["unk"]))
    learner.normalizer, learner.pre_tokenizer = normalizer, pre_tokenizer
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size, special_tokens=[*special.values(), *inside], show_progress=False
    )
    learner.train_from_iterator(texts, trainer)

    # a second tokenizer on the learned vocabulary: in the first one the characters inside words count as special tokens
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


def is_hub_name(name: str) -> bool:
    """Return whether a model that is no path on this machine can be one of the hub: `model` or `owner/model`."""
    # os.path, since pathlib raises where a name is too long for the file system
    is_path = name.startswith((".", "/", "~")) or CHECKPOINT.fullmatch(os.path.basename(name))
    return not is_path and not os.path.exists(name) and name.count("/") <= 1


def model_mistakes(name: str, trust: Trust) -> list[str]:
    """List why a model cannot be loaded: a folder, a reference to a phase (`@name`) or a hub name.

    References and hub names are looked up later.
    """
    return [] if name.startswith("@") or is_hub_name(name) else folder_mistakes(Path(name), trust)


def folder_mistakes(folder: Path, trust: Trust) -> list[str]:
    """List why a model folder cannot be loaded, as far as its files show it."""
    try:
        check_folder(folder, trust)
    except UserError as error:
        return [str(error)]
    return []


def check_folder(folder: Path, trust: Trust) -> None:
    """Raise a UserError for a folder without a readable config, or without weights that may be read."""
    read_config(folder, trust)
    if (folder / "adapter_config.json").exists():
        raise UserError(
            f"the model folder {folder} holds an adapter (adapter_config.json): merge the adapter into its model "
            f"first, and give the folder of the merged model"
        )
    for path in _weight_files(folder, trust):
        if path.suffix == ".safetensors":  # a pickle shows only when it is read whether it is whole
            with as_user_error(f"{path} is no safetensors file, or it was cut short"), safe_open(path, framework="np"):
                pass


def read_config(folder: Path, trust: Trust) -> dict[str, Any]:
    """Read config.json. UserError where there is none, or one that names code which the user has not permitted."""
    if not os.path.isdir(folder):
        raise UserError(f"the model folder {folder} {'is a file' if os.path.isfile(folder) else 'does not exist'}")
    if not os.path.lexists(folder / "config.json"):
        inside = f"; {folder / 'model'} is one" if (folder / "model" / "config.json").is_file() else ""
        raise UserError(f"the model folder {folder} has no config.json: it is not a transformers model{inside}")
    config = read_value(folder / "config.json")
    if not isinstance(config, dict):
        raise UserError(f"{folder / 'config.json'} holds {quoted(config)}: it must be an object, {{...}}")
    if not trust.trust_remote_code and _names_kernel(config):
        raise UserError(
            f"the config of {folder} names a kernel of the hub as attention or expert implementation, which is code: "
            f"remove it, or give --trust_remote_code"
        )
    return config


def is_compact(folder: Path) -> bool:
    """Return whether a folder's weights are in a compact file alone."""
    return (folder / COMPACT_FILE).is_file() and not has_safetensors(folder)


def has_safetensors(folder: Path) -> bool:
    return (folder / _SAFE).is_file() or (folder / f"{_SAFE}{_INDEX}").is_file()


def _weight_files(folder: Path, trust: Trust) -> list[Path]:
    """Return the files that the weights are read from; UserError where there are none, or some are missing."""
    if is_compact(folder):
        return [folder / COMPACT_FILE]
    forms = (_SAFE, _PICKLE) if trust.allow_pickle else (_SAFE,)
    for whole in forms:
        if (folder / whole).is_file():
            return [folder / whole]
        if (folder / f"{whole}{_INDEX}").is_file():
            return _shards(folder, folder / f"{whole}{_INDEX}", Path(whole).suffix)
    named = " or ".join(forms)
    pickles = not trust.allow_pickle and any(folder.glob("*.bin"))
    hint = ", and the .bin files are pickles: convert them, or give --allow_pickle" if pickles else ""
    raise UserError(f"the model folder {folder} has no weights: it has no {named}{hint}")


def _shards(folder: Path, index: Path, suffix: str) -> list[Path]:
    """Return the files that an index names. Outside of the folder, or of another kind, they could be anything."""
    with as_user_error(f"{index} has no weight_map of names and files"):
        names = sorted({str(name) for name in read_value(index)["weight_map"].values()})
    absent = [name for name in names if Path(name).name != name or not (folder / name).is_file()]
    wrong = absent or [name for name in names if not name.endswith(suffix)]
    if wrong or not names:
        raise UserError(f"{index} names {len(names)} files, and these are no {suffix} files here: {listed(wrong, 3)}")
    return [folder / name for name in names]


def _names_kernel(value: Any) -> bool:
    """Return whether a config's value, at any depth, chooses an implementation that is a repository of the hub."""
    if isinstance(value, dict):
        chosen = (inner for name, inner in value.items() if name in _KERNEL_FIELDS)
        return any("/" in json.dumps(inner) for inner in chosen) or any(map(_names_kernel, value.values()))
    return isinstance(value, list) and any(map(_names_kernel, value))
