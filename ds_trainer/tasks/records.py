"""Read the records of a data file or of a hub data set, and say where a broken one stands.

A record holds the wanted columns of one line of TSV, CSV or JSON lines, or of one row of parquet or of the hub. Text is
UTF-8, with or without a byte order mark. Every mistake is one `UserError` that names the file and, where a format has
lines, the line. Loads neither torch nor numpy before parquet or the hub is read, so that a missing file or column is
reported at once.
"""

import csv
import io
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

from pydantic_core import from_json

from ds_trainer.config.task_specs import TaskBase
from ds_trainer.files.messages import kind_of, listed, quoted
from ds_trainer.files.reading import check_file, content_hash
from ds_trainer.ranks.failures import UserError

T = TypeVar("T")
Record = dict[str, Any]


class Records(ABC):
    """The records of one split, read anew at each iteration."""

    columns: Sequence[str]
    origin: str
    entry: str
    """What a record is called in a message: a line or a row."""
    skipped = 0
    """How many malformed records the latest iteration passed over."""

    def parsed(self, parse: Callable[[Record], T]) -> Iterator[tuple[int, T]]:
        """Yield the number of each record (a line or a row, from 1) and what `parse` makes of it.

        A ValueError of `parse` becomes a `UserError` that begins with the record's place. No record at all is an error.
        """
        number = 0
        for number, record in self._read():
            try:
                result = parse({name: record[name] for name in self.columns})
            except ValueError as error:
                raise UserError(f"{self.place(number)}: {error}") from None
            yield number, result
        if not number:
            raise UserError(f"{self.origin} has no examples: it is empty, or holds only a header")

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
            raise UserError(f"{place}: no column {listed(missing)}; the columns are: {listed(present) or 'none'}")
        repeated = [name for name in self.columns if present.count(name) > 1]
        if repeated:
            raise UserError(f"{place}: more than one column {listed(repeated)}: rename or remove all but one")


@dataclass
class FileRecords(Records):
    """The records of a file, whose ending says how to read it.

    `header` names the columns of a table without a header line; where it is empty, they are numbered from 0. With
    `skip_malformed`, rows with a wrong number of fields (GLUE's QQP has some) are passed over.
    """

    path: Path
    columns: Sequence[str]
    header: Sequence[str] | None = None
    skip_malformed: bool = False

    def __post_init__(self) -> None:
        self.origin = str(self.path)
        self.entry = "row" if self.path.suffix.lower() == ".parquet" else "line"

    def fingerprint(self) -> str:
        return content_hash(self.path).hex()

    def _read(self) -> Iterator[tuple[int, Record]]:
        self.skipped = 0
        suffix = self.path.suffix.lower()
        if suffix == ".parquet":
            return self._parquet()
        if suffix == ".jsonl":
            return self._json_lines()
        if suffix in (".tsv", ".csv"):
            return self._table(_tab_separated(self.path) if suffix == ".tsv" else _comma_separated(self.path))
        raise UserError(f"{self.path}: the ending {quoted(suffix)} is unknown: use .csv, .tsv, .jsonl or .parquet")

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
                self.skipped += 1
            else:
                raise UserError(
                    f"{self.place(number)}: {len(cells)} fields where {len(header)} are expected ({listed(header)})"
                )

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
            if not isinstance(record, dict):
                raise UserError(f"{self.place(number)}: {kind_of(record)} where a JSON object is expected")
            self._check_columns(self.place(number), list(record))
            yield number, record

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


def _tab_separated(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Cut lines at tabs and at nothing else: in GLUE's files a quote is an ordinary character."""
    for number, line in enumerate(lines(path), 1):
        row = line.removesuffix("\n").removesuffix("\r")
        if row:
            yield number, row.split("\t")


def _comma_separated(path: Path) -> Iterator[tuple[int, list[str]]]:
    csv.field_size_limit(2**31 - 1)  # the default refuses a text of 128 KiB
    # a bare carriage return ends a line, too: old spreadsheets write it
    rows = chain.from_iterable(io.StringIO(line, newline="") for line in lines(path))
    reader = csv.reader(rows, strict=True)
    number = 1
    try:
        for cells in reader:
            if cells:
                yield number, cells
            number = reader.line_num + 1
    except csv.Error as error:
        raise UserError(f"{path}, line {number}: not CSV: {error}") from None


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
