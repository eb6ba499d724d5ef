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
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from ds_trainer.files.messages import cut, kind_of, listed, quoted
from ds_trainer.files.reading import TOO_LONG, check_file, most_held, read_file
from ds_trainer.ranks.failures import UserError

FORMATS = (".csv", ".tsv", ".jsonl", ".parquet")
_MOST_OF_A_START = 2**26
_BYTES_OF_A_RECORD = 400
"""What Python takes for a record of two short fields, by experiment."""
_ROWS_AT_ONCE = 1024
_TEXTS = ("string", "large_string", "string_view", "binary", "large_binary")
"""Arrow's types of which a value is of any length."""


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
            raise UserError(f"{path}, line {record.line}: {record.cause}")
    if not found.records:
        raise UserError(f"{path} has no examples: it is empty or holds only a header")
    return found


def check_columns(path: Path, form: FileForm) -> None:
    """Raise what `read_table` would raise up to the first record, reading no further than that."""
    if _format(path) == ".parquet":
        _parquet_columns(path, form)
    elif form.header is None and _format(path) != ".jsonl":
        _, header = next(_delimited(path, _first_lines(path)), (1, []))
        _check_header(path, header, form)
    else:
        read = _jsonl if _format(path) == ".jsonl" else _official
        first = next(iter(read(path, _first_lines(path), form)), None)
        if first is None:
            raise UserError(f"{path} has no examples: it is empty or blank")
        if isinstance(first, _Malformed) and not form.skip_malformed:
            raise UserError(f"{path}, line {first.line}: {first.cause}")


def _records(path: Path, form: FileForm) -> Iterator[Record | _Malformed]:
    readers: dict[str, Callable[[Path, Iterable[str], FileForm], Iterator[Record | _Malformed]]] = {
        ".tsv": _official,
        ".csv": _with_header,
        ".jsonl": _jsonl,
    }
    suffix = _format(path)
    if suffix == ".parquet":
        return _parquet(path, form)
    # not `splitlines`, which would also cut at U+0085
    return readers[suffix](path, io.StringIO(read_text(path), newline="\n"), form)


def read_text(path: Path) -> str:
    """The whole file, decoded; broken UTF-8 and NUL bytes are errors that name the line."""
    return _decoded(path, read_file(path))


def _format(path: Path) -> str:
    suffix = path.suffix.lower()
    if suffix not in FORMATS:
        raise UserError(f"{path}: the ending {quoted(suffix)} is not known: use one of {', '.join(FORMATS)}")
    return suffix


def _first_lines(path: Path) -> Iterator[str]:
    """The lines from the first on, as they are asked for, up to a size that no header and no record has."""
    check_file(path)
    read, number = 0, 0
    try:
        with path.open("rb") as file:
            while line := file.readline(_MOST_OF_A_START):
                read, number = read + len(line), number + 1
                if read >= _MOST_OF_A_START and b"\0" not in line:
                    raise UserError(f"{path}: there is no record in the first {_MOST_OF_A_START:,} bytes")
                yield _decoded(path, line, number)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None


def _decoded(path: Path, data: bytes, first_line: int = 1) -> str:
    nul = data.find(b"\0")
    if nul >= 0:
        hint = " (is it UTF-16? save it as UTF-8)" if data[:2] in (b"\xff\xfe", b"\xfe\xff") else ""
        line = first_line + data.count(b"\n", 0, nul)
        raise UserError(f"{path}, line {line}: NUL byte{hint}")
    try:
        return data.decode("utf-8-sig" if first_line == 1 else "utf-8")
    except UnicodeDecodeError as error:
        byte, line = data[error.start], first_line + data.count(b"\n", 0, error.start)
        raise UserError(f"{path}, line {line}: not UTF-8 (byte 0x{byte:02x}): save it as UTF-8") from None


def _check_header(path: Path, columns: Sequence[str], form: FileForm) -> None:
    missing = [name for name in form.wanted if name not in columns]
    if missing:
        known = listed(columns) or "none, the file is empty"
        raise UserError(f"{path}, line 1: no column {listed(missing)}; columns found: {known}")
    twice = [name for name in form.wanted if list(columns).count(name) > 1]
    if twice:
        raise UserError(f"{path}, line 1: the column {quoted(twice[0])} appears twice")


def _official(path: Path, lines: Iterable[str], form: FileForm) -> Iterator[Record | _Malformed]:
    if form.header is None:
        yield from _with_header(path, lines, form)
        return
    yield from _picked(_tab_separated(lines), form.header, form.wanted)


def _with_header(path: Path, lines: Iterable[str], form: FileForm) -> Iterator[Record | _Malformed]:
    rows = _delimited(path, lines)
    _, header = next(rows, (1, []))
    _check_header(path, header, form)
    yield from _picked(rows, header, form.wanted)


def _picked(
    rows: Iterable[tuple[int, list[str]]], header: Sequence[str], wanted: Sequence[str]
) -> Iterator[Record | _Malformed]:
    places = {name: list(header).index(name) for name in wanted}
    for line, cells in rows:
        if len(cells) == len(header):
            yield Record(line, {name: cells[place] for name, place in places.items()})
        else:
            expected = f"{len(header)} are expected ({listed(header)})"
            yield _Malformed(line, f"{len(cells)} fields where {expected}")


