"""The folder of a run: what may be written there, and a list of what was, so that nothing else is ever deleted."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import time
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import IO, Any

from ds_trainer.files.messages import cut
from ds_trainer.files.whole_file import read_value
from ds_trainer.ranks import distributed
from ds_trainer.ranks.failures import UserError

_LIST = ".ds_trainer.json"
_LOCK = ".ds_trainer.lock"
_ASIDE = re.compile(r"\..+\.\d+\.tmp")
TOKENIZER_FILES = (
    *("tokenizer*.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja"),
    *("vocab.txt", "vocab.json", "merges.txt", "spm.model", "spiece.model", "sentencepiece.bpe.model"),
)
MODEL_FILES = (
    *("config.json", "generation_config.json", "model*.safetensors", "model.safetensors.index.json"),
    *("exits.json", "exit_heads.safetensors", "shrunk_model.py", *TOKENIZER_FILES),
)
"""The names of files of a model, as this program writes its folder."""
_WRITTEN = (
    *MODEL_FILES,
    *("complete.json*", "*_states.pt", "events.out.tfevents.*"),
    *("predictions.json", "nbest_predictions.json", "null_odds.json"),
)
"""The names of files inside folders that a run writes: models, checkpoints, TensorBoard, predictions."""


def check_output_folder(
    folder: Path, overwrite: bool, resume: bool = False, checkpoint: Path | None = None
) -> list[str]:
    """The mistakes in writing a run to `folder`, or in resuming it from a checkpoint; creates and deletes nothing.

    A folder without anything may be resumed: a run that was killed in its first second is not there yet.
    """
    try:
        folder.exists()
    except OSError as error:  # a name that is too long, or links in a circle
        return [f"the output folder {cut(str(folder), 300)} cannot be made: {error.strerror}"]
    parent = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not parent.is_dir():
        return [f"the output folder {folder} cannot be made: {parent} is a file"]
    if not os.access(parent, os.W_OK):
        return [f"the output folder {folder} cannot be written: {parent} is read-only"]
    if checkpoint:
        return _checkpoint_mistakes(checkpoint, folder)
    there = (
        [path for path in folder.iterdir() if not (_is_aside(path) or path.name == _LOCK)] if folder.is_dir() else []
    )
    if overwrite or not there:
        return []
    if resume:
        return [] if (folder / _LIST).is_file() else [f"--resume: {folder} holds no run of this program"]
    return [f"the output folder {folder} is not empty: give another, or --overwrite_output_dir, or --resume"]


@contextlib.contextmanager
def kept_from_runs(folder: Path) -> Iterator[None]:
    """Inside, no run can begin to write to the folder; ValueError where one is under way.

    Commands that only read share the lock; they need no right to write, and where a run has left no lock file, or the
    disk knows no locks, they read without it.
    """
    with contextlib.ExitStack() as until_read:
        try:
            fcntl.flock(until_read.enter_context((folder / _LOCK).open("rb")), fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"a run is writing to {folder}, and may delete a checkpoint while it is read: wait until the run ends, "
                f"or stop it"
            ) from None
        except OSError:
            pass
        yield


def _checkpoint_mistakes(checkpoint: Path, folder: Path) -> list[str]:
    if not (checkpoint / "complete.json").is_file():
        return [f"--resume {checkpoint}: this is no whole checkpoint of this program; name a folder checkpoint-N"]
    if not checkpoint.resolve().is_relative_to(folder.resolve()):
        return [f"--resume {checkpoint}: the checkpoint is not of the run in {folder}: name its own --output_dir"]
    return []


class RunFolder:
    """Hands out paths inside the folder and remembers them; to be used by rank 0."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._list = path / _LIST
        self._locked: IO[str] | None = None  # kept open: the lock goes with the file

    def open(self, overwrite: bool) -> None:
        """Make the folder; with `overwrite`, delete what an earlier run wrote there, and only that.

        What a killed run had begun to write aside goes.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        own = self._own()
        for begun in [path for path in self.path.glob(".*.tmp") if _is_aside(path)]:
            begun.unlink()
        if overwrite:
            written = [path for name in own for path in self.path.glob(name)]
            for target in written:
                self._check_inside(target)
            for target in written:
                _delete_written(target, self.path)
            own = {name for name in own if any(self.path.glob(name))}
        self._write_list(own)

    def lock(self, seconds: float = 60) -> None:
        """Keep other runs out of the folder until this process ends, however it does.

        One that is just ending is waited for. Raises ValueError where it does not end.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        self._locked = (self.path / _LOCK).open("w")
        end, waited = time.monotonic() + seconds, False
        while not _taken(self._locked):
            if not waited:
                distributed.warn(f"another run is writing to {self.path}: waiting until it ends")
            waited = True
            if time.monotonic() > end:
                raise UserError(f"another run is writing to {self.path}: wait until it ends, or stop it")
            time.sleep(0.1)

    def claim(self, name: str) -> Path:
        """A path to write, or a pattern of paths; one that is there and that no run of ours wrote is a ValueError."""
        target = self.path / name
        self._check_inside(target)
        own = self._own()
        foreign = [] if name in own else sorted(self.path.glob(name))
        if foreign:
            raise UserError(f"{foreign[0]} is there and was not written by this program: move it, or write elsewhere")
        self._write_list(own | {name})
        target.parent.mkdir(parents=True, exist_ok=True)
        return target

    def write_json(self, name: str, value: Any) -> None:
        """Write a JSON file whole or not at all."""
        _replace(self.claim(name), json.dumps(value, indent=2) + "\n")

    def _check_inside(self, path: Path) -> None:
        if not path.resolve().is_relative_to(self.path.resolve()):
            raise UserError(f"{path} is a link that leads out of the output folder: remove it, or write elsewhere")

    def _own(self) -> set[str]:
        """What was claimed; read every time, since another object, or process, may have claimed more."""
        return _listed(self._list) if self._list.is_file() else set()

    def _write_list(self, own: set[str]) -> None:
        _replace(self._list, json.dumps(sorted(own)))


def _listed(file: Path) -> set[str]:
    found = read_value(file)
    if not isinstance(found, list) or not all(isinstance(name, str) and _stays(name) for name in found):
        raise UserError(f"{file} is no list of what a run wrote here: delete it, and what is not wanted in the folder")
    return set(found)


def _stays(name: str) -> bool:
    parts = Path(name).parts
    return bool(parts) and not Path(name).is_absolute() and ".." not in parts and "**" not in name


def _replace(target: Path, text: str) -> None:
    aside = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    with aside.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())  # or a power cut could leave the name without the content
    aside.replace(target)


def _taken(file: IO[str]) -> bool:
    """Whether the lock was free, and is this process's now; a file system without locks has it always free."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def _is_aside(path: Path) -> bool:
    """Whether it is the beginning of a file of ours, as `_replace` names it."""
    return _ASIDE.fullmatch(path.name) is not None


def _delete_written(target: Path, root: Path) -> None:
    """Delete a file of ours, or in a folder of ours the files a run writes; folders go once they are empty."""
    if target.is_dir():
        for path in target.rglob("*"):  # which does not follow links
            if path.is_file() and any(fnmatchcase(path.name, pattern) for pattern in _WRITTEN):
                path.unlink()
        folders = [
            *sorted((path for path in target.rglob("*") if path.is_dir() and not path.is_symlink()), reverse=True),
            target,
            target.parent,
        ]
    else:
        target.unlink()
        folders = [target.parent]
    for folder in folders:
        if folder != root and not any(folder.iterdir()):
            folder.rmdir()
