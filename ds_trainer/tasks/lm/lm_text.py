"""Where the documents of language modelling come from: plain text, the column of a table, or a hub data set.

A document is a text, or a conversation, the messages of one record. Files are read one after another, so that a corpus
larger than the memory can lie in parts ("part-*.txt"). A file whose ending is not that of a table is plain text. The
module loads neither torch nor numpy before the hub is read, and does not tokenise.
"""

import glob
import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ds_trainer.files.messages import kind_of, quoted
from ds_trainer.files.reading import content_hash
from ds_trainer.recipe.task_specs import LmSpec
from ds_trainer.tasks.records import (
    TABLES,
    FileRecords,
    HubRecords,
    Record,
    Records,
    file_of,
    find_file,
    in_data_dir,
    lines,
    text_in,
)

Message = dict[str, Any]
"""A message of a conversation, with "role" and "content"; a chat template may know further keys."""
Read = Callable[[list[Message]], Any]
"""What makes a document of a conversation; a ValueError becomes a mistake that begins with its place."""


def as_text(messages: list[Message]) -> str:
    """Return the roles and contents of a conversation, a line each."""
    return "\n".join(f"{message['role']}\n{message['content']}" for message in messages)


def training_texts(spec: LmSpec) -> list[str]:
    """Return every document of the training split."""
    return [row.value for row in records(spec, "train").rows()]


def records(spec: LmSpec, split: str, read: Read = as_text) -> Records[Any]:
    """Return the source of a split: its texts but blank ones, or with messages_column what `read` makes of them."""
    parse, columns = partial(_document, spec, read), [spec.column]
    if spec.dataset:
        return Corpus([HubRecords(spec.dataset, split, columns, parse)], columns, parse)
    if split != "train" and spec.name == "mlm" and spec.train_file:
        files(spec, "train")  # whose tokens are counted before any split can be masked: they must be there
    sources = list[Records[Any]]()
    for path in files(spec, split):
        is_table = path.suffix.lower() in TABLES
        kind = FileRecords if is_table else _Lines if spec.line_by_line else _WholeText
        sources.append(kind(path, columns, parse))
    return Corpus(sources, columns, parse)


class Corpus(Records[Any]):
    """The documents of several sources, one after another, but blank ones."""

    unit, missing = "document", ()

    def __init__(self, sources: Sequence[Records[Any]], columns: Sequence[str], parse: Callable[[Record], Any]) -> None:
        self.sources, self.columns, self.parse = sources, columns, parse
        self._current, more = sources[0], len(sources) - 1
        self.origin = self._current.origin + (f" and {more:,} more files" if more else "")
        self.entry = self._current.entry

    def check(self) -> None:
        """Raise what reading would raise up to the first document; the hub is left alone."""
        if not isinstance(self._current, HubRecords):
            super().check()

    def fingerprint(self) -> str:
        """Return a hash of the sources alone: blank documents were left out in every version."""
        return self._source_hash()

    def place(self, number: int) -> str:
        """Return where a record of the source that is being read stands."""
        return self._current.place(number)

    def _source_hash(self) -> str:
        digest = hashlib.blake2b(digest_size=16)
        for source in self.sources:
            if not isinstance(source, FileRecords):
                return source._source_hash()
            digest.update(source.path.suffix.lower().encode() + content_hash(source.path))
        return digest.hexdigest()

    def _read(self) -> Iterator[tuple[int, Record]]:
        for source in self.sources:
            self._current = source
            yield from source._read()


class _WholeText(FileRecords[Any]):
    """A text file as the only record, of one column."""

    def _read(self) -> Iterator[tuple[int, Record]]:
        yield 1, {self.columns[0]: "".join(lines(self.path))}


class _Lines(FileRecords[Any]):
    """The lines of a text file as the records of one column."""

    def _read(self) -> Iterator[tuple[int, Record]]:
        for number, text in enumerate(lines(self.path), 1):
            yield number, {self.columns[0]: text.removesuffix("\n").removesuffix("\r")}


def files(spec: LmSpec, split: str) -> list[Path]:
    """Return the files of a split, in the order of their names; the error lists the paths that were tried."""
    name = file_of(spec, split)
    if not os.path.isfile(in_data_dir(spec, name)):
        # only the file name is a pattern: the path of data_dir itself may contain a bracket or a star
        pattern = os.path.join(glob.escape(str(in_data_dir(spec))), os.path.expanduser(name))
        if paths := sorted(Path(match) for match in glob.glob(pattern, recursive=True) if os.path.isfile(match)):
            return paths
    return [find_file(spec, split)]


def _document(spec: LmSpec, read: Read, record: Record) -> Any:
    """Return the text of a record, or what `read` makes of its conversation; ValueError where it has neither."""
    if not spec.messages_column:
        return text_in(record, spec.text_column)
    messages = record[spec.messages_column]
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"{quoted(spec.messages_column)} is {kind_of(messages)}, and must be a list of messages")
    for number, message in enumerate(messages, 1):
        fields = [message.get(name) for name in ("role", "content")] if isinstance(message, dict) else [None]
        if not all(isinstance(value, str) for value in fields):
            raise ValueError(f'message {number} must have a "role" and a "content", each of them text')
    return read(messages)
