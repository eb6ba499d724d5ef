"""The figures show the data in the run's files, and cover none of them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from ds_trainer.report.drawing import pixels
from support.run_plots import NAMES, pruned_bert, record, synthetic_exits, taught, write_model

from ds_trainer.report import plots

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def every_figure(folder: Path) -> dict[str, Figure | None]:
    """Each kind of figure, with as many entries as it is likely to have."""
    counts, deep = pruned_bert(folder / "model"), pruned_bert(folder / "deep", 24, 16)
    costs = [{"encoder weights kept": 10**6 * i, "milliseconds, batch 32": 50.0 / i} for i in range(1, 10)]
    long = {f"a_phase_with_a_rather_long_name_{i}": (0.9 - i / 100, cost) for i, cost in enumerate(costs)}
    return {
        "loss": plots.losses("taught", taught()),
        "long_names": plots.losses("a" * 64, [{**row, f"train/lr/*.{'b' * 64}.*": 1e-3} for row in taught()]),
        "density": plots.densities("taught", taught(), counts),
        "alike": plots.densities("taught", [record(s, prune__density=1 / s) for s in range(1, 5)], {}),
        "kept": plots.kept_weights("taught", counts, folder / "model"),
        "kept_deep": plots.kept_weights("a" * 64, deep, folder / "deep"),
        "score": plots.score_by_cost("accuracy", long),
        "agreement": plots.agreement("taught", taught(), 0.93),
        **{f"exits{n}": plots.exit_curves("exits", "validation", synthetic_exits(n)) for n in (12, 24)},
        **{f"histogram{n}": plots.exit_histogram("exits", "validation", synthetic_exits(n)) for n in (12, 24)},
    }


@pytest.fixture(scope="module")
def figures(tmp_path_factory) -> dict[str, Figure]:
    found = every_figure(tmp_path_factory.mktemp("model"))
    assert all(found.values())
    for figure in found.values():
        figure.draw_without_rendering()
    return found


def lines(figure: Figure, panel: int = 0) -> dict[str, Any]:
    return {str(line.get_label()): line for line in figure.axes[panel].get_lines()}


def test_legends_cover_no_data_and_nothing_is_cut_off(figures):
    """At the size on the page: a legend lies beside its panel; legends, titles and labels lie inside the picture."""
    for name, figure in figures.items():
        whole, title = figure.bbox, figure._suptitle.get_window_extent()
        assert title.x0 >= 0, name
        assert title.x1 <= whole.x1, name
        assert title.y1 <= whole.y1, name
        for axes in figure.axes:
            legend = axes.get_legend()
            boxes = [
                text.get_window_extent() for text in (axes.title, axes.xaxis.label, axes.yaxis.label) if text.get_text()
            ]
            if legend is not None:
                boxes.append(legend.get_window_extent())
                for panel in figure.axes:
                    assert not legend.get_window_extent().overlaps(panel.get_window_extent()), name
            for box in boxes:
                assert min(box.x0, box.y0) >= -1, name
                assert box.x1 <= whole.x1 + 1, name
                assert box.y1 <= whole.y1 + 1, name


def test_long_names_leave_room_for_the_data(figures):
    """A legend takes less than half of the width."""
    for name in ("long_names", "score"):
        panel = figures[name].axes[0].get_window_extent()
        assert panel.width > 0.5 * figures[name].bbox.width, name


def test_text_does_not_overlap_text(figures):
    """Tick labels, titles and the numbers of heads keep clear of their neighbours; text has 8 points or more."""
    for name, figure in figures.items():
        for axes in figure.axes:
            for ticks in (axes.get_xticklabels(), axes.get_yticklabels(), axes.texts):
                shown = [text for text in ticks if text.get_text() and text.get_visible()]
                boxes = [text.get_window_extent() for text in shown]
                assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i]), name
                assert all(text.get_fontsize() >= 8 for text in shown)
        titles = [axes.title.get_window_extent() for axes in figure.axes if axes.get_title()]
        assert not any(a.overlaps(b) for i, a in enumerate(titles) for b in titles[:i]), name


def test_nothing_is_drawn_of_what_is_not_there():
    """None, not an empty figure: no log, no pruning, no teacher, one phase, nobody left."""
    bare = [record(1, train__loss=None), record(2, train__loss=None)]
    assert plots.losses("a", []) is None
    assert plots.losses("a", bare) is None
    assert plots.densities("a", bare, {}) is None
    assert plots.agreement("a", bare, 0.9) is None
    assert plots.kept_weights("a", {}, Path("gone")) is None
    for b in ((math.nan, {"weights": 9}), (0.6, {"weights": 10}), (0.6, {})):
        assert plots.score_by_cost("f1", {"a": (0.5, {"weights": 10}), "b": b}) is None
    exits = synthetic_exits()
    exits["splits"]["validation"]["early_exit"]["exit_counts"] = {}
    assert plots.exit_histogram("a", "validation", exits) is None


def test_the_weighted_terms_add_up_to_the_loss():
    """Dashed lines are weight times term, dotted lines the unweighted term."""
    drawn = lines(plots.losses("taught", taught()))
    total = drawn["0.5 × task"].get_ydata() + drawn["2 × distill.logits"].get_ydata()
    assert np.allclose(total, drawn["loss"].get_ydata())
    assert np.allclose(drawn["task, unweighted"].get_ydata(), [1 / step for step in range(1, 21)])


def test_a_term_that_is_all_of_the_loss_does_not_hide_it():
    """Thin dashes over a thick line: both colours are in the picture."""
    rows = [
        record(
            s,
            **{"train/loss": 3 / s, "train/term/heads": 3 / s, "train/weight/heads": 1.0},
            **{"train/term/task": 1.0, "train/weight/task": 0.0},
        )
        for s in range(1, 40)
    ]
    figure = plots.losses("a", rows)
    for axes in figure.axes:
        axes.set_axis_off()
        axes.get_legend() and axes.get_legend().remove()
    figure.suptitle("")
    values = pixels(figure).reshape(-1, 3).astype(int)
    for colour in ((0, 0, 0), (0, 114, 178)):  # of the loss and of its first term
        assert (np.abs(values - colour).max(1) < 30).sum() > 200


@pytest.mark.parametrize("far", [50.0, 0.01])
def test_what_is_not_part_of_the_loss_does_not_squash_it(far):
    """A term of weight 0 far above the loss, or far below, is named; one beside it is drawn."""
    values = {"train/loss": 10.0, "train/term/heads": 10.0, "train/weight/heads": 1.0, "train/weight/task": 0.0}
    rows = [
        record(s, **values | {"train/loss": 10 + s / 10, "train/term/heads": 10 + s / 10, "train/term/task": far})
        for s in range(1, 11)
    ]
    figure = plots.losses("a", rows)
    assert "off the scale: task" in lines(figure)
    low, high = figure.axes[0].get_ylim()
    assert high - low < 3
    near = plots.losses("a", [row | {"train/term/task": 10.5} for row in rows])
    assert "task, unweighted" in lines(near)


def test_a_loss_that_is_the_task_s_is_one_line():
    """A single term of weight 1 is not drawn twice."""
    rows = [record(s, train__loss=1.0, **{"train/term/task": 1.0, "train/weight/task": 1.0}) for s in (1, 2)]
    assert list(lines(plots.losses("a", rows))) == ["loss"]


def test_a_value_that_was_not_finite_is_a_gap():
    """Its neighbours are not joined across it."""
    rows = [record(step, train__loss=value) for step, value in ((1, 3.0), (2, None), (3, 1.0))]
    assert np.array_equal(lines(plots.losses("a", rows))["loss"].get_ydata(), [3, np.nan, 1], equal_nan=True)


def test_rates_that_are_the_same_share_a_line_and_far_ones_a_logarithm():
    """So that a rate of 1e-4 can be read beside one of 1e-2; a rate of 0 does not drag the axis down."""
    figure = plots.losses(
        "a", [*taught(), record(21, **{"train/loss": 1.0, "train/lr/weights": 0.0, "train/lr/vectors": 0.0})]
    )
    assert set(lines(figure, 1)) == {"weights, vectors", "*.mask_scores"}
    assert figure.axes[1].get_yscale() == "log"
    pixels(figure)
    assert figure.axes[1].get_ylim()[0] > 1e-7
    assert not np.isfinite(figure.axes[1].transData.transform((21, 0))).all(), "0 is no point of the line"
    near = plots.losses("a", [record(s, train__loss=1.0, **{"train/lr/weights": 1e-4 / s}) for s in (1, 2)])
    assert near.axes[1].get_yscale() == "linear"


def test_densities_are_grouped_by_layer_and_by_kind():
    """3 layers and 6 kinds of 18 matrices, each mean by the sizes of its matrices."""
    counts = {name: {"kept": 1, "total": 3 if "query" in name else 1} for name in NAMES}
    figure = plots.densities("taught", taught(), counts)
    by_layer, by_kind = figure.axes[0].get_lines(), lines(figure, 1)
    assert len(by_layer) == 3 + 1
    assert set(by_kind) == {"query", "key", "value", "output", "ff in", "ff out", "all"}
    last = [taught()[-1][f"prune/density/{name}"] for name in NAMES[:6]]
    assert by_layer[0].get_ydata()[-1] == pytest.approx(100 * (3 * last[0] + sum(last[1:])) / 8)


def test_heads_are_rows_of_the_query_and_columns_of_the_output(tmp_path):
    """Of a model in bfloat16; feed-forward matrices are one cell each."""
    figure = plots.kept_weights("pruned", pruned_bert(tmp_path / "model"), tmp_path / "model")
    grids = {axes.get_title(): np.asarray(axes.images[0].get_array()) for axes in figure.axes if axes.get_title()}
    assert list(grids) == ["query", "key", "value", "output", "ff\nin", "ff\nout"]
    assert grids["query"].tolist() == [[100, 0, 100, 100], [100] * 4, [100] * 4]
    assert grids["output"].tolist() == [[100, 100, 100, 0], [100] * 4, [100] * 4]
    assert grids["ff\nin"].tolist() == [[50], [100], [100]]


def test_distilbert_and_layers_that_have_lost_heads(tmp_path):
    """Its own names and config; a head that is gone has no share, rather than 0."""
    names = ("q_lin", "k_lin", "v_lin")
    weights = {f"distilbert.transformer.layer.0.attention.{n}": np.ones((8, 8), np.float32) for n in names}
    weights |= {f"distilbert.transformer.layer.1.attention.{n}": np.ones((4, 8), np.float32) for n in names}
    weights["distilbert.transformer.layer.0.ffn.lin1"] = np.eye(8, dtype=np.float32)
    counts = write_model(tmp_path / "model", {"dim": 8, "n_heads": 4}, weights)
    figure = plots.kept_weights("pruned", counts, tmp_path / "model")
    query, *_, ff = [axes for axes in figure.axes if axes.get_title()]
    assert np.ma.getmaskarray(query.images[0].get_array()).tolist() == [[False] * 4, [False, False, True, True]]
    assert ff.get_title() == "ff\nin"
    assert np.asarray(ff.images[0].get_array())[0, 0] == 12.5


def test_what_was_cut_out_is_counted_from_before(tmp_path):
    """A cell for each matrix: remaining weights do not show which heads they were; an empty block has lost all."""
    before = dict.fromkeys(NAMES, 64)
    counts = {name: {"kept": 16, "total": 16} for name in NAMES if "layer.1.attention" not in name}
    figure = plots.kept_weights("cut", counts, tmp_path, before)
    grids = {axes.get_title(): np.asarray(axes.images[0].get_array()) for axes in figure.axes if axes.get_title()}
    assert grids["query"].tolist() == grids["output"].tolist() == [[25], [0], [25]]
    assert grids["ff\nin"].tolist() == [[25]] * 3


def test_an_unknown_family_gets_a_cell_for_each_matrix():
    """From the counts of the run alone: its model is not even opened."""
    counts = {f"model.layers.{i}.{n}": {"kept": i, "total": 2} for i in range(3) for n in ("attn.Wqkv", "mlp.Wo")}
    figure = plots.kept_weights("pruned", counts, Path("gone"))
    grids = {axes.get_title(): np.asarray(axes.images[0].get_array()) for axes in figure.axes if axes.get_title()}
    cells = [[0], [50], [100]]
    assert {name: grid.tolist() for name, grid in grids.items()} == {"attn\nWqkv": cells, "mlp\nWo": cells}


def test_a_model_without_the_counted_weight_is_told(tmp_path):
    """A folder that is not the one the run has counted."""
    counts = pruned_bert(tmp_path / "model")
    with pytest.raises(ValueError, match=r"has no weight bert.encoder.layer.7.attention.self.query.weight"):
        plots.kept_weights(
            "a", {"bert.encoder.layer.7.attention.self.query": {"kept": 1, "total": 2}, **counts}, tmp_path / "model"
        )


def test_models_stand_at_their_costs_and_score():
    """A panel for each cost that differs, weights in M, milliseconds as they are; the legend names each model."""
    weights, ms = "encoder weights kept", "milliseconds, batch 32"
    models = {"dense": (0.9, {weights: 10_000_000, ms: 50.0}), "pruned": (0.8, {weights: 1_500_000, ms: 12.5})}
    figure = plots.score_by_cost("f1", models | {"leaving early": (0.7, {ms: 6.0})})
    left, right = ({name: line.get_xydata().tolist() for name, line in lines(figure, n).items()} for n in (0, 1))
    assert left == {"dense": [[10_000_000, 0.9]], "pruned": [[1_500_000, 0.8]], "leaving early": []}
    assert right == {"dense": [[50, 0.9]], "pruned": [[12.5, 0.8]], "leaving early": [[6, 0.7]]}
    assert [axes.get_xlabel() for axes in figure.axes] == [weights, ms]
    assert figure.axes[0].xaxis.get_major_formatter()(1_500_000) == "1.5M"
    assert len(figure.axes[0].get_legend().get_texts()) == 3
    alike = {name: (score, costs | {weights: 7}) for name, (score, costs) in models.items()}
    assert [axes.get_xlabel() for axes in plots.score_by_cost("f1", alike).axes] == [ms]


def test_noise_is_not_drawn_as_a_result():
    """A tenth of a point fills a small part of the panel; the axis of a perplexity notes that less is better."""
    figure = plots.score_by_cost("f1", {"dense": (0.9, {"weights": 10}), "pruned": (0.899, {"weights": 5})})
    low, high = figure.axes[0].get_ylim()
    assert high - low == pytest.approx(0.02)
    assert low < 0.899 < 0.9 < high
    assert figure.axes[0].get_ylabel() == "f1"
    figure = plots.score_by_cost("perplexity", {"dense": (20.0, {"weights": 10}), "pruned": (30.0, {"weights": 5})})
    assert figure.axes[0].get_ylabel() == "perplexity (less is better)"
    low, high = figure.axes[0].get_ylim()
    assert low < 20 < 30 < high


def test_the_final_agreement_stands_at_the_last_step():
    """Beside that of the training batches."""
    drawn = lines(plots.agreement("taught", taught(), 0.93))
    assert drawn["validation: 93.0 %"].get_xdata()[0] == 20
    assert drawn["training batches"].get_ydata()[0] == 50


def test_exits_stand_at_the_expected_speed_up():
    """Layers over mean layers for curves and policy, layers over its number for a head."""
    drawn = lines(plots.exit_curves("exits", "validation", synthetic_exits(6)))
    assert set(drawn) == {"entropy", "confidence", "patience", "one head for all samples", "chosen: entropy 0.2"}
    assert np.allclose(drawn["one head for all samples"].get_xdata(), [6 / n for n in range(6, 0, -1)])
    assert drawn["chosen: entropy 0.2"].get_xdata()[0] == pytest.approx(1 / 0.6)
    assert max(drawn["entropy"].get_xdata()) == pytest.approx(6 / 1.5)


def test_criteria_that_say_the_same_are_both_seen():
    """Entropy and confidence of two classes: a pale band and a line on it."""
    exits = synthetic_exits(6)
    curves = exits["splits"]["validation"]["curves"]
    curves["confidence"] = curves["entropy"]
    figure = plots.exit_curves("exits", "validation", exits)
    figure.axes[0].get_legend().remove()
    values = pixels(figure).reshape(-1, 3).astype(int)
    for colour in ((153, 199, 224), (213, 94, 0)):
        assert (np.abs(values - colour).max(1) < 20).sum() > 200


def test_regression_has_patience_alone():
    """One curve, and a policy of two layers that agree."""
    exits = synthetic_exits(6, "pearson")
    exits["splits"]["validation"]["curves"] = {"patience": exits["splits"]["validation"]["curves"]["patience"]}
    exits["policy"]["criterion"] = "patience"
    drawn = lines(plots.exit_curves("exits", "validation", exits))
    assert set(drawn) == {"patience", "one head for all samples", "chosen: patience 2"}


def test_a_score_that_is_not_finite_is_left_out():
    """One head's missing score leaves the others."""
    exits = synthetic_exits(3)
    exits["splits"]["validation"]["heads"]["1"]["accuracy"] = None
    exits["splits"]["validation"]["heads"]["2"]["accuracy"] = math.nan
    drawn = lines(plots.exit_curves("exits", "validation", exits))
    assert list(drawn["one head for all samples"].get_xdata()) == [1]


def test_the_histogram_counts_every_exit():
    """A bar for each layer, also where nobody leaves, and how many samples it was in all."""
    exits = synthetic_exits(4)
    exits["splits"]["validation"]["early_exit"]["exit_counts"] = {"1": 5, "4": 15}
    (axes, *_) = plots.exit_histogram("exits", "validation", exits).axes
    assert [bar.get_height() for bar in axes.patches] == [25, 0, 0, 75]
    assert [text.get_text() for text in axes.texts] == ["25 %", "0 %", "0 %", "75 %"]
    assert axes.get_ylabel() == "share of 20 samples (%)"


def test_names_are_drawn_as_they_are_written():
    """A dollar starts no formula, a leading underscore hides no line, long names differ in their ends."""
    rows = [record(step, train__loss=1.0, **{"train/lr/$x^$": 1e-4, "train/lr/_hidden": 1e-5}) for step in (1, 2)]
    figure = plots.losses("$\\frac$", rows)
    pixels(figure)
    assert len(figure.axes[1].get_legend().get_texts()) == 2
    long = plots.score_by_cost("f1", {f"{'x' * 60}_{number}": (0.5, {"weights": number}) for number in (1, 2)})
    assert [label[-3:] for label in lines(long)] == ["x_1", "x_2"]
