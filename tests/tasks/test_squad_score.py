"""SQuAD's counting: exact match, F1, v2's thresholds and the n best, against values computed by hand."""

from __future__ import annotations

import random

import numpy as np
import pytest

from ds_trainer.tasks.squad.squad_score import (
    Candidate,
    best_threshold,
    exact,
    f1,
    n_best,
    normalised,
    score_v1,
    score_v2,
    with_probabilities,
)


def test_exact_and_f1_equal_hand_computed_values() -> None:
    """Words count as often as they occur; articles and punctuation do not."""
    assert exact("The Cat!", "cat") == 1
    assert exact("cats", "cat") == 0
    assert f1("the cat sat on the mat", "a cat sat") == pytest.approx(2 * 1.0 * 0.5 / 1.5)
    assert f1("x x y", "x z") == pytest.approx(2 * (1 / 3) * (1 / 2) / (5 / 6))
    assert f1("dog", "cat") == 0
    assert f1("the", "a") == 0
    assert normalised(" The  U.S.A., an\tanthem—a “The” ") == "usa anthem— “ ”"
    assert normalised("Theory of A-the") == "theory of athe"
    assert normalised("Café\u00a0İ") == "café i̇"
    # v1.1's F1 of two empty texts is 0, and v2's is 1: such a gold text is no answer to give
    assert score_v1({"c": "an"}, {"c": ["the"]}) == {"exact_match": 100, "f1": 0}
    found = score_v2({"a": ""}, {"a": ["the"]}, {"a": 1.0}, {"a": ""})
    assert found["exact_match"] == found["f1"] == found["HasAns_f1"] == 100
    assert not [name for name in found if name.startswith("NoAns")]


def test_v2_scores_equal_hand_computed_values() -> None:
    """Two questions with an answer, two without; in each part one is right."""
    golds = {"a": ["old town"], "b": ["moon", "the"], "c": [], "d": []}
    predictions = {"a": "the old town hall", "b": "moon", "c": "", "d": "sun"}
    odds = {"a": -3.0, "b": 2.0, "c": 5.0, "d": 1.0}
    found = score_v2(predictions, golds, odds, predictions)
    assert found == {
        "exact_match": 50.0,
        "f1": pytest.approx(100 * (0.8 + 1 + 1 + 0) / 4),
        "total": 4.0,
        "HasAns_exact": 50.0,
        "HasAns_f1": pytest.approx(90.0),
        "HasAns_total": 2.0,
        "NoAns_exact": 50.0,
        "NoAns_f1": 50.0,
        "NoAns_total": 2.0,
        # from 2 for silence, exact goes by a: +0, d: -1, b: +1; F1 by a: +0.8, d: -1, b: +1
        "best_exact": 50.0,
        "best_exact_thresh": 0.0,
        "best_f1": pytest.approx(70.0),
        "best_f1_thresh": -3.0,
    }
    # what the run made "" at 0 is right: answering up to 1.5 would be worth 100, and silence cannot hide that
    golds, odds = {"a": ["moon"], "b": ["sun"], "c": []}, {"a": -1.0, "b": 1.5, "c": 9.0}
    found = score_v2({"a": "moon", "b": "", "c": ""}, golds, odds, {"a": "moon", "b": "sun", "c": "sky"})
    assert found["f1"] == found["exact_match"] == pytest.approx(200 / 3)
    assert found["HasAns_f1"] == 50
    assert (
        (found["best_f1"], found["best_f1_thresh"]) == (found["best_exact"], found["best_exact_thresh"]) == (100, 1.5)
    )


def score_at(threshold: float, scores: dict[str, float], silent: dict[str, float], odds: dict[str, float]) -> float:
    """Percent, with silence above the threshold."""
    return 100 * sum(scores[id] if odds[id] <= threshold else silent[id] for id in scores) / len(scores)


def test_the_best_threshold_is_the_best_of_all() -> None:
    """Against trying every threshold: answering up to it gives the score, and no other gives more."""
    rng = random.Random(0)
    for _ in range(200):
        ids = [f"q{i}" for i in range(rng.randint(1, 8))]
        answerable = {id for id in ids if rng.random() < 0.5}
        predictions = {id: rng.choice(["", "x"]) for id in ids}
        silent = {id: float(id not in answerable) for id in ids}
        scores = {id: rng.random() if id in answerable else 1.0 for id in ids}
        scores = {id: score if predictions[id] else silent[id] for id, score in scores.items()}
        scores |= {id: 0.0 for id in ids if predictions[id] and id not in answerable}
        odds = {id: rng.uniform(-5, 5) for id in ids}
        best, threshold = best_threshold(predictions, scores, odds, answerable)
        tried = [score_at(each, scores, silent, odds) for each in [-9.0, *odds.values()]]
        assert best == pytest.approx(max(tried))
        reached = score_at(threshold, scores, silent, odds)
        assert best == pytest.approx(reached) or (threshold == 0 and best == pytest.approx(tried[0]))


def test_the_n_best_have_different_texts_and_probabilities() -> None:
    """The better of two equal texts stays; the softmax is over the scores and survives large ones."""
    spans = [("x", 500.0, 500.0), ("y", 501.0, 500.0), ("x", 1.0, 0.0), ("z", 0.0, 0.0)]
    best = n_best([Candidate(text, 2 * i, 2 * i + 1, *logits) for i, (text, *logits) in enumerate(spans)], 2)
    assert [(each.text, each.start) for each in best] == [("y", 2), ("x", 0)]
    first, second = with_probabilities(best)
    assert (first["probability"], second["probability"]) == pytest.approx((1 / (1 + np.exp(-1)), 1 / (1 + np.e)))
    assert second.keys() == {"text", "probability", "start_logit", "end_logit", "start", "end"}
    assert n_best([], 3) == with_probabilities([]) == []
