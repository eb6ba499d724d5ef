"""The files by which sentence-transformers reads a model folder: how tokens become one vector, prompts, similarity.

They lie beside the model: `modules.json` lists an encoder, `1_Pooling` and, where vectors have the length 1,
`2_Normalize`; `sentence_bert_config.json` has the length at which texts are cut, and
`config_sentence_transformers.json` prompts and similarity. A folder without them is an encoder, of which
sentence-transformers takes the mean over tokens.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast, get_args

from transformers import AutoConfig
from transformers.utils import cached_file

from ds_trainer.files.messages import listed, quoted
from ds_trainer.files.reading import read_object, read_value
from ds_trainer.files.writing import write_json
from ds_trainer.models.folders import as_user_error, is_hub_name
from ds_trainer.ranks.failures import UserError

Pooling = Literal["mean", "cls", "lasttoken"]

MODULES_FILE = "modules.json"
_ENCODER_FILE, _MODEL_FILE, _POOLING = "sentence_bert_config.json", "config_sentence_transformers.json", "1_Pooling"
_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "lasttoken",
    "pooling_mode_max_tokens": "max",
}
"""The flags by which versions before 5.3 name the mode, and later ones still read it."""
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
        flags = {flag: mode == self.pooling for flag, mode in _FLAGS.items()}
        write_json(
            folder / _POOLING / "config.json", {"word_embedding_dimension": width, **flags, "include_prompt": True}
        )


def copy_sentence_files(source: str | Path, folder: Path) -> None:
    """Copy the files of a folder, if it has some, into the folder of a model of the same width that was made of it.

    Of a hub name what they say is written anew.
    """
    with contextlib.suppress(UserError):  # without a network nothing is known of a hub name
        if named := _activation(source):
            config = folder / "config.json"
            write_json(config, read_object(config) | {ACTIVATION: {"activation_fn": named}})
        if not has_sentence_files(source):
            return
        if is_hub_name(str(source)):
            read_sentence_files(source).write(folder, AutoConfig.from_pretrained(folder).get_text_config().hidden_size)
            return
    for path in map(Path(source).joinpath, (MODULES_FILE, _ENCODER_FILE, _MODEL_FILE)):
        if path.is_file():
            shutil.copyfile(path, folder / path.name)
    for module in filter(None, (module["path"] for module in _read(source, MODULES_FILE))):
        if Path(source, module).is_dir():
            shutil.copytree(Path(source, module), folder / module, dirs_exist_ok=True)


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
        first, second = (str(module["path"]) for module in modules[:2])
    pooling, config = _read(source, f"{second}/config.json") or {}, _read(source, _MODEL_FILE) or {}
    encoder = _read(source, f"{first}/{_ENCODER_FILE}".lstrip("/")) or {}
    modes = pooling.get("pooling_mode") or [flag for flag in _FLAGS if pooling.get(flag)] or ["mean"]
    mode = "+".join(_FLAGS.get(each, each) for each in ([modes] if isinstance(modes, str) else modes))
    similarity = config.get("similarity_fn_name") or "cosine"
    computed = {
        f"{MODULES_FILE} lists {listed(kinds)}": kinds[:2] == ["Transformer", "Pooling"]
        and kinds[2:] in ([], ["Normalize"]),
        f"it pools by {quoted(mode)}": mode in get_args(Pooling),
        "prompts are left out of the pooling": pooling.get("include_prompt", True),
        f"{_ENCODER_FILE} has do_lower_case": not encoder.get("do_lower_case"),
        f"it compares by {quoted(similarity)}": similarity in ("cosine", "dot"),
    }
    if wrong := [what for what, can in computed.items() if not can]:
        raise UserError(
            f"{source}: {'; '.join(wrong)}: what is computed here is an encoder, the mean, cls or lasttoken of all its "
            "tokens, perhaps Normalize, and cosine or dot"
        )
    return SentenceFiles(
        pooling=cast(Pooling, mode),
        normalize="Normalize" in kinds,
        max_seq_length=encoder.get("max_seq_length"),
        prompts=config.get("prompts") or {},
        default_prompt_name=config.get("default_prompt_name"),
        similarity=similarity,
    )


def _read(source: str | Path, name: str) -> Any:
    """Return the value of a JSON file of a folder or hub name, None where there is no such file.

    UserError where the network would have to say it, and there is none.
    """
    if not is_hub_name(str(source)):
        path = Path(source) / name
        return read_value(path) if path.is_file() else None
    with as_user_error(f"the hub does not say whether {source} has {name}"):
        path = cached_file(str(source), name, _raise_exceptions_for_missing_entries=False)
    return json.loads(Path(path).read_text(encoding="utf-8")) if path else None
