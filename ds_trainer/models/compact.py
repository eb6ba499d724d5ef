"""The compact file: a model's weights as bits that say where they are not zero, and those values in fp16 or int8.

What is pruned weight by weight is no faster on ordinary hardware, but small on disk: a bit for each weight, and two
bytes or one for each that is left. One safetensors file, `model.compact.safetensors`, holds it, beside an ordinary
config and tokenizer. Every tensor has the smallest of these forms:

- `name`: as it is, in fp16 ("dense"). Of the values "int8" these are the vectors: biases and norms, which are a
  hundredth of the weights and act on every token without being averaged. What is no float stays what it is.
- `name#int8` (its shape) and `name#scale` (rows,), fp32: a matrix in int8, each number times its row's scale.
- `name#mask`, row by row, eight to a byte, the first the highest bit, and `name#values`: the weights that are not zero,
  in order; in int8 also `name#scale`.

fp16 is read as exactly what `tensor.half()` holds (a negative zero as zero); int8 at most half of its row's scale off.
"""

from __future__ import annotations

import contextlib
import json
import math
import shutil
import tempfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from ds_trainer.files.messages import quoted
from ds_trainer.files.run_folder import MODEL_FILES
from ds_trainer.files.whole_file import memory
from ds_trainer.models.model_folder import COMPACT_FILE, FP16, INT8, VALUES, tensor_shapes
from ds_trainer.ranks.failures import UserError

_FORMAT, _VERSION = "ds_trainer.compact", "1"
_ERRORS = {FP16: "that of rounding to fp16", INT8: "at most half of the scale of a weight's row; fp16 in vectors"}
"""What is stated of each kind of values, in the file's header."""
_MOST_OF_FP16 = 65504.0
_MOST_OF_INT8 = 127
_SMALLEST_SCALE = float(np.finfo(np.float32).tiny)
"""Below, a scale in fp32 would lose digits."""
_PARTS: dict[str, dict[str, tuple[str, ...]]] = {
    "dense": {"": ("F16", "I64", "I32", "I16", "I8", "U8", "BOOL")},
    "int8": {"#int8": ("I8",), "#scale": ("F32",)},
    "mask": {"#mask": ("U8",), "#values": ("F16",)},
    "mask_int8": {"#mask": ("U8",), "#values": ("I8",), "#scale": ("F32",)},
}
"""The tensors of each form: what follows the name, and the types that it may have."""
_MOST_DIMENSIONS = 16
_WEIGHTS = ("model*.safetensors", "*.index.json")
_BESIDE = (*MODEL_FILES, "*.py", "*.jinja", "*.spm", "*.tiktoken")
"""Files of a model folder that a compact folder has, too, but for those of its weights."""
_TO_LOAD = ("config.json", "generation_config.json", "*.py")
_MOST_BYTES_OF_CODE = 1 << 24
_PLAIN = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
"""What may be held as it is."""

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"


@dataclass(frozen=True)
class Sizes:
    """Bytes of the compact file, and beside it of the same weights written otherwise."""

    compact: int
    dense: int
    """As safetensors in fp32."""
    compact_zip: int
    """Of that file in a zip (deflate, level 6)."""
    dense_zip: int
    floor: float
    """What a code for masks whose bits are independent needs at least, with the kept values as they are."""


def write_compact(model_or_state: nn.Module | Mapping[str, Tensor], path: Path, values: str = "fp16") -> dict[str, Any]:
    """Write the compact file of a model, or of a state dict; gives its report.

    `values` is "fp16" or "int8". The report has `values`, `numbers`, `kept` (those of the file that are not zero),
    `became_zero` (those that were not, and are so small that they are zero in the file), `max_error` (the largest, of
    all weights), `max_scale` (int8: half of it bounds the error), and `bytes`, as `Sizes`. ValueError for weights that
    are not finite, that are complex or of unsigned types other than uint8, or, where fp16 is to hold them, beyond
    65,504.
    """
    if values not in VALUES:
        raise UserError(f"the values of a compact file are {quoted(values)}: allowed are {', '.join(VALUES)}")
    state = _state_of(model_or_state)
    tensors: dict[str, Tensor] = {}
    entries: dict[str, dict[str, Any]] = {}
    for name, tensor in state.items():
        form, parts = _packed(name, tensor, values)
        tensors |= {f"{name}{part}": value for part, value in parts.items()}
        entries[name] = {"form": form, "shape": list(tensor.shape)}
    said = {"format": _FORMAT, "version": _VERSION, "values": values, "error": _ERRORS[values]}
    save_file(tensors, path, said | {"tensors": json.dumps(entries)})
    scales = [float(tensor.max()) for name, tensor in tensors.items() if name.endswith("#scale") and tensor.numel()]
    read = read_compact(path)
    kept = sum(int(tensor.count_nonzero()) for tensor in read.values())
    return {
        "values": values,
        "numbers": sum(tensor.numel() for tensor in state.values()),
        "kept": kept,
        "became_zero": sum(int(tensor.count_nonzero()) for tensor in state.values()) - kept,
        "max_error": max((_error(tensor, read[name]) for name, tensor in state.items()), default=0.0),
        **({"max_scale": max(scales, default=0.0)} if values == INT8 else {}),
        "bytes": asdict(_sizes(state, path, _floor(state, entries, tensors))),
    }


