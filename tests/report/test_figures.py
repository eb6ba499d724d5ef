"""The figures show the data in the run's files, and cover none of them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from support.report_runs import NAMES, parts, record, synthetic_exits, taught

from ds_trainer.report import figures

if TYPE_CHECKING:
    from matplotlib.figure import Figure


RECONSTRUCTION = [{"name": f"layer.{i}", "before": 0.1 + i / 10, "after": 0.05, "seconds": 4.0} for i in range(3)]


def every_figure() -> dict[str, Figure | None]:
    """Each kind of figure, with as many entries as it is likely to have."""
    layers = {f"prune/density/layer.{i}.{name}": i / 24 for i in range(24) for name in ("query", "output.dense")}
    return {
        "loss": figures.losses("taught", taught()),
        "long_names": figures.losses("a" * 64, [{**row, f"train/lr/*.{'b' * 64}.*": 1e-3} for row in taught()]),
        "readings": figures.readings("taught", taught()),
        "readings_deep": figures.readings("a", [record(n, prune__density=1 / n) | layers for n in (1, 2)]),
        "cut": figures.cut_parts("quarter", parts(), RECONSTRUCTION),
        **{f"exits{n}": figures.exit_curves("exits", "validation", synthetic_exits(n)) for n in (12, 24)},
        "histogram": figures.exit_histogram("exits", "validation", synthetic_exits(24)),
    }


def lines(figure: Figure | None, panel: int = 0) -> dict[str, Any]:
    assert figure is not None
    return {str(line.get_label()): line for line in figure.axes[panel].get_lines()}


def test_text_covers_no_data_and_no_other_text():
    """At the size on the page a legend lies beside its panel, all text lies inside the picture, and a legend of long
    names takes less than half of the width."""
    for name, figure in every_figure().items():
        assert figure is not None
        figure.draw_without_rendering()
        whole, boxes = figure.bbox, [figure._suptitle.get_window_extent()]
        for axes in figure.axes:
            boxes += [label.get_window_extent() for label in (axes.xaxis.label, axes.yaxis.label) if label.get_text()]
            if legend := axes.get_legend():
                boxes.append(legend.get_window_extent())
                assert not any(boxes[-1].overlaps(panel.get_window_extent()) for panel in figure.axes), name
                assert axes.get_window_extent().width > 0.5 * whole.width, name
        for box in boxes:
            assert min(box.x0, box.y0) >= -1, name
            assert box.x1 <= whole.x1 + 1, name
            assert box.y1 <= whole.y1 + 1, name


def test_nothing_is_drawn_of_what_is_not_there():
    """None, not an empty figure: no log, no techniques, one phase, nobody left, nothing cut."""
    bare = [record(1, train__loss=None), record(2, train__loss=None)]
    assert figures.losses("a", []) is None
    assert figures.losses("a", bare) is None
    assert figures.readings("a", [*bare, record(3, eval__accuracy=0.5) | {"memory/resident/rank0": 1}]) is None
    assert figures.cut_parts("a", [], []) is None
    exits = synthetic_exits()
    exits["splits"]["validation"]["early_exit"]["exit_counts"] = {}
    assert figures.exit_histogram("a", "validation", exits) is None


def test_the_weighted_terms_add_up_to_the_loss():
    """Dashed lines are weight times term, none for a weight of 0; a gap stays a gap."""
    drawn = lines(figures.losses("taught", taught()))
    total = drawn["0.5 × task"].get_ydata() + drawn["2 × distill.logits"].get_ydata()
    assert np.allclose(total, drawn["loss"].get_ydata())
    rows = [
        record(step, train__loss=value, **{"train/term/heads": 9.0, "train/weight/heads": 0.0})
        for step, value in ((1, 3.0), (2, None), (3, 1.0))
    ]
    alone = lines(figures.losses("a", rows))
    assert list(alone) == ["loss"]
    assert np.array_equal(alone["loss"].get_ydata(), [3, np.nan, 1], equal_nan=True)


def test_rates_that_are_far_apart_are_drawn_by_their_logarithms():
    """So that a rate of 1e-4 can be read beside one of 1e-2; a rate of 0 does not drag the axis down."""
    figure = figures.losses("a", [*taught(), record(21, **{"train/loss": 1.0, "train/lr/weights": 0.0})])
    assert set(lines(figure, 1)) == {"weights", "*.mask_scores"}
    assert figure.axes[1].get_yscale() == "log"
    assert figure.axes[1].get_ylim()[0] > 1e-7
    near = figures.losses("a", [record(s, train__loss=1.0, **{"train/lr/weights": 1e-4 / s}) for s in (1, 2)])
    assert near.axes[1].get_yscale() == "linear"


def test_readings_have_a_panel_each_and_a_line_for_each_layer():
    """Of any technique, whatever it reads: its own value, and the means of the matrices of a layer."""
    figure = figures.readings("taught", taught())
    assert [axes.get_ylabel() for axes in figure.axes] == ["prune/density", "plugin/share"]
    by_layer = lines(figure)
    assert set(by_layer) == {"layer 0", "layer 1", "layer 2", "all"}
    last = [taught()[-1][f"prune/density/{name}"] for name in NAMES[:6]]
    assert by_layer["layer 0"].get_ydata()[-1] == pytest.approx(np.mean(last))
    assert by_layer["all"].get_ydata()[-1] == pytest.approx(0.4)
    (share,) = figure.axes[1].get_lines()
    assert share.get_ydata()[-1] == taught()[-1]["plugin/share"]


def test_a_cut_is_drawn_by_layer():
    """A line for each kind of block, at 100% where one was left whole, above the errors of outputs and whole layers."""
    figure = figures.cut_parts("quarter", parts(), RECONSTRUCTION)
    kept = {name: list(line.get_ydata()) for name, line in lines(figure).items()}
    assert kept == {"heads (of 12)": [50, 25, 50], "neurons (of 1,536)": [50, 25, 100]}
    below = [list(line.get_ydata()) for line in figure.axes[1].get_lines()]
    assert np.allclose(below, [[0, 10, 20], [0, 10, 0], [10, 20, 30], [5, 5, 5]])


def test_exits_stand_at_the_expected_speed_up():
    """Layers over mean layers for curves and policy, layers over its number for a head; what is not finite is left out.

    The histogram has a bar for each layer, also where nobody leaves, and says how many samples there are.
    """
    exits = synthetic_exits(6)
    split = exits["splits"]["validation"]
    drawn = lines(figures.exit_curves("exits", "validation", exits))
    assert set(drawn) == {"entropy", "confidence", "patience", "one head for all samples", "chosen: entropy"}
    assert np.allclose(drawn["one head for all samples"].get_xdata(), [6 / n for n in range(6, 0, -1)])
    assert drawn["chosen: entropy"].get_xdata()[0] == pytest.approx(1 / 0.6)
    assert max(drawn["entropy"].get_xdata()) == pytest.approx(6 / 1.5)
    split["heads"]["1"]["accuracy"], split["heads"]["2"]["accuracy"] = None, math.nan
    drawn = lines(figures.exit_curves("exits", "validation", exits))
    assert np.allclose(drawn["one head for all samples"].get_xdata(), [6 / n for n in range(6, 2, -1)])
    split["early_exit"]["exit_counts"] = {"1": 5, "4": 15}
    (axes, *_) = figures.exit_histogram("exits", "validation", exits).axes
    assert [bar.get_height() for bar in axes.patches] == [25, 0, 0, 75, 0, 0]
    assert axes.get_ylabel() == "share of 20 samples (%)"


def test_names_are_drawn_as_they_are_written():
    """A dollar starts no formula, a leading underscore hides no line, long names differ in their ends."""
    rows = [record(step, train__loss=1.0, **{"train/lr/$x^$": 1e-4, "train/lr/_hidden": 1e-5}) for step in (1, 2)]
    figure = figures.losses("$\\frac$", rows)
    figure.draw_without_rendering()
    assert len(figure.axes[1].get_legend().get_texts()) == 2
    long = [record(1, train__loss=1.0, **{f"train/lr/{'x' * 60}_{number}": 1e-4 for number in (1, 2)})]
    assert [label[-3:] for label in lines(figures.losses("a", long), 1)] == ["x_1", "x_2"]
