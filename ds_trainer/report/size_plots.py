"""The figure of a benchmark: sizes, speed-ups and scores of model folders, from plain data."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

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
        for case, speed_up in model.speed_ups.items():
            right.plot(speed_up, score, _case_markers(scored)[case], color=colour, markersize=9, mec="white")
    dress(left, "size on disk (MiB)", drawing.score_name(metric))
    dress(right, "measured speed-up", "")
    left.set_xlim(0, 1.08 * max(model.bytes for model in scored) / _MIB)
    right.axvline(1, color="0.6", linewidth=1, zorder=0)
    drawing.limit_scores(left, scores)
    _legend(right, scored)
    return figure


def _speed_by_size(models: Sequence[MeasuredModel]) -> Figure | None:
    if len(models) < 2:
        return None
    figure, axes = drawing.one_panel(800, _height(models), "speed-up against size")
    for colour, model in zip(colours(models), models, strict=True):
        for case, speed_up in model.speed_ups.items():
            axes.plot(100 * model.kept, speed_up, _case_markers(models)[case], color=colour, markersize=9, mec="white")
    axes.axhline(1, color="0.6", linewidth=1, zorder=0)
    axes.set_xlim(0, 105 * (max(model.kept for model in models) or 1))
    axes.set_ylim(0, 1.1 * max(speed_up for model in models for speed_up in model.speed_ups.values()))
    dress(axes, "encoder weights kept (%)", "measured speed-up")
    _legend(axes, models)
    return figure


def _case_markers(models: Sequence[MeasuredModel]) -> dict[str, str]:
    """Return a marker for each case that something was measured in."""
    cases = dict.fromkeys(case for model in models for case in model.speed_ups)
    return dict(zip(cases, drawing.markers(cases), strict=True))


def _height(models: Sequence[MeasuredModel]) -> int:
    """Return the height in pixels that leaves room for the legend."""
    return max(420, 80 + 21 * (len(models) + len(_case_markers(models))))


def _legend(axes: Axes, models: Sequence[MeasuredModel]) -> None:
    """List the models by their colours, then the cases by their markers."""
    from matplotlib.lines import Line2D

    entries = [(model.name, colour, "o") for model, colour in zip(models, colours(models), strict=True)]
    entries += [(case, "0.35", marker) for case, marker in _case_markers(models).items()]
    lines = [
        Line2D([], [], color=colour, marker=marker, linestyle="", label=label(name)) for name, colour, marker in entries
    ]
    axes.legend(handles=lines, **LEGEND)
