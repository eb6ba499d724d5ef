"""The figures show the data in the run's files, and cover none of them."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from PIL import Image
from support.launching import run_python
from support.report_runs import NAMES, parts, pruned_bert, record, synthetic_exits, taught, write_model

from ds_trainer.report import figures
from ds_trainer.report.figures import new_figure, pixels, save

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def every_figure(folder: Path) -> dict[str, Figure | None]:
    """Each kind of figure, with as many entries as it is likely to have."""
    counts, deep = pruned_bert(folder / "model"), pruned_bert(folder / "deep", 24, 16)
    layers = {f"prune/density/layer.{i}.{name}": i / 24 for i in range(24) for name in ("query", "output.dense")}
    costs = [{"encoder weights kept": 10**6 * i, "milliseconds, batch 32": 50.0 / i} for i in range(1, 10)]
    long = {f"a_phase_with_a_rather_long_name_{i}": (0.9 - i / 100, cost) for i, cost in enumerate(costs)}
    return {
        "loss": figures.losses("taught", taught()),
        "long_names": figures.losses("a" * 64, [{**row, f"train/lr/*.{'b' * 64}.*": 1e-3} for row in taught()]),
        "density": figures.densities("taught", taught(), counts),
        "density_deep": figures.densities(
            "a", [record(1, prune__density=0.5) | layers, record(2, prune__density=0.4)], {}
        ),
        "kept": figures.kept_weights("taught", counts, folder / "model"),
        "kept_deep": figures.kept_weights("a" * 64, deep, folder / "deep"),
        "cut": figures.cut_parts("quarter", parts()),
        "score": figures.score_by_cost("accuracy", long),
        "agreement": figures.agreement("taught", taught(), 0.93),
        **{f"exits{n}": figures.exit_curves("exits", "validation", synthetic_exits(n)) for n in (12, 24)},
        **{f"histogram{n}": figures.exit_histogram("exits", "validation", synthetic_exits(n)) for n in (12, 24)},
    }


def lines(figure: Figure | None, panel: int = 0) -> dict[str, Any]:
    assert figure is not None
    return {str(line.get_label()): line for line in figure.axes[panel].get_lines()}


def grids(figure: Figure | None) -> dict[str, list[Any]]:
    assert figure is not None
    return {
        axes.get_title(): np.ma.filled(axes.images[0].get_array(), -1).tolist()
        for axes in figure.axes
        if axes.get_title()
    }


def test_text_covers_no_data_and_no_other_text(tmp_path):
    """At the size on the page a legend lies beside its panel, all text lies inside the picture and apart, and a legend
    of long names takes less than half of the width."""
    for name, figure in every_figure(tmp_path).items():
        assert figure is not None
        figure.draw_without_rendering()
        whole, titles = figure.bbox, [axes.title.get_window_extent() for axes in figure.axes if axes.get_title()]
        boxes = [figure._suptitle.get_window_extent(), *titles]
        for axes in figure.axes:
            boxes += [label.get_window_extent() for label in (axes.xaxis.label, axes.yaxis.label) if label.get_text()]
            if legend := axes.get_legend():
                boxes.append(legend.get_window_extent())
                assert not any(boxes[-1].overlaps(panel.get_window_extent()) for panel in figure.axes), name
                assert axes.get_window_extent().width > 0.5 * whole.width, name
            for ticks in (axes.get_xticklabels(), axes.get_yticklabels(), axes.texts):
                shown = [text.get_window_extent() for text in ticks if text.get_text() and text.get_visible()]
                assert not any(a.overlaps(b) for i, a in enumerate(shown) for b in shown[:i]), name
        assert not any(a.overlaps(b) for i, a in enumerate(titles) for b in titles[:i]), name
        for box in boxes:
            assert min(box.x0, box.y0) >= -1, name
            assert box.x1 <= whole.x1 + 1, name
            assert box.y1 <= whole.y1 + 1, name


def test_nothing_is_drawn_of_what_is_not_there():
    """None, not an empty figure: no log, no pruning, no teacher, one phase, nobody left, nothing cut."""
    bare = [record(1, train__loss=None), record(2, train__loss=None)]
    assert figures.losses("a", []) is None
    assert figures.losses("a", bare) is None
    assert figures.densities("a", bare, {}) is None
    assert figures.agreement("a", bare, 0.9) is None
    assert figures.kept_weights("a", {}, Path("gone")) is None
    assert figures.cut_parts("a", []) is None
    for b in ((math.nan, {"weights": 9}), (0.6, {"weights": 10}), (0.6, {})):
        assert figures.score_by_cost("f1", {"a": (0.5, {"weights": 10}), "b": b}) is None
    exits = synthetic_exits()
    exits["splits"]["validation"]["early_exit"]["exit_counts"] = {}
    assert figures.exit_histogram("a", "validation", exits) is None


def test_the_weighted_terms_add_up_to_the_loss():
    """Dashed lines are weight times term; a single term of weight 1 is not drawn twice, and a gap stays a gap."""
    drawn = lines(figures.losses("taught", taught()))
    total = drawn["0.5 × task"].get_ydata() + drawn["2 × distill.logits"].get_ydata()
    assert np.allclose(total, drawn["loss"].get_ydata())
    rows = [
        record(step, train__loss=value, **{"train/term/task": 1.0, "train/weight/task": 1.0})
        for step, value in ((1, 3.0), (2, None), (3, 1.0))
    ]
    alone = lines(figures.losses("a", rows))
    assert list(alone) == ["loss"]
    assert np.array_equal(alone["loss"].get_ydata(), [3, np.nan, 1], equal_nan=True)
    rows = [row | {"train/term/heads": 9.0, "train/weight/heads": 0.0, "train/loss": 1.0} for row in rows]
    assert list(lines(figures.losses("a", rows))) == ["loss", "1 × task"], "a weight of 0 is no part of the loss"


def test_rates_that_are_far_apart_are_drawn_by_their_logarithms():
    """So that a rate of 1e-4 can be read beside one of 1e-2; a rate of 0 does not drag the axis down."""
    figure = figures.losses("a", [*taught(), record(21, **{"train/loss": 1.0, "train/lr/weights": 0.0})])
    assert set(lines(figure, 1)) == {"weights", "*.mask_scores"}
    assert figure.axes[1].get_yscale() == "log"
    pixels(figure)
    assert figure.axes[1].get_ylim()[0] > 1e-7
    near = figures.losses("a", [record(s, train__loss=1.0, **{"train/lr/weights": 1e-4 / s}) for s in (1, 2)])
    assert near.axes[1].get_yscale() == "linear"


def test_densities_are_grouped_by_layer_and_by_kind():
    """3 layers and 6 kinds of 18 matrices, each mean by the sizes of its matrices."""
    counts = {name: {"kept": 1, "total": 3 if "query" in name else 1} for name in NAMES}
    figure = figures.densities("taught", taught(), counts)
    by_layer, by_kind = lines(figure), lines(figure, 1)
    assert set(by_layer) == {"layer 1", "layer 2", "layer 3", "all"}
    assert set(by_kind) == {"query", "key", "value", "output", "ff in", "ff out", "all"}
    last = [taught()[-1][f"prune/density/{name}"] for name in NAMES[:6]]
    assert by_layer["layer 1"].get_ydata()[-1] == pytest.approx(100 * (3 * last[0] + sum(last[1:])) / 8)


def test_kept_weights_have_a_cell_for_each_head(tmp_path):
    """Heads are rows of the query and columns of the output; DistilBERT has names and a config that differ.

    A head that a layer has lost is grey (-1 here), rather than 0. The weights of a folder must be those counted.
    """
    counts = pruned_bert(tmp_path / "model")
    drawn = grids(figures.kept_weights("pruned", counts, tmp_path / "model"))
    assert list(drawn) == ["query", "key", "value", "output", "ff\nin", "ff\nout"]
    assert drawn["query"] == [[100, 0, 100, 100], [100] * 4, [100] * 4]
    assert drawn["output"] == [[100, 100, 100, 0], [100] * 4, [100] * 4]
    assert drawn["ff\nin"] == [[50], [100], [100]]
    names = ("q_lin", "k_lin", "v_lin")
    weights = {f"distilbert.transformer.layer.0.attention.{n}": np.ones((8, 8), np.float32) for n in names}
    weights |= {f"distilbert.transformer.layer.1.attention.{n}": np.ones((4, 8), np.float32) for n in names}
    weights["distilbert.transformer.layer.0.ffn.lin1"] = np.eye(8, dtype=np.float32)
    distil = write_model(tmp_path / "distil", {"dim": 8, "n_heads": 4}, weights)
    drawn = grids(figures.kept_weights("pruned", distil, tmp_path / "distil"))
    assert drawn["query"] == [[100] * 4, [100, 100, -1, -1]]
    assert drawn["ff\nin"][0] == [12.5]
    counts["bert.encoder.layer.7.attention.self.query"] = {"kept": 1, "total": 2}
    with pytest.raises(ValueError, match=r"has no weight bert.encoder.layer.7.attention.self.query.weight"):
        figures.kept_weights("a", counts, tmp_path / "model")


def test_what_was_cut_out_is_counted_from_before():
    """A cell for each matrix: remaining weights do not show which heads they were; an empty block has lost all.

    So has an unknown family, whose model is not even opened.
    """
    before = dict.fromkeys(NAMES, 64)
    counts = {name: {"kept": 16, "total": 16} for name in NAMES if "layer.1.attention" not in name}
    drawn = grids(figures.kept_weights("cut", counts, Path("gone"), before))
    assert drawn["query"] == drawn["output"] == [[25], [0], [25]]
    assert drawn["ff\nin"] == [[25]] * 3
    counts = {f"model.layers.{i}.{n}": {"kept": i, "total": 2} for i in range(3) for n in ("attn.Wqkv", "mlp.Wo")}
    cells = [[0], [50], [100]]
    assert grids(figures.kept_weights("a", counts, Path("gone"))) == {"attn\nWqkv": cells, "mlp\nWo": cells}


def test_a_cut_is_drawn_by_layer():
    """A line for each kind of block, at 100% where one was left whole, above the errors of the outputs."""
    figure = figures.cut_parts("quarter", parts())
    kept = {name: list(line.get_ydata()) for name, line in lines(figure).items()}
    assert kept == {"heads (of 12)": [50, 25, 50], "neurons (of 1,536)": [50, 25, 100]}
    assert [list(line.get_ydata()) for line in figure.axes[1].get_lines()] == [[0, 10, 20], [0, 10, 0]]


def test_models_stand_at_their_costs_and_score():
    """A panel for each cost that differs, weights in M, milliseconds as they are; the legend names each model.

    A tenth of a point fills a small part of the panel; the axis of a perplexity notes that less is better.
    """
    weights, ms = "encoder weights kept", "milliseconds, batch 32"
    models = {"dense": (0.9, {weights: 10_000_000, ms: 50.0}), "pruned": (0.8, {weights: 1_500_000, ms: 12.5})}
    figure = figures.score_by_cost("f1", models | {"leaving early": (0.7, {ms: 6.0})})
    left, right = ({name: line.get_xydata().tolist() for name, line in lines(figure, n).items()} for n in (0, 1))
    assert left == {"dense": [[10_000_000, 0.9]], "pruned": [[1_500_000, 0.8]], "leaving early": []}
    assert right == {"dense": [[50, 0.9]], "pruned": [[12.5, 0.8]], "leaving early": [[6, 0.7]]}
    assert [axes.get_xlabel() for axes in figure.axes] == [weights, ms]
    assert figure.axes[0].xaxis.get_major_formatter()(1_500_000) == "1.5M"
    assert len(figure.axes[0].get_legend().get_texts()) == 3
    alike = {name: (score, costs | {weights: 7}) for name, (score, costs) in models.items()}
    assert [axes.get_xlabel() for axes in figures.score_by_cost("f1", alike).axes] == [ms]
    for metric, scores, span in (("f1", (0.9, 0.899), 0.02), ("perplexity", (20.0, 30.0), 13)):
        near = figures.score_by_cost(metric, {str(score): (score, {weights: score}) for score in scores})
        low, high = near.axes[0].get_ylim()
        assert high - low == pytest.approx(span)
        assert low < min(scores) < max(scores) < high
        assert near.axes[0].get_ylabel() == metric + " (less is better)" * (metric == "perplexity")


def test_the_final_agreement_stands_at_the_last_step():
    drawn = lines(figures.agreement("taught", taught(), 0.93))
    assert drawn["validation: 93.0 %"].get_xdata()[0] == 20
    assert drawn["training batches"].get_ydata()[0] == 50


def test_exits_stand_at_the_expected_speed_up():
    """Layers over mean layers for curves and policy, layers over its number for a head; what is not finite is left out.

    The histogram has a bar for each layer, also where nobody leaves, and says how many samples there are.
    """
    exits = synthetic_exits(6)
    split = exits["splits"]["validation"]
    drawn = lines(figures.exit_curves("exits", "validation", exits))
    assert set(drawn) == {"entropy", "confidence", "patience", "one head for all samples", "chosen: entropy 0.2"}
    assert np.allclose(drawn["one head for all samples"].get_xdata(), [6 / n for n in range(6, 0, -1)])
    assert drawn["chosen: entropy 0.2"].get_xdata()[0] == pytest.approx(1 / 0.6)
    assert max(drawn["entropy"].get_xdata()) == pytest.approx(6 / 1.5)
    split["heads"]["1"]["accuracy"], split["heads"]["2"]["accuracy"] = None, math.nan
    for policy, name in (
        ({"criterion": "patience", "patience": 3}, "chosen: patience 3"),
        ({"criterion": "entropy", "thresholds": [0.1, 0.2]}, "chosen: entropy by layer"),
    ):
        drawn = lines(figures.exit_curves("exits", "validation", exits | {"policy": policy}))
        assert name in drawn
        assert np.allclose(drawn["one head for all samples"].get_xdata(), [6 / n for n in range(6, 2, -1)])
    split["early_exit"]["exit_counts"] = {"1": 5, "4": 15}
    (axes, *_) = figures.exit_histogram("exits", "validation", exits).axes
    assert [bar.get_height() for bar in axes.patches] == [25, 0, 0, 75, 0, 0]
    assert axes.texts[0].get_text() == "25 %"
    assert axes.get_ylabel() == "share of 20 samples (%)"


def test_names_are_drawn_as_they_are_written():
    """A dollar starts no formula, a leading underscore hides no line, long names differ in their ends."""
    rows = [record(step, train__loss=1.0, **{"train/lr/$x^$": 1e-4, "train/lr/_hidden": 1e-5}) for step in (1, 2)]
    figure = figures.losses("$\\frac$", rows)
    pixels(figure)
    assert len(figure.axes[1].get_legend().get_texts()) == 2
    long = figures.score_by_cost("f1", {f"{'x' * 60}_{number}": (0.5, {"weights": number}) for number in (1, 2)})
    assert [label[-3:] for label in lines(long)] == ["x_1", "x_2"]


def test_files_hold_what_is_drawn_at_the_requested_size(tmp_path):
    """Whatever rounding Matplotlib does in inches; red is red, an SVG has shapes, and no other file remains."""
    figure, (axes,) = new_figure(333, 111, "")
    figure.set_layout_engine("none")
    axes.set_position((0, 0, 1, 1))
    axes.set_axis_off()
    axes.axhspan(0.25, 0.75, color="red", linewidth=0)
    save(figure, tmp_path / "figure.png")
    save(figure, tmp_path / "figure.svg")
    image = Image.open(tmp_path / "figure.png").convert("RGB")
    assert (image.size, pixels(figure).shape, pixels(figure).dtype) == ((333, 111), (111, 333, 3), np.uint8)
    assert np.array_equal(np.asarray(image), pixels(figure))
    assert image.getpixel((100, 50)) == (255, 0, 0)
    assert "#ff0000" in (tmp_path / "figure.svg").read_text()
    assert len([*tmp_path.iterdir()]) == 2


def test_matplotlib_is_optional_and_pyplot_never_loaded(monkeypatch):
    """Importing the modules loads no drawing library; without it there is an error with the way out."""
    code = (
        "import sys; from ds_trainer.report import figures, page\n"
        "print({'matplotlib', 'markdown_it'} & set(sys.modules))\n"
        "figures.pixels(figures.new_figure(80, 40, 'a')[0]); print('matplotlib.pyplot' in sys.modules)"
    )
    done = run_python("-c", code)
    assert done.stdout.split() == ["set()", "False"], done.stderr
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ValueError, match="pip install matplotlib"):
        new_figure(80, 40, "")
