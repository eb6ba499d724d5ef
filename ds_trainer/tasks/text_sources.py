"""Where the texts of embedding and rerank tasks come from: tables, several sources at once, searches of SQuAD or BEIR.

The layout of BEIR (arXiv 2104.08663) is a folder with `corpus.jsonl`, `queries.jsonl` and the judgements
`qrels/SPLIT.tsv`; on the hub these are three data sets. The module loads neither torch nor numpy before rows are read,
and does not tokenise.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from operator import itemgetter
from typing import Any, TypeVar

from ds_trainer.files.messages import quoted
from ds_trainer.ranks.failures import UserError
from ds_trainer.recipe.task_specs import SourcesSpec, SquadSpec, TextSource
from ds_trainer.tasks import squad_file
from ds_trainer.tasks.records import GAPS, FileRecords, HubRecords, Record, Records, find_file, text_in

T = TypeVar("T")
Search = tuple[list[tuple[str, str, dict[str, float]]], dict[str, str]]
"""Queries with a relevant document, each its id, its text and the grades by the documents' ids; and the documents."""


def source_of(spec: SourcesSpec, split: str) -> TextSource:
    """Return the source of a split that is scored."""
    return next(source for source in spec.validation if source.label == split)


def split_of(spec: SourcesSpec, source: TextSource) -> str:
    """Return the split of a hub data set or of judgements: by default that to train on, or to score on."""
    scored = {"beir": "test"}.get(source.form, "validation")
    return source.split or ("train" if any(source is each for each in spec.train) else scored)


def score_names(spec: SourcesSpec, names: Callable[[TextSource], Iterable[str]]) -> list[str]:
    """Return the names of all scores, given those of a source; those of the first split have no prefix."""
    labelled = [("" if not place else f"{each.label}/", each) for place, each in enumerate(spec.validation)]
    return [f"{prefix}{name}" for prefix, each in labelled for name in names(each)]


class Made(Records[T]):
    """Rows that are `made` of the records of some `parts`, and have the places that `made` counts."""

    columns = ("row",)
    parse = staticmethod(itemgetter("row"))

    def __init__(self, origin: str, entry: str, parts: Sequence[Records[Any]], made: Callable[[], Iterator[T]]) -> None:
        self.origin, self.entry, self.parts, self.made, self.left_out = origin, entry, parts, made, {}

    def check(self) -> None:
        """Check the parts: the rows can only be made of whole files, which may take seconds."""
        for part in self.parts:
            part.check()

    def summary(self) -> str:
        """Say what was made, and what was read of the parts, and left out there."""
        return f"{self.read:,} {self.entry}s of " + "; ".join(f"{part.origin}: {part.summary()}" for part in self.parts)

    def _source_hash(self) -> str:
        return "".join(part.fingerprint() for part in self.parts)

    def _read(self) -> Iterator[tuple[int, Record]]:
        return enumerate(({"row": row} for row in self.made()), 1)


def training_rows(spec: SourcesSpec, rows_of: Callable[[Any, TextSource], Records[T]]) -> list[Records[T]]:
    """Return the records of all training sources; UserError where there are none."""
    if not spec.train:
        raise UserError(f"the {spec.name} task has nothing to train on: name its sources in task.train")
    return [rows_of(spec, source) for source in spec.train]


def all_rows(sources: Sequence[TextSource], parts: Sequence[Records[T]]) -> Iterator[T]:
    """Yield the rows of several sources, one source after another, at most `max_examples` of each."""
    from ds_trainer.tasks.data import spread

    for part, source in zip(parts, sources, strict=True):
        rows = [row.value for row in part.rows()]
        yield from (rows[place] for place in spread(len(rows), source.max_examples))


