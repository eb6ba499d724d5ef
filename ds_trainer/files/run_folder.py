"""The folder of a run: whether a run may write to it, the list of the files that runs wrote, and what lies elsewhere.

No file is ever deleted from it that is not in this list. The relative paths of an engine file are taken inside of it.
"""

import contextlib
import copy
import fcntl
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import IO, Any

from ds_trainer.files.checkpoint_files import MARKER
from ds_trainer.files.reading import read_value
from ds_trainer.files.writing import existing_above, is_aside, is_leftover, write_json
from ds_trainer.ranks import distributed
from ds_trainer.ranks.failures import UserError

DEEPSPEED_FOLDER = "deepspeed"
"""In the output folder, for what DeepSpeed itself writes."""
_WRITTEN_BY_DEEPSPEED = {"tensorboard": "output_path", "csv_monitor": "output_path", "flops_profiler": "output_file"}
"""The keys of the engine file by which DeepSpeed finds what it writes."""

LOG, RESULTS, STATUS = "log.jsonl", "all_results.json", "status.json"
"""The files of a run that report, tuning and resuming read as well."""
RUN_LIST = ".ds_trainer.json"
"""The file in an output folder that lists the paths, or patterns of paths, that runs of this program wrote."""
CARD = "README.md"
CARD_MARK = "<!-- ds_trainer wrote this card and replaces it: remove this line to keep your changes -->"
_LOCK = ".ds_trainer.lock"
_ENDING = 60  # seconds in which a run that was asked to stop has mostly saved and ended
TOKENIZER_FILES = (
    *("tokenizer*.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja"),
    *("vocab.txt", "vocab.json", "merges.txt", "spm.model", "spiece.model", "sentencepiece.bpe.model"),
)
MODEL_FILES = (
    *("config.json", "generation_config.json", "model*.safetensors", "model.safetensors.index.json"),
    *("exits.json", "exit_heads.safetensors", "shrunk_model.py", "cut.json", *TOKENIZER_FILES),
    *("modules.json", "sentence_bert_config.json", "config_sentence_transformers.json"),
)
"""The names of the files of a model folder that this program writes."""
_WRITTEN = (
    *MODEL_FILES,
    *(f"{MARKER}*", "*_states.pt", "events.out.tfevents.*"),
    *("predictions.csv", "predictions.conll", "predictions.json", "nbest_predictions.json", "null_odds.json"),
)
"""The names of the files that a run writes into folders: models, checkpoints, TensorBoard, predictions."""


def check_output_folder(
    folder: Path, overwrite: bool, resume: bool = False, checkpoint: Path | None = None
) -> list[str]:
    """Return why a run cannot write to `folder`, or cannot resume there; nothing is created or deleted.

    An empty or missing folder may be resumed, because a run that was killed in its first second has written nothing.
    """
    parent = existing_above(folder)
    if not (os.path.isdir(parent) and os.access(parent, os.W_OK)):
        return [f"the output folder {folder} cannot be made: {parent} is a file, or read-only"]
    if checkpoint and not os.path.isfile(checkpoint / MARKER):
        return [f"--resume {checkpoint}: this is no complete checkpoint of this program; name a folder checkpoint-N"]
    if checkpoint and not checkpoint.resolve().is_relative_to(folder.resolve()):
        return [f"--resume {checkpoint}: the checkpoint belongs to another run than {folder}: give its --output_dir"]
    files = folder.iterdir() if os.path.isdir(folder) else ()
    if overwrite or checkpoint or all(is_aside(path) or path.name == _LOCK for path in files):
        return []
    if not resume:
        return [f"the output folder {folder} is not empty: give another, or --overwrite_output_dir, or --resume"]
    return [] if (folder / RUN_LIST).is_file() else [f"--resume: {folder} holds no run of this program"]


def phase_folder(output: Path, phases: Sequence[str], name: str) -> Path:
    """Return where a phase writes: the last one into the output folder itself, the others into one of their name."""
    return output if name == phases[-1] else output / name


def is_own_card(path: Path) -> bool:
    """Whether a file is a card that this program wrote, and that nobody has made their own."""
    return path.name == CARD and path.is_file() and CARD_MARK in path.read_text(encoding="utf-8", errors="replace")


