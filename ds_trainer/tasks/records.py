"""Read the records of a data file or of a hub data set, and say where a broken one stands.

A record holds the wanted columns of one line of TSV, CSV or JSON lines, or of one row of parquet, of the hub or of a
JSON array. Text is UTF-8, with or without a byte order mark. A mistake is a `UserError` that names the file and, where
a format has lines, the line. What is left out is counted. The module loads neither torch nor numpy before parquet or
the hub is read, so that a missing file or column is reported at once.
"""

import codecs
import csv
import io
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from pydantic_core import from_json

from ds_trainer.files.messages import kind_of, listed, quoted
from ds_trainer.files.reading import check_file, content_hash, read_file
from ds_trainer.ranks.failures import UserError, raise_mistakes
from ds_trainer.recipe.task_specs import TaskBase

T = TypeVar("T")
Record = Mapping[str, Any]
TABLES = (".csv", ".tsv", ".jsonl", ".json", ".parquet")
"""The endings of the files that have columns."""
GAPS = ("nan", "NaN", "NA")
"""The words that pandas and R write where a cell has no value."""
_MOST_MISTAKES = 20
"""Reading stops after this many mistakes."""
_LEFT_OUT = dict[tuple[str, str], str]()
"""What is left out of a source, in words, by its settings and its content: to know it, all records are read."""


class Row(NamedTuple, Generic[T]):
    """What `parse` makes of a record; the number of its line or row in the source, from 1; its number in the split."""

    value: T
    place: int
    number: int = 0


class Records(ABC, Generic[T]):
    """The records of one split, which are read anew at each iteration; `parse` turns them into examples.

    `parse` gets the cells of `columns`; its ValueErrors become mistakes that begin with the record's place. Where
    `missing` is a sequence, a record is left out if a cell of its columns is null, NaN, blank, or one of these words.

    origin: what a message calls the source.
    entry: what a record is called in a message: a line or a row.
    unit: what is counted: by default entries.
    read: how many records the latest iteration has kept.
    left_out: what the latest iteration has left out: the numbers of the records, from 1, by what is wrong with them.
    """

    columns: Sequence[str]
    parse: Callable[[Record], T]
    missing: Sequence[str] | None = None
    origin: str
    entry: str
    unit: str = ""
    read: int
    left_out: dict[str, list[int]]

    def rows(self, most_mistakes: int = _MOST_MISTAKES) -> Iterator[Row[T]]:
        """Yield the examples; one `UserError` lists the first mistakes, and to yield none is one, too."""
        self.read, mistakes = 0, list[str]()
        for number, cells in self._complete():
            try:
                value = self.parse(cells)
            except ValueError as error:  # noqa: PERF203 - it costs nothing beside the parsing
                mistakes.append(f"{self.place(number)}: {error}")
                if len(mistakes) == most_mistakes:
                    break
            else:
                self.read += 1
                yield Row(value, number)
        raise_mistakes(mistakes)
        if not self.read:
            why = self.what_is_left_out() or "it is empty, or holds only a header"
            raise UserError(f"{self.origin} has no examples: {why}")

    def check(self) -> None:
        """Raise what reading would raise up to the first record."""
        next(self.rows(most_mistakes=1))

    def fingerprint(self) -> str:
        """Return a hash that changes whenever the examples may have changed, and is the same on every host."""
        source = self._source_hash()
        if self.missing is None:
            return source
        key = repr(self), source
        if key not in _LEFT_OUT:
            for _ in self._complete():
                pass
            _LEFT_OUT[key] = str(self.left_out or "")
        # version 0.2 left no record out: its caches and checkpoints are good only where nothing is left out
        return source + _LEFT_OUT[key]

    def summary(self) -> str:
        """Return in words what the latest iteration has kept, and what it has left out and why."""
        left_out = self.what_is_left_out()
        return f"{self.read:,} {self.unit or self.entry}s kept" + (f"; {left_out}" if left_out else "")

    def what_is_left_out(self) -> str:
        """Return in words what the latest iteration has left out and why, with the first numbers; "" if nothing."""
        kinds = list[str]()
        for kind, numbers in self.left_out.items():
            places = ", ".join([*map(str, numbers[:3]), *["..."] * (len(numbers) > 3)])
            count = f"{len(numbers):,} " + "left out, " * (not kinds)
            kinds.append(f"{count}{kind} ({self.entry}{'s' * (len(numbers) > 1)} {places})")
        return ", ".join(kinds)

    def place(self, number: int) -> str:
        """Return where a record stands, for a message."""
        return f"{self.origin}, {self.entry} {number}"

    @abstractmethod
    def _source_hash(self) -> str: ...

    @abstractmethod
    def _read(self) -> Iterator[tuple[int, Record]]: ...

    def _complete(self) -> Iterator[tuple[int, Record]]:
        """Yield the numbers and the cells of the records without a gap."""
        self.left_out = {}
        for number, record in self._read():
            cells = {name: record[name] for name in self.columns}
            gap = next((name for name, cell in cells.items() if self._is_missing(cell)), None)
            if gap is None:
                yield number, cells
                continue
            written = cells[gap].strip() if isinstance(cells[gap], str) else None
            kind = "null" if written is None else quoted(written) if written else "empty"
            self._leave_out(f"whose {quoted(gap)} is {kind}", number)

    def _is_missing(self, value: Any) -> bool:
        if self.missing is None:
            return False
        is_nan = isinstance(value, float) and value != value
        return value is None or is_nan or (isinstance(value, str) and value.strip() in ("", *self.missing))

    def _leave_out(self, kind: str, number: int) -> None:
        self.left_out.setdefault(kind, []).append(number)

    def _check_columns(self, place: str, present: Sequence[str]) -> None:
        missing = [name for name in self.columns if name not in present]
        if missing:
            columns = listed(present) or "none"
            if any(";" in name for name in present):
                columns += "; cells must be apart by commas or, in .tsv, by tabs"
            raise UserError(f"{place}: no column {listed(missing)}; the columns are: {columns}")
        repeated = [name for name in self.columns if present.count(name) > 1]
        if repeated:
            raise UserError(f"{place}: more than one column {listed(repeated)}: rename or remove all but one")