def _delimited(path: Path, lines: Iterable[str]) -> Iterator[tuple[int, list[str]]]:
    return _tab_separated(lines) if _format(path) == ".tsv" else _comma_separated(path, lines)


def _tab_separated(lines: Iterable[str]) -> Iterator[tuple[int, list[str]]]:
    """Cut at newlines and tabs only: GLUE's files quote nothing."""
    for line, row in enumerate(lines, 1):
        row = row.removesuffix("\n").removesuffix("\r")
        if row:
            yield line, row.split("\t")


def _comma_separated(path: Path, lines: Iterable[str]) -> Iterator[tuple[int, list[str]]]:
    previous = csv.field_size_limit(2**31 - 1)  # the default refuses a text of 128 KiB
    reader = csv.reader(chain.from_iterable(io.StringIO(line, newline="") for line in lines), strict=True)
    line = 1
    try:
        for cells in reader:
            if cells:
                yield line, cells
            line = reader.line_num + 1
    except csv.Error as error:
        raise UserError(f"{path}, line {line}: not CSV: {error}") from None
    finally:
        csv.field_size_limit(previous)


def _jsonl(path: Path, lines: Iterable[str], form: FileForm) -> Iterator[Record]:
    for line, source in enumerate(lines, 1):
        if not source.strip():
            continue
        try:
            record = json.loads(source.removesuffix("\n"))
        except json.JSONDecodeError as error:
            raise UserError(f"{path}, line {line}, column {error.colno}: not JSON: {error.msg}") from None
        except ValueError:
            raise UserError(f"{path}, line {line}: not JSON that can be read: {TOO_LONG}") from None
        except RecursionError:
            raise UserError(f"{path}, line {line}: nested too deeply") from None
        if not isinstance(record, dict):
            raise UserError(f"{path}, line {line}: {kind_of(record)} where a JSON object is expected")
        missing = [name for name in form.wanted if name not in record]
        if missing:
            found = listed(record) or "none"
            raise UserError(f"{path}, line {line}: no field {listed(missing)}; fields found: {found}")
        yield Record(line, {name: record[name] for name in form.wanted})


def _parquet_columns(path: Path, form: FileForm) -> Any:
    import pyarrow
    import pyarrow.parquet

    check_file(path)
    try:
        file = pyarrow.parquet.ParquetFile(path)
        columns = file.schema_arrow.names
    except (OSError, ValueError, pyarrow.ArrowException) as error:
        raise _no_parquet(path, error) from None
    _check_header(path, columns, form)
    return file


def _parquet(path: Path, form: FileForm) -> Iterator[Record]:
    import pyarrow
    from pyarrow import parquet

    found = _parquet_columns(path, form)
    _check_rows(path, found.metadata.num_rows)
    columns = list(form.wanted)
    # a text that stands in the file once, for many rows, is held once: its copies are counted before they are made
    texts = [name for name in columns if str(found.schema_arrow.field(name).type) in _TEXTS]
    line, held = 0, 0
    try:
        file = parquet.ParquetFile(path, read_dictionary=texts)
        for batch in file.iter_batches(_ROWS_AT_ONCE, columns=columns):
            held += batch.num_rows * _BYTES_OF_A_RECORD + sum(map(_bytes_of, batch.columns))
            if held > most_held():
                raise _TooMuchError(line + batch.num_rows)
            for record in batch.to_pylist():
                line += 1
                yield Record(line, record)
    except _TooMuchError as error:
        raise UserError(
            f"{path}: its first {error.args[0]:,} rows take {held:,} bytes, and {most_held():,} are the most that this "
            f"host's memory allows: take fewer rows, or shorter texts"
        ) from None
    # a text that is not UTF-8, a time before the year 1 or in no known zone
    except (OSError, UnicodeDecodeError, OverflowError, KeyError, pyarrow.ArrowException) as error:
        raise _no_parquet(path, error) from None


class _TooMuchError(Exception):
    """So many rows are more than can be held."""


def _check_rows(path: Path, rows: int) -> None:
    most = most_held() // _BYTES_OF_A_RECORD
    if rows > most:
        raise UserError(
            f"{path} has {rows:,} rows, and {most:,} are the most that this host's memory allows: take fewer"
        )


def _bytes_of(column: Any) -> int:
    """Of a column's values, once each is an object of its own."""
    from pyarrow import compute, types

    if types.is_dictionary(column.type) and str(column.type.value_type) in _TEXTS:
        lengths = compute.binary_length(column.dictionary)
        return compute.sum(compute.cast(lengths, "int64").take(column.indices)).as_py() or 0
    return column.nbytes


def _no_parquet(path: Path, error: Exception) -> ValueError:
    cause = "a text is not UTF-8" if isinstance(error, UnicodeDecodeError) else cut(" ".join(str(error).split()), 200)
    return UserError(f"{path} is not a readable parquet file: {cause}")
