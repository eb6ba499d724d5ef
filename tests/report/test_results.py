"""The verdict says in words what the phases' models gain and lose beside the first one that was timed."""

from __future__ import annotations

import math
from typing import Any

import pytest

from ds_trainer.report.results import results_table, verdict


def phase(metric: str, score: float, *ms: float, **more: Any) -> dict[str, Any]:
    """The results of a phase whose model takes so many milliseconds at batch 1 and 32."""
    latency = {f"batch_{size}": {"median_ms": value} for size, value in zip((1, 32), ms, strict=False)}
    return {"eval": {metric: score, **more.pop("eval", {})}, "latency": latency, **more}


@pytest.mark.parametrize(
    ("metric", "before", "after", "words"),
    [
        ("accuracy", 0.875, 0.873, "0.2 points less accuracy"),
        ("accuracy", 0.873, 0.875, "0.2 points more accuracy"),
        ("f1", 0.8731, 0.8733, "equal f1"),
        ("matthews", 0.05, -0.05, "10.0 points less matthews"),
        ("exact_match", 0.5, 0.3, "0.2 points less exact_match"),  # of SQuAD, in percent
        ("f1", 88.1, 86.9, "1.2 points less f1"),
        ("perplexity", 24.93, 28428.2, "perplexity 28,428.2 instead of 24.9300, which is worse"),
        ("loss", 0.4, 0.31, "loss 0.3100 instead of 0.4000, which is better"),
        ("loss", 0.4, 0.4, "equal loss"),
    ],
)
def test_scores_are_compared_in_points_or_where_less_is_better_as_they_are(metric, before, after, words):
    """A share has a hundred points, a percentage is points already, and a perplexity has none."""
    results = {"dense": phase(metric, before, 4, 38), "half": phase(metric, after, 2.9, 20)}
    assert verdict(results) == [f"half: 1.4 times as fast as dense at batch 1, 1.9 times at batch 32, {words}."]


def test_only_what_was_measured_is_compared():
    """A batch size that both have; no score that is not finite; early exits by their own times and score."""
    early = {"early_exit_latency": {"batch_32": {"median_ms": 10.0}}, "eval": {"early_exit/accuracy": 0.86}}
    results = {
        "other_task": {"eval": {"f1": 0.5}},
        "dense": phase("accuracy", 0.88, 4, 40),
        "broken": phase("accuracy", math.nan, 8),
        "exits": phase("accuracy", 0.87, 4, 40, **early),
    }
    assert verdict(results) == [
        "broken: 0.5 times as fast as dense at batch 1.",
        "exits: 1.0 times as fast as dense at batch 1, 1.0 times at batch 32, 1.0 points less accuracy.",
        "exits, leaving early: 4.0 times as fast as dense at batch 32, 2.0 points less accuracy.",
    ]
    assert verdict({}) == verdict({"dense": results["dense"]}) == verdict({"untimed": {"eval": {"f1": 1.0}}}) == []


def test_the_closing_table_ends_in_the_verdict():
    """Below the rows, whose scores stand together before the costs, which a run without a report has not measured."""
    train = {"train_seconds": 70.0, "examples_per_s": 500.0}
    half = phase("accuracy", 0.87, 2, 18.25, eval={"teacher/agreement": 0.98}, train=train, size={"bytes": 3 * 2**20})
    results = {"dense": phase("accuracy", 0.88, 4, train=train), "half": half}
    lines = results_table(results).splitlines()
    assert lines[0].split("  ")[1:3] == ["accuracy", "teacher/agreement"]
    assert lines[1].split()[:3] == ["dense", "0.8800", "–"]
    assert lines[3:] == ["", *verdict(results)]
    first, row = results_table({"half": half}).splitlines()
    assert first.split("  ")[-5:] == ["MiB", "ms (batch 1)", "ms (batch 32)", "seconds", "examples/s"]
    assert row.split()[-5:] == ["3.0", "2.00", "18.25", "70", "500"]
    assert "MiB" not in results_table({"dense": {"train": train, "eval": {}}})
