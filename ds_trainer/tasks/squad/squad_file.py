"""Read the questions of SQuAD's official JSON (v1.1, v2), or of records as the hub has them, and check their answers.

The module loads neither torch nor numpy before the hub is read, so that missing files are reported at once. It does not
tokenise.
"""

import codecs
from collections.abc import Iterator
from functools import partial
from typing import Annotated, NamedTuple

from pydantic import BaseModel, BeforeValidator, ValidationError

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
    id: Annotated[str, BeforeValidator(lambda value: str(value) if type(value) is int else value)]
    question: str
    answers: list[_AnswerJson]
    is_impossible: bool | None = None


class _FlatJson(_QuestionJson):
    context: str


class _ParagraphJson(BaseModel):
    context: str
    qas: list[_QuestionJson]


class _ArticleJson(BaseModel):
    paragraphs: list[_ParagraphJson]


class _SquadJson(BaseModel):
    data: list[_ArticleJson]


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
            squad = _SquadJson.model_validate_json(content, strict=True)
        except ValidationError as error:
            raise UserError(f"{self.path} is not in SQuAD's form: {_first_mistake(error)}") from None
        self.entry, self.columns = "question", (*_FLAT, "is_impossible")
        paragraphs = (paragraph for article in squad.data for paragraph in article.paragraphs)
        asked = ((paragraph.context, question) for paragraph in paragraphs for question in paragraph.qas)
        return ((number, {"context": context, **dict(question)}) for number, (context, question) in enumerate(asked, 1))


def _question(spec: SquadSpec, record: Record) -> Question:
    """Check a flat record, whose answers are a list of objects or, as on the hub, a list for each of their fields."""
    answers = record["answers"]
    if isinstance(answers, dict):
        answers = [dict(zip(answers, values, strict=True)) for values in zip(*answers.values(), strict=True)]
    try:
        asked = _FlatJson.model_validate({**record, "answers": answers}, strict=True)
    except ValidationError as error:
        raise ValueError(_first_mistake(error)) from None
    golds = tuple(GoldAnswer(answer.text, answer.answer_start) for answer in asked.answers)
    question = Question(asked.id, asked.context, asked.question, golds)
    if mistake := _mistake_in(spec, question, asked.is_impossible):
        raise ValueError(f"id {quoted(question.id)}: {mistake}")
    return question


def _first_mistake(error: ValidationError) -> str:
    """Return the first mistake with the path of its value, such as data.0.paragraphs.3.context."""
    first = error.errors(include_url=False)[0]
    more = f" (and {error.error_count() - 1:,} more mistakes)" if error.error_count() > 1 else ""
    path = ".".join(map(str, first["loc"]))
    return f"{path}: {first['msg']}{more}" if path else first["msg"]


def _mistake_in(spec: SquadSpec, question: Question, is_impossible: bool | None) -> str | None:
    """Return the first mistake of a question that the types do not show.

    v1.1 and the hub have no `is_impossible`: an unanswerable question has an empty list of answers.
    """
    context, answers = question.context, question.answers
    if not context.strip():
        return "the context is blank: fill it in, or drop the question"
    if answers and is_impossible:
        return "is_impossible is true, and there are answers: drop one of the two"
    if not answers and is_impossible is False:
        return "is_impossible is false, and there are no answers"
    if not answers and not spec.version_2_with_negative:
        return "the question has no answer: set version_2_with_negative to true for SQuAD v2"
    for text, start in answers:
        if not text.strip():
            return "the text of an answer is empty"
        if start < 0 or not context.startswith(text, start):
            present = context[start : start + len(text)] if start >= 0 else ""
            return f"answer_start is {start}, where the context has {quoted(present)}, not {quoted(text)}"
    return None