def read_compact(path: Path) -> dict[str, Tensor]:
    """The weights of a compact file, whole, floats as fp32. ValueError for a file that is none, before it is unpacked.

    A file of a few bytes may unpack to 32 times as many: what this host's memory cannot hold is refused.
    """
    shapes = tensor_shapes(path)
    try:
        with safe_open(path, framework="np") as file:
            entries = _entries(path, file, shapes)
            return {name: torch.from_numpy(_unpacked(path, name, file, *entry)) for name, entry in entries.items()}
    except SafetensorError as error:
        raise UserError(f"{path} is no safetensors file: {error}") from None


def numbers_of(path: Path) -> int:
    """How many weights a compact file holds, zeros too, from its header; ValueError for a file that is none."""
    shapes = tensor_shapes(path)
    with safe_open(path, framework="np") as file:
        return sum(math.prod(shape) for _, shape in _entries(path, file, shapes).values())


def write_compact_folder(folder: Path, model: nn.Module, target: Path, values: str) -> dict[str, Any]:
    """Write a compact folder: the config, tokenizer, exit heads and code, and the compact file; gives its report.

    `target` is an empty folder, `model` is that of `folder`.
    """
    _copy(folder, target, _BESIDE)
    return write_compact(model, target / COMPACT_FILE, values)


def unpack_compact(folder: Path, target: Path) -> None:
    """Write the ordinary model folder, in fp32, of a compact one; `target` is an empty folder."""
    _copy(folder, target, _BESIDE)
    _write_whole(folder, target)


@contextlib.contextmanager
def unpacked(folder: Path) -> Iterator[Path]:
    """The folder that a compact one's model is loaded from, while it is used; a ValueError names the compact one."""
    with tempfile.TemporaryDirectory() as aside:
        target = Path(aside) / folder.absolute().name
        target.mkdir()
        _copy(folder, target, _TO_LOAD)
        _write_whole(folder, target)
        try:
            yield target
        except ValueError as error:
            raise UserError(str(error).replace(str(target), str(folder))) from error


def _state_of(model_or_state: nn.Module | Mapping[str, Tensor]) -> dict[str, Tensor]:
    """By name, on the CPU; of tied weights the first."""
    if isinstance(model_or_state, nn.Module):
        kept = {name for name, _ in model_or_state.named_parameters()}
        tied = {name for name, _ in model_or_state.named_parameters(remove_duplicate=False)} - kept
        model_or_state = {name: value for name, value in model_or_state.state_dict().items() if name not in tied}
    return {name: value.detach().cpu().contiguous() for name, value in model_or_state.items()}


def _packed(name: str, tensor: Tensor, values: str) -> tuple[str, dict[str, Tensor]]:
    """The smallest form of a tensor, and its parts."""
    if "#" in name:
        raise UserError(f"{name}: a weight's name in a compact file has no #")
    if not tensor.is_floating_point() and tensor.dtype not in _PLAIN:
        raise UserError(f"{name} is {str(tensor.dtype)[6:]}, which a compact file does not hold: convert it")
    if not tensor.is_floating_point():
        return "dense", {"": tensor}
    numbers = tensor.float().numpy()
    if not np.isfinite(numbers).all():
        raise UserError(f"{name} holds numbers that are not finite: the model is broken, there is nothing to keep")
    if values == INT8 and numbers.ndim > 1:
        quantised, scale = _quantised(numbers)
        dense: dict[str, Array] = {"#int8": quantised, "#scale": scale}
        masked: dict[str, Array] = {**_masked(quantised), "#scale": scale}
        forms = {"int8": dense, "mask_int8": masked}
    else:
        halves = _halves(name, numbers)
        forms = {"dense": {"": halves}, "mask": _masked(halves)}
    form = min(forms, key=lambda key: sum(part.nbytes for part in forms[key].values()))
    return form, {part: torch.from_numpy(value) for part, value in forms[form].items()}


