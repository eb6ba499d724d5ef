"""Read a file whole, where it is one: a pipe would be waited for, and a device has no end."""

from __future__ import annotations

import hashlib
import json
import os
import stat
from pathlib import Path
from typing import Any

from ds_trainer.ranks.failures import UserError

TOO_LONG = "a number has thousands of digits"
"""The one fault of sound JSON that Python does not read, beside nesting."""
_GROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
"""Of the second and the first version of control groups, as a container sees its own."""
_SHARE_OF_A_FILE = 8


def read_file(path: Path, said: str | None = None, most: int | None = None) -> bytes:
    """The bytes of a regular file; else a ValueError, which begins with `said`, by default the path.

    `most` are the bytes that such a file can have; by default `most_held`.
    """
    check_file(path, said, most)
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"{said or path} cannot be read: {error.strerror}") from None
    except MemoryError:
        raise UserError(f"{said or path} has {os.path.getsize(path):,} bytes: more than there is memory for") from None


def memory() -> int:
    """The bytes of memory that this process can have: the host's, or those of its control group, if these are fewer."""
    host = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([host, *filter(None, map(_group_limit, _GROUP_LIMITS))])


def _group_limit(path: Path) -> int | None:
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):  # there is none, or it is "max"
        return None


def most_held() -> int:
    """The bytes that what is read of one file may take: of text, Python's objects take several times as many."""
    return memory() // _SHARE_OF_A_FILE


def read_value(path: Path) -> Any:
    """The value in a file of plain JSON; NaN is a number there. ValueError, with the path, where there is none."""
    raw = read_file(path)
    try:
        return json.loads(raw.decode("utf-8-sig"))
    except UnicodeDecodeError:
        cause = "it is not UTF-8"
    except json.JSONDecodeError as error:
        cause = f"it is not JSON: {error.msg}, line {error.lineno}, column {error.colno}"
    except RecursionError:
        cause = "it is nested too deeply"
    except ValueError:
        cause = TOO_LONG
    raise UserError(f"{path} cannot be read: {cause}")


def check_file(path: Path, said: str | None = None, most: int | None = None) -> None:
    """Raise what `read_file` would raise, without opening it."""
    said = said or str(path)
    try:
        found = os.stat(path)
    except FileNotFoundError:
        raise UserError(f"{said} does not exist") from None
    except OSError as error:
        raise UserError(f"{said} cannot be read: {error.strerror}") from None
    except ValueError:  # a NUL, or half a surrogate pair
        raise UserError(f"{said} does not exist: that is no name of a file") from None
    if stat.S_ISDIR(found.st_mode):
        raise UserError(f"{said} is a folder: name the file in it")
    if not stat.S_ISREG(found.st_mode):
        raise UserError(f"{said} is a pipe or a device: name a file, every rank reads it")
    most = most or most_held()
    if found.st_size > most:
        raise UserError(f"{said} has {found.st_size:,} bytes, and such a file is read whole: {most:,} are the most")


def content_hash(path: Path) -> bytes:
    """Hash of the content: time stamps differ between hosts, and an edited file can keep its size."""
    digest = hashlib.blake2b(digest_size=16)
    try:
        with path.open("rb") as file:
            while chunk := file.read(1 << 20):
                digest.update(chunk)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    return digest.digest()
