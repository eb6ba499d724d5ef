"""Where tagged sentences come from: CoNLL files, JSON lines, parquet, or a hub data set.

The module loads neither torch nor numpy before sentences are read, and does not tokenise.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

from ds_trainer.config.task_specs import TokenSpec
from ds_trainer.files.messages import kind_of, quoted
from ds_trainer.ranks.failures import UserError
from ds_trainer.tasks.records import FileRecords, HubRecords, Record, Records, file_of, find_file, lines, mistakes_of

_DOCUMENT = "-DOCSTART-"
"""The word of the line by which CoNLL-2003 begins a document."""


class Sentence(NamedTuple):
    """The words of a sentence with their tags, and the number of its first line, or of its row, in the source."""

    words: list[str]
    tags: list[str]
    place: int


@dataclass
class ConllRecords(FileRecords):
    """The sentences of a CoNLL file: a line for each word, and blank lines between sentences.

    A line with a tab is cut at its tabs, any other at its spaces. The first field is the word and the last its tag; all
    lines have as many fields as the first one.
    """

    def _read(self) -> Iterator[tuple[int, Record]]:
        rows = list[tuple[str, str]]()
        start = expected = 0
        for number, line in enumerate(chain(map(str.rstrip, lines(self.path)), [""]), 1):
            fields = [field for part in line.split("\t" if "\t" in line else " ") if (field := part.strip(" "))]
            if not line or fields[0] == _DOCUMENT:
                if rows:
                    yield start, dict(zip(self.columns, map(list, zip(*rows, strict=True)), strict=True))
                rows = []
                continue
            expected = expected or max(2, len(fields))
            if len(fields) != expected:
                raise UserError(
                    f"{self.place(number)}: {len(fields)} fields where {expected} are expected ({quoted(line)}): write "
                    f"the word first and its tag last, with a tab between"
                )
            start = start if rows else number
            rows.append((fields[0], fields[-1]))


def check_data_files(spec: TokenSpec, splits: Sequence[str] | None = None) -> list[str]:
    """Return every mistake in the settings, and every missing folder, file or column.

    `splits` defaults to training and the evaluation split that is scored. Of each file the first sentence is read.
    """
    mistakes = spec.source_mistakes()
    scored = () if spec.score_held_out else ("validation",)
    return mistakes or mistakes_of(lambda split: _records(spec, split).check(), splits or ("train", *scored))


def training_texts(spec: TokenSpec) -> list[str]:
    """Return every sentence of the training split as a text, including held-out ones.

    A space is before every word, also the first one: byte-level tokenizers have other tokens where there is none.
    """
    return ["".join(f" {word}" for word in sentence.words) for sentence in read_sentences(spec, "train")]


def read_sentences(spec: TokenSpec, split: str) -> list[Sentence]:
    """Read the sentences of a split; an error names the file and the line."""
    records = _records(spec, split)
    parsed = records.parsed(partial(_words_and_tags, records.columns))
    return [Sentence(words, tags, number) for number, (words, tags) in parsed]


def origin(spec: TokenSpec, split: str) -> str:
    """Return what a message calls the source of a split."""
    return _records(spec, split).origin


def fingerprint(spec: TokenSpec, split: str) -> str:
    """Return a hash that changes whenever the sentences may have changed, and is the same on every host."""
    return _records(spec, split).fingerprint()


def _records(spec: TokenSpec, split: str) -> Records:
    columns = (spec.tokens_column, spec.tags_column)
    if spec.dataset:
        return HubRecords(spec.dataset, split, columns)
    path = find_file(spec, split, [file_of(spec, split)])
    return ConllRecords(path, columns) if spec.name == "ner" else FileRecords(path, columns)


def _words_and_tags(columns: Sequence[str], record: Record) -> tuple[list[str], list[str]]:
    words, tags = (_texts(column, record[column]) for column in columns)
    if len(words) != len(tags):
        raise ValueError(f"{len(words)} words in {quoted(columns[0])}, and {len(tags)} tags in {quoted(columns[1])}")
    return words, tags


def _texts(column: str, values: Any) -> list[str]:
    """Check the words or the tags of a sentence."""
    if not isinstance(values, list):
        raise ValueError(f"{quoted(column)} is {kind_of(values)}, and must be a list of texts")
    for place, value in enumerate(values):
        if not isinstance(value, str) or not value:
            present = kind_of(value) if value != "" else "empty"
            raise ValueError(f"{quoted(column)}[{place}] is {present}, and must be text")
    return values
