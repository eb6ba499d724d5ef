"""The folder of a run: whether a run may write to it, the list of the files that runs wrote, and what lies elsewhere.

No file is ever deleted from it that is not in this list.

A recipe or an engine file may be somebody else's. A path in it that leads out of the output folder is an error, which
`--allow_write` lifts. Paths in flags and in `--set` are the user's own and are taken as they are; so is `nvme_path`,
whose purpose is to name another disk.
"""

import contextlib
import copy
import fcntl
import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import IO, Any

from ds_trainer.files.checkpoint_files import MARKER
from ds_trainer.files.messages import quoted
from ds_trainer.files.reading import read_value
from ds_trainer.files.writing import existing_above, is_aside, is_leftover, write_json
from ds_trainer.ranks import distributed
from ds_trainer.ranks.failures import UserError, raise_mistakes

CACHE_VARIABLE = "DS_TRAINER_CACHE"
DEFAULT_CACHE = "~/.cache/ds_trainer"
DEEPSPEED_FOLDER = "deepspeed"
"""In the output folder, for what DeepSpeed itself writes."""
_WRITTEN_BY_DEEPSPEED = {
    "tensorboard": ("output_path", "job_name"),
    "csv_monitor": ("output_path", "job_name"),
    "flops_profiler": ("output_file",),
}
"""The keys of the engine file by which DeepSpeed finds what it writes. It appends a job_name to the output_path."""
_BY_ENVIRONMENT = {"wandb": "WANDB_DIR", "comet": "COMET_OFFLINE_DIRECTORY"}

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


@contextlib.contextmanager
def kept_from_runs(folder: Path) -> Iterator[None]:
    """Keep runs from writing to the folder inside the context. Raises UserError where a run is writing to it.

    Any number of readers share the lock. Where there is no lock file, or the file system has no locks, they read
    without it: a command that reads needs no right to write.
    """
    with contextlib.ExitStack() as until_read:
        with contextlib.suppress(FileNotFoundError, PermissionError):
            if not _taken(until_read.enter_context((folder / _LOCK).open()), fcntl.LOCK_SH):
                raise UserError(
                    f"a run is writing to {folder}, and may delete a checkpoint that is read: wait until the run ends, "
                    f"or stop it"
                )
        yield


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

        Raises UserError where something exists at this path that no run wrote, or a link leads out of the folder.
        """
        target = self.path / name
        if not self._holds(target):
            raise UserError(f"{target} leads out of the output folder by a link: remove the link, or write elsewhere")
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
        if not isinstance(names, list) or not all(isinstance(name, str) and _stays_inside(name) for name in names):
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


def placed_engine_file(
    config: Mapping[str, Any], as_read: Mapping[str, Any], output: Path, allowed: Sequence[str]
) -> tuple[dict[str, Any], list[str]]:
    """Take the relative paths of an engine file inside `OUTPUT_DIR/deepspeed`.

    `as_read` is the file before `--set`. Returns the new config, and a line for each path that was changed. Raises
    UserError where a path of the file leads out of the output folder and of the `allowed` ones.
    """
    folder = output / DEEPSPEED_FOLDER
    placed, notes, mistakes = copy.deepcopy(dict(config)), list[str](), list[str]()
    for section in filter(partial(_is_on, placed), _WRITTEN_BY_DEEPSPEED):
        block, of_file = placed[section], as_read.get(section)
        for key in _WRITTEN_BY_DEEPSPEED[section]:
            value = block.get(key)
            if key == "output_path" and value in (None, "", "auto"):
                value = "."  # DeepSpeed would write to the current folder
            elif not (isinstance(of_file, Mapping) and of_file.get(key) == value and value and type(value) is str):
                continue  # it comes from --set, is missing, or is an error that the check of the engine file reports
            target = os.path.normpath(folder / value)
            if not _is_inside(target, [folder, *allowed]):
                mistakes.append(
                    f"{section}.{key} is {quoted(value)}, which lies outside of the output folder: write a relative "
                    f"path, which is taken inside {folder}, or give --allow_write with its folder"
                )
            elif key != "job_name" and target != value:
                block[key] = target
                notes.append(f"the engine file's {section}.{key} is {target}")
    raise_mistakes(mistakes)
    return placed, notes


def environment_of(config: Mapping[str, Any], output: Path) -> dict[str, str]:
    """Return the variables that name a folder to the monitors without a key for it.

    A variable that is set already stays.
    """
    names = [name for section, name in _BY_ENVIRONMENT.items() if _is_on(config, section) and name not in os.environ]
    return dict.fromkeys(names, str(output / DEEPSPEED_FOLDER))


def cache_place(cache_dir: str | None, as_read: Any, roots: Sequence[str | Path]) -> str | None:
    """Return the cache folder of a recipe; by default $DS_TRAINER_CACHE.

    A cache folder that the recipe's file names (`as_read`) must lie in one of the `roots` or in the user's default
    cache; a relative one is taken inside the first root. Raise UserError where it lies elsewhere.
    """
    default = os.environ.get(CACHE_VARIABLE) or None
    if cache_dir is None:
        return default
    if cache_dir != as_read:
        return cache_dir
    place = os.path.abspath(os.path.join(*roots[:1], os.path.expanduser(cache_dir)))
    if not _is_inside(place, [*roots, DEFAULT_CACHE, *filter(None, [default])]):
        way_out = "give --cache_dir or --allow_write with it if you mean that, or drop it"
        raise UserError(f"the recipe's cache_dir is {quoted(cache_dir)}, outside of the output folder: {way_out}")
    return place


def _is_on(config: Mapping[str, Any], section: str) -> bool:
    block = config.get(section)
    return isinstance(block, Mapping) and bool(block.get("enabled"))


def _is_inside(place: str, folders: Sequence[str | Path]) -> bool:
    """Whether a path lies in one of the folders, or is one; symbolic links are followed."""
    real = Path(os.path.realpath(place))
    return any(real.is_relative_to(os.path.realpath(os.path.expanduser(folder))) for folder in folders)


def _stays_inside(name: str) -> bool:
    """Whether a pattern of the list names files inside the run's folder; ** would match the user's files too."""
    parts = Path(name).parts
    return bool(parts) and parts[0] != "/" and ".." not in parts and "**" not in name


def _taken(file: IO[str], how: int = fcntl.LOCK_EX) -> bool:
    """Try to lock the file; a file system without locks counts as unlocked."""
    try:
        fcntl.flock(file, how | fcntl.LOCK_NB)
    except OSError as error:
        return not isinstance(error, BlockingIOError)
    return True