@dataclass
class FileRecords(Records[T]):
    """The records of a file, whose ending says how to read it.

    `header` names the columns of a table without a header line; where it is empty, they are numbered from 0. With
    `skip_malformed`, rows with a wrong number of fields (GLUE's QQP has some) are left out. `quoting` says whether the
    cells of a table are in quotes where they need it; None: in .csv they are, and in .tsv no cell may begin with one.
    """

    path: Path
    columns: Sequence[str]
    parse: Callable[[Record], T] = field(repr=False)
    header: Sequence[str] | None = None
    skip_malformed: bool = False
    missing: Sequence[str] | None = None
    quoting: bool | None = None

    def __post_init__(self) -> None:
        self.origin, self._suffix = str(self.path), self.path.suffix.lower()
        self.entry = "row" if self._suffix in (".parquet", ".json") else "line"

    def _source_hash(self) -> str:
        # version 0.2 took the quotes off .csv files alone: where they are read otherwise, cached examples are others
        other = self._suffix in (".csv", ".tsv") and self.quoting not in (None, self._suffix == ".csv")
        return content_hash(self.path).hex() + "quoting" * other

    def _read(self) -> Iterator[tuple[int, Record]]:
        readers = {".parquet": self._parquet, ".jsonl": self._json_lines, ".json": self._json}
        readers |= dict.fromkeys((".csv", ".tsv"), self._table)
        if self._suffix in readers:
            return readers[self._suffix]()
        raise UserError(f"{self.path}: the ending {quoted(self.path.suffix)} is unknown: use {', '.join(TABLES)}")

    def _table(self) -> Iterator[tuple[int, Record]]:
        is_csv = self._suffix == ".csv"
        takes_quotes = is_csv if self.quoting is None else self.quoting
        rows = (_quoted_rows if takes_quotes else plain_rows)(self.path, "," if is_csv else "\t")
        if self.quoting is None and not is_csv:
            rows = map(self._without_quotes, rows)
        first = [] if self.header else [next(rows, (1, []))]
        header = first.pop()[1] if self.header is None else self.header or list(map(str, range(len(first[0][1]))))
        self._check_columns(f"{self.path}, line 1", header)
        for number, cells in chain(first, rows):
            if len(cells) == len(header):
                yield number, dict(zip(header, cells, strict=True))
            elif self.skip_malformed:
                self._leave_out("with a wrong number of fields", number)
            else:
                expected = f"{len(header)} are expected ({listed(header)})"
                raise UserError(f"{self.place(number)}: {len(cells)} fields where {expected}")

    def _without_quotes(self, row: tuple[int, list[str]]) -> tuple[int, list[str]]:
        """Refuse a row that means one thing where a CSV writer wrote it, and another where quotes are text."""
        if any(cell.startswith('"') for cell in row[1]):
            raise UserError(
                f"{self.place(row[0])}: a cell begins with a quote: set quoting to true if it is that of a CSV writer, "
                f"such as pandas, and to false if it is part of the text; or save the file as .csv"
            )
        return row

    def _json(self) -> Iterator[tuple[int, Record]]:
        """Read an array of records, alone or as "data", or JSON lines under another name."""
        try:
            value = from_json(read_file(self.path).removeprefix(codecs.BOM_UTF8))
        except ValueError:
            self.entry = "line"
            yield from self._json_lines()  # which names the first line that is wrong
            return
        records = value.get("data", [value]) if isinstance(value, dict) else value
        if not isinstance(records, list):
            raise UserError(f"{self.path}: {kind_of(records)} where an array of records is expected")
        for number, record in enumerate(records, 1):
            yield number, self._object(number, record)

    def _json_lines(self) -> Iterator[tuple[int, Record]]:
        for number, line in enumerate(lines(self.path), 1):
            if not line.strip():
                continue
            try:
                # unlike Python's parser, it refuses half a surrogate pair, which is no text that can be tokenised
                record = from_json(line.rstrip())
            except ValueError as error:
                cause = str(error).replace("at line 1 column", "at column")  # the parser sees only this line
                raise UserError(f"{self.place(number)}: not JSON: {cause}") from None
            yield number, self._object(number, record)

    def _object(self, number: int, record: Any) -> Record:
        if not isinstance(record, dict):
            raise UserError(f"{self.place(number)}: {kind_of(record)} where a JSON object is expected")
        self._check_columns(self.place(number), list(record))
        return record

    def _parquet(self) -> Iterator[tuple[int, Record]]:
        from pyarrow import ArrowException, parquet

        check_file(self.path)
        try:
            file = parquet.ParquetFile(self.path)
            self._check_columns(self.origin, file.schema_arrow.names)
            batches = file.iter_batches(columns=list(self.columns))
            yield from enumerate(chain.from_iterable(batch.to_pylist() for batch in batches), 1)
        except UserError:
            raise
        except (ArrowException, OSError, ValueError, OverflowError, KeyError) as error:
            raise UserError(f"{self.path} is not a readable parquet file: {error}") from None


