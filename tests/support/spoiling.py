"""Ways to spoil a model folder, each a function of the folder."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
Spoil = Callable[[Path], Any]


def edit(name: str, **fields: Any) -> Spoil:
    """Change fields of a JSON file; None removes one."""

    def spoil(folder: Path) -> None:
        value = json.loads((folder / name).read_text()) | fields
        (folder / name).write_text(json.dumps({key: item for key, item in value.items() if item is not None}))

    return spoil


def put(name: str, text: str | bytes) -> Spoil:
    return lambda folder: (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())


def drop(pattern: str) -> Spoil:
    return lambda folder: [path.unlink() for path in folder.glob(pattern)]


def index_of(*names: Any) -> Spoil:
    """An index in place of the weights."""

    def spoil(folder: Path) -> None:
        keys = list(load_file(folder / WEIGHTS))
        (folder / WEIGHTS).unlink()
        chosen = {key: names[number % len(names)] for number, key in enumerate(keys)}
        (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": chosen}))

    return spoil


def cut(name: str, share: float) -> Spoil:
    return lambda folder: os.truncate(folder / name, int((folder / name).stat().st_size * share))


def header(change: Callable[[dict[str, Any]], Any], name: str = WEIGHTS) -> Spoil:
    """Change the header of a safetensors file."""

    def spoil(folder: Path) -> None:
        raw = (folder / name).read_bytes()
        length = struct.unpack("<Q", raw[:8])[0]
        value = change(json.loads(raw[8 : 8 + length]))
        text = value if isinstance(value, bytes) else json.dumps(value).encode()
        (folder / name).write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length :])

    return spoil


def entry(**fields: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda value: value | {"classifier.bias": value["classifier.bias"] | fields}


def pipe(name: str) -> Spoil:
    def spoil(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)

    return spoil


def link(name: str, target: str) -> Spoil:
    def spoil(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(target)

    return spoil


def sparse(name: str, size: int) -> Spoil:
    return lambda folder: (open(folder / name, "ab").close(), os.truncate(folder / name, size))


def reshaped(folder: Path) -> None:
    weights = load_file(folder / WEIGHTS)
    save_file({name: torch.cat([w, w]) for name, w in weights.items()}, folder / WEIGHTS, metadata={"format": "pt"})


def table(name: str, field: str, rows: int) -> Spoil:
    """Cut one of the embeddings' tables, in the weights and in the config alike."""

    def spoil(folder: Path) -> None:
        key, weights = f"bert.embeddings.{name}.weight", load_file(folder / WEIGHTS)
        weights[key] = weights[key][:rows].clone()
        save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
        edit("config.json", **{field: rows})(folder)

    return spoil
