"""Where the texts of an embedding task come from: tables, lines, the STS benchmark, and searches of SQuAD or BEIR.

The layout of BEIR (arXiv 2104.08663) is a folder with `corpus.jsonl`, `queries.jsonl` and the judgements
`qrels/SPLIT.tsv`; on the hub these are three data sets. The module loads neither torch nor numpy before rows are read,
and does not tokenise.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

from ds_trainer.files.messages import kind_of, quoted
from ds_trainer.ranks.failures import UserError
from ds_trainer.recipe.task_specs import EmbeddingSpec, SquadSpec, TextSource
from ds_trainer.tasks import squad_file
from ds_trainer.tasks.records import GAPS, FileRecords, HubRecords, Record, Records, Row, find_file, plain_rows, text_in

QUERY, DOCUMENT = "query", "document"
"""The names of the prompts of a search, as sentence-transformers has them."""
_STS_SCORE, _STS_TEXTS = 4, (5, 6)
"""The columns of the published files of the STS benchmark, whose rows may have further ones behind them."""
_SCORES = {True: ("ndcg@10", "mrr@10", "recall@10"), False: ("spearman", "pearson")}
"""The names of the scores: those of a search, and those of pairs."""


class EmbeddingRow(NamedTuple):
    """Some texts that belong together, each with the name of its prompt.

    They are an anchor, a positive and negatives; two texts with a score; or a query or a document of a search. A query
    has the grades of its `relevant` documents, by their `id`s.
    """

    texts: tuple[str, ...]
    prompts: tuple[str | None, ...]
    score: float = 0.0
    id: str = ""
    relevant: Mapping[str, float] | None = None


def setting_mistakes(spec: EmbeddingSpec) -> list[str]:
    """Return the mistakes in the settings that show without reading a file."""
    return spec.source_mistakes()


def score_names(spec: EmbeddingSpec) -> list[str]:
    """Return the names of the scores; those of the first split have no prefix."""
    labelled = [("" if not place else f"{each.label}/", each) for place, each in enumerate(spec.validation)]
    return [f"{prefix}{name}" for prefix, each in labelled for name in _SCORES[each.is_search]]


def source_of(spec: EmbeddingSpec, split: str) -> TextSource:
    """Return the source of a split that is scored."""
    return next(source for source in spec.validation if source.label == split)


def records(spec: EmbeddingSpec, split: str) -> Records[EmbeddingRow]:
    """Return the rows of a split: of all training sources together, or of a source that is scored."""
    if split != "train":
        source = source_of(spec, split)
        return _search(spec, source, spec.max_eval_samples) if source.is_search else _rows_of(spec, source)
    if not spec.train:
        raise UserError("the embedding task has nothing to train on: name its sources in task.train")
    parts = [_rows_of(spec, source) for source in spec.train]
    return _Made("task.train", "example", parts, lambda: _joined(spec, parts))


def training_texts(spec: EmbeddingSpec) -> list[str]:
    """Return every text of the training sources."""
    return [text for row in records(spec, "train").rows() for text in row.value.texts]


class _Made(Records[EmbeddingRow]):
    """Rows that are `made` of the records of some `parts`, and have the places that `made` counts."""

    columns = ()
    parse: Any = None

    def __init__(
        self, origin: str, entry: str, parts: Sequence[Records[Any]], made: Callable[[], Iterator[EmbeddingRow]]
    ) -> None:
        self.origin, self.entry, self.parts, self.made, self.left_out = origin, entry, parts, made, {}

    def rows(self, most_mistakes: int = 0) -> Iterator[Row[EmbeddingRow]]:
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


class _Lines(FileRecords[Any]):
    """The cells of the lines of a file, whatever its ending; blank lines are left out."""

    def _read(self) -> Iterator[tuple[int, Record]]:
        self.entry = "line"
        for number, cells in plain_rows(self.path, "\t"):
            if any(map(str.strip, cells)):
                yield number, {"cells": cells}


class _Whole(FileRecords[Any]):
    """The records of a file of BEIR with all of their fields: a document may have a title."""

    def _complete(self) -> Iterator[tuple[int, Record]]:
        self.left_out = {}
        return self._read()


def _rows_of(spec: EmbeddingSpec, source: TextSource) -> Records[EmbeddingRow]:
    """Return the rows of a source: a table, lines, scored pairs, or the queries of a search with their documents."""
    if source.is_search:
        return _search(spec, source, pairs=True)
    prompts, columns = source.prompts or [None] * source.texts, list(map(str, source.text_columns or []))
    if source.form != "table":
        parse = _sts_row if source.form == "stsb" else _line
        return _Lines(find_file(spec, source.label, [source.file or ""]), ("cells",), partial(parse, tuple(prompts)))
    scored = None if source.score_column is None else str(source.score_column)
    row, columns_read = partial(_table_row, columns, prompts, scored), [*columns, *([scored] if scored else [])]
    if source.dataset:
        return HubRecords(source.dataset, source.split or "train", columns_read, row, GAPS)
    path, header = find_file(spec, source.label, [source.file or ""]), None if source.header else ()
    return FileRecords(path, columns_read, row, header, missing=GAPS, quoting=source.quoting)


def _line(prompts: tuple[str | None, ...], record: Record) -> EmbeddingRow:
    return EmbeddingRow(("\t".join(record["cells"]).strip(),), prompts)


def _sts_row(prompts: tuple[str | None, ...], record: Record) -> EmbeddingRow:
    cells = record["cells"]
    if len(cells) <= max(_STS_TEXTS):
        raise ValueError(f"{len(cells)} cells, and the STS benchmark has 7 in a line")
    return EmbeddingRow(tuple(cells[place] for place in _STS_TEXTS), prompts, _number(cells[_STS_SCORE], "the score"))


def _table_row(
    columns: Sequence[str], prompts: Sequence[str | None], scored: str | None, record: Record
) -> EmbeddingRow:
    """Check the cells of a row; a list of texts is allowed behind the first two columns, for negatives."""
    texts = list[tuple[str, str | None]]()
    for place, (column, prompt) in enumerate(zip(columns, prompts, strict=True)):
        for text in record[column] if isinstance(record[column], list) and place > 1 else [record[column]]:
            if not (isinstance(text, str) and text.strip()):
                raise ValueError(f"{quoted(column)} is {kind_of(text)}, and must be text")
            texts.append((text, prompt))
    score = _number(record[scored], scored) if scored else 0.0
    return EmbeddingRow(tuple(text for text, _ in texts), tuple(prompt for _, prompt in texts), score)


def _number(value: Any, name: str) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = float("nan")
    if not abs(number) < float("inf"):
        raise ValueError(f"{quoted(name)} is {quoted(value)}, and must be a number")
    return number


def _joined(spec: EmbeddingSpec, parts: Sequence[Records[EmbeddingRow]]) -> Iterator[EmbeddingRow]:
    """Yield the rows of all training sources; without a loss each different text is a row of its own."""
    from ds_trainer.tasks.data import spread

    seen = set[Any]()
    for part, source in zip(parts, spec.train, strict=True):
        rows = [row.value for row in part.rows()]
        for row in (rows[place] for place in spread(len(rows), source.max_examples)):
            if spec.loss != "none":
                yield row
                continue
            for text, prompt in zip(row.texts, row.prompts, strict=True):
                if (text, prompt) not in seen:
                    seen.add((text, prompt))
                    yield EmbeddingRow((text,), (prompt,))


def _search(
    spec: EmbeddingSpec, source: TextSource, most: int | None = None, pairs: bool = False
) -> Records[EmbeddingRow]:
    """Return the queries of a search, at most so many, and then all documents; or each query with its documents."""
    if source.form == "squad":
        file = {"data_dir": spec.data_dir, "validation_file": source.file, "dataset": source.dataset}
        parts: list[Records[Any]] = [
            squad_file.records(SquadSpec(version_2_with_negative=True, **file), source.split or "validation")
        ]
    else:
        parts = _parts_of_beir(spec, source)
    read = _read_squad if source.form == "squad" else _read_beir
    of_query, of_document = source.prompts or (QUERY, DOCUMENT)

    def made() -> Iterator[EmbeddingRow]:
        from ds_trainer.tasks.data import spread

        queries, documents = read(*parts)
        if pairs:
            both = ((text, documents[id]) for _, text, relevant in queries for id in relevant)
            return (EmbeddingRow(texts, (of_query, of_document)) for texts in both)
        chosen = (queries[place] for place in spread(len(queries), most))
        return chain(
            (EmbeddingRow((text,), (of_query,), id=id, relevant=relevant) for id, text, relevant in chosen),
            (EmbeddingRow((text,), (of_document,), id=id) for id, text in documents.items()),
        )

    return _Made(source.label, "pair" if pairs else "text", parts, made)


_Search = tuple[list[tuple[str, str, dict[str, float]]], dict[str, str]]
"""Queries with a relevant document, each its id, its text and the grades by the documents' ids; and the documents."""


def _read_squad(questions: Records[Any]) -> _Search:
    asked = [row.value for row in questions.rows() if row.value.answers]
    ids = {text: str(number) for number, text in enumerate(dict.fromkeys(each.context for each in asked))}
    queries = [(each.id, each.question, {ids[each.context]: 1.0}) for each in asked]
    return queries, {id: text for text, id in ids.items()}


def _parts_of_beir(spec: EmbeddingSpec, source: TextSource) -> list[Records[Any]]:
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


def _read_beir(corpus: Records[Any], queries: Records[Any], judged: Records[Any]) -> _Search:
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
        if grade := _number(row.value["score"], "score"):
            relevant.setdefault(query, {})[document] = grade
    return [(id, texts[id], grades) for id, grades in relevant.items()], documents
