"""What the readers of all tasks share: the hub, the lookup and the hash of a file, and the fault of a value.

Imports neither torch nor numpy. Does not know what is in a file: that is the matter of `readers.py`, `squad_file.py`
and `lm_text.py`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ds_trainer.config.task_specs import TaskSpec
from ds_trainer.files.messages import cut, kind_of, shown
from ds_trainer.files.reading import check_file
from ds_trainer.ranks.failures import UserError

_KINDS = {str: "text", int: "a whole number", list: "a list", dict: "an object", bool: "true or false"}


def fetch(name: str, split: str) -> Any:
    """The `datasets.Dataset` of "name", "owner/name" or "owner/name/configuration"; ValueError if it cannot be had."""
    import datasets

    parts = name.split("/", 2)
    path, configuration = "/".join(parts[:2]), parts[2] if len(parts) == 3 else None
    try:
        return datasets.load_dataset(path, configuration, split=split)
    except (OSError, ValueError) as error:
        raise UserError(
            f"the hub data set {path} ({configuration or 'default'}, {split}) cannot be had: {error}. "
            f"Without a network give data_dir, the folder of the files (and train_file and validation_file, where "
            f"these have no official names)"
        ) from error


def data_folder(spec: TaskSpec) -> Path:
    """`data_dir`, by default the current folder."""
    return user_path(spec.data_dir or ".", "data_dir")


def user_path(name: str, field: str) -> Path:
    """The path that a field names, "~" resolved; ValueError where there is no such user."""
    try:
        return Path(name).expanduser()
    except RuntimeError:
        raise UserError(f"{field} is {shown(name, 200)}, and there is no user of that name") from None


def first_file(spec: TaskSpec, split: str, candidates: Sequence[Path]) -> Path:
    """The first candidate that is a file, and one that the memory can hold; ValueError where none is."""
    found = next((path for path in candidates if is_file(path)), None)
    if found is None:
        raise no_file(spec, split, candidates)
    check_file(found)
    return found


def is_file(path: Path) -> bool:
    """Whether there is such a file. `Path.is_file` raises where a name is too long to be one."""
    return os.path.isfile(path)


def no_file(spec: TaskSpec, split: str, candidates: Sequence[Path]) -> ValueError:
    """What to raise where a split has no file: it tells what was looked for."""
    folder, looked_for = data_folder(spec), ", ".join(cut(str(path), 300) for path in candidates)
    if not os.path.isdir(folder):
        return UserError(f"data_dir {cut(str(folder), 300)} does not exist; looked for {looked_for}")
    return UserError(f"no file for the {split} split of {cut(spec.name, 60)}; looked for {looked_for}")


def fault_of(value: Any, kind: type) -> str | None:
    """What is wrong with a value of JSON that must be of a kind, to follow its name; None where it is sound."""
    # true is an int to Python
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        return f"is {kind_of(value)}, and must be {_KINDS[kind]}"
    try:
        str(value if kind is str else "").encode("utf-8")
    except UnicodeEncodeError:  # JSON can say "\ud800" alone, and tokenizers cannot take it
        return "holds half a surrogate pair"
    return None