class RunFolder:
    """Give out the paths inside a run's folder and remember them. Only rank 0 uses it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._locked: IO[str] | None = None  # stays open, since closing the file gives up its lock

    def open(self, overwrite: bool) -> None:
        """Make the folder and remove the unfinished files and folders of killed processes from it.

        With `overwrite`, also delete the files that earlier runs wrote to it, and no others.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        begun = [*self.path.glob(".*"), *self.path.glob("*/.*")]  # those of earlier phases lie in their folders
        for path in filter(is_leftover, begun):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        names = self._listed()
        if overwrite:
            for path in [path for name in names for path in self.path.glob(name)]:
                self._delete(path)
            names = {name for name in names if any(self.path.glob(name))}
        write_json(self.path / RUN_LIST, sorted(names))

    def lock(self) -> None:
        """Keep other runs out of the folder until this process ends, in whatever way it ends.

        Waits for a run that is just ending. Raises UserError where it has not ended after a minute.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        self._locked = (self.path / _LOCK).open("w")
        end = time.monotonic() + _ENDING
        if not _taken(self._locked):
            distributed.warn(f"another run is writing to {self.path}: waiting until it ends")
            while not _taken(self._locked):
                if time.monotonic() > end:
                    raise UserError(f"another run is writing to {self.path}: wait until it ends, or stop it")
                time.sleep(0.1)

    def claim(self, name: str) -> Path:
        """Return the path `name` to write to, which may be a pattern of paths, after adding it to the list.

        Raises UserError where something exists at this path that no run wrote.
        """
        target = self.path / name
        names = self._listed()
        foreign = [] if name in names else sorted(self.path.glob(name))
        if foreign:
            raise UserError(f"{foreign[0]} exists and was not written by this program: move it, or write elsewhere")
        write_json(self.path / RUN_LIST, sorted({*names, name}))
        target.parent.mkdir(parents=True, exist_ok=True)
        return target

    def write_json(self, name: str, value: Any) -> None:
        """Claim a path and write a JSON file there, as a whole or not at all."""
        write_json(self.claim(name), value)

    def _listed(self) -> set[str]:
        """Read the list; every time anew, since another object or process may have claimed more."""
        file = self.path / RUN_LIST
        names = read_value(file) if file.is_file() else []
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise UserError(f"{file} is not the list of files that a run wrote: move it and your own files elsewhere")
        return set(names)

    def _delete(self, target: Path) -> None:
        """Delete a file of the list; in a folder of the list, only the files that a run writes into folders.

        A folder is removed once it is empty. Files outside of the run's folder, behind a link, are not touched.
        """
        if not self._holds(target):
            return
        inside = sorted(target.rglob("*"), reverse=True)  # the deepest first; rglob follows no links
        for file in inside if target.is_dir() else [target]:
            written = file == target or is_own_card(file) or any(fnmatchcase(file.name, name) for name in _WRITTEN)
            if file.is_file() and written:
                file.unlink()
        for folder in (*inside, target, target.parent):
            with contextlib.suppress(OSError):  # it is a file, or not empty, as the run's own folder with its list
                folder.rmdir()

    def _holds(self, target: Path) -> bool:
        """Whether a path lies in the run's folder once its links are followed."""
        return target.resolve().is_relative_to(self.path.resolve())


def placed_engine_file(config: Mapping[str, Any], output: Path) -> dict[str, Any]:
    """Take the relative paths of an engine file inside `OUTPUT_DIR/deepspeed`.

    DeepSpeed would take them in the current folder, and write there where a monitor has none.
    """
    placed = copy.deepcopy(dict(config))
    for section, key in _WRITTEN_BY_DEEPSPEED.items():
        block = placed.get(section)
        if not (isinstance(block, dict) and block.get("enabled")):
            continue
        path = block.get(key)
        if key == "output_path" and path in (None, "", "auto"):
            path = "."
        if path and isinstance(path, str):  # what is no path is left to the check of the engine file
            block[key] = os.path.normpath(output / DEEPSPEED_FOLDER / path)
    return placed


def _taken(file: IO[str]) -> bool:
    """Try to lock the file; a file system without locks counts as unlocked."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return not isinstance(error, BlockingIOError)
    return True
