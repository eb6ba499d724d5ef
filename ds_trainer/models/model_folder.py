"""What is wrong with a model folder, by its files alone: before torch is loaded, or anything in it is allocated or run.

A folder may come from anywhere. Refused are weights other than safetensors, code, weights outside of the folder, files
that are broken, endless or of a size that no model has, and headers that promise what is not there. Whether config and
weights belong together shows where the model is built, in `tasks/pretrained.py`.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ds_trainer.config.trust import Trust
from ds_trainer.ranks.failures import UserError

_MIB = 1 << 20
_MOST_BYTES = {"config.json": 16 * _MIB, "exits.json": _MIB}
_MOST_BYTES_OF_TEXT = 256 * _MIB
"""Of any other JSON or text of a folder: tokenizers of 256,000 words have 35 MiB."""
_TEXT = (".json", ".txt", ".jinja", ".model")
_MOST_OF_A_COUNT = 2_000_000
_COUNT = re.compile(r"layer|head|block|expert|group|depth|label|stage", re.IGNORECASE)
"""Keys of a config whose number some config class makes a list of, before a model is built."""
_MOST_BYTES_OF_HEADER = 100_000_000  # as safetensors itself
_MOST_DIMENSIONS = 16
_BITS = {
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "F64": 64,
    "I64": 64,
    "U64": 64,
    "C64": 64,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
}
COMPACT_FILE = "model.compact.safetensors"
"""The weights of a compact folder, which `compact.py` reads."""
FP16, INT8 = VALUES = ("fp16", "int8")
"""How a compact file can hold numbers; an .onnx file knows the latter, too."""
_SAFE, _SAFE_INDEX = "model.safetensors", "model.safetensors.index.json"
_PICKLE, _PICKLE_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
_KERNELS = {"attn_implementation", "_attn_implementation", "experts_implementation", "_experts_implementation"}


@dataclass(frozen=True)
class Held:
    """What the weights of a folder can fill: tensors, and numbers in all."""

    tensors: int
    numbers: int


def model_mistakes(name: str, trust: Trust) -> list[str]:
    """What is wrong with the folder of a model, of which `name` may also be a reference or a hub's: looked up later."""
    folder = Path(name)
    # os.path, since pathlib raises where a name is too long to be one
    hub_name = not os.path.exists(folder) and name.count("/") <= 1 and not name.startswith((".", "/", "~"))
    if name.startswith("@") or hub_name:
        return []
    return folder_mistakes(folder, trust)


def folder_mistakes(folder: Path, trust: Trust) -> list[str]:
    """What is wrong with a model folder; empty where it can be loaded, as far as its files alone tell."""
    if not os.path.isdir(folder):
        return [f"the model folder {folder} " + ("is a file" if os.path.isfile(folder) else "does not exist")]
    mistakes = config_mistakes(folder, trust)
    if not os.path.lexists(folder / "config.json"):
        return mistakes
    try:
        _check_weights(folder, trust)
    except ValueError as error:
        mistakes.append(str(error))
    return mistakes


def config_mistakes(folder: Path, trust: Trust) -> list[str]:
    """What is wrong with all but the weights of a model folder."""
    if not os.path.lexists(folder / "config.json"):
        return [f"the model folder {folder} has no config.json: it is not a transformers model"]
    return text_mistakes(folder, trust)


def text_mistakes(folder: Path, trust: Trust) -> list[str]:
    """What is wrong with what a tokenizer needs, and with the config, if there is one."""
    mistakes = [*_file_mistakes(folder)]
    if mistakes or not (folder / "config.json").is_file():
        return mistakes
    try:
        return [*_config_mistakes(folder, _object(folder / "config.json"), trust)]
    except ValueError as error:
        return [f"the config of {folder} cannot be read: {error}"]


def held_weights(folder: Path) -> Held:
    """What the weights of a folder without mistakes can fill; of pickles, which only tell by being read, at most."""
    files = _weight_files(folder)
    if files[0].suffix != ".safetensors":
        size = sum(path.stat().st_size for path in files)
        return Held(size, size)
    shapes = [shape for path in files for shape in tensor_shapes(path).values()]
    return Held(len(shapes), sum(map(math.prod, shapes)))


def is_compact(folder: Path) -> bool:
    """Whether a folder's weights are in a compact file alone."""
    return (folder / COMPACT_FILE).is_file() and not has_safetensors(folder)