@dataclass
class HubRecords(Records[T]):
    """The records of a hub data set "name", "owner/name" or "owner/name/configuration".

    A class, which the hub stores as a number, is given by its name, also in a list; None where it has none.
    """

    name: str
    split: str
    columns: Sequence[str]
    parse: Callable[[Record], T] = field(repr=False)
    missing: Sequence[str] | None = None
    entry = "row"

    def __post_init__(self) -> None:
        self.origin = f"{self.name} ({self.split})"

    def check(self) -> None:
        """Leave the hub alone: asking it takes longer than a check of the settings may."""

    def _source_hash(self) -> str:
        return str(self._dataset._fingerprint)

    @cached_property
    def _dataset(self) -> Any:
        import datasets

        *owner, name, configuration = self.name.split("/", 2) if self.name.count("/") > 1 else (self.name, None)
        try:
            return datasets.load_dataset("/".join([*owner, name]), configuration, split=self.split)
        except (OSError, ValueError) as error:
            raise UserError(
                f"the hub data set {self.origin} cannot be loaded: {error}. Without a network set data_dir, the folder "
                f"of the files (and train_file and validation_file, where these have no official names)"
            ) from error

    def _read(self) -> Iterator[tuple[int, Record]]:
        self._check_columns(self.origin, self._dataset.column_names)
        features = getattr(self._dataset, "features", {})
        kinds = {name: getattr(kind, "feature", kind) for name, kind in features.items()}  # a list's is of its values
        classes = {name: kinds[name].names for name in self.columns if hasattr(kinds.get(name), "names")}
        for number, record in enumerate(self._dataset.select_columns(list(self.columns)), 1):
            yield number, record | {name: _named(names, record[name]) for name, names in classes.items()}