def table_of(spec: SourcesSpec, source: TextSource, parse: Callable[[Record], T]) -> Records[T]:
    """Return the rows of a source that is a table, of a file or of the hub."""
    columns = [*(source.text_columns or []), *([] if source.score_column is None else [source.score_column])]
    names = list(map(str, columns))
    if source.dataset:
        return HubRecords(source.dataset, split_of(spec, source), names, parse, GAPS)
    path, header = find_file(spec, source.label, [source.file or ""]), None if source.header else ()
    return FileRecords(path, names, parse, header, missing=GAPS, quoting=source.quoting)


def number_in(value: Any, name: str) -> float:
    """Return the number that a cell holds; ValueError where it is none."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = float("nan")
    if not abs(number) < float("inf"):
        raise ValueError(f"{quoted(name)} is {quoted(value)}, and must be a number")
    return number


def search_of(spec: SourcesSpec, source: TextSource) -> tuple[list[Records[Any]], Callable[[], Search]]:
    """Return the records that a search is made of, and a function that reads them."""
    if source.form == "beir":
        parts = _parts_of_beir(spec, source)
        return parts, partial(_read_beir, *parts)
    files = {"data_dir": spec.data_dir, "train_file": source.file, "validation_file": source.file}
    squad = SquadSpec(version_2_with_negative=True, dataset=source.dataset, **files)
    questions = squad_file.records(squad, split_of(spec, source))
    return [questions], partial(_read_squad, questions)


def _read_squad(questions: Records[Any]) -> Search:
    asked = [row.value for row in questions.rows() if row.value.answers]
    ids = {text: str(number) for number, text in enumerate(dict.fromkeys(each.context for each in asked))}
    queries = [(each.id, each.question, {ids[each.context]: 1.0}) for each in asked]
    return queries, {id: text for text, id in ids.items()}


class _Whole(FileRecords[Any]):
    """The records of a file of BEIR with all of their fields: a document may have a title."""

    def _complete(self) -> Iterator[tuple[int, Record]]:
        self.left_out = {}
        return self._read()


def _parts_of_beir(spec: SourcesSpec, source: TextSource) -> list[Records[Any]]:
    """Return the records of the corpus, of the queries, and of the judgements."""
    split, hub = split_of(spec, source), source.dataset
    files = ("corpus.jsonl", "queries.jsonl", f"qrels/{split}.tsv")
    names = (f"{hub}/corpus", "corpus"), (f"{hub}/queries", "queries"), (f"{hub}-qrels", split)
    of_corpus = ("_id", "title", "text") if hub else ("_id", "text")  # a file may have no titles
    columns = of_corpus, ("_id", "text"), ("query-id", "corpus-id", "score")
    parts = list[Records[Any]]()
    for file, name, read, parse in zip(files, names, columns, (_titled, _titled, _judgement), strict=True):
        path = find_file(spec, source.label, [f"{source.file}/{file}"]) if not hub else None
        parts.append(_Whole(path, read, parse, quoting=False) if path else HubRecords(*name, read, parse))
    return parts


def _titled(record: Record) -> tuple[str, str]:
    """Return the id and the text of a query or of a document, whose title stands before its text, as in BEIR."""
    return str(record["_id"]), f"{record.get('title') or ''} {text_in(record, 'text')}".strip()


def _judgement(record: Record) -> tuple[str, str, float]:
    return str(record["query-id"]), str(record["corpus-id"]), number_in(record["score"], "score")


def _read_beir(corpus: Records[Any], queries: Records[Any], judged: Records[Any]) -> Search:
    documents, texts = (dict(row.value for row in part.rows()) for part in (corpus, queries))
    relevant: dict[str, dict[str, float]] = {}
    for row in judged.rows():
        query, document, grade = row.value
        for what, id, known in (("query", query, texts), ("document", document, documents)):
            if id not in known:
                raise UserError(f"{judged.place(row.place)}: there is no {what} {quoted(id)} in its files")
        if grade > 0:
            relevant.setdefault(query, {})[document] = grade
    return [(id, texts[id], grades) for id, grades in relevant.items()], documents