def has_safetensors(folder: Path) -> bool:
    return any((folder / name).is_file() for name in (_SAFE, _SAFE_INDEX))


def tensor_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """The shapes in a safetensors file, from its header alone; ValueError where the file does not hold them."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = struct.unpack("<Q", file.read(8))[0] if size >= 8 else -1
            if not 0 <= length <= min(size - 8, _MOST_BYTES_OF_HEADER):
                raise UserError(f"{path} is no safetensors file, or cut short: its header does not fit into it")
            header = json.loads(file.read(length))
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError):
        raise UserError(f"{path} is no safetensors file: its header is not JSON") from None
    if not isinstance(header, dict):
        raise UserError(f"{path} is no safetensors file: its header is no object")
    header.pop("__metadata__", None)
    shapes = {name: _shape(path, name, entry, size - 8 - length) for name, entry in header.items()}
    if sum(entry["data_offsets"][1] - entry["data_offsets"][0] for entry in header.values()) > size - 8 - length:
        raise UserError(f"{path} is broken: its header has the same bytes for several weights")
    return shapes


def size_mistakes(config: Any, where: str) -> Iterator[str]:
    """The counts of a model's config that are of no model; some config classes make a list of so many entries."""
    for path, value in _leaves(config):
        if isinstance(value, int) and _COUNT.search(path) and abs(value) > _MOST_OF_A_COUNT:
            shown = str(value) if abs(value) < 10**18 else "a number of more than 18 digits"
            yield f"{where}: {path} is {shown}, which is that of no model: at most {_MOST_OF_A_COUNT:,}"


def shrunk_mistakes(config: Mapping[str, Any], where: str) -> Iterator[str]:
    """What is wrong with the sizes of layers that were cut, as far as their form tells; no more than one."""
    sizes = config.get("shrunk")
    if sizes is None:
        return
    lists = [sizes.get(name) for name in ("heads", "neurons")] if isinstance(sizes, dict) else [None]
    if not all(_is_list_of_counts(values) for values in lists) or len({len(values or ()) for values in lists}) > 1:
        yield (
            f'{where}: shrunk must be {{"heads": [...], "neurons": [...]}}, whole numbers from 0, one of each a layer: '
            f"take the config that was written with the model"
        )


def _is_list_of_counts(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value <= _MOST_OF_A_COUNT for value in values)


def _file_mistakes(folder: Path) -> Iterator[str]:
    """Entries of the folder that cannot be files of a model; a pipe would be waited for without an end."""
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError as error:
        yield f"the model folder {folder} cannot be read: {error.strerror}"
        return
    for entry in entries:
        try:
            status = entry.stat()  # of what a link leads to: the hub's cache is made of links
        except OSError:
            if entry.name == "config.json":
                yield f"the model folder {folder}: config.json is a link to nowhere"
            continue
        most = _MOST_BYTES.get(entry.name, _MOST_BYTES_OF_TEXT if entry.name.endswith(_TEXT) else math.inf)
        if not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):
            yield f"the model folder {folder}: {entry.name} is neither a file nor a folder"
        elif entry.name == "config.json" and not stat.S_ISREG(status.st_mode):
            yield f"the model folder {folder}: config.json is a folder"
        elif status.st_size > most:
            yield f"the model folder {folder}: {entry.name} has {status.st_size:,} bytes, more than {most:,}"


def _config_mistakes(folder: Path, config: Mapping[str, Any], trust: Trust) -> Iterator[str]:
    where = f"the config of {folder}"
    yield from size_mistakes(config, where)
    yield from shrunk_mistakes(config, where)
    for path, value in _leaves(config):
        if set(path.split(".")) & _KERNELS and "/" in str(value) and not trust.trust_remote_code:
            yield f"{where}: {path} is {str(value)[:60]!r}, code of its own: remove it, or give --trust_remote_code"
    names = config.get("architectures") or []
    if not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        yield f"{where}: architectures is no list of names"
    explicit = config.get("transformers_weights")
    if explicit not in (None, _SAFE, _SAFE_INDEX):
        yield f"{where}: transformers_weights names other weights than {_SAFE}: rename them, and remove it"