def _halves(name: str, numbers: Array) -> Array:
    largest = float(np.abs(numbers).max(initial=0.0))
    if largest > _MOST_OF_FP16:
        raise UserError(f"{name} holds {largest:g}, and fp16 ends at {_MOST_OF_FP16:,.0f}: scale the model down")
    return np.asarray(numbers.astype(np.float16) + np.float16(0))  # which makes a negative zero one of two equal zeros


def _quantised(numbers: Array) -> tuple[Array, Array]:
    """int8 numbers and the scale of each row, fp32: at most half of it off, exactly.

    A scale has 17 binary digits, rounded up: no number is beyond 127 of it, and each product is exact in fp32.
    """
    rows = numbers.reshape(len(numbers), math.prod(numbers.shape[1:])).astype(np.float64)
    largest = np.abs(rows).max(1, initial=0.0)
    scale = _of_17_digits(np.maximum(largest / _MOST_OF_INT8, _SMALLEST_SCALE))
    nearest = np.rint(rows / scale[:, None].astype(np.float64))
    return np.clip(nearest, -_MOST_OF_INT8, _MOST_OF_INT8).astype(np.int8).reshape(numbers.shape), scale


def _of_17_digits(values: Array) -> Array:
    """The next numbers in fp32, none smaller, that times an int8 number are one of fp32."""
    digits, exponents = np.frexp(values)
    return np.ldexp(np.ceil(np.ldexp(digits, 17)), exponents - 17).astype(np.float32)


def _masked(numbers: Array) -> dict[str, Array]:
    kept = numbers.ravel() != 0
    return {"#mask": np.packbits(kept), "#values": numbers.ravel()[kept]}


def _error(tensor: Tensor, read: Tensor) -> float:
    return float((tensor.double() - read.double()).abs().max()) if tensor.numel() else 0.0


def _floor(state: Mapping[str, Tensor], entries: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> float:
    """Bytes: of masks their entropy, of all else what it has."""
    total = 0.0
    for name, tensor in state.items():
        for part in _PARTS[entries[name]["form"]]:
            total += 0 if part == "#mask" else tensors[f"{name}{part}"].nbytes
        if "mask" in entries[name]["form"]:
            total += _entropy(tensors[f"{name}#values"].numel() / tensor.numel()) * tensor.numel() / 8
    return total


def _entropy(share: float) -> float:
    """Bits of a choice that falls one way with this probability."""
    return -sum(p * math.log2(p) for p in (share, 1 - share) if p > 0)


def _sizes(state: Mapping[str, Tensor], path: Path, floor: float) -> Sizes:
    with tempfile.TemporaryDirectory() as aside:
        dense = Path(aside) / "model.safetensors"
        whole = {name: value.float() if value.is_floating_point() else value for name, value in state.items()}
        save_file(whole, dense, {"format": "pt"})
        zips = _zipped(path, aside), _zipped(dense, aside)
        return Sizes(path.stat().st_size, dense.stat().st_size, *zips, floor)


def _zipped(path: Path, aside: str) -> int:
    target = Path(aside) / "zip"
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED, compresslevel=6) as archive:
        archive.write(path, path.name)
    return target.stat().st_size


def _write_whole(folder: Path, target: Path) -> None:
    """The weights in fp32, and a config that says so: transformers would round them to what the first model was in."""
    save_file(read_compact(folder / COMPACT_FILE), target / "model.safetensors", {"format": "pt"})
    config = json.loads((target / "config.json").read_text(encoding="utf-8"))
    config.pop("torch_dtype", None)  # as transformers 4 called it
    (target / "config.json").write_text(json.dumps(config | {"dtype": "float32"}, indent=2) + "\n", encoding="utf-8")


def _copy(folder: Path, target: Path, patterns: Sequence[str]) -> None:
    """The files of a model folder that these patterns name, but for its weights and for what is too large for code."""
    for path in sorted(folder.iterdir()):
        named = any(map(path.match, patterns)) and not any(map(path.match, _WEIGHTS))
        if named and path.is_file() and not (path.suffix == ".py" and path.stat().st_size > _MOST_BYTES_OF_CODE):
            shutil.copyfile(path, target / path.name)


