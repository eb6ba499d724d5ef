"""Read records from TSV, CSV, JSON lines and parquet files, and tell what is wrong with a file and where.

Every fault of a file is one `ValueError` that names the file and the line. Imports neither torch nor numpy:
broken files are told before anything heavy is loaded. Files are UTF-8, with or without a byte order mark.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

FORMATS = (".csv", ".tsv", ".jsonl", ".parquet")
TOO_LONG = "a number has thousands of digits"
"""The one fault of sound JSON that Python does not read."""


class Record(NamedTuple):
    """One record: where it stands (a line, from 1; a row number in parquet) and its wanted fields."""

    line: int
    fields: dict[str, Any]


@dataclass(frozen=True)
class FileForm:
    """How a file is to be read: the wanted columns, and for TSV what the official files differ in."""

    wanted: tuple[str, ...]
    header: tuple[str, ...] | None = None
    """Column names of a file that has no header line."""
    skip_malformed: bool = False
    """Pass over rows with a wrong number of fields (QQP has some) instead of refusing the file."""


@dataclass
class Table:
    """The wanted fields of a file's records, and how many malformed ones were passed over."""

    path: Path
    records: list[Record] = field(default_factory=list)
    skipped: int = 0


class _Malformed(NamedTuple):
    line: int
    cause: str


def read_table(path: Path, form: FileForm) -> Table:
    """Read every record; ValueError with file and line for the first fault. A file of no records is one."""
    found = Table(path)
    for record in _records(path, form):
        if isinstance(record, Record):
            found.records.append(record)
        elif form.skip_malformed:
            found.skipped += 1
        else:
            raise ValueError(f"{path}, line {record.line}: {record.cause}")
    if not found.records:
        raise ValueError(f"{path} has no examples: it is empty or holds only a header")
    return found


def check_columns(path: Path, form: FileForm) -> None:
    """Raise what `read_table` would raise up to the first record, reading no further than that."""
    if _format(path) == ".parquet":
        _parquet_columns(path, form)
    elif form.header is None and _format(path) != ".jsonl":
        first = next(_delimited(path, _first_line(path)), None)
        _check_header(path, list(first[1]) if first else [], form)
    else:
        text = _first_line(path)
        if not text.strip():
            raise ValueError(f"{path} has no examples: it is empty or starts with a blank line")
        read = _jsonl if _format(path) == ".jsonl" else _official
        for record in read(path, text, form):
            if isinstance(record, _Malformed) and not form.skip_malformed:
                raise ValueError(f"{path}, line {record.line}: {record.cause}")


def _records(path: Path, form: FileForm) -> Iterator[Record | _Malformed]:
    readers: dict[str, Callable[[Path, str, FileForm], Iterator[Record | _Malformed]]] = {
        ".tsv": _official,
        ".csv": _with_header,
        ".jsonl": _jsonl,
    }
    suffix = _format(path)
    if suffix == ".parquet":
        return _parquet(path, form)
    return readers[suffix](path, read_text(path), form)


