"""The files of a checkpoint: their list with sizes and checksums, and whether they are still as they were written.

`checked_sums` and `damage_of` are collective: the ranks share the reading.
"""

import contextlib
import errno
import json
import os
import shutil
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ds_trainer.files.writing import write_whole
from ds_trainer.ranks import distributed
from ds_trainer.ranks.failures import UserError

MARKER = "complete.json"
_CHUNK = 1 << 22
_PAGE = 1 << 16  # bytes that a full disk may still report as free

Sums = dict[str, tuple[int, int]]
"""Size and CRC-32 of every file, by its path inside the folder."""


class DamagedCheckpointError(UserError):
    """The files of a checkpoint are not those that were written."""


@dataclass
class Writes:
    """The files that this rank has DeepSpeed write, and the errors of writing."""

    paths: list[Path] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


@contextlib.contextmanager
def watched(engine: Any) -> Iterator[Writes]:
    """Collect the errors of DeepSpeed's writer, while a checkpoint is saved inside the context.

    An error that one rank raised inside `save_checkpoint` would leave the other ranks waiting at a barrier. The scripts
    that DeepSpeed copies beside its checkpoints are left out: copying them could fail in the same way, and could
    overwrite a user's file of that name.
    """
    writes, writer = Writes(), engine.checkpoint_engine
    write, copy = writer.save, engine._copy_recovery_script

    def save(state_dict: Any, path: str) -> None:
        writes.paths.append(Path(path))
        try:
            write(state_dict, path)
        except (OSError, RuntimeError) as error:
            # on a full disk torch's zip writer only reports that its file is shorter than it should be
            full = shutil.disk_usage(Path(path).parent).free < _PAGE
            writes.errors.append(os.strerror(errno.ENOSPC) if full else str(error).splitlines()[0])

    writer.save, engine._copy_recovery_script = save, lambda folder: None
    try:
        yield writes
    finally:
        writer.save, engine._copy_recovery_script = write, copy


def checked_sums(folder: Path, writes: Writes) -> Sums:
    """Flush all files of the folder to disk, read them back and sum them.

    Raises OSError, on every rank, where writing or reading one of them failed on any.
    """
    # a host that does not share the folder sees only its own files: each rank names those that it wrote
    seen = {*writes.paths, *(path for path in folder.rglob("*") if path.is_file())}
    names = {str(path.relative_to(folder)) for path in seen}
    of_ranks = distributed.broadcast(distributed.gather((names, writes.errors)))
    if errors := [error for _, errors in of_ranks for error in errors]:
        raise OSError(errors[0])
    sums: Sums = {}
    for name, result in _shared_sums(folder, sorted(set().union(*(seen for seen, _ in of_ranks))), sync=True).items():
        if isinstance(result, str):
            raise OSError(f"{name}: {result}")
        sums[name] = result
    return sums


def damage_of(folder: Path, sums: Mapping[str, tuple[int, int]]) -> str | None:
    """Return the first difference between the folder's files and what was written, on every rank."""
    for name, result in _shared_sums(folder, sorted(sums), sync=False).items():
        if isinstance(result, str):
            return f"{name}: {result}"
        if result[0] != sums[name][0]:
            return f"{name} has {result[0]:,} bytes, and was written with {sums[name][0]:,}"
        if result[1] != sums[name][1]:
            return f"{name} is not what was written: its checksum differs"
    return None


def _shared_sums(folder: Path, names: list[str], sync: bool) -> dict[str, tuple[int, int] | str]:
    """Return size and checksum of every file, or an error in words, on every rank; each rank reads its share."""
    share = {name: _sum_or_error(folder / name, sync) for name in names[distributed.rank() :: distributed.world_size()]}
    return {name: result for part in distributed.broadcast(distributed.gather(share)) for name, result in part.items()}


def _sum_or_error(path: Path, sync: bool) -> tuple[int, int] | str:
    """Read a file; `sync` first puts it on disk."""
    total = 0
    try:
        with path.open("rb") as file:
            if sync:
                os.fsync(file.fileno())
            while chunk := file.read(_CHUNK):
                total = zlib.crc32(chunk, total)
            return file.tell(), total
    except FileNotFoundError:
        return f"rank {distributed.rank()} does not see it, and all hosts must share the output folder"
    except OSError as error:
        return str(error.strerror)


def write_marker(folder: Path, sums: Sums, state: Mapping[str, Any]) -> None:
    """Write the list of the folder's files and the state of the phase; an older marker is replaced."""
    content = {"files": sums, "position": state}
    write_whole(folder / MARKER, json.dumps(content | {"checksum": _sum_of(content)}, indent=1))
    sync_folder(folder)


def read_marker(folder: Path) -> tuple[Sums, dict[str, Any]]:
    """Return the files and the state. Raises UserError for a marker that is not as it was written."""
    try:
        content = json.loads((folder / MARKER).read_text(encoding="utf-8"))
        if content.pop("checksum") != _sum_of(content):
            raise UserError("its checksum differs")
        return {name: (size, crc) for name, (size, crc) in content["files"].items()}, content["position"]
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise UserError(f"{MARKER} cannot be read: {error}") from error


def sync_folder(folder: Path) -> None:
    """Flush a folder's names to disk; some network file systems cannot, and need not."""
    with contextlib.suppress(OSError):
        place = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(place)
        finally:
            os.close(place)


def _sum_of(content: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())
