"""The figure of a benchmark shows each folder at its size, speed-ups and score."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from ds_trainer.report.size_plots import MeasuredModel, size_speed_score

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CASES = [f"{backend}, batch {size}" for backend in ("torch", "onnxruntime") for size in (1, 32)]
MODELS = [
    MeasuredModel("dense", 80 << 20, 1.0, 0.91, dict.fromkeys(CASES, 1.0)),
    MeasuredModel("half", 60 << 20, 0.5, 0.90, dict(zip(CASES, (1.6, 1.8, 1.7, 1.9), strict=True))),
    MeasuredModel(
        "a_folder_with_a_$rather^_long_name", 50 << 20, 0.25, 0.88, dict(zip(CASES, (2, 3, 2.5, 3.5), strict=True))
    ),
]


def drawn(figure: Figure | None, panel: int = 0) -> list[tuple[float, float]]:
    """The points of a panel, without its line at 1 and the entries of the legend."""
    assert figure is not None
    lines: Any = figure.axes[panel].get_lines()
    points = [line for line in lines if line.get_marker() != "None" and len(line.get_xdata())]
    return [(line.get_xdata()[0], line.get_ydata()[0]) for line in points]


def test_scores_stand_over_bytes_and_speed_ups() -> None:
    """A point for each folder on the left, for each folder and setting on the right; the legend names both."""
    figure = size_speed_score("accuracy", MODELS)
    assert drawn(figure) == [(80, 0.91), (60, 0.90), (50, 0.88)]
    assert drawn(figure, 1) == [(s, point.score) for point in MODELS for s in point.speed_ups.values()]
    assert figure is not None
    legend = figure.axes[1].get_legend()
    assert legend is not None
    named = [text.get_text() for text in legend.get_texts()]
    assert named[:2] + named[3:] == ["dense", "half", *CASES]


def test_without_a_score_speed_ups_stand_over_sizes() -> None:
    """Also where the scores are not finite."""
    for score in (None, math.nan):
        figure = size_speed_score("f1", [replace(point, score=score) for point in MODELS])
        assert drawn(figure) == [(100 * point.kept, s) for point in MODELS for s in point.speed_ups.values()]
    assert drawn(size_speed_score(None, MODELS)) == drawn(figure)


def test_nothing_is_drawn_of_what_cannot_be_compared() -> None:
    """One folder, or one that has been measured."""
    unmeasured = replace(MODELS[1], speed_ups={})
    for metric in ("accuracy", None):
        assert size_speed_score(metric, []) is None
        assert size_speed_score(metric, MODELS[:1]) is None
        assert size_speed_score(metric, [MODELS[0], unmeasured]) is None


@pytest.mark.parametrize("metric", ["accuracy", None])
def test_legends_cover_no_data_and_nothing_is_cut_off(metric: str | None) -> None:
    """At its own size, with many folders and settings."""
    more = {f"compile, cuda, batch {size}": 2.0 for size in range(6)}
    many = [replace(MODELS[2], name=f"{MODELS[2].name} {n}", speed_ups=MODELS[2].speed_ups | more) for n in range(6)]
    figure = size_speed_score(metric, [*MODELS, *many])
    assert figure is not None
    figure.draw_without_rendering()
    whole = figure.bbox
    for axes in figure.axes:
        boxes = [text.get_window_extent() for text in (axes.xaxis.label, axes.yaxis.label) if text.get_text()]
        legend = axes.get_legend()
        if legend is not None:
            boxes.append(legend.get_window_extent())
            assert not any(boxes[-1].overlaps(panel.get_window_extent()) for panel in figure.axes)
        for box in boxes:
            assert min(box.x0, box.y0) >= -1
            assert box.x1 <= whole.x1 + 1
            assert box.y1 <= whole.y1 + 1


def test_less_is_better_is_said() -> None:
    """Of a perplexity; noise is not drawn as a result."""
    near = [replace(point, score=0.9 + place / 1000) for place, point in enumerate(MODELS)]
    figure = size_speed_score("perplexity", near)
    assert figure is not None
    axes = figure.axes[0]
    assert axes.get_ylabel() == "perplexity (less is better)"
    low, high = axes.get_ylim()
    assert high - low == pytest.approx(0.02)
