"""A model folder judged by its files alone: which weights it holds, and why it cannot be loaded.

These checks run before torch is loaded, so that a missing folder or a file that was cut short is reported at once.
Weights are safetensors unless the user permits pickles, and a config that names code is refused unless the user permits
that code. Whether the weights fit the config shows when the model is built, in `pretrained.py`.
"""

import contextlib
import difflib
import json
import os
from pathlib import Path
from typing import Any

from safetensors import safe_open

from ds_trainer.files.messages import listed, quoted
from ds_trainer.files.reading import check_file, read_value
from ds_trainer.models.loading import as_user_error
from ds_trainer.ranks.failures import UserError
from ds_trainer.recipe.saved_checkpoint import CHECKPOINT
from ds_trainer.recipe.trust import Trust

COMPACT_FILE = "model.compact.safetensors"
"""The weights of a compact folder, which `compact.py` writes and reads."""
_SAFE, _PICKLE, _INDEX = "model.safetensors", "pytorch_model.bin", ".index.json"
_MOST_BYTES = 256 << 20
"""The size limit of a folder's JSON files: the tokenizer of 256,000 words has 35 MiB."""
_KERNEL_FIELDS = {"attn_implementation", "_attn_implementation", "experts_implementation", "_experts_implementation"}


def is_hub_name(name: str) -> bool:
    """Return whether a model that is no path on this machine can be one of the hub: `model` or `owner/model`."""
    # os.path, since pathlib raises where a name is too long for the file system
    is_path = name.startswith((".", "/", "~")) or CHECKPOINT.fullmatch(os.path.basename(name))
    return not is_path and not os.path.exists(name) and name.count("/") <= 1


def nearest_folder(name: str) -> str:
    """Say in brackets which folder of this machine is spelled most like a path that is none; "" where none is."""
    place = Path()
    for part in Path(name).parts:
        near = [part]
        if not os.path.isdir(place / part):
            with contextlib.suppress(OSError):  # it may not be read
                near = difflib.get_close_matches(part, [entry.name for entry in os.scandir(place) if entry.is_dir()], 1)
        if not near or not os.path.isdir(place / near[0]):
            return ""
        place /= near[0]
    return f" (the nearest is {place})"


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
    """Read config.json, and check the folder's other JSON files for their size.

    UserError where there is no config, or one that names code which the user has not permitted.
    """
    if not os.path.isdir(folder):
        fault = "is a file" if os.path.isfile(folder) else f"does not exist{nearest_folder(str(folder))}"
        raise UserError(f"the model folder {folder} {fault}")
    if not os.path.lexists(folder / "config.json"):
        inside = f"; {folder / 'model'} is one" if (folder / "model" / "config.json").is_file() else ""
        raise UserError(f"the model folder {folder} has no config.json: it is not a transformers model{inside}")
    for path in sorted(folder.glob("*.json")):
        check_file(path, max_bytes=_MOST_BYTES)
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
