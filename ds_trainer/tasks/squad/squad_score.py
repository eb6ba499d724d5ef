"""Score answers to SQuAD: exact match, F1, the thresholds of v2, and the n best of several windows.

The numbers equal those of the official scripts of SQuAD v1.1 (arXiv 1606.05250) and v2 (arXiv 1806.03822). Pure
functions of texts, without tokens or models.
"""

import math
import re
import string
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)

Golds = Mapping[str, Sequence[str]]
"""The texts of the annotated answers by question id; empty for a question without an answer."""


class Candidate(NamedTuple):
    """A possible answer: its text, the characters of the context from `start` to `end`, and its logits."""

    text: str
    start: int
    end: int
    start_logit: float
    end_logit: float

    @property
    def score(self) -> float:
        return self.start_logit + self.end_logit


def normalised(text: str) -> str:
    """Return a text in lower case, without ASCII punctuation, articles and repeated spaces."""
    bare = text.lower().translate(_NO_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", bare).split())


def exact(prediction: str, gold: str) -> float:
    """Return 1 if both are equal once normalised, else 0."""
    return float(normalised(prediction) == normalised(gold))


def f1(prediction: str, gold: str) -> float:
    """Return the harmonic mean of precision and recall over the normalised words; 0 where one text has none."""
    predicted, wanted = normalised(prediction).split(), normalised(gold).split()
    common = (Counter(predicted) & Counter(wanted)).total()
    return 2 * common / (len(predicted) + len(wanted)) if common else 0.0


def f1_v2(prediction: str, gold: str) -> float:
    """Return `f1`, and 1 where both have no words: an empty answer is right for a question without one."""
    return max(f1(prediction, gold), float(normalised(prediction) == normalised(gold) == ""))


def score_v1(predictions: Mapping[str, str], golds: Golds) -> dict[str, float]:
    """Return exact match and F1 in percent, the best over each question's answers, as SQuAD v1.1's script does."""
    exacts = [max(exact(predictions[id], gold) for gold in texts) for id, texts in golds.items()]
    overlaps = [max(f1(predictions[id], gold) for gold in texts) for id, texts in golds.items()]
    return {"exact_match": _percent(exacts), "f1": _percent(overlaps)}


def score_v2(
    predictions: Mapping[str, str], golds: Golds, null_odds: Mapping[str, float], answers: Mapping[str, str]
) -> dict[str, float]:
    """Return all numbers of SQuAD v2's script. A prediction of "" means that the question has no answer.

    `answers` are the best texts before a threshold on `null_odds` replaced some of them by "". The best thresholds are
    searched among them. The script uses the predictions, so no threshold above the one in use can win.
    """
    exacts, overlaps = _v2_scores(predictions, golds)
    answerable = {id for id, texts in golds.items() if texts}
    scores = {}
    for prefix, ids in (("", set(golds)), ("HasAns_", answerable), ("NoAns_", set(golds) - answerable)):
        if ids:
            scores[f"{prefix}exact" if prefix else "exact_match"] = _percent(exacts[id] for id in ids)
            scores[f"{prefix}f1"] = _percent(overlaps[id] for id in ids)
            scores[f"{prefix}total"] = float(len(ids))
    for name, values in zip(("exact", "f1"), _v2_scores(answers, golds), strict=True):
        best, threshold = best_threshold(answers, values, null_odds, answerable)
        scores |= {f"best_{name}": best, f"best_{name}_thresh": threshold}
    return scores


def _v2_scores(texts: Mapping[str, str], golds: Golds) -> tuple[dict[str, float], dict[str, float]]:
    """Return exact match and F1 of each question, the best over its answers; as in the script, a text without words is
    no answer."""
    wanted = {id: [gold for gold in each if normalised(gold)] or [""] for id, each in golds.items()}
    exacts = {id: max(exact(texts[id], gold) for gold in each) for id, each in wanted.items()}
    return exacts, {id: max(f1_v2(texts[id], gold) for gold in each) for id, each in wanted.items()}


def best_threshold(
    predictions: Mapping[str, str], scores: Mapping[str, float], null_odds: Mapping[str, float], answerable: set[str]
) -> tuple[float, float]:
    """Return the best score in percent, and the highest null odds at which to answer for it; 0.0 if never to answer.

    Without any answers, each question that has none earns a point. Then questions are answered in the order of their
    null odds: one with an answer adds its score, and one without loses its point unless the prediction is empty.
    """
    current = best = float(len(scores) - len(answerable))
    threshold = 0.0
    for id in sorted(null_odds, key=lambda key: null_odds[key]):
        current += scores[id] if id in answerable else -bool(predictions[id])
        if current > best:
            best, threshold = current, null_odds[id]
    return 100 * best / len(scores), threshold


def n_best(candidates: Iterable[Candidate], size: int) -> list[Candidate]:
    """Return the `size` best candidates, best first; of candidates with equal texts only the best."""
    ranked = sorted(candidates, key=lambda candidate: (-candidate.score, candidate.start, candidate.end))
    by_text: dict[str, Candidate] = {}
    for candidate in ranked:
        by_text.setdefault(candidate.text, candidate)
    return list(by_text.values())[:size]


def with_probabilities(candidates: Sequence[Candidate]) -> list[dict[str, Any]]:
    """Return the candidates as JSON objects, each with its share of the softmax over their scores."""
    highest = max((candidate.score for candidate in candidates), default=0.0)
    weights = [math.exp(candidate.score - highest) for candidate in candidates]
    shares = (weight / sum(weights) for weight in weights)
    return [candidate._asdict() | {"probability": share} for candidate, share in zip(candidates, shares, strict=True)]


def _percent(values: Iterable[float]) -> float:
    scores = list(values)
    return 100 * sum(scores) / len(scores)