def read_text(path: Path) -> str:
    """The whole file, decoded; broken UTF-8 and NUL bytes are errors that name the line."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    return _decoded(path, data)


def _format(path: Path) -> str:
    suffix = path.suffix.lower()
    if suffix not in FORMATS:
        raise ValueError(f"{path}: the ending {suffix!r} is not known: use one of {', '.join(FORMATS)}")
    return suffix


def _first_line(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return _decoded(path, file.readline())
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None


def _decoded(path: Path, data: bytes) -> str:
    nul = data.find(b"\0")
    if nul >= 0:
        hint = " (is it UTF-16? save it as UTF-8)" if data[:2] in (b"\xff\xfe", b"\xfe\xff") else ""
        raise ValueError(f"{path}, line {_line_at(data, nul)}: NUL byte{hint}")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        byte = data[error.start]
        line = _line_at(data, error.start)
        raise ValueError(f"{path}, line {line}: not UTF-8 (byte 0x{byte:02x}): save it as UTF-8") from None


def _line_at(data: bytes, position: int) -> int:
    return data.count(b"\n", 0, position) + 1


def _check_header(path: Path, columns: Sequence[str], form: FileForm) -> None:
    missing = [name for name in form.wanted if name not in columns]
    if missing:
        known = ", ".join(map(repr, columns)) or "none, the file is empty"
        raise ValueError(f"{path}, line 1: no column {', '.join(map(repr, missing))}; columns found: {known}")
    twice = [name for name in form.wanted if list(columns).count(name) > 1]
    if twice:
        raise ValueError(f"{path}, line 1: the column {twice[0]!r} appears twice")


def _official(path: Path, text: str, form: FileForm) -> Iterator[Record | _Malformed]:
    if form.header is None:
        yield from _with_header(path, text, form)
        return
    yield from _picked(_tab_separated(text), form.header, form.wanted)


def _with_header(path: Path, text: str, form: FileForm) -> Iterator[Record | _Malformed]:
    lines = _delimited(path, text)
    _, header = next(lines, (1, []))
    _check_header(path, header, form)
    yield from _picked(lines, header, form.wanted)


def _picked(
    lines: Iterable[tuple[int, list[str]]], header: Sequence[str], wanted: Sequence[str]
) -> Iterator[Record | _Malformed]:
    places = {name: list(header).index(name) for name in wanted}
    for line, cells in lines:
        if len(cells) == len(header):
            yield Record(line, {name: cells[place] for name, place in places.items()})
        else:
            expected = f"{len(header)} are expected ({', '.join(header)})"
            yield _Malformed(line, f"{len(cells)} fields where {expected}")


def _delimited(path: Path, text: str) -> Iterator[tuple[int, list[str]]]:
    return _tab_separated(text) if _format(path) == ".tsv" else _comma_separated(path, text)


def _tab_separated(text: str) -> Iterator[tuple[int, list[str]]]:
    """Cut at newlines and tabs only: GLUE's files quote nothing, and `splitlines` would cut at U+0085 too."""
    for line, row in enumerate(text.split("\n"), 1):
        row = row.removesuffix("\r")
        if row:
            yield line, row.split("\t")


def _comma_separated(path: Path, text: str) -> Iterator[tuple[int, list[str]]]:
    previous = csv.field_size_limit(2**31 - 1)  # the default refuses a text of 128 KiB
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    line = 1
    try:
        for cells in reader:
            if cells:
                yield line, cells
            line = reader.line_num + 1
    except csv.Error as error:
        raise ValueError(f"{path}, line {line}: not CSV: {error}") from None
    finally:
        csv.field_size_limit(previous)


def _jsonl(path: Path, text: str, form: FileForm) -> Iterator[Record]:
    for line, source in enumerate(text.split("\n"), 1):
        if not source.strip():
            continue
        try:
            record = json.loads(source)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {line}, column {error.colno}: not JSON: {error.msg}") from None
        except ValueError:
            raise ValueError(f"{path}, line {line}: not JSON that can be read: {TOO_LONG}") from None
        except RecursionError:
            raise ValueError(f"{path}, line {line}: nested too deeply") from None
        if not isinstance(record, dict):
            kind = type(record).__name__
            raise ValueError(f"{path}, line {line}: a {kind} where a JSON object is expected")
        missing = [name for name in form.wanted if name not in record]
        if missing:
            lacking, found = ", ".join(map(repr, missing)), ", ".join(map(repr, record)) or "none"
            raise ValueError(f"{path}, line {line}: no field {lacking}; fields found: {found}")
        yield Record(line, {name: record[name] for name in form.wanted})


def _parquet_columns(path: Path, form: FileForm) -> Any:
    import pyarrow
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path)
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist") from None
    except (OSError, pyarrow.ArrowException) as error:
        raise ValueError(f"{path} is not a readable parquet file: {error}") from None
    _check_header(path, file.schema_arrow.names, form)
    return file


def _parquet(path: Path, form: FileForm) -> Iterator[Record]:
    import pyarrow

    try:
        records = _parquet_columns(path, form).read(columns=list(form.wanted)).to_pylist()
    except (OSError, UnicodeDecodeError, pyarrow.ArrowException) as error:
        raise ValueError(f"{path} is not a readable parquet file: {error}") from None
    for line, record in enumerate(records, 1):
        yield Record(line, record)
