"""Where the texts of embedding and rerank tasks come from: tables, several sources at once, searches of SQuAD or BEIR.

The layout of BEIR (arXiv 2104.08663) is a folder with `corpus.jsonl`, `queries.jsonl` and the judgements
`qrels/SPLIT.tsv`; on the hub these are three data sets. The module loads neither torch nor numpy before rows are read,
and does not tokenise.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

from ds_trainer.files.messages import quoted
from ds_trainer.ranks.failures import UserError
from ds_trainer.recipe.task_specs import SourcesSpec, SquadSpec, TextSource
from ds_trainer.tasks import squad_file
from ds_trainer.tasks.records import GAPS, FileRecords, HubRecords, Record, Records, Row, find_file, text_in

T = TypeVar("T")
Search = tuple[list[tuple[str, str, dict[str, float]]], dict[str, str]]
"""Queries with a relevant document, each its id, its text and the grades by the documents' ids; and the documents."""


def source_of(spec: SourcesSpec, split: str) -> TextSource:
    """Return the source of a split that is scored."""
    return next(source for source in spec.validation if source.label == split)


def score_names(spec: SourcesSpec, names: Callable[[TextSource], Iterable[str]]) -> list[str]:
    """Return the names of all scores, given those of a source; those of the first split have no prefix."""
    labelled = [("" if not place else f"{each.label}/", each) for place, each in enumerate(spec.validation)]
    return [f"{prefix}{name}" for prefix, each in labelled for name in names(each)]


class Made(Records[T]):
    """Rows that are `made` of the records of some `parts`, and have the places that `made` counts."""

    columns = ()
    parse: Any = None

    def __init__(self, origin: str, entry: str, parts: Sequence[Records[Any]], made: Callable[[], Iterator[T]]) -> None:
        self.origin, self.entry, self.parts, self.made, self.left_out = origin, entry, parts, made, {}

    def rows(self, most_mistakes: int = 0) -> Iterator[Row[T]]:
        self.read = 0
        for value in self.made():
            self.read += 1
            yield Row(value, self.read)
        if not self.read:
            raise UserError(f"{self.origin} has no texts")

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
        raise NotImplementedError("rows are made of those of the parts")


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
        return HubRecords(source.dataset, source.split or "train", names, parse, GAPS)
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
    file = {"data_dir": spec.data_dir, "validation_file": source.file, "dataset": source.dataset}
    questions = squad_file.records(SquadSpec(version_2_with_negative=True, **file), source.split or "validation")
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
    split, hub = source.split or "test", source.dataset
    of_corpus = ("_id", "title", "text") if hub else ("_id", "text")  # a file may have no titles
    columns = of_corpus, ("_id", "text"), ("query-id", "corpus-id", "score")
    if hub:
        names = (f"{hub}/corpus", "corpus"), (f"{hub}/queries", "queries"), (f"{hub}-qrels", split)
        return [HubRecords(*name, each, dict) for name, each in zip(names, columns, strict=True)]
    files = ("corpus.jsonl", "queries.jsonl", f"qrels/{split}.tsv")
    paths = [find_file(spec, source.label, [f"{source.file}/{file}"]) for file in files]
    return [_Whole(path, each, dict, quoting=False) for path, each in zip(paths, columns, strict=True)]


def _read_beir(corpus: Records[Any], queries: Records[Any], judged: Records[Any]) -> Search:
    documents = {}
    for row in corpus.rows():
        title = row.value.get("title") or ""  # BEIR has it before the text
        documents[str(row.value["_id"])] = f"{title} {text_in(row.value, 'text')}".strip()
    texts = {str(row.value["_id"]): text_in(row.value, "text") for row in queries.rows()}
    relevant: dict[str, dict[str, float]] = {}
    for row in judged.rows():
        query, document = (str(row.value[name]) for name in ("query-id", "corpus-id"))
        for what, id, known in (("query", query, texts), ("document", document, documents)):
            if id not in known:
                raise UserError(f"{judged.place(row.place)}: there is no {what} {quoted(id)} in its files")
        if grade := number_in(row.value["score"], "score"):
            relevant.setdefault(query, {})[document] = grade
    return [(id, texts[id], grades) for id, grades in relevant.items()], documents
