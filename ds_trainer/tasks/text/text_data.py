"""Where the rows of a labelled-text task come from: GLUE's official files, a user's files, the hub, or docstrings.

The module loads neither torch nor numpy before rows are read, and does not tokenise.
"""

import contextlib
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from ds_trainer.config.task_specs import TextSpec
from ds_trainer.files.messages import kind_of, quoted
from ds_trainer.tasks.records import FileRecords, HubRecords, Record, Records, file_of, find_file, mistakes_of, text_in
from ds_trainer.tasks.text import docstrings
from ds_trainer.tasks.text.glue import GLUE, evaluation_splits, is_regression, setting_mistakes

_DOCSTRINGS = "docstrings of the installed packages"
_LEFT_OUT = dict[tuple[str, str], str]()
"""What is left out of a source, in words, by its settings and its fingerprint: to know it, all rows are read."""
_WRITTEN_LIST = re.compile(r"\[\s*(['\"\d-].*)?\]|[({]\s*['\"].*[)}]", re.DOTALL)
"""A list of labels in a cell of a table; also a tuple, a set or an object, which are refused."""


class TextRow(NamedTuple):
    """One labelled example: one or two texts, and the name of a class, those of several, or a score."""

    texts: tuple[str, ...]
    label: str | float | tuple[str, ...]
    place: int = 0
    """The number of its line or row in the source."""


@dataclass(frozen=True)
class TextSplit:
    """The rows of a split, and the records that they were read from; None for docstrings."""

    rows: list[TextRow]
    records: Records | None = None

    @property
    def origin(self) -> str:
        return self.records.origin if self.records else _DOCSTRINGS

    def place(self, row: TextRow) -> str:
        """Return where a row stands, for a message."""
        return self.records.place(row.place) if self.records else self.origin


def check_data_files(spec: TextSpec, splits: Sequence[str] | None = None) -> list[str]:
    """Return every mistake in the settings, and every missing folder, file or column.

    `splits` defaults to training and all evaluation splits that are scored.
    """
    mistakes = setting_mistakes(spec)
    if mistakes or spec.name == "docstrings":
        return mistakes
    scored = () if spec.score_held_out else evaluation_splits(spec)
    return mistakes_of(lambda split: _records(spec, split).check(), splits or ("train", *scored))


def training_texts(spec: TextSpec) -> list[str]:
    """Return every text of the training split, including held-out ones."""
    return [text for row in read_split(spec, "train").rows for text in row.texts]


def read_split(spec: TextSpec, split: str) -> TextSplit:
    """Read the rows of a split; an error names the file and the line."""
    if spec.name == "docstrings":
        return TextSplit([TextRow((text,), package) for text, package in docstrings.extracted()[split]])
    records = _records(spec, split)
    rows = records.parsed(partial(_texts_and_label, spec, records.columns))
    return TextSplit([TextRow(texts, label, number) for number, (texts, label) in rows], records)


def origin(spec: TextSpec, split: str) -> str:
    """Return what a message calls the source of a split."""
    return _DOCSTRINGS if spec.name == "docstrings" else _records(spec, split).origin


def fingerprint(spec: TextSpec, split: str) -> str:
    """Return a hash that changes whenever the rows may have changed, and is the same on every host."""
    if spec.name == "docstrings":
        return docstrings.fingerprint(split)
    records = _records(spec, split)
    source = records.fingerprint()
    if spec.name in GLUE:
        return source
    key = repr(records), source
    if key not in _LEFT_OUT:
        for _ in records.parsed(lambda record: None):
            pass
        _LEFT_OUT[key] = str(records.left_out or "")
    # earlier versions left no row out: their caches and checkpoints are good only where nothing is left out
    return source + _LEFT_OUT[key]


