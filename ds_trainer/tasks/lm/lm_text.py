"""Where the documents of language modelling come from: .txt and .jsonl files, or a hub data set.

Imports neither torch nor numpy, so that missing folders, files and columns are told before anything heavy is loaded.
A file is read whole, one at a time: a corpus beyond the memory wants to be in parts ("part-*.txt"). Does not tokenise
(`tasks/lm.py`).
"""

from __future__ import annotations

import glob
import hashlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ds_trainer.config.task_specs import LmSpec
from ds_trainer.files.messages import quoted
from ds_trainer.files.reading import check_file, content_hash
from ds_trainer.ranks.failures import UserError
from ds_trainer.tasks.sources import data_folder, fault_of, fetch, is_file, no_file, user_path
from ds_trainer.tasks.tabular import FileForm, check_columns, read_table, read_text

FORMATS = (".txt", ".jsonl")
SPLITS = ("train", "validation")


def check_data_files(spec: LmSpec, splits: Sequence[str] | None = None) -> list[str]:
    """Every mistake in the task's settings, and every missing folder, file or column; loads nothing heavy.

    `splits` defaults to training and validation; to mask any split the training tokens are counted, so that a
    train_file of "mlm" is always looked at. Lines beyond the first are not, nor is a hub data set.
    """
    mistakes = _setting_mistakes(spec)
    if mistakes or spec.dataset:
        return mistakes
    wanted = set(splits or SPLITS) | ({"train"} if spec.name == "mlm" and spec.train_file else set())
    return [mistake for split in SPLITS if split in wanted for mistake in _file_mistakes(spec, split)]


def documents(spec: LmSpec, split: str) -> Iterator[str]:
    """The texts of a split, one after another, blank ones left out.

    ValueError for mistakes in the settings at the call; for a fault of a file, with its line, when it is reached.
    """
    mistakes = _setting_mistakes(spec)
    if mistakes:
        raise UserError("\n".join(mistakes))
    if spec.dataset:
        return _of_hub(spec.dataset, split, spec.text_column)
    return _of_files(spec, files(spec, split))


def fingerprint(spec: LmSpec, split: str) -> str:
    """Changes whenever the documents may have changed; the same on every host."""
    if spec.dataset:
        return str(fetch(spec.dataset, split)._fingerprint)
    digest = hashlib.blake2b(digest_size=16)
    for path in files(spec, split):
        digest.update(path.suffix.lower().encode())
        digest.update(content_hash(path))
    return digest.hexdigest()


def training_texts(spec: LmSpec) -> list[str]:
    """Every document of the training split, for training a tokenizer."""
    return list(documents(spec, "train"))


def files(spec: LmSpec, split: str) -> list[Path]:
    """The files of a split, by name; ValueError says what was looked for."""
    name = spec.train_file if split == "train" else spec.validation_file
    if not name:
        raise UserError(f'the task "{spec.name}" has no file for the {split} split: set {split}_file')
    folder, given = data_folder(spec), user_path(name, f"{split}_file")
    found = [folder / given] if is_file(folder / given) else _matches(folder, given)
    if not found:
        raise no_file(spec, split, [folder / given])
    for path in found:
        check_file(path)
        if path.suffix.lower() not in FORMATS:
            raise UserError(f"{path}: the ending {quoted(path.suffix)} is not known: use one of {', '.join(FORMATS)}")
    return found


def _matches(folder: Path, given: Path) -> list[Path]:
    """Only the name is a pattern: the folder may hold a bracket or a star of its own."""
    if not glob.has_magic(str(given)):
        return []
    # an absolute name takes the place of the folder
    pattern = os.path.join(glob.escape(str(folder)), given)
    return sorted(path for path in map(Path, glob.glob(pattern, recursive=True)) if is_file(path))


def _of_files(spec: LmSpec, paths: Sequence[Path]) -> Iterator[str]:
    for path in paths:
        empty = True
        for text in _of_file(spec, path):
            if text.strip():
                empty = False
                yield text
        if empty:
            raise UserError(f"{path} has no text: it is empty or blank")


def _of_file(spec: LmSpec, path: Path) -> Iterator[str]:
    if path.suffix.lower() == ".jsonl":
        for record in read_table(path, FileForm((spec.text_column,))).records:
            yield _checked(record.fields[spec.text_column], f"{path}, line {record.line}", spec.text_column)
    elif spec.line_by_line:
        # `splitlines` would also cut at U+0085 and form feeds
        yield from (line.removesuffix("\r") for line in read_text(path).split("\n"))
    else:
        yield read_text(path)


def _of_hub(name: str, split: str, column: str) -> Iterator[str]:
    dataset, origin = fetch(name, split), f"{name} ({split})"
    if column not in dataset.column_names:
        raise UserError(f"{origin}: no column {column!r}; columns found: {dataset.column_names}; set text_column")
    empty = True
    for number, record in enumerate(dataset.select_columns([column]), 1):
        text = _checked(record[column], f"{origin}, row {number}", column)
        if text.strip():
            empty = False
            yield text
    if empty:
        raise UserError(f"{origin} has no text: it is empty or blank")


def _checked(text: Any, place: str, column: str) -> str:
    fault = fault_of(text, str)
    if fault:
        raise UserError(f"{place}: {quoted(column)} {fault}")
    return str(text)


def _setting_mistakes(spec: LmSpec) -> list[str]:
    mistakes = []
    named = spec.train_file or spec.validation_file
    if spec.dataset and named:
        mistakes.append(f"dataset ({spec.dataset}) and files ({named}) are both set: keep one")
    if not spec.dataset and not spec.validation_file:
        mistakes.append(f'the task "{spec.name}" needs train_file and validation_file, or dataset for one on the hub')
    return mistakes


def _file_mistakes(spec: LmSpec, split: str) -> list[str]:
    try:
        paths = files(spec, split)
    except ValueError as error:
        return [str(error)]
    return [mistake for path in paths if (mistake := _file_mistake(spec, path))]


def _file_mistake(spec: LmSpec, path: Path) -> str | None:
    try:
        if path.suffix.lower() == ".jsonl":
            check_columns(path, FileForm((spec.text_column,)))
        elif path.stat().st_size == 0:
            return f"{path} has no text: it is empty"
    except ValueError as error:
        return str(error)
    return None
