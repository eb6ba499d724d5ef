"""The figure of a benchmark: sizes, speed-ups and scores of model folders, from plain data."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ds_trainer.report import drawing
from ds_trainer.report.drawing import LEGEND, colours, dress, label

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MIB = 2**20


@dataclass(frozen=True)
class MeasuredModel:
    """A model folder, run to its end or with early exits."""

    name: str
    bytes: int
    """Size on disk."""
    kept: float
    """Encoder weights that are present and not 0, as a share of the base's encoder weights."""
    score: float | None
    speed_ups: Mapping[str, float]
    """Speed-ups relative to the base, by the case they were measured in."""


def size_speed_score(metric: str | None, models: Sequence[MeasuredModel]) -> Figure | None:
    """Draw the score over bytes and over speed-ups; without a score, the speed-ups over encoder weights kept.

    A colour is a model, a marker the case of a speed-up. None where there is nothing to compare.
    """
    models = [model for model in models if model.speed_ups]
    scored = [model for model in models if model.score is not None and math.isfinite(model.score)]
    if metric is None or not scored:
        return _speed_by_size(models)
    if len(scored) < 2:
        return None
    figure = drawing.new_figure(900, _height(scored), f"{metric} against size and speed")
    left, right = drawing.add_panels(figure, 1, 2, sharey=True)
    scores = [model.score for model in scored if model.score is not None]
    for colour, model, score in zip(colours(scored), scored, scores, strict=True):
        left.plot(model.bytes / _MIB, score, "o", color=colour, markersize=9)
    _draw_speed_ups(right, scored, lambda model, speed_up: (speed_up, model.score))
    dress(left, "size on disk (MiB)", drawing.score_name(metric))
    dress(right, "measured speed-up", "")
    left.set_xlim(0, 1.08 * max(model.bytes for model in scored) / _MIB)
    right.axvline(1, color="0.6", linewidth=1, zorder=0)
    drawing.limit_scores(left, scores)
    return figure


def _speed_by_size(models: Sequence[MeasuredModel]) -> Figure | None:
    if len(models) < 2:
        return None
    figure, axes = drawing.one_panel(800, _height(models), "speed-up against size")
    _draw_speed_ups(axes, models, lambda model, speed_up: (100 * model.kept, speed_up))
    axes.axhline(1, color="0.6", linewidth=1, zorder=0)
    axes.set_xlim(0, 105 * (max(model.kept for model in models) or 1))
    axes.set_ylim(0, 1.1 * max(speed_up for model in models for speed_up in model.speed_ups.values()))
    dress(axes, "encoder weights kept (%)", "measured speed-up")
    return figure


def _draw_speed_ups(
    axes: Axes, models: Sequence[MeasuredModel], point: Callable[[MeasuredModel, float], tuple[Any, Any]]
) -> None:
    """Draw the point of each model's speed-up in each case; the legend lists the models, then the cases."""
    cases = _cases(models)
    markers = dict(zip(cases, drawing.markers(cases), strict=True))
    for colour, model in zip(colours(models), models, strict=True):
        axes.plot([], [], "o", color=colour, label=label(model.name))
        for case, speed_up in model.speed_ups.items():
            axes.plot(*point(model, speed_up), markers[case], color=colour, markersize=9, mec="white")
    for case, marker in markers.items():
        axes.plot([], [], marker, color="0.35", label=label(case))
    axes.legend(**LEGEND)


def _cases(models: Sequence[MeasuredModel]) -> list[str]:
    return list(dict.fromkeys(case for model in models for case in model.speed_ups))


def _height(models: Sequence[MeasuredModel]) -> int:
    """Return the height in pixels that leaves room for the legend."""
    return max(420, 80 + 21 * (len(models) + len(_cases(models))))