def _records(spec: TextSpec, split: str) -> Records:
    """Return the source of a split.

    The folder of a GLUE task is tried before data_dir itself, which may hold the files of another task.
    """
    glue = GLUE.get(spec.name)
    if glue and spec.data_dir is None:
        matched = spec.name == "mnli" and split == "validation"
        columns = (*(glue.hub_columns or glue.columns), "label")
        return HubRecords(f"nyu-mll/glue/{spec.name}", "validation_matched" if matched else split, columns)
    if glue:
        official = glue.evaluation.get(split, "train.tsv")
        path = find_file(spec, split, [f"{glue.folder}/{official}", f"glue/{glue.folder}/{official}", official])
        columns = (*glue.columns, glue.label)
        return FileRecords(path, columns, glue.header, glue.skip_malformed, quoting=False)
    columns = tuple(map(str, (*(spec.text_columns or ()), spec.label_column)))
    if spec.dataset:
        return HubRecords(spec.dataset, split, columns, spec.missing)
    path, header = find_file(spec, split, [file_of(spec, split)]), None if spec.header else ()
    return FileRecords(path, columns, header, missing=spec.missing, quoting=spec.quoting)


def holds_lists(spec: TextSpec, split: str) -> bool:
    """Return whether the first label of a split is a list."""
    records = _records(spec, split)
    _, (_, label) = next(records.parsed(partial(_texts_and_label, spec, records.columns)))
    return isinstance(label, tuple)


def _texts_and_label(
    spec: TextSpec, columns: Sequence[str], record: Record
) -> tuple[tuple[str, ...], str | float | tuple[str, ...]]:
    texts = tuple(text_in(record, column) for column in columns[:-1])
    column, cell = columns[-1], record[columns[-1]]
    if is_regression(spec):
        return texts, _score(spec, column, cell)
    labels = _list_in(column, cell) if spec.name == "text" and spec.multi_label is not False else None
    if labels is not None:
        return texts, tuple(dict.fromkeys(_one_label(spec, column, label) for label in labels))
    return texts, _one_label(spec, column, cell)


def _one_label(spec: TextSpec, column: str, value: Any) -> str:
    if isinstance(value, list | dict):
        raise ValueError(f"{quoted(column)} has {kind_of(value)}, {quoted(value)}, where one label is expected")
    return _class_name(spec, column, value)


def _list_in(column: str, cell: Any) -> list[Any] | None:
    """Return the list in a cell, also as JSON or as pandas writes lists of text to CSV; None for other cells."""
    if isinstance(cell, str) and _WRITTEN_LIST.fullmatch(cell.strip()):
        for text in (cell, cell.replace("'", '"')):
            with contextlib.suppress(ValueError):
                written = json.loads(text)
                if isinstance(written, list):
                    return written
        raise ValueError(
            f'{quoted(column)} is {quoted(cell)}, and a list of labels is written as in JSON: ["a", "b"]; where it is '
            f"the name of a class, set multi_label to false"
        )
    return cell if isinstance(cell, list) else None


def _score(spec: TextSpec, column: str, value: Any) -> float:
    glue = GLUE.get(spec.name)
    low, high = (glue and glue.score_range) or (-math.inf, math.inf)
    try:
        score = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        score = math.nan
    if math.isfinite(score) and low <= score <= high:
        return score
    allowed = "a finite number" if math.isinf(low) else f"a number from {low:g} to {high:g}"
    raise ValueError(f"{quoted(column)} is {quoted(value)}, and must be {allowed}")


def _class_name(spec: TextSpec, column: str, value: Any) -> str:
    if isinstance(value, float) and value.is_integer():
        value = int(value)  # pandas writes a column of integers with gaps as floats
    name = "" if value is None or isinstance(value, float) else str(value).strip()
    known = GLUE[spec.name].labels if spec.name in GLUE else None
    if known is None and name:
        return re.sub(r"^([+-]?[0-9]+)\.0+$", r"\1", name)  # as above, in a table
    if known and name in known:
        return known[name]
    if known and name in known.values():  # the name that the hub uses
        return name
    allowed = f"one of {', '.join(map(repr, known))}" if known else "a label"
    raise ValueError(f"unknown label {quoted(value)} in {quoted(column)}: it must be {allowed}")
