"""What the rows of an embedding task hold: texts of tables and lines, the STS benchmark, and searches.

The module loads neither torch nor numpy before rows are read, and does not tokenise.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

from ds_trainer.files.messages import kind_of, quoted
from ds_trainer.recipe.task_specs import EmbeddingSpec, TextSource
from ds_trainer.tasks import text_sources
from ds_trainer.tasks.records import FileRecords, Record, Records, find_file, plain_rows
from ds_trainer.tasks.text_sources import Made, all_rows, number_in, search_of, source_of, table_of, training_rows

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


def score_names(spec: EmbeddingSpec) -> list[str]:
    """Return the names of the scores."""
    return text_sources.score_names(spec, lambda source: _SCORES[source.is_search])


def records(spec: EmbeddingSpec, split: str) -> Records[EmbeddingRow]:
    """Return the rows of a split: of all training sources together, or of a source that is scored."""
    if split != "train":
        source = source_of(spec, split)
        if source.is_search:
            return _search(spec, source, source.max_examples or spec.max_eval_samples)
        part = _rows_of(spec, source)
        return Made(part.origin, part.entry, [part], partial(all_rows, [source], [part]))
    parts = training_rows(spec, _rows_of)
    rows = partial(all_rows, spec.train, parts)
    return Made("task.train", "example", parts, (lambda: _different_texts(rows())) if spec.loss == "none" else rows)


def training_texts(spec: EmbeddingSpec) -> list[str]:
    """Return every text of the training sources."""
    return [text for row in records(spec, "train").rows() for text in row.value.texts]


class _Lines(FileRecords[Any]):
    """The cells of the lines of a file, whatever its ending; blank lines are left out."""

    def _read(self) -> Iterator[tuple[int, Record]]:
        self.entry = "line"
        for number, cells in plain_rows(self.path, "\t"):
            if any(map(str.strip, cells)):
                yield number, {"cells": cells}


def _rows_of(spec: EmbeddingSpec, source: TextSource) -> Records[EmbeddingRow]:
    """Return the rows of a source: a table, lines, scored pairs, or the queries of a search with their documents."""
    if source.is_search:
        return _search(spec, source, pairs=True)
    prompts, columns = source.prompts or [None] * source.texts, list(map(str, source.text_columns or []))
    if source.form != "table":
        parse = _sts_row if source.form == "stsb" else _line
        return _Lines(find_file(spec, source.label, [source.file or ""]), ("cells",), partial(parse, tuple(prompts)))
    scored = None if source.score_column is None else str(source.score_column)
    return table_of(spec, source, partial(_table_row, columns, prompts, scored))


def _line(prompts: tuple[str | None, ...], record: Record) -> EmbeddingRow:
    return EmbeddingRow(("\t".join(record["cells"]).strip(),), prompts)


def _sts_row(prompts: tuple[str | None, ...], record: Record) -> EmbeddingRow:
    cells = record["cells"]
    if len(cells) <= max(_STS_TEXTS):
        raise ValueError(f"{len(cells)} cells, and the STS benchmark has 7 in a line")
    return EmbeddingRow(tuple(cells[place] for place in _STS_TEXTS), prompts, number_in(cells[_STS_SCORE], "the score"))


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
    score = number_in(record[scored], scored) if scored else 0.0
    return EmbeddingRow(tuple(text for text, _ in texts), tuple(prompt for _, prompt in texts), score)


def _different_texts(rows: Iterator[EmbeddingRow]) -> Iterator[EmbeddingRow]:
    """Yield each different text as a row of its own."""
    texts = dict.fromkeys(pair for row in rows for pair in zip(row.texts, row.prompts, strict=True))
    return (EmbeddingRow((text,), (prompt,)) for text, prompt in texts)


def _search(
    spec: EmbeddingSpec, source: TextSource, most: int | None = None, pairs: bool = False
) -> Records[EmbeddingRow]:
    """Return the queries of a search, at most so many, and then all documents; or each query with its documents."""
    parts, read = search_of(spec, source)
    of_query, of_document = source.prompts or (QUERY, DOCUMENT)

    def made() -> Iterator[EmbeddingRow]:
        from ds_trainer.tasks.data import spread

        queries, documents = read()
        if pairs:
            both = ((text, documents[id]) for _, text, relevant in queries for id in relevant)
            return (EmbeddingRow(texts, (of_query, of_document)) for texts in both)
        chosen = (queries[place] for place in spread(len(queries), most))
        return chain(
            (EmbeddingRow((text,), (of_query,), id=id, relevant=relevant) for id, text, relevant in chosen),
            (EmbeddingRow((text,), (of_document,), id=id) for id, text in documents.items()),
        )

    return Made(source.label, "pair" if pairs else "text", parts, made)
