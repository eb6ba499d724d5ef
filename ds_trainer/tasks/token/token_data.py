"""Where tagged sentences come from: CoNLL files, JSON lines, parquet, or a hub data set.

The module loads neither torch nor numpy before sentences are read, and does not tokenise.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import NamedTuple

from ds_trainer.files.messages import kind_of, listed, quoted
from ds_trainer.files.reading import content_hash
from ds_trainer.ranks.failures import UserError
from ds_trainer.recipe.task_specs import TokenSpec
from ds_trainer.tasks.records import FileRecords, Record, Records, find_file, lines, table

_DOCUMENT = "-DOCSTART-"
"""The word of the line by which CoNLL-2003 begins a document."""
_NO_ROW = ("#", _DOCUMENT)
_DOCUMENT_ENDS = ("#begin document", "#end document")
"""How the lines begin by which CoNLL-2011 and CoNLL-2012 begin and end a document."""
_SEVERAL = re.compile(r"[0-9]+[-.][0-9]+")
"""The number by which CoNLL-U marks a line that is no single word."""


class Sentence(NamedTuple):
    """The words of a sentence with their tags."""

    words: list[str]
    tags: list[str]


@dataclass
class ConllRecords(FileRecords[Sentence]):
    """The sentences of a CoNLL file: a line for each word, and blank lines between sentences.

    The first line that does not begin with # says whether fields are apart by tabs or by spaces, and how many a line
    has. Lines that begin with # may be comments, or words. Where the first field is no word, it is CoNLL-U's number of
    one, and lines that it numbers as several words (1-2), or as one that was left unsaid (1.1), are left out.
    """

    word_column: int = 0
    tag_column: int = -1
    unit = "sentence"

    def _source_hash(self) -> str:
        return content_hash(self.path).hex()  # its quotes are words, whatever the file's ending

    def _read(self) -> Iterator[tuple[int, Record]]:
        first = next((line for line in map(str.rstrip, lines(self.path)) if line and not line.startswith(_NO_ROW)), "")
        mark = "\t" if "\t" in first else " "
        expected = max(2, len(_fields(first, mark)))
        numbers = (self.word_column, self.tag_column)
        if first and len({value % expected for value in numbers if -expected <= value < expected}) < 2:
            columns = f"word_column is {numbers[0]}, and tag_column {numbers[1]}"
            raise UserError(f"{self.path}: {columns}: name two of the {expected} fields, 0 to {expected - 1}")
        rows, start = list[tuple[str, str]](), 0
        for number, line in enumerate(chain(map(str.rstrip, lines(self.path)), [""]), 1):
            fields = _fields(line, mark)
            if not line or fields[0] == _DOCUMENT:
                if rows:
                    yield start, dict(zip(self.columns, map(list, zip(*rows, strict=True)), strict=True))
                rows = []
                continue
            # #word and a # inside a sentence are words, if the line has as many fields as the others
            is_comment = len(fields) != expected or (not rows and line.startswith("# "))
            if line.startswith(_DOCUMENT_ENDS) or (line.startswith("#") and is_comment):
                self._leave_out("as comments", number)
                continue
            if len(fields) != expected:
                raise UserError(
                    f"{self.place(number)}: {len(fields)} fields where {expected} are expected ({quoted(line)}): write "
                    f"the word first and its tag last, with a tab between"
                )
            if self.word_column and _SEVERAL.fullmatch(fields[0]):
                self._leave_out("as no single word", number)
                continue
            start = start if rows else number
            rows.append((fields[self.word_column], fields[self.tag_column]))


def _fields(line: str, mark: str) -> list[str]:
    return [field for part in line.split(mark) if (field := part.strip(" "))]


def training_texts(spec: TokenSpec) -> list[str]:
    """Return every sentence of the training split as a text, including held-out ones.

    A space is before every word, also the first one: byte-level tokenizers have other tokens where there is none.
    """
    return ["".join(f" {word}" for word in row.value.words) for row in records(spec, "train").rows()]


def records(spec: TokenSpec, split: str, known: Sequence[str] = ()) -> Records[Sentence]:
    """Return the source of a split; without `known` tags any are allowed."""
    columns, parse = (spec.tokens_column, spec.tags_column), partial(_sentence, known)
    if spec.name == "token" or spec.dataset:
        return table(spec, split, columns, parse)
    path = find_file(spec, split)
    return ConllRecords(path, columns, parse, word_column=spec.word_column, tag_column=spec.tag_column)


def _sentence(known: Sequence[str], record: Record) -> Sentence:
    (words_name, words), (tags_name, tags) = record.items()
    for name, values in record.items():
        if not isinstance(values, list):
            raise ValueError(f"{quoted(name)} is {kind_of(values)}, and must be a list of texts")
        for place, value in enumerate(values):
            if not isinstance(value, str) or not value:
                present = kind_of(value) if value != "" else "empty"
                raise ValueError(f"{quoted(name)}[{place}] is {present}, and must be text")
    if len(words) != len(tags):
        raise ValueError(f"{len(words)} words in {quoted(words_name)}, and {len(tags)} tags in {quoted(tags_name)}")
    if unknown := [tag for tag in tags if known and tag not in known]:
        raise ValueError(f"unknown tag {unknown[0]!r}: allowed are {listed(known)}")
    return Sentence(words, tags)