def _entries(path: Path, file: Any, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Form and shape of each weight; ValueError where the file's own tensors do not go with that."""
    said = file.metadata() or {}
    if said.get("format") != _FORMAT:
        raise UserError(f"{path} is no compact file: its header does not say {_FORMAT}")
    if said.get("version") != _VERSION:
        raise UserError(f"{path} has version {quoted(said.get('version'))} of compact files, and {_VERSION} is known")
    entries = {name: _entry(path, name, entry) for name, entry in _object(path, said.get("tensors")).items()}
    parts = {f"{name}{part}": kinds for name, (form, _) in entries.items() for part, kinds in _PARTS[form].items()}
    if parts.keys() != shapes.keys():
        wrong = min(parts.keys() ^ shapes.keys())
        raise UserError(f"{path} is broken: {quoted(wrong)} is in its list of weights or in its tensors, not in both")
    for name, kinds in parts.items():
        found = file.get_slice(name).get_dtype()
        if found not in kinds:
            raise UserError(f"{path} is broken: {quoted(name)} is {found}, and should be {' or '.join(kinds)}")
    for name, (form, shape) in entries.items():
        _check_shapes(path, name, form, shape, shapes)
    room, wanted = memory(), 8 * sum(math.prod(shape) for _, shape in entries.values())
    if wanted > room:
        raise UserError(f"{path} unpacks to more than this host's memory: {wanted:,} bytes on the way, of {room:,}")
    return entries


def _object(path: Path, text: str | None) -> dict[str, Any]:
    try:
        value = json.loads(text or "")
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise UserError(f"{path} is broken: its list of weights is no JSON object")
    return value


def _entry(path: Path, name: str, entry: Any) -> tuple[str, tuple[int, ...]]:
    values = entry if isinstance(entry, dict) else {}
    form, shape = str(values.get("form")), values.get("shape")
    sound = isinstance(shape, list) and len(shape) <= _MOST_DIMENSIONS
    if not (sound and all(type(side) is int and 0 <= side < 1 << 48 for side in shape or ())) or form not in _PARTS:
        raise UserError(f"{path} is broken: its entry of {quoted(name)} has no known form, or no shape")
    assert isinstance(shape, list)
    return form, tuple(shape)


def _check_shapes(path: Path, name: str, form: str, shape: tuple[int, ...], shapes: Mapping[str, Any]) -> None:
    rows = shape[:1]
    wanted: dict[str, Any] = {"": shape, "#int8": shape, "#scale": rows, "#mask": (-(-math.prod(shape) // 8),)}
    for part in _PARTS[form]:
        found = shapes[f"{name}{part}"]
        wrong = len(found) != 1 or found[0] > math.prod(shape) if part == "#values" else found != wanted[part]
        if wrong or (part == "#scale" and not rows):
            raise UserError(
                f"{path} is broken: {quoted(name)} is said to be {list(shape)}, which {part or 'a tensor'} of "
                f"{list(found)} does not fit"
            )


def _unpacked(path: Path, name: str, file: Any, form: str, shape: tuple[int, ...]) -> Array:
    parts: dict[str, Array] = {part: file.get_tensor(f"{name}{part}") for part in _PARTS[form]}
    for part, values in parts.items():
        if values.dtype.kind == "f" and not np.isfinite(values).all():
            raise UserError(f"{path} is broken: {quoted(name + part)} holds numbers that are not finite")
    if form == "dense":
        return parts[""].astype(np.float32) if parts[""].dtype.kind == "f" else parts[""]
    numbers = parts["#int8"] if form == "int8" else _placed(path, name, parts, shape)
    found = numbers.astype(np.float32)
    if "#scale" in parts:
        found *= parts["#scale"].reshape(-1, *(1,) * (len(shape) - 1))
    return found


def _placed(path: Path, name: str, parts: Mapping[str, Array], shape: tuple[int, ...]) -> Array:
    """The values where the mask has a bit, zeros elsewhere."""
    count = math.prod(shape)
    bits = np.unpackbits(parts["#mask"])
    if bits[count:].any():
        raise UserError(f"{path} is broken: the mask of {quoted(name)} has bits beyond its {count:,} weights")
    kept = bits[:count].astype(bool)
    if int(kept.sum()) != len(parts["#values"]):
        raise UserError(
            f"{path} is broken: the mask of {quoted(name)} keeps {int(kept.sum()):,} weights, and there are "
            f"{len(parts['#values']):,} values"
        )
    placed = np.zeros(count, parts["#values"].dtype)
    placed[kept] = parts["#values"]
    return placed.reshape(shape)
