"""Read the questions of SQuAD's official JSON (v1.1, v2), or of records as the hub has them, and check their answers.

The module loads neither torch nor numpy before the hub is read, so that missing files are reported at once. It does not
tokenise.
"""

import codecs
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

from pydantic import BaseModel, BeforeValidator, ValidationError

from ds_trainer.config.task_specs import SquadSpec
from ds_trainer.files.messages import quoted
from ds_trainer.files.reading import check_file, content_hash, read_file
from ds_trainer.ranks.failures import UserError, raise_mistakes
from ds_trainer.tasks.records import FileRecords, HubRecords, Record, Records, find_file, mistakes_of

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


class _ParagraphJson(BaseModel):
    context: str
    qas: list[_QuestionJson]


class _ArticleJson(BaseModel):
    paragraphs: list[_ParagraphJson]


class _SquadJson(BaseModel):
    data: list[_ArticleJson]


def check_data_files(spec: SquadSpec, splits: Sequence[str] | None = None) -> list[str]:
    """Return mistakes in the settings, and every missing file. `splits` defaults to training and validation.

    Files are not read: a JSON file can only be parsed as a whole, which may take seconds.
    """
    if spec.dataset:
        return spec.source_mistakes()
    if _from_hub(spec):
        return []
    return mistakes_of(lambda split: check_file(_path(spec, split)), splits or ("train", "validation"))


def training_texts(spec: SquadSpec) -> list[str]:
    """Return the training split's contexts, each once, followed by its questions."""
    split = questions(spec, "train")
    return [*dict.fromkeys(question.context for question in split), *(question.question for question in split)]


def questions(spec: SquadSpec, split: str) -> list[Question]:
    """Read every question of a split, in the source's order; one error lists the first mistakes."""
    if _from_hub(spec):
        paragraphs = _flat_paragraphs(_hub_records(spec, split))
    else:
        paragraphs = _file_paragraphs(_path(spec, split))
    place = origin(spec, split)
    checked: dict[str, Question] = {}
    mistakes = []
    for paragraph in paragraphs:
        for record in paragraph.qas:
            answers = tuple(GoldAnswer(answer.text, answer.answer_start) for answer in record.answers)
            question = Question(record.id, paragraph.context, record.question, answers)
            mistake = "the id is not unique" if record.id in checked else _mistake_in(spec, question, record)
            if mistake:
                mistakes.append(f"{place}, question {quoted(record.id)}: {mistake}")
            checked[record.id] = question
    raise_mistakes(mistakes)
    if not checked:
        raise UserError(f"{place} has no questions")
    return list(checked.values())


def origin(spec: SquadSpec, split: str) -> str:
    """Return what a message calls the source of a split."""
    return _hub_records(spec, split).origin if _from_hub(spec) else str(_path(spec, split))


def fingerprint(spec: SquadSpec, split: str) -> str:
    """Return a hash that changes whenever the questions may have changed, and is the same on every host."""
    return _hub_records(spec, split).fingerprint() if _from_hub(spec) else content_hash(_path(spec, split)).hex()


def _path(spec: SquadSpec, split: str) -> Path:
    official = f"{'train' if split == 'train' else 'dev'}-{'v2.0' if spec.version_2_with_negative else 'v1.1'}.json"
    name = spec.train_file if split == "train" else spec.validation_file
    return find_file(spec, split, [name] if name else [official, f"squad/{official}"])


def _from_hub(spec: SquadSpec) -> bool:
    return bool(spec.dataset) or not (spec.data_dir or spec.train_file or spec.validation_file)


def _hub_records(spec: SquadSpec, split: str) -> HubRecords:
    official = "rajpurkar/squad_v2" if spec.version_2_with_negative else "rajpurkar/squad"
    return HubRecords(spec.dataset or official, split, _FLAT)


def _file_paragraphs(path: Path) -> list[_ParagraphJson]:
    if path.suffix.lower() in (".jsonl", ".parquet"):
        return _flat_paragraphs(FileRecords(path, _FLAT))
    content = read_file(path).removeprefix(codecs.BOM_UTF8)
    if b'"context"' in content and b'"paragraphs"' not in content:  # inside a text these quotes would be escaped
        return _flat_paragraphs(FileRecords(path, _FLAT))
    try:
        squad = _SquadJson.model_validate_json(content, strict=True)
    except ValidationError as error:
        raise UserError(f"{path} is not in SQuAD's form: {_first_mistake(error)}") from None
    return [paragraph for article in squad.data for paragraph in article.paragraphs]


def _flat_paragraphs(records: Records) -> list[_ParagraphJson]:
    return [paragraph for _, paragraph in records.parsed(_flat_paragraph)]


def _flat_paragraph(record: Record) -> _ParagraphJson:
    """Convert a record of the hub's form, whose answers are a list for each field, to the official form."""
    answers = record["answers"]
    if isinstance(answers, dict):
        answers = [dict(zip(answers, values, strict=True)) for values in zip(*answers.values(), strict=True)]
    paragraph = {"context": record["context"], "qas": [record | {"answers": answers}]}
    try:
        return _ParagraphJson.model_validate(paragraph, strict=True)
    except ValidationError as error:
        raise ValueError(_first_mistake(error)) from None


def _first_mistake(error: ValidationError) -> str:
    """Return the first mistake with the path of its value, such as data.0.paragraphs.3.context."""
    first = error.errors(include_url=False)[0]
    more = f" (and {error.error_count() - 1:,} more mistakes)" if error.error_count() > 1 else ""
    path = ".".join(map(str, first["loc"]))
    return f"{path}: {first['msg']}{more}" if path else first["msg"]


def _mistake_in(spec: SquadSpec, question: Question, record: _QuestionJson) -> str | None:
    """Return the first mistake of a question that the types do not show.

    v1.1 and the hub have no `is_impossible`: an unanswerable question has an empty list of answers.
    """
    context, answers = question.context, question.answers
    if not context.strip():
        return "the context is blank: fill it in, or drop the question"
    if answers and record.is_impossible:
        return "is_impossible is true, and there are answers: drop one of the two"
    if not answers and record.is_impossible is False:
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
