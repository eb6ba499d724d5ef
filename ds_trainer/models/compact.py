"""The compact file: a bit for each weight that says whether it is zero, and the weights that are not, in fp16.

A model that was pruned weight by weight is no faster on ordinary hardware, but it can be small on disk: it takes one
bit for each weight, and two bytes for each weight that is not zero. They are in one safetensors file,
`model.compact.safetensors`, beside an ordinary config and tokenizer. Every tensor has the smaller of two forms:

- `name`: the tensor as it is, floats in fp16 ("dense"). What is no float keeps its type.
- `name#mask`, row by row, eight weights to a byte, the first in the highest bit, and `name#values`: the weights that
  are not zero, in order.

Weights are read back as exactly `tensor.half()` (a negative zero as zero). Version 0.2 could also write int8 values,
with `name#scale` (rows,), fp32, a factor for each row; such files are still read.
"""

import json
import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from ds_trainer.files.messages import quoted
from ds_trainer.files.reading import free_memory
from ds_trainer.files.run_folder import MODEL_FILES
from ds_trainer.files.writing import write_json
from ds_trainer.models.folders import COMPACT_FILE, as_user_error
from ds_trainer.ranks.failures import UserError

_FORMAT, _VERSION = "ds_trainer.compact", "1"
"""The marks in the files' headers since version 0.1, whatever this module is called."""
_MOST_OF_FP16 = 65504.0
_PARTS = {
    "dense": ("",),
    "mask": ("#mask", "#values"),
    "int8": ("#int8", "#scale"),
    "mask_int8": ("#mask", "#values", "#scale"),
}
"""The tensors of each form, by what follows the weight's name. The last two are those of version 0.2."""
_WEIGHTS = ("model*.safetensors", "*.index.json")
_BESIDE = (*MODEL_FILES, "*.py", "*.jinja", "*.spm", "*.tiktoken")
"""The files of a model folder that a compact folder has, too, except for those of its weights."""

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]


def write_compact(state: Mapping[str, Tensor], path: Path) -> dict[str, Any]:
    """Write the compact file of a state dict, on the CPU, and return its report.

    The report has the `bytes` of the `compact` file, and of the same weights in fp32 (`dense`). UserError for weights
    that are not finite, or beyond 65,504, the largest number of fp16.
    """
    tensors: dict[str, Tensor] = {}
    entries: dict[str, dict[str, Any]] = {}
    for name, tensor in state.items():
        form, parts = _packed(name, tensor)
        tensors |= {f"{name}{part}": value for part, value in parts.items()}
        entries[name] = {"form": form, "shape": list(tensor.shape)}
    header = {"format": _FORMAT, "version": _VERSION}
    save_file(tensors, path, header | {"tensors": json.dumps(entries)})
    return {
        "bytes": {
            "compact": path.stat().st_size,
            "dense": sum(4 * one.numel() if one.is_floating_point() else one.nbytes for one in state.values()),
        },
    }


def read_compact(path: Path) -> dict[str, Tensor]:
    """Read the weights of a compact file, whole, floats as fp32. UserError where it is none, or its parts do not agree.

    A file of a few bytes may unpack to 32 times as many: one that this host's free memory cannot hold is refused.
    """
    with as_user_error(f"{path} is no sound compact file"), safe_open(path, framework="np") as file:
        header = file.metadata() or {}
        if header.get("format") != _FORMAT:
            raise UserError(f"its header does not name the format {_FORMAT}")
        if header.get("version") != _VERSION:
            raise UserError(f"its version is {quoted(header.get('version'))}, and {_VERSION} is known")
        entries: dict[str, dict[str, Any]] = json.loads(header["tensors"])
        room, wanted = free_memory(), 8 * sum(math.prod(entry["shape"]) for entry in entries.values())
        if wanted > room:
            raise UserError(f"it unpacks to more than is free in memory: {wanted:,} bytes on the way, of {room:,}")
        return {name: torch.from_numpy(_unpacked(name, file, **entry)) for name, entry in entries.items()}


def write_compact_folder(folder: Path, model: nn.Module, target: Path) -> dict[str, Any]:
    """Write a compact folder: config, tokenizer, exit heads and code, and the compact file; returns its report.

    `target` is an empty folder, `model` is that of `folder`.
    """
    _copy_beside(folder, target)
    # tied weights are written once, under the first of their names
    first = {name for name, _ in model.named_parameters()}
    tied = {name for name, _ in model.named_parameters(remove_duplicate=False)} - first
    state = {name: value.cpu().contiguous() for name, value in model.state_dict().items() if name not in tied}
    return write_compact(state, target / COMPACT_FILE)


def unpack_compact(folder: Path, target: Path) -> None:
    """Write the ordinary model folder, in fp32, of a compact one; `target` is an empty folder."""
    _copy_beside(folder, target)
    save_file(read_compact(folder / COMPACT_FILE), target / "model.safetensors", {"format": "pt"})
    # transformers would round the weights to the type that the config names
    config = json.loads((target / "config.json").read_text(encoding="utf-8"))
    config.pop("torch_dtype", None)  # the name in transformers 4
    write_json(target / "config.json", config | {"dtype": "float32"})


def _packed(name: str, tensor: Tensor) -> tuple[str, dict[str, Tensor]]:
    """Pack a tensor: the name of its smaller form, and the parts of that form."""
    if not tensor.is_floating_point():
        return "dense", {"": tensor}
    numbers = tensor.float().numpy()
    if not np.isfinite(numbers).all():
        raise UserError(f"{name} holds numbers that are not finite: the model is broken, there is nothing to keep")
    largest = float(np.abs(numbers).max(initial=0.0))
    if largest > _MOST_OF_FP16:
        raise UserError(f"{name} holds {largest:g}, and fp16 ends at {_MOST_OF_FP16:,.0f}: scale the model down")
    halves = np.asarray(numbers.astype(np.float16) + np.float16(0))  # makes a negative zero one of two equal zeros
    kept = halves.ravel() != 0
    masked = {"#mask": np.packbits(kept), "#values": halves.ravel()[kept]}
    if sum(part.nbytes for part in masked.values()) < halves.nbytes:
        return "mask", {part: torch.from_numpy(value) for part, value in masked.items()}
    return "dense", {"": torch.from_numpy(halves)}


def _copy_beside(folder: Path, target: Path) -> None:
    """Copy the files of a model folder that are not its weights."""
    for path in sorted(folder.iterdir()):
        if path.is_file() and any(map(path.match, _BESIDE)) and not any(map(path.match, _WEIGHTS)):
            shutil.copyfile(path, target / path.name)


def _unpacked(name: str, file: Any, form: str, shape: list[int]) -> Array:
    """The whole weight of an entry, floats as fp32."""
    parts: dict[str, Array] = {part: file.get_tensor(f"{name}{part}") for part in _PARTS[form]}
    if "#mask" in parts:
        kept = np.unpackbits(parts["#mask"])[: math.prod(shape)].astype(bool)
        numbers = np.zeros(len(kept), parts["#values"].dtype)
        numbers[kept] = parts["#values"]
    else:
        numbers = parts["" if form == "dense" else "#int8"]
    numbers = numbers.reshape(shape)
    if form == "dense" and numbers.dtype.kind != "f":
        return numbers
    whole = numbers.astype(np.float32)
    if "#scale" in parts:
        whole *= parts["#scale"].reshape(shape[0], *(1,) * (len(shape) - 1))
    return whole
