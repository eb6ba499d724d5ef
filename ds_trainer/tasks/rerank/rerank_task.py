"""Reranking: a cross-encoder reads a query and a document as a pair of texts, and gives one score.

An example of the training split is a query with all of its documents, each pair of which is a row of a batch. In a
split that is scored, an example is a pair.

| loss | what it is | arXiv |
|---|---|---|
| bce | the binary cross entropy of each pair: whether the document answers the query; mean over pairs | 1901.04085 |
| softmax | the cross entropy over the documents of a query; mean over queries | 2101.08751 |

A teacher's scores are compared by the margins between the documents of a query (`losses.margin_mse`). The model's
folder is one that `CrossEncoder` of sentence-transformers opens; its config names the function that it applies to the
logit.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ds_trainer.models import pretrained
from ds_trainer.models.pretrained import CLASSIFIER
from ds_trainer.models.sentence_files import activation_of
from ds_trainer.recipe.task_specs import RerankSpec
from ds_trainer.tasks.data import COLUMN, Array, ExampleIds, Examples, joined
from ds_trainer.tasks.records import Row
from ds_trainer.tasks.rerank import rerank_data
from ds_trainer.tasks.rerank.rerank_data import RankRow
from ds_trainer.tasks.scores import ranking_scores
from ds_trainer.tasks.task import PAD_LOGIT, Batch, Task, Unit


class RerankTask(Task):
    """Documents ranked for queries.

    The labels of a batch are (pairs, 2) int64: whether the document answers the query, and the query's place.
    """

    spec: RerankSpec
    head = CLASSIFIER
    family = "rerank"
    data: ClassVar[Any] = rerank_data
    token_columns: ClassVar[Mapping[str, Any]] = {**Task.token_columns, COLUMN: np.uint16}
    hashed_fields = ("name", "max_seq_length")
    regression, by_query = True, True
    logits_of = "position"
    logits_unit: Unit = "label"

    def __init__(self, spec: RerankSpec, tokenizer: Any, source: str | Path, cache_dir: Path) -> None:
        length = spec.max_seq_length or pretrained.default_length(tokenizer, pretrained.load_config(source, CLASSIFIER))
        super().__init__(spec.model_copy(update={"max_seq_length": length}), tokenizer, source, cache_dir)
        self.loss_unit: Unit = "label" if spec.loss == "bce" else "example"

    def hashed_values(self) -> list[Any]:
        return self.spec.rows_read

    def limit(self, split: str) -> int | None:
        return super().limit(split) if split == "train" else None  # where the pairs are read, queries are limited

    def encode(self, rows: Sequence[Row[RankRow]]) -> dict[str, Any]:
        pairs = [(row.value.query, document) for row in rows for document in row.value.documents]
        return joined(self.tokens(*zip(*pairs, strict=True)), (len(row.value.documents) for row in rows)) | {
            "labels": np.array([row.value.positives for row in rows], np.int32),
            "query": np.array([row.value.number for row in rows], np.int32),
        }

    def build_model(self, folder: str | Path) -> nn.Module:
        model: Any = super().build_model(folder)
        model.config.sentence_transformers = {"activation_fn": activation_of(folder)}
        return model

    def collate(self, examples: Examples, ids: Sequence[int] | ExampleIds, draw: int = 0) -> Batch:
        batch = super().collate(examples, ids, draw)
        column = examples.sequences.column[examples.sequences.of_examples(batch.ids.numpy())]
        query = np.cumsum(column == 0) - 1
        answers = column < batch.labels.numpy()[query]
        return replace(batch, labels=torch.from_numpy(np.stack([answers, query], 1).astype(np.int64)))

    def loss(self, out: Any, batch: Batch) -> Tensor:
        scores, answers = out.logits.float().squeeze(-1), batch.labels[:, 0].float()
        if self.spec.loss == "bce":
            return F.binary_cross_entropy_with_logits(scores, answers)
        return softmax_loss(scores, answers, batch)

    def score(self, split: str, answers: Mapping[int, Any]) -> dict[str, float]:
        """Return nDCG@10 and MRR@10 over each query's documents, means over the queries."""
        labels = self.examples(split).fields["labels"]
        gains = [labels[pairs].tolist() for pairs in self._ranked(split, answers)]
        scores = ranking_scores((each, each) for each in gains)
        return {name: scores[name] for name in ("ndcg@10", "mrr@10")}

    def agreement(self, split: str, answers: Mapping[int, Any], others: Mapping[int, Any]) -> float:
        """Return the share of the queries of which both models rank the same document first."""
        both = zip(self._ranked(split, answers), self._ranked(split, others), strict=True)
        return float(np.mean([ours[0] == theirs[0] for ours, theirs in both]))

    def _ranked(self, split: str, answers: Mapping[int, Any]) -> list[Array]:
        """Return the pairs of each query, the best first; of equal scores the documents that do not answer it."""
        fields, scores = self.examples(split).fields, self.stacked(split, answers)[:, 0]
        order, query = np.lexsort((fields["labels"], -scores, fields["query"])), np.asarray(fields["query"])
        return np.split(order, np.flatnonzero(np.diff(query[order])) + 1)


def softmax_loss(scores: Tensor, answers: Tensor, batch: Batch) -> Tensor:
    """Return the cross entropy over the documents of a query, mean over those that answer it, then over queries.

    `scores` and `answers`, which are 1 or 0, are (pairs,) fp32.
    """
    of_query = batch.labels[:, 1] == torch.arange(len(batch.ids), device=scores.device)[:, None]
    log_shares = torch.where(of_query, scores, PAD_LOGIT).log_softmax(1)
    wanted = of_query * answers
    return -(log_shares * wanted / wanted.sum(1, keepdim=True)).sum() / len(batch.ids)
