"""Where tagged sentences come from: CoNLL files, JSON lines, parquet, or a hub data set.

The module loads neither torch nor numpy before sentences are read, and does not tokenise.
"""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import NamedTuple

from ds_trainer.files.messages import kind_of, listed, quoted
from ds_trainer.files.reading import content_hash
from ds_trainer.ranks.failures import UserError
from ds_trainer.recipe.task_specs import TokenSpec
from ds_trainer.tasks.records import FileRecords, Record, Records, Row, find_file, table
from ds_trainer.tasks.table_rows import lines

_DOCUMENT = "-DOCSTART-"
"""The word of the line by which CoNLL-2003 begins a document."""
_DOCUMENT_ENDS = ("#begin document", "#end document")
"""How the lines begin by which CoNLL-2011 and CoNLL-2012 begin and end a document."""
_SEVERAL = re.compile(r"[0-9]+[-.][0-9]+")
"""The number by which CoNLL-U marks a line that is no single word."""
_FEW_TAGS = 20
"""This number of tags may each occur once in a file."""


class Sentence(NamedTuple):
    """The words of a sentence with their tags."""

    words: list[str]
    tags: list[str]


@dataclass
class ConllRecords(FileRecords[Sentence]):
    """The sentences of a CoNLL file: a line for each word, and blank lines between sentences.

    A line with a tab is cut at its tabs, any other at its spaces. All lines have as many fields as the first one that
    does not begin with #: lines that do may be comments, or words. Where the first field is no word, it is CoNLL-U's
    number of one, and lines that it numbers as several words (1-2), or as one that was left unsaid (1.1), are left out.
    """

    word_column: int = 0
    tag_column: int = -1
    unit = "sentence"

    def rows(self, most_mistakes: int = 20) -> Iterator[Row[Sentence]]:
        """Yield the sentences, and check at their end that the columns can be those of the words and of the tags."""
        words, tags, numbered = dict[str, None](), Counter[str](), True
        longest = 0
        for row in super().rows(most_mistakes):
            yield row
            single = [word for word in row.value.words if not _SEVERAL.fullmatch(word)]
            counted = ([str(first + place) for place in range(len(single))] for first in (0, 1))
            numbered, longest = numbered and single in counted, max(longest, len(single))
            words.update(dict.fromkeys(row.value.words))
            tags.update(row.value.tags)
        way_out = "set word_column and tag_column to the numbers of their columns, from 0 (-1 is the last)"
        if numbered and longest > 1:
            raise UserError(f"{self.origin}: column {self.word_column} numbers the words: {way_out}")
        once = sum(count == 1 for count in tags.values())
        if len(tags) > len(words) or (len(tags) > _FEW_TAGS and once > 0.9 * len(tags)):
            raise UserError(
                f"{self.origin}: tag_column ({self.tag_column}) has {len(tags):,} different tags, of which {once:,} "
                f"occur once, such as {listed(list(tags)[:3])}, and word_column ({self.word_column}) {len(words):,} "
                f"different words, such as {listed(list(words)[:3])}: {way_out}"
            )

    def _source_hash(self) -> str:
        return content_hash(self.path).hex()  # its quotes are words, whatever the file's ending

    def _read(self) -> Iterator[tuple[int, Record]]:
        first, line = self._first_row()
        tabs, expected = "\t" in line, max(2, len(_fields(line)))
        if first:
            self._check_numbers(self.place(first), expected)
        rows = list[tuple[str, str]]()
        start = 0
        for number, line in enumerate(chain(map(str.rstrip, lines(self.path)), [""]), 1):
            fields = _fields(line)
            if not line or fields[0] == _DOCUMENT:
                if rows:
                    yield start, dict(zip(self.columns, map(list, zip(*rows, strict=True)), strict=True))
                rows = []
                continue
            if line.startswith("#"):
                # #word and a # inside a sentence are words, if a line of words looks like that
                unlike = "\t" not in line and (tabs or len(fields) != expected)
                above = not rows and (len(fields) != expected or line.partition("\t")[0].rstrip().startswith("# "))
                if unlike or above or line.startswith(_DOCUMENT_ENDS):
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

    def _first_row(self) -> tuple[int, str]:
        """Return the first line that is certainly no comment, and its number; where all begin with #, the first."""
        numbered = enumerate(map(str.rstrip, lines(self.path)), 1)
        rows = ((number, line) for number, line in numbered if line and not line.startswith(_DOCUMENT))
        first = next(rows, (0, ""))
        return next((row for row in chain([first], rows) if not row[1].startswith("#")), first)

    def _check_numbers(self, place: str, count: int) -> None:
        numbers = {"word_column": self.word_column, "tag_column": self.tag_column}
        for name, value in numbers.items():
            if not -count <= value < count:
                raise UserError(f"{place}: {name} is {value}, and the {count} fields have the numbers 0 to {count - 1}")
        if len({value % count for value in numbers.values()}) < 2:
            raise UserError(f"{place}: word_column and tag_column name the same of the {count} fields")


def _fields(line: str) -> list[str]:
    return [field for part in line.split("\t" if "\t" in line else " ") if (field := part.strip(" "))]


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
