"""The figure of a benchmark: sizes, speed-ups and scores of model folders, from plain data."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ds_trainer.report.figure import Figure
from ds_trainer.report.plots import COLOURS, LOWER_IS_BETTER, MARKERS, dress, label, title

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MIB = 2**20


@dataclass(frozen=True)
class Point:
    """A model folder, or one that exits early."""

    name: str
    bytes: int
    """On disk."""
    kept: float
    """Share of the base's encoder weights that are there and not 0."""
    score: float | None
    speed_ups: Mapping[str, float]
    """To the base, by what they were measured at."""


def size_speed_score(metric: str | None, points: Sequence[Point]) -> Figure | None:
    """The score over bytes and over speed-ups; without a score, the speed-ups over encoder weights kept.

    A colour is a folder, a marker what a speed-up was measured at. None where nothing is there to compare.
    """
    points = [point for point in points if point.speed_ups]
    scored = [(point, point.score) for point in points if point.score is not None and math.isfinite(point.score)]
    if metric is None or not scored:
        return _speed_by_size(points)
    if len(scored) < 2:
        return None
    points = [point for point, _ in scored]
    markers = _markers(points)
    figure = Figure(900, _height(points, markers))
    left, right = figure.panels(1, 2, sharey=True)
    for colour, (point, score) in zip(_colours(points), scored, strict=True):
        left.plot(point.bytes / _MIB, score, "o", color=colour, markersize=9)
        for setting, speed_up in point.speed_ups.items():
            right.plot(speed_up, score, markers[setting], color=colour, markersize=9, mec="white")
    lower = metric.rpartition("/")[2] in LOWER_IS_BETTER
    dress(left, "size on disk (MiB)", f"{metric} (less is better)" if lower else metric)
    dress(right, "measured speed-up", "")
    left.set_xlim(0, 1.08 * max(point.bytes for point in points) / _MIB)
    right.axvline(1, color="0.6", linewidth=1, zorder=0)
    _room(left, [score for _, score in scored])
    _legends(right, points, markers)
    title(figure, f"{metric} against size and speed")
    return figure


def _speed_by_size(points: Sequence[Point]) -> Figure | None:
    if len(points) < 2:
        return None
    markers = _markers(points)
    figure = Figure(800, _height(points, markers))
    (axes,) = figure.panels()
    for colour, point in zip(_colours(points), points, strict=True):
        for setting, speed_up in point.speed_ups.items():
            axes.plot(100 * point.kept, speed_up, markers[setting], color=colour, markersize=9, mec="white")
    axes.axhline(1, color="0.6", linewidth=1, zorder=0)
    axes.set_xlim(0, 105 * (max(point.kept for point in points) or 1))
    axes.set_ylim(0, 1.1 * max(speed_up for point in points for speed_up in point.speed_ups.values()))
    dress(axes, "encoder weights kept (%)", "measured speed-up")
    _legends(axes, points, markers)
    title(figure, "speed-up against size")
    return figure


def _markers(points: Sequence[Point]) -> dict[str, str]:
    """One for each setting; they come again after the eighth."""
    settings = dict.fromkeys(setting for point in points for setting in point.speed_ups)
    return {setting: MARKERS[place % len(MARKERS)] for place, setting in enumerate(settings)}


def _height(points: Sequence[Point], markers: Mapping[str, str]) -> int:
    """In pixels; the legend has room."""
    return max(420, 80 + 21 * (len(points) + len(markers)))


def _colours(points: Sequence[Point]) -> list[str]:
    return [COLOURS[place % len(COLOURS)] for place in range(len(points))]


def _room(axes: Axes, scores: Sequence[float]) -> None:
    """Up are at least 2 points, or 2 % of a score above 1, so that noise does not look like a result."""
    middle, span = (max(scores) + min(scores)) / 2, max(scores) - min(scores)
    half = max(1.3 * span, 0.02 * max(1, *map(abs, scores))) / 2
    axes.set_ylim(middle - half, middle + half)


def _legends(axes: Axes, points: Sequence[Point], markers: Mapping[str, str]) -> None:
    """Right of the panel: the folders by their colours, then the settings by their markers."""
    from matplotlib.lines import Line2D

    of_folders = [
        Line2D([], [], color=colour, marker="o", linestyle="", label=label(point.name))
        for colour, point in zip(_colours(points), points, strict=True)
    ]
    of_settings = [
        Line2D([], [], color="0.35", marker=marker, linestyle="", label=label(setting))
        for setting, marker in markers.items()
    ]
    place: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (1.01, 1), "borderaxespad": 0}
    axes.legend(handles=[*of_folders, *of_settings], frameon=False, fontsize=9, **place)
