"""The files of a checkpoint: what was written, with sizes and checksums, and whether that is still there.

All functions but the marker's are collective: the ranks share the reading.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ds_trainer.ranks import distributed
from ds_trainer.ranks.failures import UserError

MARKER = "complete.json"
_CHUNK = 1 << 22
_PAGE = 1 << 16  # bytes that a full disk may still call free

Sums = dict[str, tuple[int, int]]
"""Size and CRC-32 of every file, by its path inside the folder."""


class DamagedCheckpointError(UserError):
    """The files of a checkpoint are not those that were written."""


class Writes:
    """What this rank has DeepSpeed write, and what went wrong with it."""

    def __init__(self) -> None:
        self.paths: list[Path] = []
        self.errors: list[str] = []


@contextlib.contextmanager
def watched(engine: Any) -> Iterator[Writes]:
    """Have DeepSpeed's writer keep an error for later: raised in the midst, it leaves the other ranks at a barrier.

    The scripts that DeepSpeed would copy beside its checkpoints stay where they are: they could fail in the same way,
    and a user's file may have their name.
    """
    writes, writer = Writes(), engine.checkpoint_engine
    write, copy = writer.save, engine._copy_recovery_script

    def save(state_dict: Any, path: str) -> None:
        writes.paths.append(Path(path))
        try:
            write(state_dict, path)
        except (OSError, RuntimeError) as error:
            writes.errors.append(_why(error, Path(path).parent))

    writer.save, engine._copy_recovery_script = save, lambda folder: None
    try:
        yield writes
    finally:
        writer.save, engine._copy_recovery_script = write, copy


def checked_sums(folder: Path, writes: Writes) -> Sums:
    """Put all files of the folder on disk and sum them. OSError, on every rank, where one is not there for another."""
    own = [str(path.relative_to(folder)) for path in writes.paths]
    seen = [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]
    names = sorted(set().union(*distributed.broadcast(distributed.gather({*own, *seen}))))
    merged: Sums = {}
    for share in distributed.broadcast(distributed.gather(_own_sums(folder, names))):
        if isinstance(share, str):
            raise OSError(share)
        merged |= share
    return merged


def _own_sums(folder: Path, names: list[str]) -> Sums | str:
    """Those of every world-th file; or what is wrong with one."""
    share = names[distributed.rank() :: distributed.world_size()]
    try:
        return {name: _size_and_sum(folder / name, sync=True) for name in share}
    except FileNotFoundError as error:
        return f"rank {distributed.rank()} does not see {error.filename}: all hosts must share the output folder"
    except OSError as error:
        return f"{error.filename}: {error.strerror}"


def damage_of(folder: Path, sums: Mapping[str, tuple[int, int]]) -> str | None:
    """What is wrong with the folder's files, if anything, on every rank."""
    shares = distributed.broadcast(distributed.gather(_own_damage(folder, sums)))
    return next((damage for damage in shares if damage), None)


def _own_damage(folder: Path, sums: Mapping[str, tuple[int, int]]) -> str | None:
    for name in sorted(sums)[distributed.rank() :: distributed.world_size()]:
        try:
            size, checksum = _size_and_sum(folder / name)
        except OSError as error:
            return f"{name}: {error.strerror}"
        if size != sums[name][0]:
            return f"{name} has {size:,} bytes, and was written with {sums[name][0]:,}"
        if checksum != sums[name][1]:
            return f"{name} is not what was written: its checksum differs"
    return None


def write_marker(folder: Path, sums: Sums, position: Mapping[str, Any]) -> None:
    """Say that the folder is whole, of which files, and where the run was; a marker that is there is replaced."""
    content, aside = {"files": sums, "position": position}, folder / f"{MARKER}.new"
    with aside.open("w", encoding="utf-8") as file:
        json.dump(content | {"checksum": _sum_of(content)}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(folder / MARKER)
    sync_folder(folder)


def read_marker(folder: Path) -> tuple[Sums, dict[str, Any]]:
    """The files and the position. Raises ValueError for one that is not as it was written."""
    try:
        content = json.loads((folder / MARKER).read_text(encoding="utf-8"))
        checksum = content.pop("checksum")
        if checksum != _sum_of(content):
            raise UserError("its checksum differs")
        return {name: (size, crc) for name, (size, crc) in content["files"].items()}, content["position"]
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise UserError(f"{MARKER} cannot be read: {error}") from error


def sync_folder(folder: Path) -> None:
    """Put a folder's names on disk; some network file systems cannot, and need not."""
    with contextlib.suppress(OSError):
        place = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(place)
        finally:
            os.close(place)


def _sum_of(content: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())


def _size_and_sum(path: Path, sync: bool = False) -> tuple[int, int]:
    total = 0
    with path.open("rb") as file:
        if sync:
            os.fsync(file.fileno())
        while chunk := file.read(_CHUNK):
            total = zlib.crc32(chunk, total)
        return file.tell(), total


def _why(error: Exception, place: Path) -> str:
    """What the system says; torch's zip writer only finds that its file is shorter than it should be."""
    if shutil.disk_usage(place).free < _PAGE:
        return os.strerror(errno.ENOSPC)
    return str(getattr(error, "strerror", None) or str(error).splitlines()[0])
