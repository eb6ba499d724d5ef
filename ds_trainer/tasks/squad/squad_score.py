"""How answers to SQuAD are counted: exact match, F1, the thresholds of v2, and the n best of several windows.

Counts what the official scripts count: SQuAD v1.1, arXiv 1606.05250, and v2, arXiv 1806.03822. Pure functions
over texts; knows neither tokens nor models.
"""

from __future__ import annotations

import math
import re
import string
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)

Golds = Mapping[str, Sequence[str]]
"""The texts of a question's answers, by its id; none where it has no answer."""


class Candidate(NamedTuple):
    """A possible answer: its text, the characters of the context that it spans, and its logits."""

    text: str
    start: int
    end: int
    start_logit: float
    end_logit: float

    @property
    def score(self) -> float:
        return self.start_logit + self.end_logit


def normalised(text: str) -> str:
    """Lower case, without ASCII punctuation and articles, with single spaces."""
    bare = text.lower().translate(_NO_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", bare).split())


def exact(prediction: str, gold: str) -> float:
    """1 if both are equal once normalised, else 0."""
    return float(normalised(prediction) == normalised(gold))


def f1(prediction: str, gold: str) -> float:
    """Harmonic mean of precision and recall over the words of the normalised texts; 0 where one has none."""
    predicted, wanted = normalised(prediction).split(), normalised(gold).split()
    common = (Counter(predicted) & Counter(wanted)).total()
    return 2 * common / (len(predicted) + len(wanted)) if common else 0.0


def f1_v2(prediction: str, gold: str) -> float:
    """`f1`, and 1 where both have no words: nothing is the right answer to what has none."""
    return max(f1(prediction, gold), float(normalised(prediction) == normalised(gold) == ""))


def score_v1(predictions: Mapping[str, str], golds: Golds) -> dict[str, float]:
    """Exact match and F1 in percent, the best over each question's answers, by SQuAD v1.1's script."""
    exacts = [max(exact(predictions[id], gold) for gold in texts) for id, texts in golds.items()]
    overlaps = [max(f1(predictions[id], gold) for gold in texts) for id, texts in golds.items()]
    return {"exact_match": _percent(exacts), "f1": _percent(overlaps)}


def score_v2(
    predictions: Mapping[str, str], golds: Golds, null_odds: Mapping[str, float], answers: Mapping[str, str]
) -> dict[str, float]:
    """All that SQuAD v2's script tells of predictions in which "" says that there is no answer.

    The best thresholds on `null_odds` are searched over `answers`, the best texts before any were made "": the script,
    which knows the predictions alone, can only find thresholds below the one that they were made with.
    """
    exacts, overlaps = _v2_scores(predictions, golds)
    found = {**_summary("", exacts, overlaps), "total": float(len(golds))}
    for name, answered in (("HasAns_", True), ("NoAns_", False)):
        ids = [id for id, texts in golds.items() if bool(texts) == answered]
        if ids:
            part = _summary(name, {id: exacts[id] for id in ids}, {id: overlaps[id] for id in ids})
            found |= {**part, f"{name}total": float(len(ids))}
    answerable = {id for id, texts in golds.items() if texts}
    for name, scores in zip(("exact", "f1"), _v2_scores(answers, golds), strict=True):
        best, threshold = best_threshold(answers, scores, null_odds, answerable)
        found |= {f"best_{name}": best, f"best_{name}_thresh": threshold}
    return found


def _v2_scores(texts: Mapping[str, str], golds: Golds) -> tuple[dict[str, float], dict[str, float]]:
    """Exact match and F1 of each question, the best over its answers."""
    wanted = {id: [gold for gold in each if normalised(gold)] or [""] for id, each in golds.items()}
    exacts = {id: max(exact(texts[id], gold) for gold in each) for id, each in wanted.items()}
    return exacts, {id: max(f1_v2(texts[id], gold) for gold in each) for id, each in wanted.items()}


def best_threshold(
    predictions: Mapping[str, str], scores: Mapping[str, float], null_odds: Mapping[str, float], answerable: set[str]
) -> tuple[float, float]:
    """The best score, in percent, and the null odds up to which to answer for it; 0.0 where answering nothing is best.

    Questions are let through in the order of their odds: one with an answer adds its score, one without takes away the
    point that silence had earned, if the prediction is no silence.
    """
    current = best = float(len(scores) - len(answerable))
    threshold = 0.0
    for id in sorted(null_odds, key=lambda key: null_odds[key]):
        current += scores[id] if id in answerable else -bool(predictions[id])
        if current > best:
            best, threshold = current, null_odds[id]
    return 100 * best / len(scores), threshold


def n_best(candidates: Iterable[Candidate], size: int) -> list[Candidate]:
    """The best candidates of different texts, best first; of equal texts the better one."""
    ranked = sorted(candidates, key=lambda each: (-each.score, each.start, each.end))
    by_text: dict[str, Candidate] = {}
    for candidate in ranked:
        by_text.setdefault(candidate.text, candidate)
        if len(by_text) == size:
            break
    return list(by_text.values())


def with_probabilities(candidates: Sequence[Candidate]) -> list[dict[str, Any]]:
    """JSON objects of the candidates, with the softmax over their scores."""
    highest = max((candidate.score for candidate in candidates), default=0.0)
    weights = [math.exp(candidate.score - highest) for candidate in candidates]
    total = sum(weights)
    return [
        {
            "text": candidate.text,
            "probability": weight / total,
            "start_logit": candidate.start_logit,
            "end_logit": candidate.end_logit,
            "start": candidate.start,
            "end": candidate.end,
        }
        for candidate, weight in zip(candidates, weights, strict=True)
    ]


def _summary(prefix: str, exacts: Mapping[str, float], overlaps: Mapping[str, float]) -> dict[str, float]:
    name = f"{prefix}exact" if prefix else "exact_match"
    return {name: _percent(exacts.values()), f"{prefix}f1": _percent(overlaps.values())}


def _percent(values: Iterable[float]) -> float:
    found = list(values)
    return 100 * sum(found) / len(found)
