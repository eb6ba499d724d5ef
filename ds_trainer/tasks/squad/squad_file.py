"""SQuAD's official JSON (v1.1, v2) or a hub data set of its form: questions read, and every fault told with its place.

Imports neither torch nor numpy: missing files are told before anything heavy is loaded. Does not tokenise.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ds_trainer.config.task_specs import SquadSpec
from ds_trainer.files.messages import kind_of, listed, quoted
from ds_trainer.files.reading import TOO_LONG, content_hash
from ds_trainer.ranks.failures import UserError
from ds_trainer.tasks.sources import data_folder, fault_of, fetch, first_file, user_path
from ds_trainer.tasks.tabular import read_text


class Answer(NamedTuple):
    """`text` stands at character `start` of the context."""

    text: str
    start: int


class Question(NamedTuple):
    """A question about a context; without answers where it has none."""

    id: str
    title: str
    context: str
    question: str
    answers: tuple[Answer, ...]
    impossible: bool


def check_data_files(spec: SquadSpec, splits: Sequence[str] | None = None) -> list[str]:
    """Mistakes in the settings, and every missing folder or file; the files are not read, a hub data set not asked.

    `splits` defaults to training and validation.
    """
    files = spec.train_file or spec.validation_file
    if spec.dataset and files:
        return [f"dataset ({spec.dataset}) and files ({files}) are both set: keep one"]
    if _from_hub(spec):
        return []
    return [mistake for split in splits or ("train", "validation") if (mistake := _path_mistake(spec, split))]


def questions(spec: SquadSpec, split: str) -> list[Question]:
    """Every question of a split, in the file's order.

    One ValueError tells the first fault of each kind, by file, article and question id, and how many more there are.
    """
    origin, records = _hub_records(spec, split) if _from_hub(spec) else _file_records(_path(spec, split))
    faults = _Faults(origin)
    reader = _Reader(faults, spec.version_2_with_negative)
    found = [question for record in records(faults) if (question := reader.question(record))]
    faults.tell()
    if not found:
        raise UserError(f"{origin} has no questions")
    return found


def fingerprint(spec: SquadSpec, split: str) -> str:
    """Changes whenever the questions may have changed: the hash of the file's content, or the hub's fingerprint."""
    if _from_hub(spec):
        return str(fetch(_hub_name(spec), split)._fingerprint)
    return content_hash(_path(spec, split)).hex()


def training_texts(spec: SquadSpec) -> list[str]:
    """Every context of the training split once, then every question: what a tokenizer is trained on."""
    found = questions(spec, "train")
    return [*dict.fromkeys(each.context for each in found), *(each.question for each in found)]


class _Record(NamedTuple):
    """One question as it was written, not yet checked but for its context."""

    article: str
    number: str
    title: str
    context: str
    fields: Any


@dataclass
class _Faults:
    """What is wrong with a file: of each kind the first, and how many there are."""

    origin: str
    first: dict[str, str] = field(default_factory=dict)
    count: dict[str, int] = field(default_factory=dict)

    def add(self, kind: str, place: str, message: str) -> None:
        self.first.setdefault(kind, f"{place}: {message}")
        self.count[kind] = self.count.get(kind, 0) + 1

    def tell(self) -> None:
        """Raise a ValueError of all faults, where there are any."""
        lines = []
        for kind, message in self.first.items():
            more = self.count[kind] - 1
            lines.append(message + (f" (and {more:,} more of this kind)" if more else ""))
        if len(lines) == 1:
            raise UserError(f"{self.origin}, {lines[0]}")
        if lines:
            raise UserError("\n".join([f"{self.origin} has {len(lines)} kinds of faults:", *lines]))

    def field(self, record: Any, name: str, kind: type, place: str) -> Any:
        """The field, if it is there and of the kind; else the fault is noted and None returned."""
        if not isinstance(record, dict):
            self.add("not an object", place, f"{kind_of(record)} where an object is expected")
            return None
        if name not in record:
            known = listed(record) or "none"
            self.add(f"no {name}", place, f"no field {name!r}; fields found: {known}")
            return None
        fault = fault_of(record[name], kind)
        if fault:
            self.add(f"{name} {fault}", place, f"{name!r} {fault}")
            return None
        return record[name]


@dataclass
class _Reader:
    """Turns records into questions, noting what is wrong with them."""

    faults: _Faults
    unanswerable_allowed: bool
    seen: dict[str, str] = field(default_factory=dict)

    def question(self, record: _Record) -> Question | None:
        id = self.faults.field(record.fields, "id", str, f"{record.article}, {record.number}")
        place = f"{record.article}, {record.number if id is None else f'question {quoted(id)}'}"
        text = self.faults.field(record.fields, "question", str, place)
        answers = self.faults.field(record.fields, "answers", list, place)
        if id is None or text is None or answers is None:
            return None
        if not record.context.strip():  # a blank question can be read, and official files are not free of odd ones
            self.faults.add("blank context", place, "the context is blank: fill it in, or drop the question")
            return None
        if id in self.seen:
            self.faults.add("id twice", place, f"the id is not unique: {self.seen[id]} has it too")
        self.seen[id] = record.article
        found = tuple(answer for entry in answers if (answer := self._answer(entry, record.context, place)))
        impossible = self._impossible(record.fields, bool(answers), place)
        return Question(id, record.title, record.context, text, found, impossible)

    def _impossible(self, fields: Mapping[str, Any], answered: bool, place: str) -> bool:
        """Whether it is a question without an answer; v1.1 and the hub do not say so but by giving none."""
        said = fields.get("is_impossible")
        if said is not None:
            said = self.faults.field(fields, "is_impossible", bool, place)
        if answered and said:
            self.faults.add("contradiction", place, "is_impossible is true, and there are answers: drop one of the two")
        elif not answered and said is False:
            self.faults.add("no answer", place, "no answers, and is_impossible is false")
        elif not answered and not self.unanswerable_allowed:
            self.faults.add(
                "unanswerable", place, "the question has no answer: set version_2_with_negative to true for SQuAD v2"
            )
        return not answered

    def _answer(self, entry: Any, context: str, place: str) -> Answer | None:
        text = self.faults.field(entry, "text", str, place)
        start = self.faults.field(entry, "answer_start", int, place)
        if text is None or start is None:
            return None
        if not text.strip():
            self.faults.add("empty answer", place, "the text of an answer is empty")
            return None
        if start < 0 or not context.startswith(text, start):
            there = context[start : start + len(text)] if start >= 0 else ""
            message = f"answer_start is {start}, where the context has {quoted(there)}, not {quoted(text)}"
            self.faults.add("answer_start", place, message)
            return None
        return Answer(text, start)


def _file_records(path: Path) -> tuple[str, Any]:
    text = read_text(path)
    if not text.strip():
        raise UserError(f"{path} is empty: it must be SQuAD's JSON")
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}"
        raise UserError(f"{path}, {place}: not JSON: {error.msg}") from None
    except ValueError:
        raise UserError(f"{path} is not JSON that can be read: {TOO_LONG}") from None
    except RecursionError:
        raise UserError(f"{path} is nested too deeply") from None
    if not isinstance(data, dict) or not isinstance(data.get("data"), list):
        raise UserError(f'{path} is not in SQuAD\'s form: it must be an object with a list of articles, "data"')
    return str(path), lambda faults: _of_articles(data["data"], faults)


def _of_articles(articles: list[Any], faults: _Faults) -> Iterator[_Record]:
    for number, article in enumerate(articles, 1):
        place, title = f"article {number}", ""
        if isinstance(article, dict) and article.get("title") is not None:
            title = faults.field(article, "title", str, place) or ""
            place = f"article {quoted(title)}" if title else place
        for paragraph in faults.field(article, "paragraphs", list, place) or ():
            yield from _of_paragraph(paragraph, title, place, faults)


def _of_paragraph(paragraph: Any, title: str, article: str, faults: _Faults) -> Iterator[_Record]:
    asked = faults.field(paragraph, "qas", list, article)
    if asked is None:
        return
    # a paragraph has no name but those of its questions
    first = asked[0].get("id") if asked and isinstance(asked[0], dict) else None
    context = faults.field(paragraph, "context", str, article + (f", question {quoted(first)}" if first else ""))
    if context is None:
        return
    for number, fields in enumerate(asked, 1):
        yield _Record(article, f"question {number} of a paragraph", title, context, fields)


def _path_mistake(spec: SquadSpec, split: str) -> str | None:
    try:
        _path(spec, split)
    except ValueError as error:
        return str(error)
    return None


def _path(spec: SquadSpec, split: str) -> Path:
    """The file of a split; ValueError says which names were looked for."""
    folder = data_folder(spec)
    name = spec.train_file if split == "train" else spec.validation_file
    version = "v2.0" if spec.version_2_with_negative else "v1.1"
    official = f"{'train' if split == 'train' else 'dev'}-{version}.json"
    candidates = (
        [folder / user_path(name, "train_file" if split == "train" else "validation_file")]
        if name
        else [folder / official, folder / "squad" / official]
    )
    return first_file(spec, split, candidates)


def _from_hub(spec: SquadSpec) -> bool:
    return bool(spec.dataset) or not (spec.data_dir or spec.train_file or spec.validation_file)


def _hub_name(spec: SquadSpec) -> str:
    return spec.dataset or ("rajpurkar/squad_v2" if spec.version_2_with_negative else "rajpurkar/squad")


def _hub_records(spec: SquadSpec, split: str) -> tuple[str, Any]:
    name = _hub_name(spec)
    dataset, origin = fetch(name, split), f"{name} ({split})"
    missing = [name for name in ("id", "context", "question", "answers") if name not in dataset.column_names]
    if missing:
        raise UserError(f"{origin}: no column {missing}; columns found: {dataset.column_names}")
    return origin, lambda faults: _of_rows(dataset, faults)


def _of_rows(dataset: Any, faults: _Faults) -> Iterator[_Record]:
    for number, row in enumerate(dataset, 1):
        title = row.get("title") or ""
        article = f"article {quoted(title)}" if title else "no article"
        context = faults.field(row, "context", str, f"{article}, row {number}")
        if context is not None:
            yield _Record(article, f"row {number}", title, context, row | {"answers": _listed(row["answers"])})


def _listed(answers: Any) -> Any:
    """The hub keeps a list a field, the files an object an answer."""
    if not isinstance(answers, dict) or len(answers.get("text", "")) != len(answers.get("answer_start", "x")):
        return answers
    pairs = zip(answers["text"], answers["answer_start"], strict=True)
    return [{"text": text, "answer_start": start} for text, start in pairs]
