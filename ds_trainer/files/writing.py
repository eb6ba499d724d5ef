"""Write a file or a folder as a whole or not at all: first beside its place, then renamed into it in one step."""

import contextlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil

_ASIDE = re.compile(r"\..+\.(\d+|[a-z0-9_]{8})\.tmp")  # a process id, or eight characters of mkdtemp


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file, or replace an existing one. Text is written as UTF-8."""
    with file_aside(path) as aside:
        # a lone surrogate, from a path that is not UTF-8, becomes \udcXX, which JSON reads back
        aside.write_bytes(content.encode(errors="backslashreplace") if isinstance(content, str) else content)


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file, or replace an existing one; missing folders above it are made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(value, ensure_ascii=False, indent=2) + "\n")


def write_artifacts(folder: Path, files: Mapping[str, Any]) -> None:
    """Write files by their names into a folder, which is made: texts as they are, and any other value as JSON."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in files.items():
        write_whole(folder / name, value) if isinstance(value, str) else write_json(folder / name, value)


@contextlib.contextmanager
def file_aside(path: Path) -> Iterator[Path]:
    """Yield a path beside `path` to write to; the file is renamed to `path` at the end, or removed after an error."""
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
    """Yield an empty folder beside `path`; it is renamed to `path` at the end, or removed after an error.

    `path` must not exist, or be an empty folder. Raises OSError where another process has made it in the meantime.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent))
    try:
        aside.chmod(0o755)  # mkdtemp makes folders that only their owner can read
        yield aside
        aside.rename(path)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def move_files(source: Path, folder: Path, key: Callable[[Path], Any] = str) -> None:
    """Move the files of a folder, and of the folders in it, into another one, in the order of `key`."""
    for path in sorted(filter(Path.is_file, source.rglob("*")), key=key):
        target = folder / path.relative_to(source)
        target.parent.mkdir(exist_ok=True)
        path.replace(target)


def is_aside(path: Path) -> bool:
    """Whether a path is named like a file or folder of `file_aside` or `folder_aside`."""
    return _ASIDE.fullmatch(path.name) is not None


def is_leftover(path: Path) -> bool:
    """Whether a path is named like one of `file_aside`, by a process of this host that no longer runs."""
    name = _ASIDE.fullmatch(path.name)
    return name is not None and name[1].isdecimal() and not psutil.pid_exists(int(name[1]))


def existing_above(path: Path) -> Path:
    """Return the path itself if it exists, else the nearest folder above it that does."""
    return next(place for place in (path, *path.absolute().parents) if os.path.exists(place))
