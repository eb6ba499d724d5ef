"""Read a file as a whole: only regular files, and none that is larger than memory allows. Hash files and models.

What users write is read as DeepSpeed reads its own files: as Hjson, in which comments and trailing commas are fine. Our
errors say in addition which key stands twice. This module loads neither torch nor DeepSpeed.
"""

import contextlib
import hashlib
import json
import os
import stat
from collections import Counter
from pathlib import Path
from typing import Any

import hjson
import psutil

from ds_trainer.files.messages import cut, kind_of, listed
from ds_trainer.ranks.failures import UserError

_MOST_BYTES_OF_SETTINGS = 2**20

_CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
"""The files in which a container sees its memory limit: of cgroup v2, and of v1."""
_CGROUP_USED = (Path("/sys/fs/cgroup/memory.current"), Path("/sys/fs/cgroup/memory/memory.usage_in_bytes"))
_NOT_LOADED = (".*", "*.md", "*.onnx*", "export.json")
"""What no model is loaded from, and commands add to a folder after its model was used."""


def read_file(path: Path, name: str | None = None, max_bytes: int | None = None) -> bytes:
    """Return the bytes of a regular file of at most `max_bytes` (default: `largest_file()`).

    Raises UserError, which calls the file `name` (default: its path).
    """
    check_file(path, name, max_bytes)
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"{name or path} cannot be read: {error.strerror}") from None


def check_file(path: Path, name: str | None = None, max_bytes: int | None = None) -> None:
    """Raise the UserError that `read_file` would raise, without opening the file."""
    name = name or str(path)
    try:
        status = os.stat(path)
    except FileNotFoundError:
        raise UserError(f"{name} does not exist") from None
    except (OSError, ValueError) as error:  # a ValueError: the name holds a NUL character
        raise UserError(f"{name} cannot be read: {getattr(error, 'strerror', 'it is no valid name')}") from None
    if stat.S_ISDIR(status.st_mode):
        raise UserError(f"{name} is a folder: name a file in it")
    if not stat.S_ISREG(status.st_mode):  # a pipe blocks until somebody writes to it, and only one rank would read it
        raise UserError(f"{name} is a pipe or a device: name a regular file, since every rank reads it")
    max_bytes = max_bytes or largest_file()
    if status.st_size > max_bytes:
        raise UserError(f"{name} has {status.st_size:,} bytes: at most {max_bytes:,} are read into memory")


def read_value(path: Path) -> Any:
    """Parse a JSON file of this program, in which NaN counts as a number. Raises UserError where it is not JSON."""
    raw = read_file(path)
    try:
        return json.loads(raw.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read: it is not JSON: {error}") from None


def read_object(path: Path) -> dict[str, Any]:
    """Parse the JSON object in a file of this program, as `read_value` does."""
    return _object(read_value(path), str(path))


def read_json(path: str | Path, role: str) -> dict[str, Any]:
    """Read the object that a user wrote; `role` names the file in errors, e.g. "the recipe"."""
    name = f"{role} {path}"
    return parse_json(read_file(Path(path), name, _MOST_BYTES_OF_SETTINGS), name)


def parse_json(raw: bytes, name: str) -> dict[str, Any]:
    """Parse an object that a user wrote. Raises UserError with its `name`, and the line of a mistake of syntax."""
    try:
        text = raw.decode("utf-8-sig")
        if not text.strip():
            raise UserError("it is empty: it must be an object, {...}")
        data = hjson.loads(text, object_pairs_hook=_without_duplicates)
    except UserError as error:
        cause = str(error)
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        cause = f"line {line} is not UTF-8: save it as UTF-8"
    except hjson.HjsonDecodeError as error:
        cause = f"{cut(error.msg, 200)} at line {error.lineno}, column {error.colno}"
    except (IndexError, RecursionError, OverflowError, ValueError) as error:
        # Hjson raises an IndexError at an end where it expects none; Python reads no number of thousands of digits
        causes = {IndexError: "it ends inside a comment or a text", RecursionError: "it is nested too deeply"}
        cause = causes.get(type(error), "a number is too large")
    else:
        if mistake := value_mistake(data):
            raise UserError(f"{name} {mistake}")
        return _object(data, name)
    raise UserError(f"{name} is not JSON: {cause}")


def value_mistake(data: Any) -> str | None:
    """Say why a value could not be written back as JSON or be used as a path; None where it can."""
    try:
        text = json.dumps(data, allow_nan=False, ensure_ascii=False)
        text.encode()
    except UnicodeEncodeError:
        return "holds half a surrogate pair, which is no character"
    except RecursionError:
        return "is nested too deeply"
    except ValueError:
        return "holds a number that JSON has not: NaN, Infinity, or one of thousands of digits"
    return "holds a NUL character" if "\\u0000" in text else None


def _object(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise UserError(f"{name} holds {kind_of(value)}: it must be an object, {{...}}")
    return value


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if twice := sorted(key for key, times in Counter(key for key, _ in pairs).items() if times > 1):
        raise UserError(f"it has {listed(twice)} twice in one section: keep one")
    return dict(pairs)


def memory_limit() -> int:
    """Return the bytes of memory that this process may use: the host's, or its control group's where that has less."""
    limits = [psutil.virtual_memory().total]
    for path in _CGROUP_LIMITS:
        with contextlib.suppress(OSError, ValueError):  # the file does not exist, or says "max"
            limits.append(int(path.read_text(encoding="ascii")))
    return min(limits)


def free_memory() -> int:
    """Return the bytes of memory that are free on this host, or in this process's control group."""
    available: int = psutil.virtual_memory().available
    for path, used in zip(_CGROUP_LIMITS, _CGROUP_USED, strict=True):
        with contextlib.suppress(OSError, ValueError):
            statistics = dict(line.split() for line in used.with_name("memory.stat").read_text("ascii").splitlines())
            cached = int(statistics.get("total_inactive_file", statistics.get("inactive_file", 0)))
            available = min(available, int(path.read_text("ascii")) - int(used.read_text("ascii")) + cached)
    return available


def largest_file() -> int:
    """Return how many bytes a file may have: as Python's objects, its text takes several times as many."""
    return memory_limit() // 8


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

    These are the files of its folder (config, weights in any form, tokenizer, ...) and the code in folders below it.
    """
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted({*folder.iterdir(), *folder.rglob("*.py")}):
        if path.is_file() and not any(path.match(name) for name in _NOT_LOADED):
            digest.update(f"{path.relative_to(folder)}\0".encode() + content_hash(path))
    return digest.hexdigest()
