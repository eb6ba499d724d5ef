"""Where the rows of a labelled-text task come from: GLUE's official files, a user's files, the hub, or docstrings.

The module loads neither torch nor numpy before rows are read, and does not tokenise.
"""

import contextlib
import difflib
import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

from ds_trainer.files.messages import kind_of, listed, quoted, shown
from ds_trainer.recipe.task_specs import FAMILIES, TextSpec
from ds_trainer.tasks.records import FileRecords, HubRecords, Record, Records, find_file, text_in
from ds_trainer.tasks.text import docstrings
from ds_trainer.tasks.text.glue import GLUE, TASK_NAMES, is_regression, label_mistakes

_WRITTEN_LIST = re.compile(r"\[\s*(['\"\d-].*)?\]|[({]\s*['\"].*[)}]", re.DOTALL)
"""A list of labels in a cell of a table; also a tuple, a set or an object, which are refused."""


class TextRow(NamedTuple):
    """One labelled example: one or two texts, and the name of a class, those of several, or a score."""

    texts: tuple[str, ...]
    label: str | float | tuple[str, ...]


def setting_mistakes(spec: TextSpec) -> list[str]:
    """Return every mistake in the spec that shows without reading its files."""
    if spec.name not in TASK_NAMES and type(spec) is TextSpec:  # a plugin's spec has a name of its own
        names = (*TASK_NAMES, *(name for entry in FAMILIES.values() for name in entry.names))
        near = difflib.get_close_matches(spec.name.lower(), names, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(names)}"
        return [f"task name {quoted(spec.name)} is unknown: {hint}"]
    mistakes = label_mistakes(spec, spec.multi_label)
    if spec.name != "text":
        return mistakes
    kind = "column name" if spec.header else "column number"
    if not spec.text_columns:
        mistakes.append(f'the task "text" needs text_columns: one or two {kind}s')
    if spec.label_column in (None, ""):
        mistakes.append(f'the task "text" needs label_column: a {kind}')
    columns = (*(spec.text_columns or ()), spec.label_column)
    wrong = [column for column in columns if isinstance(column, int if spec.header else str)]
    if wrong:
        allowed = "names" if spec.header else "numbers, from 0"
        mistakes.append(f"column {listed(wrong)}: header is {shown(spec.header)}, so that columns have {allowed}")
    sources = filter(None, (spec.dataset, spec.train_file, spec.validation_file))
    named = [source for source in sources if not source.lower().endswith((".csv", ".tsv"))]
    if named and not spec.header:
        mistakes.append(f"header is false, and the columns of {listed(named)} have names: drop header")
    return mistakes + spec.source_mistakes()


def records(spec: TextSpec, split: str, several: bool | None = None, classes: Sequence[str] = ()) -> Records[TextRow]:
    """Return the source of a split.

    `several` says whether a label must be a list, by default as the spec says, and `classes` which labels are known.
    The folder of a GLUE task is tried before data_dir itself, which may hold the files of another task.
    """
    parse = partial(_row, spec, spec.multi_label if several is None else several, classes)
    if spec.name == "docstrings":
        return _Docstrings(split, parse)
    glue = GLUE.get(spec.name)
    if glue and spec.data_dir is None:
        matched = spec.name == "mnli" and split == "validation"
        columns = (*(glue.hub_columns or glue.columns), "label")
        return HubRecords(f"nyu-mll/glue/{spec.name}", "validation_matched" if matched else split, columns, parse)
    if glue:
        official = glue.evaluation.get(split, "train.tsv")
        path = find_file(spec, split, [f"{glue.folder}/{official}", f"glue/{glue.folder}/{official}", official])
        columns = (*glue.columns, glue.label)
        return FileRecords(path, columns, parse, glue.header, glue.skip_malformed, quoting=False)
    columns = tuple(map(str, (*(spec.text_columns or ()), spec.label_column)))
    if spec.dataset:
        return HubRecords(spec.dataset, split, columns, parse, spec.missing)
    header = None if spec.header else ()
    return FileRecords(find_file(spec, split), columns, parse, header, missing=spec.missing, quoting=spec.quoting)


def training_texts(spec: TextSpec) -> list[str]:
    """Return every text of the training split, including held-out ones."""
    return [text for row in records(spec, "train").rows() for text in row.value.texts]


class _Docstrings(Records[TextRow]):
    """The embedded docstrings, which have neither a file nor lines."""

    origin, entry, columns = "docstrings of the installed packages", "example", ("text", "package")

    def __init__(self, split: str, parse: Callable[[Record], TextRow]) -> None:
        self.split, self.parse = split, parse

    def check(self) -> None:
        """Extract nothing, which takes seconds."""

    def _source_hash(self) -> str:
        return docstrings.fingerprint(self.split)

    def _read(self) -> Iterator[tuple[int, Record]]:
        for number, pair in enumerate(docstrings.extracted()[self.split], 1):
            yield number, dict(zip(self.columns, pair, strict=True))


def _row(spec: TextSpec, several: bool | None, classes: Sequence[str], record: Record) -> TextRow:
    *columns, column = record
    texts, cell = tuple(text_in(record, name) for name in columns), record[column]
    if is_regression(spec):
        return TextRow(texts, _score(spec, column, cell))
    written = _list_in(column, cell) if spec.name == "text" and spec.multi_label is not False else None
    if several is not None and several != (written is not None):
        if several:
            raise ValueError(f'the label is {cell!r}, where a list is expected, as ["a", "b"]')
        raise ValueError("the label is a list, and the first one is not: write lists throughout")
    labels = tuple(dict.fromkeys(_class_name(spec, column, each) for each in ([cell] if written is None else written)))
    for label in labels:
        if classes and label not in classes:
            raise ValueError(f"unknown label {label!r}: allowed are {', '.join(map(repr, classes))}")
    return TextRow(texts, labels[0] if written is None else labels)


def _list_in(column: str, cell: Any) -> list[Any] | None:
    """Return the list in a cell, also as JSON or as pandas writes lists of text to CSV; None for other cells."""
    if isinstance(cell, str) and _WRITTEN_LIST.fullmatch(cell.strip()):
        for text in (cell, cell.replace("'", '"')):
            with contextlib.suppress(ValueError):
                written = json.loads(text)
                if isinstance(written, list):
                    return written
        form = '["a", "b"]; where it is the name of a class, set multi_label to false'
        raise ValueError(f"{quoted(column)} is {quoted(cell)}, and a list of labels is written as in JSON: {form}")
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
    if isinstance(value, list | dict):
        raise ValueError(f"{quoted(column)} has {kind_of(value)}, {quoted(value)}, where one label is expected")
    if isinstance(value, float) and value.is_integer():
        value = int(value)  # pandas writes a column of integers with gaps as floats
    name = "" if value is None or isinstance(value, float) else str(value).strip()
    known = GLUE[spec.name].labels if spec.name in GLUE else None
    if known is None and name:
        return re.sub(r"^([+-]?[0-9]+)\.0+$", r"\1", name)  # as above, in a table
    if known and name in (*known, *known.values()):  # the hub has the names
        return known.get(name, name)
    allowed = f"one of {', '.join(map(repr, known))}" if known else "a label"
    raise ValueError(f"unknown label {quoted(value)} in {quoted(column)}: it must be {allowed}")
