"""Write a file or a folder whole or not at all: beside its place first, then put there in one step."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_ASIDE = re.compile(r"\..+\.tmp")


def write_whole(path: Path, content: str | bytes) -> None:
    """Put a file in its place, in that of an older one too. Text is written as UTF-8."""
    with file_aside(path) as aside:
        aside.write_bytes(content.encode() if isinstance(content, str) else content)


def write_json(path: Path, value: Any) -> None:
    """Put a JSON file in its place; its folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(value, ensure_ascii=False, indent=2) + "\n")


@contextlib.contextmanager
def file_aside(path: Path) -> Iterator[Path]:
    """The path to write a file to, beside `path`; put there when the block ends, removed when it fails."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield aside
        with aside.open("rb") as file:
            os.fsync(file.fileno())  # or a power cut could leave the name without the content
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


@contextlib.contextmanager
def folder_aside(path: Path) -> Iterator[Path]:
    """An empty folder beside `path`, which must not exist; renamed to it when the block ends, removed when it fails.

    OSError where another process has put something there meanwhile.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent))
    try:
        aside.chmod(0o755)  # that of mkdtemp is for its owner alone
        yield aside
        aside.rename(path)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def is_aside(path: Path) -> bool:
    """Whether a path has the name of something that was written beside its place, by a process that may be dead."""
    return _ASIDE.fullmatch(path.name) is not None
