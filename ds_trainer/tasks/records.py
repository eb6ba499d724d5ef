"""Read the records of a data file or of a hub data set, and say where a broken one stands.

A record holds the wanted columns of one line of TSV, CSV or JSON lines, or of one row of parquet, of the hub or of a
JSON array. Text is UTF-8, with or without a byte order mark. Every mistake is one `UserError` that names the file and,
where a format has lines, the line. What is left out is counted. Loads neither torch nor numpy before parquet or the hub
is read, so that a missing file or column is reported at once.
"""

import codecs
import csv
import io
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

from pydantic_core import from_json

from ds_trainer.config.task_specs import TaskBase
from ds_trainer.files.messages import kind_of, listed, quoted
from ds_trainer.files.reading import check_file, content_hash, read_file
from ds_trainer.ranks.failures import UserError

T = TypeVar("T")
Record = dict[str, Any]
_QUOTED_CELL = r'(?:"[^"]*(?:""[^"]*)*"|[^"\t]*)'
_QUOTED_ROW = re.compile(rf"{_QUOTED_CELL}(?:\t{_QUOTED_CELL})*")
"""A row of a table with tabs in which every quote begins a cell, ends it, or is doubled."""


class NoExamplesError(UserError):
    """A source has no records, or all of them are left out."""


