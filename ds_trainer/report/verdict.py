"""What the phases' models cost and score beside the first one that was timed, in numbers and in words.

Latencies are those of `deploy.latency`: measured in turns, on the texts of one task, which the scores are of as well.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ds_trainer.recipe.task_specs import greater_is_better

_PERCENTS = ("exact_match",)
"""Scores that are given in percent; others of 1 or less are shares, of which a hundredth is a point."""


@dataclass(frozen=True)
class TimedPhase:
    """A phase's model, run to its end or leaving early, with its score and the median milliseconds by batch size."""

    name: str
    score: float | None
    ms: Mapping[str, float]
    """By "batch 1", "batch 32"."""


def main_metric(results: Mapping[str, Any]) -> str | None:
    """Return the name of the score that the last phase's task gives first."""
    return next(iter(list(results.values())[-1].get("eval", {})), None) if results else None


def timed_phases(results: Mapping[str, Any]) -> list[TimedPhase]:
    """Return the models that were timed, the one that the others are compared with first."""
    timed, metric = [], main_metric(results)
    for phase, result in results.items():
        for key, way, scores in (("latency", "", ""), ("early_exit_latency", ", leaving early", "early_exit/")):
            ms = {batch.replace("_", " "): times["median_ms"] for batch, times in result.get(key, {}).items()}
            score = result.get("eval", {}).get(f"{scores}{metric}")
            if ms:
                finite = score is not None and math.isfinite(score)
                timed.append(TimedPhase(phase + way, score if finite else None, ms))
    return timed


def verdict(results: Mapping[str, Any]) -> list[str]:
    """Say in a sentence for each timed model how fast it is and how well it scores beside the first one."""
    metric, timed, sentences = main_metric(results), timed_phases(results), []
    for model in timed[1:]:
        base, beside = timed[0], f" as fast as {timed[0].name}"
        parts: list[str] = []
        for batch in filter(base.ms.get, model.ms):
            parts.append(f"{base.ms[batch] / model.ms[batch]:.1f} times{'' if parts else beside} at {batch}")
        if metric and model.score is not None and base.score is not None:
            parts.append(_difference(metric, base.score, model.score))
        sentences.append(f"{model.name}: {', '.join(parts)}.")
    return sentences


def _difference(metric: str, before: float, after: float) -> str:
    """Say how a score differs: in points, or as both values where less is better, which has no points."""
    if greater_is_better(metric) is False:
        order = "worse" if after > before else "better"
        values = f"{metric} {_short(after)} instead of {_short(before)}"
        return f"{values}, which is {order}" if _short(after) != _short(before) else f"{metric} {_short(after)} as well"
    shares = metric not in _PERCENTS and max(abs(before), abs(after)) <= 1
    points = f"{abs(after - before) * (100 if shares else 1):.1f}"
    return f"{points} points {'less' if after < before else 'more'} {metric}" if points != "0.0" else f"equal {metric}"


def _short(value: float) -> str:
    return f"{value:,.1f}" if abs(value) >= 10 else f"{value:.3f}"