def _check_weights(folder: Path, trust: Trust) -> None:
    """Refuse a folder without weights that may be read; ValueError."""
    if os.path.lexists(folder / "adapter_config.json"):
        raise UserError(
            f"the model folder {folder} holds an adapter (adapter_config.json): merge the adapter into its model "
            f"first, and give the folder of the merged model"
        )
    if any(re.match(r"shard-\d{5}-model-", path.name) for path in folder.glob("shard-*")):
        raise UserError(f"the model folder {folder} holds a distributed checkpoint: save it as {_SAFE}")
    if is_compact(folder):
        tensor_shapes(folder / COMPACT_FILE)
        return
    if not has_safetensors(folder) and not trust.allow_pickle:
        raise UserError(
            f"the model folder {folder} has no .safetensors weights of a known name{_found_instead(folder)}"
        )
    for path in _weight_files(folder):
        if path.suffix == ".safetensors":
            tensor_shapes(path)


def _found_instead(folder: Path) -> str:
    """What a folder without `_SAFE` has of weights, in words."""
    pickles = ", ".join(sorted(path.name for path in folder.glob("*.bin"))[:3])
    if pickles:
        return f" (found: {pickles}, which are pickles: convert them, or give --allow_pickle)"
    names = {path.name for path in folder.glob("*.safetensors")} - {"exit_heads.safetensors"}
    others = ", ".join(sorted(names)[:3])
    return f" (found: {others}, which transformers does not look for: rename the one to read)" if others else ""


def _weight_files(folder: Path) -> list[Path]:
    """The files that transformers will read, each in the folder itself; ValueError where one is not."""
    for whole, index in ((_SAFE, _SAFE_INDEX), (_PICKLE, _PICKLE_INDEX)):
        if (folder / whole).is_file():
            return [folder / whole]
        if (folder / index).is_file():
            return _shards(folder, folder / index, Path(whole).suffix)
    raise UserError(f"the model folder {folder} has no weights: neither {_SAFE} nor {_PICKLE}")


def _shards(folder: Path, index: Path, suffix: str) -> list[Path]:
    weights = _object(index).get("weight_map")
    if not isinstance(weights, dict) or not weights or not all(isinstance(name, str) for name in weights.values()):
        raise UserError(f"{index} has no weight_map of names and files")
    names = sorted(set(weights.values()))
    wrong = [name for name in names if name != os.path.basename(name) or not name.endswith(suffix) or "\0" in name]
    if wrong:
        raise UserError(f"{index} names {wrong[0][:80]!r}: allowed are {suffix} files in the folder itself")
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise UserError(
            f"{index} names {len(names)} files, and {len(missing)} are missing, {missing[0][:80]} the first"
        )
    return [folder / name for name in names]


def _shape(path: Path, name: str, entry: Any, room: int) -> tuple[int, ...]:
    """The shape of an entry, whose bytes must be there."""
    values = entry if isinstance(entry, dict) else {}
    bits, shape, offsets = _BITS.get(str(values.get("dtype"))), _counts(values.get("shape")), values.get("data_offsets")
    place = _counts(offsets)
    if bits is None or shape is None or place is None or len(place) != 2:
        raise UserError(f"{path}: the header's entry of {name[:80]!r} is of another form than safetensors'")
    if not place[0] <= place[1] <= room or (place[1] - place[0]) * 8 != math.prod(shape) * bits:
        raise UserError(f"{path} is broken or cut short: it does not hold what its header says of {name[:80]!r}")
    return shape


def _counts(values: Any) -> tuple[int, ...] | None:
    if not isinstance(values, list) or len(values) > _MOST_DIMENSIONS:
        return None
    return tuple(values) if all(type(value) is int and 0 <= value < 1 << 63 for value in values) else None


def _object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; ValueError where there is another thing."""
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        cause = "it is nested too deeply" if isinstance(error, RecursionError) else " ".join(str(error).split())[:120]
        raise UserError(f"{path} is not JSON: {cause}") from None
    if not isinstance(value, dict):
        raise UserError(f"{path} holds a {type(value).__name__}: it must be an object, {{...}}")
    return value


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """What a JSON value holds that is no list or object, with its dotted path; not recursive, so of any depth."""
    left = [(path, value)]
    while left:
        path, value = left.pop()
        if isinstance(value, dict):
            left += [(f"{path}.{key}" if path else str(key), inner) for key, inner in value.items()]
        elif isinstance(value, list):
            left += [(path, inner) for inner in value]
        else:
            yield path, value
