"""What the rows of a rerank task hold: queries with documents, of tables.

In a split that is scored, each pair of a query and a document is a row of its own, so that a query may have any number
of documents. The module loads neither torch nor numpy before rows are read, and does not tokenise.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

from ds_trainer.files.messages import kind_of, quoted
from ds_trainer.recipe.task_specs import RerankSpec, TextSource
from ds_trainer.tasks import text_sources
from ds_trainer.tasks.records import Record, Records
from ds_trainer.tasks.text_sources import Made, all_rows, source_of, table_of, training_rows


class RankRow(NamedTuple):
    """A query with documents, of which the first `positives` answer it; `number` is that of the query in its split."""

    query: str
    documents: tuple[str, ...]
    positives: int
    number: int = 0


def score_names(spec: RerankSpec) -> list[str]:
    """Return the names of the scores."""
    return text_sources.score_names(spec, lambda _: ("ndcg@10", "mrr@10"))


def records(spec: RerankSpec, split: str) -> Records[RankRow]:
    """Return the rows of a split: the queries of all training sources, or the pairs of one source that is scored."""
    if split != "train":
        source = source_of(spec, split)
        part = _rows_of(spec, source)
        return Made(part.origin, "pair", [part], lambda: _pairs(all_rows([source], [part]), spec.max_eval_samples))
    parts = training_rows(spec, _rows_of)
    return Made("task.train", "list", parts, partial(all_rows, spec.train, parts))


def training_texts(spec: RerankSpec) -> list[str]:
    """Return every text of the training sources."""
    return [text for row in records(spec, "train").rows() for text in (row.value.query, *row.value.documents)]


def _rows_of(spec: RerankSpec, source: TextSource) -> Records[RankRow]:
    return table_of(spec, source, partial(_row, list(map(str, source.text_columns or []))))


def _pairs(rows: Iterator[RankRow], most: int | None) -> Iterator[RankRow]:
    """Yield each pair of the queries, of which at most so many are taken, spaced evenly."""
    from ds_trainer.tasks.data import spread

    queries = list(rows)
    for number, row in enumerate(queries[place] for place in spread(len(queries), most)):
        for place, document in enumerate(row.documents):
            yield RankRow(row.query, (document,), int(place < row.positives), number)


def _row(columns: list[str], record: Record) -> RankRow:
    """Check the cells of a row: a query, its positives, and negatives in any number of columns."""
    if isinstance(record[columns[0]], list):
        raise ValueError(f"{quoted(columns[0])} is a list, and must be one query")
    query, positives, *negatives = (_texts(column, record[column]) for column in columns)
    if not positives:
        raise ValueError(f"{quoted(columns[1])} is an empty list, and a query needs a document that answers it")
    return RankRow(query[0], (*positives, *(text for texts in negatives for text in texts)), len(positives))


def _texts(column: str, cell: Any) -> list[str]:
    """Return the texts of a cell, which has one or a list of them."""
    texts = cell if isinstance(cell, list) else [cell]
    for text in texts:
        if not (isinstance(text, str) and text.strip()):
            kind = "an empty text" if isinstance(text, str) else kind_of(text)
            raise ValueError(f"{quoted(column)} has {kind}, and must be a text or a list of texts")
    return texts
