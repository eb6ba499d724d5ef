"""Read the questions of SQuAD's official JSON (v1.1, v2), or of records as the hub has them, and check their answers.

The module loads neither torch nor numpy before the hub is read, so that missing files are reported at once. It does not
tokenise.
"""

import codecs
from collections.abc import Iterator
from functools import partial
from typing import Annotated, NamedTuple

from pydantic import BaseModel, BeforeValidator, ValidationError
from pydantic_core import from_json

from ds_trainer.files.messages import quoted
from ds_trainer.files.reading import check_file, content_hash, read_file
from ds_trainer.ranks.failures import UserError
from ds_trainer.recipe.task_specs import SquadSpec
from ds_trainer.tasks.records import FileRecords, HubRecords, Record, Records, find_file

_FLAT = ("id", "context", "question", "answers")
"""The columns of the hub's form, in which a record is a question with its context."""


class GoldAnswer(NamedTuple):
    """An annotated answer: `text` begins at character `start` of the context."""

    text: str
    start: int


class Question(NamedTuple):
    """A question about a context. It has no answers if the context does not answer it."""

    id: str
    context: str
    question: str
    answers: tuple[GoldAnswer, ...]


class _AnswerJson(BaseModel):
    text: str
    answer_start: int


class _QuestionJson(BaseModel):
    """A flat record: a question with its context."""

    id: Annotated[str, BeforeValidator(lambda value: str(value) if type(value) is int else value)]
    context: str
    question: str
    answers: list[_AnswerJson]


def setting_mistakes(spec: SquadSpec) -> list[str]:
    """Return the mistakes in the settings."""
    return spec.source_mistakes() if spec.dataset else []


def training_texts(spec: SquadSpec) -> list[str]:
    """Return the training split's contexts, each once, followed by its questions."""
    questions = [row.value for row in records(spec, "train").rows()]
    return [*dict.fromkeys(question.context for question in questions), *(question.question for question in questions)]


def records(spec: SquadSpec, split: str) -> Records[Question]:
    """Return the source of a split: a data set of the hub, or a file of any of the forms."""
    parse = partial(_question, spec)
    if spec.dataset or not (spec.data_dir or spec.train_file or spec.validation_file):
        official = "rajpurkar/squad_v2" if spec.version_2_with_negative else "rajpurkar/squad"
        return HubRecords(spec.dataset or official, split, _FLAT, parse)
    official = f"{'train' if split == 'train' else 'dev'}-{'v2.0' if spec.version_2_with_negative else 'v1.1'}.json"
    name = spec.train_file if split == "train" else spec.validation_file
    return SquadFile(find_file(spec, split, [name] if name else [official, f"squad/{official}"]), _FLAT, parse)


class SquadFile(FileRecords[Question]):
    """The questions of a file in the official form, or of a file of flat records."""

    unit = "question"

    def check(self) -> None:
        """Read nothing: a JSON file can only be parsed as a whole, which may take seconds."""
        check_file(self.path)

    def _source_hash(self) -> str:
        return content_hash(self.path).hex()

    def _read(self) -> Iterator[tuple[int, Record]]:
        if self.path.suffix.lower() in (".jsonl", ".parquet"):
            return super()._read()
        content = read_file(self.path).removeprefix(codecs.BOM_UTF8)
        if b'"context"' in content and b'"paragraphs"' not in content:  # inside a text these quotes would be escaped
            return super()._read()
        try:
            paragraphs = [each for article in from_json(content)["data"] for each in article["paragraphs"]]
            asked = [{**question, "context": each["context"]} for each in paragraphs for question in each["qas"]]
        except ValueError as error:
            raise UserError(f"{self.path} is not JSON: {error}") from None
        except (KeyError, TypeError):
            form = '{"data": [{"paragraphs": [{"context": "...", "qas": [...]}]}]}'
            raise UserError(f"{self.path} is not in SQuAD's form, which is {form}") from None
        self.entry = "question"
        return ((number, self._object(number, record)) for number, record in enumerate(asked, 1))


def _question(spec: SquadSpec, record: Record) -> Question:
    """Check a flat record, whose answers are a list of objects or, as on the hub, a list for each of their fields."""
    answers = record["answers"]
    if isinstance(answers, dict) and all(isinstance(values, list) for values in answers.values()):
        answers = [dict(zip(answers, values, strict=True)) for values in zip(*answers.values(), strict=True)]
    try:
        asked = _QuestionJson.model_validate({**record, "answers": answers}, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise ValueError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    golds = tuple(GoldAnswer(answer.text, answer.answer_start) for answer in asked.answers)
    question = Question(asked.id, asked.context, asked.question, golds)
    if mistake := _mistake_in(spec, question):
        raise ValueError(f"id {quoted(question.id)}: {mistake}")
    return question


def _mistake_in(spec: SquadSpec, question: Question) -> str | None:
    """Return the first mistake of a question that the types do not show.

    An unanswerable question has an empty list of answers. v2's `is_impossible` says it once more, and is not read.
    """
    context, answers = question.context, question.answers
    if not context.strip():
        return "the context is blank: fill it in, or drop the question"
    if not answers and not spec.version_2_with_negative:
        return "the question has no answer: set version_2_with_negative to true for SQuAD v2"
    for text, start in answers:
        if not text.strip():
            return "the text of an answer is empty"
        if start < 0 or not context.startswith(text, start):
            present = context[start : start + len(text)] if start >= 0 else ""
            return f"answer_start is {start}, where the context has {quoted(present)}, not {quoted(text)}"
    return None