class Records(ABC):
    """The records of one split, read anew at each iteration.

    Where `missing` is a list, a record is left out if a cell of its columns is null, NaN, blank, or one of these words.
    """

    columns: Sequence[str]
    missing: Sequence[str] | None
    origin: str
    entry: str
    """What a record is called in a message: a line or a row."""
    read: int
    """How many records the latest iteration has handed on."""
    left_out: dict[str, list[int]]
    """What the latest iteration has left out: the numbers of the records, from 1, by what is wrong with them."""
    remark = ""
    """What else is to be said of how the records are read."""

    def parsed(self, parse: Callable[[Record], T]) -> Iterator[tuple[int, T]]:
        """Yield the number of each record (a line or a row, from 1) and what `parse` makes of it.

        A ValueError of `parse` becomes a `UserError` that begins with the record's place. To yield none is a
        `NoExamplesError`.
        """
        self.read, self.left_out = 0, {}
        for number, record in self._read():
            cells = {name: record[name] for name in self.columns}
            empty = next((name for name in cells if self._is_missing(cells[name])), None)
            if empty is not None:
                value = cells[empty]
                written = (quoted(value.strip()) if value.strip() else "empty") if isinstance(value, str) else "null"
                self._leave_out(f"whose {quoted(empty)} is {written}", number)
                continue
            try:
                result = parse(cells)
            except ValueError as error:
                raise UserError(f"{self.place(number)}: {error}") from None
            self.read += 1
            yield number, result
        if not self.read:
            why = self.told_of_left_out() or "it is empty, or holds only a header"
            raise NoExamplesError(f"{self.origin} has no examples: {why}")

    def told(self) -> str:
        """Return in words what the latest iteration has kept, and what it has left out and why."""
        return "; ".join(filter(None, (f"{self.read:,} {self.entry}s kept", self.told_of_left_out(), self.remark)))

    def told_of_left_out(self) -> str:
        """Return in words what the latest iteration has left out and why, with the first numbers; "" if nothing."""
        kinds = list[str]()
        for kind, numbers in self.left_out.items():
            places = ", ".join([*map(str, numbers[:3]), *["..."] * (len(numbers) > 3)])
            count = f"{len(numbers):,} " + "left out, " * (not kinds)
            kinds.append(f"{count}{kind} ({self.entry}{'s' * (len(numbers) > 1)} {places})")
        return ", ".join(kinds)

    def _is_missing(self, value: Any) -> bool:
        if self.missing is None:
            return False
        is_nan = isinstance(value, float) and value != value
        return value is None or is_nan or (isinstance(value, str) and value.strip() in ("", *self.missing))

    def _leave_out(self, kind: str, number: int) -> None:
        self.left_out.setdefault(kind, []).append(number)

    def place(self, number: int) -> str:
        """Return where a record stands, for a message."""
        return f"{self.origin}, {self.entry} {number}"

    def check(self) -> None:
        """Raise what reading would raise up to the first record."""
        next(self.parsed(lambda record: None))

    @abstractmethod
    def fingerprint(self) -> str:
        """Return a hash that changes whenever the records may have changed, and is the same on every host."""

    @abstractmethod
    def _read(self) -> Iterator[tuple[int, Record]]: ...

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
class FileRecords(Records):
    """The records of a file, whose ending says how to read it.

    `header` names the columns of a table without a header line; where it is empty, they are numbered from 0. With
    `skip_malformed`, rows with a wrong number of fields (GLUE's QQP has some) are left out. `quoting` says whether the
    cells of a table are in quotes where they need it; None: in .csv they are, and in .tsv where the file shows it.
    """

    path: Path
    columns: Sequence[str]
    header: Sequence[str] | None = None
    skip_malformed: bool = False
    missing: Sequence[str] | None = None
    quoting: bool | None = None

    def __post_init__(self) -> None:
        self.origin = str(self.path)
        self.entry = "row" if self.path.suffix.lower() in (".parquet", ".json") else "line"

    def fingerprint(self) -> str:
        # earlier versions took no quotes off .tsv files: where they are taken off, cached examples are others
        other = self.path.suffix.lower() in (".csv", ".tsv") and self.is_quoted != self._is_csv
        return content_hash(self.path).hex() + "quoting" * other

    @cached_property
    def is_quoted(self) -> bool:
        """Whether the quotes of a table are its format's, and no part of the cells."""
        if self.quoting is not None or self._is_csv:
            return self.quoting is not False
        check_file(self.path)
        status = self.path.stat()
        shown = _shows_quoting(self.path, status.st_size, status.st_mtime_ns)
        if shown is not None:
            kind = "those of a CSV writer" if shown else "part of the text"
            self.remark = f"its quotes are read as {kind} (quoting decides)"
        return bool(shown)

    @property
    def _is_csv(self) -> bool:
        return self.path.suffix.lower() == ".csv"

    def _read(self) -> Iterator[tuple[int, Record]]:
        suffix = self.path.suffix.lower()
        if suffix == ".parquet":
            return self._parquet()
        if suffix == ".jsonl":
            return self._json_lines()
        if suffix == ".json":
            return self._json()
        if suffix in (".tsv", ".csv"):
            mark = "," if self._is_csv else "\t"
            return self._table(_quoted_rows(self.path, mark) if self.is_quoted else _plain_rows(self.path, mark))
        raise UserError(
            f"{self.path}: the ending {quoted(suffix)} is unknown: use .csv, .tsv, .jsonl, .json or .parquet"
        )

    def _table(self, rows: Iterator[tuple[int, list[str]]]) -> Iterator[tuple[int, Record]]:
        header = self.header
        if not header:
            first = next(rows, (1, []))
            header = first[1] if header is None else list(map(str, range(len(first[1]))))
            rows = rows if self.header is None else chain([first], rows)
        self._check_columns(f"{self.path}, line 1", header)
        for number, cells in rows:
            if len(cells) == len(header):
                yield number, dict(zip(header, cells, strict=True))
            elif self.skip_malformed:
                self._leave_out("with a wrong number of fields", number)
            else:
                raise UserError(
                    f"{self.place(number)}: {len(cells)} fields where {len(header)} are expected ({listed(header)})"
                )

    def _json(self) -> Iterator[tuple[int, Record]]:
        """Read an array of records, alone or as "data", or JSON lines under another name."""
        try:
            value = from_json(read_file(self.path).removeprefix(codecs.BOM_UTF8))
        except ValueError:
            self.entry = "line"
            yield from self._json_lines()  # which tells the first line that is wrong
            return
        records = value.get("data", [value]) if isinstance(value, dict) else value
        if not isinstance(records, list):
            raise UserError(f"{self.path}: {kind_of(records)} where an array of records is expected")
        for number, record in enumerate(records, 1):
            yield number, self._checked(number, record)

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
            yield number, self._checked(number, record)

    def _checked(self, number: int, record: Any) -> Record:
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
class HubRecords(Records):
    """The records of a hub data set "name", "owner/name" or "owner/name/configuration".

    A class, which the hub stores as a number, is given by its name, also in a list; None where it has none.
    """

    name: str
    split: str
    columns: Sequence[str]
    missing: Sequence[str] | None = None
    entry = "row"

    def __post_init__(self) -> None:
        self.origin = f"{self.name} ({self.split})"

    def check(self) -> None:
        """Leave the hub alone: asking it takes longer than a check of the settings may."""

    def fingerprint(self) -> str:
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
            for column, names in classes.items():
                value = record[column]
                record[column] = (
                    [_name(names, one) for one in value] if isinstance(value, list) else _name(names, value)
                )
            yield number, record


