"""Scores that tasks of several families have: correlations with numbers, and how well a search ranks."""

from collections.abc import Iterable, Sequence

import numpy as np

from ds_trainer.ranks.failures import UserError
from ds_trainer.tasks.data import Array

CUTOFF = 10
"""The rank down to which the results of a search are scored, as the names of its scores say."""


def regression_scores(values: Array, labels: Array) -> dict[str, float]:
    """Return Pearson's and Spearman's correlation of finite scores, both (n,)."""
    ranks = []
    for each in (values, labels):
        _, place, counts = np.unique(each, return_inverse=True, return_counts=True)
        ranks.append((counts.cumsum() - (counts - 1) / 2)[place])  # equal values share the mean of their ranks
    return {"pearson": correlation(values, labels), "spearman": correlation(*ranks)}


def correlation(one: Array, other: Array) -> float:
    """Return Pearson's correlation of two arrays (n,) or, summed over the columns of two (n, classes), Matthews'.

    That of two classes is the phi coefficient, and of more Gorodkin's R_K. A correlation with a constant is 0/0 and
    counts as 0, as in scikit-learn: a constant explains nothing.
    """
    if (one == one[0]).all() or (other == other[0]).all():
        return 0.0
    one, other = (each - each.mean(0, dtype=np.float64) for each in (one, other))
    return float((one * other).sum() / np.sqrt(np.square(one).sum() * np.square(other).sum()))


def ranking_scores(rankings: Iterable[tuple[Sequence[float], Sequence[float]]]) -> dict[str, float]:
    """Return the means over the queries of nDCG, the reciprocal rank of the first hit, and recall, all of the best 10.

    Each query has the grades of its results, the best first, and those of all documents that are relevant to it. The
    gain of a document is its grade, as in BEIR.
    """
    scores, discounts = list[tuple[float, float, float]](), 1 / np.log2(np.arange(2, CUTOFF + 2))
    for results, grades in rankings:
        gains, ideal = np.array(results[:CUTOFF]), np.sort(grades)[::-1][:CUTOFF]
        hits = np.flatnonzero(gains > 0)
        gained, most = (float((each * discounts[: len(each)]).sum()) for each in (gains, ideal))
        scores.append((gained / most, 1 / (hits[0] + 1) if len(hits) else 0.0, len(hits) / len(grades)))
    return dict(zip(("ndcg@10", "mrr@10", "recall@10"), np.mean(scores, axis=0).tolist(), strict=True))


def check_logits(split: str, finite: Sequence[bool]) -> None:
    """Raise UserError unless `finite`, which has one entry for each example, is true throughout."""
    broken = len(finite) - sum(finite)
    if broken:
        raise UserError(
            f"{split}: the model gives logits that are not finite (NaN or infinity) for {broken:,} of {len(finite):,} "
            f"examples, which cannot be scored: train again with a lower learning rate, or in bf16 instead of fp16"
        )
