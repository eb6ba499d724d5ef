"""Read a file as a whole, and hash files and models.

What users write is read as DeepSpeed reads its own files: as Hjson, in which comments and trailing commas are fine. Our
errors say in addition which key stands twice. This module loads neither torch nor DeepSpeed.
"""

import contextlib
import hashlib
import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import hjson
import psutil

from ds_trainer.files.messages import kind_of, listed
from ds_trainer.ranks.failures import UserError

_CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
"""The files in which a container sees its memory limit: of cgroup v2, and of v1."""
_CGROUP_USED = (Path("/sys/fs/cgroup/memory.current"), Path("/sys/fs/cgroup/memory/memory.usage_in_bytes"))
_NOT_LOADED = (".*", "*.md", "*.onnx*", "export.json")
"""What no model is loaded from, and commands add to a folder after its model was used."""


def read_file(path: Path, name: str | None = None) -> bytes:
    """Return the bytes of a file. Raises UserError, which calls the file `name` (default: its path)."""
    check_file(path, name)
    return path.read_bytes()


def check_file(path: Path, name: str | None = None) -> None:
    """Raise the UserError that `read_file` would raise, without opening the file."""
    if not os.path.isfile(path):
        raise UserError(f"{name or path} {'is a folder' if os.path.isdir(path) else 'does not exist'}")
    if not os.access(path, os.R_OK):
        raise UserError(f"{name or path} cannot be read: permission denied")


def read_value(path: Path) -> Any:
    """Parse a JSON file of this program, in which NaN counts as a number. Raises UserError where it is not JSON."""
    raw = read_file(path)
    try:
        return json.loads(raw.decode("utf-8-sig"))
    except ValueError as error:
        raise UserError(f"{path} cannot be read: it is not JSON: {error}") from None


def read_object(path: Path) -> dict[str, Any]:
    """Parse the JSON object in a file of this program, as `read_value` does."""
    return _object(read_value(path), str(path))


def read_json(path: str | Path, role: str) -> dict[str, Any]:
    """Read the object that a user wrote; `role` names the file in errors, e.g. "the recipe"."""
    name = f"{role} {path}"
    return parse_json(read_file(Path(path), name), name)


def parse_json(raw: bytes, name: str) -> dict[str, Any]:
    """Parse an object that a user wrote. Raises UserError with its `name`, and the line of a mistake of syntax."""
    try:
        text = raw.decode("utf-8-sig")
        if not text.strip():
            raise UserError("it is empty: it must be an object, {...}")
        data = hjson.loads(text, object_pairs_hook=_without_duplicates)
        json.dumps(data, allow_nan=False)  # refuses NaN and Infinity, which DeepSpeed would take
    except (ValueError, IndexError, OverflowError) as error:
        # Hjson raises an IndexError at an end inside a comment, and an OverflowError at 1e400
        raise UserError(f"{name} is not JSON: {error}") from None
    return _object(data, name)


def _object(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise UserError(f"{name} holds {kind_of(value)}: it must be an object, {{...}}")
    return value


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if twice := sorted(key for key, times in Counter(key for key, _ in pairs).items() if times > 1):
        raise UserError(f"it has {listed(twice)} twice in one section: keep one")
    return dict(pairs)


def free_memory() -> int:
    """Return the bytes of memory that are free on this host, or in this process's control group."""
    available: int = psutil.virtual_memory().available
    for path, used in zip(_CGROUP_LIMITS, _CGROUP_USED, strict=True):
        with contextlib.suppress(OSError, ValueError):
            statistics = dict(line.split() for line in used.with_name("memory.stat").read_text("ascii").splitlines())
            cached = int(statistics.get("total_inactive_file", statistics.get("inactive_file", 0)))
            available = min(available, int(path.read_text("ascii")) - int(used.read_text("ascii")) + cached)
    return available


def content_hash(path: Path) -> bytes:
    """Hash the content of a file. (Time stamps differ between hosts, and an edit may keep the size of a file.)"""
    digest = hashlib.blake2b(digest_size=16)
    try:
        with path.open("rb") as file:
            while chunk := file.read(1 << 20):
                digest.update(chunk)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    return digest.digest()


def folder_hash(folder: Path) -> str:
    """Return a hash of the names and contents of all files that a model may be loaded from.

    These are the files of its folder (config, weights in any form, tokenizer, ...), and the code and the configs of
    modules in folders below it.
    """
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted({*folder.iterdir(), *folder.rglob("*.py"), *folder.glob("*/config.json")}):
        if path.is_file() and not any(path.match(name) for name in _NOT_LOADED):
            digest.update(f"{path.relative_to(folder)}\0".encode() + content_hash(path))
    return digest.hexdigest()
