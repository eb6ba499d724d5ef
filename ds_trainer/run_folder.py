"""The folder of a run: what may be written there, and a list of what was, so that nothing else is ever deleted."""

from __future__ import annotations

import json
import os
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

_LIST = ".ds_trainer.json"
_WRITTEN = (
    *("config.json", "generation_config.json", "model*.safetensors", "model.safetensors.index.json"),
    *("tokenizer*.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja"),
    *("vocab.txt", "vocab.json", "merges.txt", "spm.model", "complete.json", "*_states.pt", "events.out.tfevents.*"),
    *("predictions.json", "nbest_predictions.json", "null_odds.json", "exits.json", "exit_heads.safetensors"),
)
"""The names of files inside folders that a run writes: models, checkpoints, TensorBoard, predictions."""


def check_output_folder(folder: Path, overwrite: bool, resume: bool) -> list[str]:
    """The mistakes in writing a run to `folder`; creates and deletes nothing."""
    parent = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not parent.is_dir():
        return [f"the output folder {folder} cannot be made: {parent} is a file"]
    if not os.access(parent, os.W_OK):
        return [f"the output folder {folder} cannot be written: {parent} is read-only"]
    if resume and not (folder / _LIST).is_file():
        return [f"--resume: {folder} holds no run of this program"]
    if not folder.is_dir() or overwrite or resume or not any(folder.iterdir()):
        return []
    return [f"the output folder {folder} is not empty: give another, or --overwrite_output_dir, or --resume"]


class RunFolder:
    """Hands out paths inside the folder and remembers them; to be used by rank 0."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._list = path / _LIST

    def open(self, overwrite: bool) -> None:
        """Make the folder; with `overwrite`, delete what an earlier run wrote there, and only that."""
        self.path.mkdir(parents=True, exist_ok=True)
        own = self._own()
        if overwrite:
            for target in [path for name in own for path in self.path.glob(name)]:
                _delete_written(target, self.path)
            own = {name for name in own if any(self.path.glob(name))}
        self._write_list(own)

    def claim(self, name: str) -> Path:
        """A path to write, or a pattern of paths; one that is there and that no run of ours wrote is a ValueError."""
        target = self.path / name
        own = self._own()
        foreign = [] if name in own else sorted(self.path.glob(name))
        if foreign:
            raise ValueError(f"{foreign[0]} is there and was not written by this program: move it, or write elsewhere")
        self._write_list(own | {name})
        target.parent.mkdir(parents=True, exist_ok=True)
        return target

    def write_json(self, name: str, value: Any) -> None:
        """Write a JSON file whole or not at all."""
        _replace(self.claim(name), json.dumps(value, indent=2) + "\n")

    def _own(self) -> set[str]:
        """What was claimed; read every time, since another object, or process, may have claimed more."""
        return set(json.loads(self._list.read_text(encoding="utf-8"))) if self._list.is_file() else set()

    def _write_list(self, own: set[str]) -> None:
        _replace(self._list, json.dumps(sorted(own)))


def _replace(target: Path, text: str) -> None:
    aside = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    aside.write_text(text, encoding="utf-8")
    aside.replace(target)


def _delete_written(target: Path, root: Path) -> None:
    """Delete a file of ours, or in a folder of ours the files a run writes; folders go once they are empty."""
    if target.is_dir():
        for path in target.rglob("*"):
            if path.is_file() and any(fnmatchcase(path.name, pattern) for pattern in _WRITTEN):
                path.unlink()
        folders = [*sorted((path for path in target.rglob("*") if path.is_dir()), reverse=True), target, target.parent]
    else:
        target.unlink()
        folders = [target.parent]
    for folder in folders:
        if folder != root and not any(folder.iterdir()):
            folder.rmdir()
