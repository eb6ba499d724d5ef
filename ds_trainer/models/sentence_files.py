"""The files by which sentence-transformers reads a model folder: how tokens become one vector, prompts, similarity.

They lie beside the model: `modules.json` lists an encoder, `1_Pooling` and, where vectors have the length 1,
`2_Normalize`; `sentence_bert_config.json` has the length at which texts are cut, and
`config_sentence_transformers.json` prompts and similarity. A folder without them is an encoder, of which
sentence-transformers takes the mean over tokens.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ds_trainer.files.messages import listed, quoted
from ds_trainer.files.reading import read_object, read_value
from ds_trainer.files.writing import write_json
from ds_trainer.models.folders import as_user_error, is_hub_name
from ds_trainer.ranks.failures import UserError

Pooling = Literal["mean", "cls", "lasttoken"]

MODULES_FILE = "modules.json"
_ENCODER_FILE, _MODEL_FILE, _POOLING = "sentence_bert_config.json", "config_sentence_transformers.json", "1_Pooling"
_OLD_POOLING: dict[str, str] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "lasttoken",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
}
"""The flags of folders that versions before 5.3 have written, and the mode that each stands for."""
_SIMILARITIES = ("cosine", "dot")
_CLASSES = "sentence_transformers.models"
ACTIVATION = "sentence_transformers"
"""The field of a cross-encoder's config that names the function which makes a score of its logit."""


@dataclass(frozen=True)
class SentenceFiles:
    """What the files of a folder say; `max_seq_length` is None where they leave it to the tokenizer."""

    pooling: Pooling = "mean"
    normalize: bool = True
    max_seq_length: int | None = None
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt_name: str | None = None
    similarity: str = "cosine"

    def with_set(self, **values: Any) -> SentenceFiles:
        """Return these files with other values, where they are not None."""
        return dataclasses.replace(self, **{name: value for name, value in values.items() if value is not None})

    def write(self, folder: Path, width: int) -> None:
        """Write the files into the folder of a model whose hidden states have this width."""
        names = ["Transformer", "Pooling"] + ["Normalize"] * self.normalize
        modules = [
            # the names of these classes before version 5.3, which later ones read, too
            {"idx": place, "name": str(place), "path": f"{place}_{name}" if place else "", "type": f"{_CLASSES}.{name}"}
            for place, name in enumerate(names)
        ]
        write_json(folder / MODULES_FILE, modules)
        write_json(folder / _ENCODER_FILE, {"max_seq_length": self.max_seq_length, "do_lower_case": False})
        values = {"prompts": dict(self.prompts), "default_prompt_name": self.default_prompt_name}
        write_json(folder / _MODEL_FILE, {**values, "similarity_fn_name": self.similarity})
        (folder / _POOLING).mkdir(exist_ok=True)
        flags = {flag: mode == self.pooling for flag, mode in _OLD_POOLING.items()}
        write_json(
            folder / _POOLING / "config.json", {"word_embedding_dimension": width, **flags, "include_prompt": True}
        )


def copy_sentence_files(source: str | Path, folder: Path) -> None:
    """Write what the files of a folder or hub name say, if it has some, into the folder of a model made of it."""
    path = folder / "config.json"
    if _activation(source):
        write_json(path, read_object(path) | {ACTIVATION: {"activation_fn": _activation(source)}})
    if has_sentence_files(source):
        config = read_object(path)
        width = next(config[name] for name in ("hidden_size", "dim", "d_model", "n_embd") if name in config)
        read_sentence_files(source).write(folder, width)


def has_sentence_files(source: str | Path) -> bool:
    """Return whether a folder or hub name is one of sentence-transformers, and no cross-encoder."""
    return _read(source, MODULES_FILE) is not None and not _activation(source)


def activation_of(source: str | Path) -> str:
    """Return the name of the function that `CrossEncoder` applies to the logit of a folder or hub name."""
    return _activation(source) or "torch.nn.modules.activation.Sigmoid"


def _activation(source: str | Path) -> str | None:
    """Return the function that the folder of a cross-encoder names: versions 3, 4 and 6 write it to three places."""
    config, files = _read(source, "config.json") or {}, _read(source, _MODEL_FILE) or {}
    named = files.get("activation_fn") or (config.get(ACTIVATION) or {}).get("activation_fn")
    return named or config.get("sbert_ce_default_activation_function")


def read_sentence_files(source: str | Path) -> SentenceFiles:
    """Read the files of a folder or hub name; UserError where they describe what this library does not compute."""
    modules = _read(source, MODULES_FILE)
    if modules is None:
        return SentenceFiles()
    with as_user_error(f"{source}: {MODULES_FILE} cannot be read"):
        kinds = [str(module["type"]).rpartition(".")[2] for module in modules]
        paths = [str(module["path"]) for module in modules]
    if kinds[:2] != ["Transformer", "Pooling"] or kinds[2:] not in ([], ["Normalize"]):
        raise UserError(
            f"{source}: {MODULES_FILE} lists {listed(kinds)}: only an encoder with pooling, and perhaps Normalize, is "
            "trained and made smaller here"
        )
    pooling = _read(source, f"{paths[1]}/config.json") or {}
    modes = pooling.get("pooling_mode") or [mode for flag, mode in _OLD_POOLING.items() if pooling.get(flag)] or "mean"
    mode: Any = modes[0] if isinstance(modes, list) and len(modes) == 1 else modes
    if mode not in ("mean", "cls", "lasttoken") or not pooling.get("include_prompt", True):
        wrong = (
            f"pools by {quoted(mode)}" if pooling.get("include_prompt", True) else "leaves prompts out of the pooling"
        )
        raise UserError(f"{source} {wrong}: mean, cls and lasttoken over all tokens are computed here")
    encoder, config = (_read(source, f"{paths[0]}/{_ENCODER_FILE}".lstrip("/")) or {}), _read(source, _MODEL_FILE) or {}
    if encoder.get("do_lower_case"):
        raise UserError(f"{source}: {_ENCODER_FILE} has do_lower_case: let the tokenizer lower the texts instead")
    similarity = config.get("similarity_fn_name") or "cosine"
    if similarity not in _SIMILARITIES:
        raise UserError(f"{source} compares by {quoted(similarity)}: {listed(_SIMILARITIES)} are computed here")
    return SentenceFiles(
        pooling=mode,
        normalize="Normalize" in kinds,
        max_seq_length=encoder.get("max_seq_length"),
        prompts=config.get("prompts") or {},
        default_prompt_name=config.get("default_prompt_name"),
        similarity=similarity,
    )


def _read(source: str | Path, name: str) -> Any:
    """Return the value of a JSON file of a folder or hub name, None where there is no such file."""
    if not is_hub_name(str(source)):
        path = Path(source) / name
        return read_value(path) if path.is_file() else None
    from transformers.utils import cached_file

    options: Any = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
    path = cached_file(str(source), name, **options)
    return json.loads(Path(path).read_text(encoding="utf-8")) if path else None