def _named(names: Sequence[str], value: Any) -> Any:
    if isinstance(value, list):
        return [_named(names, each) for each in value]
    return names[value] if value is not None and 0 <= value < len(names) else None


def text_in(record: Record, column: str) -> str:
    """Return the text of a column; ValueError where it is something else."""
    value = record[column]
    if not isinstance(value, str):
        raise ValueError(f"{quoted(column)} is {kind_of(value)}, and must be text")
    return value


def table(spec: TaskBase, split: str, columns: Sequence[str], parse: Any, missing: Any = None) -> Records[Any]:
    """Return the records of the hub data set or of the file that a spec names for a split."""
    if spec.dataset:
        return HubRecords(spec.dataset, split, columns, parse, missing)
    return FileRecords(find_file(spec, split), columns, parse, missing=missing)


def file_of(spec: TaskBase, split: str) -> str:
    """Return the file that the spec names for a split, relative to `data_dir`; none is an error."""
    name = spec.train_file if split == "train" else spec.validation_file
    if not name:
        raise UserError(f'the task "{spec.name}" has no file for the {split} split: set {split}_file')
    return name


def find_file(spec: TaskBase, split: str, names: Sequence[str] = ()) -> Path:
    """Return the first of the named files that exists, by default the spec's; the error lists the paths looked for."""
    folder, paths = in_data_dir(spec), [in_data_dir(spec, name) for name in names or [file_of(spec, split)]]
    path = next(filter(os.path.isfile, paths), None)
    if path is None:
        no_file = f"there is no file for the {split} split" if folder.is_dir() else f"data_dir {folder} does not exist"
        raise UserError(f"{no_file}; looked for {', '.join(map(str, paths))}")
    return path


def in_data_dir(spec: TaskBase, name: str = "") -> Path:
    """Return the path of a file below `data_dir`, which is the current folder by default."""
    return Path(os.path.expanduser(spec.data_dir or "."), os.path.expanduser(name))


def lines(path: Path) -> Iterator[str]:
    """Decode the lines of a UTF-8 file one after another, each with its newline; nothing else ends a line."""
    check_file(path)
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                yield line.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}, line {number}: not UTF-8 ({error.reason}): save the file as UTF-8") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None


def plain_rows(path: Path, mark: str) -> Iterator[tuple[int, list[str]]]:
    """Cut lines at the mark and at nothing else: in GLUE's files a quote is an ordinary character."""
    for number, line in enumerate(lines(path), 1):
        row = line.removesuffix("\n").removesuffix("\r")
        if row:
            yield number, row.split(mark)


def _quoted_rows(path: Path, mark: str) -> Iterator[tuple[int, list[str]]]:
    """Cut rows as a CSV writer joins them; each comes with its first line, which neither pyarrow nor pandas gives."""
    csv.field_size_limit(2**31 - 1)  # the default refuses a text of 128 KiB
    # a bare carriage return ends a line, too: old spreadsheets write it
    rows = chain.from_iterable(io.StringIO(line, newline="") for line in lines(path))
    reader = csv.reader(rows, delimiter=mark, strict=True)
    number = 1
    try:
        for cells in reader:
            if cells:
                yield number, cells
            number = reader.line_num + 1
    except csv.Error as error:
        way_out = "where quotes are part of the text, set quoting to false"
        raise UserError(f"{path}, line {number}: not CSV: {error}; {way_out}") from None