def _name(names: Sequence[str], value: int | None) -> str | None:
    return names[value] if value is not None and 0 <= value < len(names) else None


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


def _plain_rows(path: Path, mark: str) -> Iterator[tuple[int, list[str]]]:
    """Cut lines at the mark and at nothing else: in GLUE's files a quote is an ordinary character."""
    for number, line in enumerate(lines(path), 1):
        row = line.removesuffix("\n").removesuffix("\r")
        if row:
            yield number, row.split(mark)


def _quoted_rows(path: Path, mark: str) -> Iterator[tuple[int, list[str]]]:
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


@lru_cache
def _shows_quoting(path: Path, size: int, time: int) -> bool | None:
    """Return whether a file with tabs can only be what a CSV writer, such as pandas, makes of its cells.

    None: it has no quotes. Every quote is then a writer's (none stands alone inside a cell), and some cell cannot be
    meant as it stands: it holds a doubled quote, a tab or a line break, or all cells of the first row are in quotes.

    All lines are read, so the answer is kept: by its size and time, a changed file is read again.
    """
    csv.field_size_limit(2**31 - 1)
    consumed: list[str] = []

    def consuming() -> Iterator[str]:
        for line in lines(path):
            consumed.append(line)
            yield line

    shown: bool | None = None
    width = 0
    try:
        for cells in csv.reader(consuming(), delimiter="\t", strict=True):
            raw = "".join(consumed).rstrip("\r\n")
            widths = {line.count("\t") + 1 for line in consumed}
            lines_fit = len(consumed) > 1 and widths == {width}
            consumed.clear()
            if not width and cells:
                width, shown = len(cells), all(cell.startswith('"') for cell in raw.split("\t")) or None
            if '"' not in raw:
                continue
            if not _QUOTED_ROW.fullmatch(raw) or len(cells) != width:
                return False
            # a quotation over several lines that are rows themselves may be a text that was cut into sentences
            shown = bool(shown) or (not lines_fit and any(sign in cell for cell in cells for sign in '"\t\n'))
    except csv.Error:
        return False
    return shown


def text_in(record: Record, column: str) -> str:
    """Return the text of a column; ValueError where it is something else."""
    value = record[column]
    if not isinstance(value, str):
        raise ValueError(f"{quoted(column)} is {kind_of(value)}, and must be text")
    return value


def file_of(spec: TaskBase, split: str) -> str:
    """Return the file that the spec names for a split, relative to `data_dir`; none is an error."""
    name = spec.train_file if split == "train" else spec.validation_file
    if not name:
        raise UserError(f'the task "{spec.name}" has no file for the {split} split: set {split}_file')
    return name


def find_file(spec: TaskBase, split: str, names: Sequence[str]) -> Path:
    """Return the first of the named files that exists; the error lists the paths looked for."""
    paths = [in_data_dir(spec, name) for name in names]
    path = next(filter(os.path.isfile, paths), None)
    if path is None:
        raise missing_file(spec, split, paths)
    return path


def in_data_dir(spec: TaskBase, name: str = "") -> Path:
    """Return the path of a file below `data_dir`, which is the current folder by default."""
    return Path(os.path.expanduser(spec.data_dir or "."), os.path.expanduser(name))


def missing_file(spec: TaskBase, split: str, paths: Sequence[Path]) -> UserError:
    """Make the error for a split without a file."""
    looked_for = f"looked for {', '.join(map(str, paths))}"
    if not os.path.isdir(in_data_dir(spec)):
        return UserError(f"data_dir {in_data_dir(spec)} does not exist; {looked_for}")
    return UserError(f"there is no file for the {split} split; {looked_for}")


def mistakes_of(check: Callable[[str], None], splits: Sequence[str]) -> list[str]:
    """Return the messages of the splits whose check raises a `UserError`."""
    mistakes = []
    for split in splits:
        try:
            check(split)
        except UserError as error:  # noqa: PERF203 - there are three splits at most
            mistakes.append(str(error))
    return mistakes
