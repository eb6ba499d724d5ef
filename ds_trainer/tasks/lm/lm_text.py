"""Where the documents of language modelling come from: .txt and .jsonl files, or a hub data set.

A document is a text, or a conversation, the messages of one record. Files are read one after another, so that a corpus
larger than the memory can lie in parts ("part-*.txt"). The module loads neither torch nor numpy before the hub is read,
and does not tokenise.
"""

import glob
import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ds_trainer.config.task_specs import LmSpec
from ds_trainer.files.messages import kind_of, quoted
from ds_trainer.files.reading import content_hash
from ds_trainer.ranks.failures import UserError
from ds_trainer.tasks import records
from ds_trainer.tasks.records import FileRecords, HubRecords, NoExamplesError, Records

SPLITS = ("train", "validation")
Message = dict[str, Any]
"""A message of a conversation, with "role" and "content"; a chat template may know further keys."""
Read = Callable[[list[Message]], Any]
"""What makes a document of a conversation; a ValueError becomes a `UserError` that begins with its place."""


def check_data_files(spec: LmSpec, splits: Sequence[str] | None = None) -> list[str]:
    """Return every mistake in the task's settings, and every missing folder, file or column.

    `splits` defaults to training and validation. For "mlm" the train_file is always checked, since its tokens are
    counted before any split can be masked.
    """
    mistakes = spec.source_mistakes()
    if mistakes or spec.dataset:
        return mistakes
    wanted = set(splits or SPLITS) | ({"train"} if spec.name == "mlm" and spec.train_file else set())
    return records.mistakes_of(partial(_check_split, spec), [split for split in SPLITS if split in wanted])


def training_texts(spec: LmSpec) -> list[str]:
    """Return every document of the training split."""
    return list(documents(spec, "train"))


def as_text(messages: list[Message]) -> str:
    """Return the roles and contents of a conversation, a line each."""
    return "\n".join(f"{message['role']}\n{message['content']}" for message in messages)


def documents(spec: LmSpec, split: str, read: Read = as_text, told: list[str] | None = None) -> Iterator[Any]:
    """Yield the texts of a split, except blank ones, or with messages_column what `read` makes of its conversations.

    An error in a file is raised when its line is reached. What a file gave and what was left out is added to `told` at
    its end. A file may give nothing, but not all of them.
    """
    sources = _sources(spec, split)
    nothing = list[UserError]()
    for source in sources:
        try:
            yield from _parsed(spec, source, read)
        except NoExamplesError as error:
            nothing.append(error)
        if told is not None:
            told.append(source.told() if len(sources) == 1 else f"{source.origin}: {source.told()}")
    _check_some(nothing, sources)


def origin(spec: LmSpec, split: str) -> str:
    """Return what a message calls the source of a split."""
    first, *others = _sources(spec, split)
    return first.origin + (f" and {len(others):,} more files" if others else "")


class _Lines(FileRecords):
    """The lines of a .txt file as the records of one column; or the whole file as a single one."""

    line_by_line = True

    def _read(self) -> Iterator[tuple[int, records.Record]]:
        texts = records.lines(self.path) if self.line_by_line else ["".join(records.lines(self.path))]
        for number, text in enumerate(texts, 1):
            if self.line_by_line:
                text = text.removesuffix("\n").removesuffix("\r")
            yield number, {self.columns[0]: text}


def fingerprint(spec: LmSpec, split: str) -> str:
    """Return a hash that changes whenever the documents may have changed, and is the same on every host."""
    if spec.dataset:
        return HubRecords(spec.dataset, split, [spec.column]).fingerprint()
    digest = hashlib.blake2b(digest_size=16)
    for path in files(spec, split):
        digest.update(path.suffix.lower().encode())
        digest.update(content_hash(path))
    return digest.hexdigest()


def files(spec: LmSpec, split: str) -> list[Path]:
    """Return the files of a split, in the order of their names; the error lists the paths that were tried."""
    name = records.file_of(spec, split)
    path = records.in_data_dir(spec, name)
    if os.path.isfile(path):
        paths = [path]
    else:  # only the file name is a pattern: the path of data_dir itself may contain a bracket or a star
        pattern = os.path.join(glob.escape(str(records.in_data_dir(spec))), os.path.expanduser(name))
        paths = sorted(Path(match) for match in glob.glob(pattern, recursive=True) if os.path.isfile(match))
    if not paths:
        raise records.missing_file(spec, split, [path])
    for path in paths:
        endings = (".jsonl",) if spec.messages_column else (".txt", ".jsonl")
        if path.suffix.lower() not in endings:
            known = "messages_column is read from .jsonl" if spec.messages_column else "use .txt or .jsonl"
            raise UserError(f"{path}: the ending {quoted(path.suffix)} is unknown: {known}")
    _check_some([UserError(f"{path} is empty") for path in paths if not path.stat().st_size], paths)
    return paths


def _check_split(spec: LmSpec, split: str) -> None:
    paths = files(spec, split)
    nothing = list[UserError]()
    for path in paths:
        if path.suffix.lower() == ".jsonl":
            try:
                next(_parsed(spec, FileRecords(path, [spec.column], missing=()), as_text))
            except NoExamplesError as error:
                nothing.append(error)
    _check_some(nothing, paths)


def _check_some(nothing: Sequence[UserError], sources: Sequence[Any]) -> None:
    """Raise the errors of the sources that give nothing as one, if all are such."""
    if len(nothing) == len(sources):
        raise UserError("\n".join(map(str, nothing)))


def _sources(spec: LmSpec, split: str) -> list[Records]:
    if spec.dataset:
        return [HubRecords(spec.dataset, split, [spec.column], missing=())]
    return [_of_file(spec, path) for path in files(spec, split)]


def _of_file(spec: LmSpec, path: Path) -> Records:
    if path.suffix.lower() == ".jsonl":
        return FileRecords(path, [spec.column], missing=())
    source = _Lines(path, [spec.column], missing=())
    source.line_by_line = spec.line_by_line
    return source


def _parsed(spec: LmSpec, source: Records, read: Read) -> Iterator[Any]:
    def parse(record: records.Record) -> Any:
        if spec.messages_column:
            return read(_messages_in(record, spec.messages_column))
        return records.text_in(record, spec.text_column)

    return (document for _, document in source.parsed(parse))


def _messages_in(record: records.Record, column: str) -> list[Message]:
    """Return the conversation of a column; ValueError where it is something else."""
    messages = record[column]
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"{quoted(column)} is {kind_of(messages)}, and must be a list of messages")
    for number, message in enumerate(messages, 1):
        fields = [message.get(name) for name in ("role", "content")] if isinstance(message, dict) else [None]
        if not all(isinstance(value, str) for value in fields):
            raise ValueError(f'message {number} must have a "role" and a "content", each of them text')
    return messages
