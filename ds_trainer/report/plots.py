"""The figures of a run: each function turns plain data, as the run's files hold them, into a figure.

A function returns None if its data are missing or hold nothing to compare, and raises ValueError if they contradict
themselves. `page` decides which figures a report has, and their names.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from ds_trainer.report import drawing
from ds_trainer.report.drawing import COLOURS, LEGEND, colours, dress, label
from ds_trainer.report.matrices import Array, KeptCounts, cut_by_layer, kept_shares, layer_of, role_of
from ds_trainer.report.run_files import LogRecords

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Series: TypeAlias = "tuple[Array, Array]"
"""Steps and the values at these steps."""

_ROOM = 2
"""An unweighted term is drawn if the panel of losses becomes at most this many times as high as without it."""
_SPEED_UPS = (1, 1.5, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96)


def losses(phase: str, records: LogRecords) -> Figure | None:
    """Draw the loss and each term, unweighted and times its weight, above the learning rates, over optimizer steps.

    Unweighted terms that would squash the lines of the loss appear in the legend only.
    """
    steps, loss = _series(records, "train/loss")
    if not np.isfinite(loss).any():
        return None
    figure = drawing.new_figure(800, 560, f"{phase}: loss")
    above, below = drawing.add_panels(figure, 2, 1, sharex=True, height_ratios=[3, 2])
    # thick and below the dashes, so that a term that makes up the whole loss does not hide it
    _line(above, steps, loss, color="black", linewidth=3, label="loss")
    _terms(above, records)
    _rates(below, records)
    dress(above, "", "loss")
    dress(below, "optimizer step", "learning rate")
    above.legend(**LEGEND)
    return figure


def densities(phase: str, records: LogRecords, counts: KeptCounts) -> Figure | None:
    """Draw the share of encoder weights that is kept, over steps: overall, by layer, and by kind of matrix."""
    steps, overall = _series(records, "prune/density")
    if not np.isfinite(overall).any():
        return None
    names = _names(records, "prune/density/")
    matrices = {name: _series(records, f"prune/density/{name}") for name in names}
    alike = all(len(v) == len(overall) and np.nanmax(np.abs(v - overall)) < 0.005 for _, v in matrices.values())
    note = ", the same in every matrix" if alike and matrices else ""
    figure = drawing.new_figure(800, 360 if alike else 640, f"{phase}: encoder weights kept{note}")
    panels = drawing.add_panels(figure, 1 if alike else 2, 1, sharex=True)
    if not alike:
        _density_by_layer(figure, panels[0], _means(matrices, counts, layer_of))
        roles = _means(matrices, counts, role_of)
        for colour, (role, (at, values)) in zip(colours(roles), roles.items(), strict=True):
            _line(panels[1], at, 100 * values, color=colour, label=label(role))
    for axes in panels:
        dress(axes, "optimizer step" if axes is panels[-1] else "", "kept (%)")
        _line(axes, steps, 100 * overall, color="black", linewidth=2, linestyle="-" if alike else "--", label="all")
        axes.set_ylim(0, 105)
    if not alike:
        panels[1].legend(**LEGEND)
    return figure


def kept_weights(phase: str, counts: KeptCounts, model: Path, before: Mapping[str, int] | None = None) -> Figure | None:
    """Draw a heat map, layers by matrices, of the share of weights in a model folder that are not zero.

    Query, key, value and output have a cell for each head, every other matrix has one cell. If heads and neurons were
    cut out, every matrix has one cell, the share of its weights `before`. Heads that a layer has lost are grey.
    """
    shares = kept_shares(counts, model, before)
    if not shares:
        return None
    layers = sorted({layer for by_layer in shares.values() for layer in by_layer})
    widths = {role: max(len(cells) for cells in by_layer.values()) for role, by_layer in shares.items()}
    height = min(800, 150 + 30 * max(4, len(layers)))
    figure = drawing.new_figure(800, height, f"{phase}: weights kept in the final model")
    ratios = [max(width, 0.45 * max(widths.values())) for width in widths.values()]
    panels = drawing.add_panels(figure, 1, len(shares), sharey=True, width_ratios=ratios)
    most = max(float(np.max(cells)) for by_layer in shares.values() for cells in by_layer.values())
    for axes, (role, by_layer) in zip(panels, shares.items(), strict=True):
        rows = [by_layer.get(layer, np.empty(0)) for layer in layers]
        grid = np.array([np.pad(row, (0, widths[role] - len(row)), constant_values=np.nan) for row in rows])
        image = axes.imshow(100 * grid, aspect="auto", vmin=0, vmax=100 * most or 1, cmap=_colour_map())
        axes.set_title(label(role).replace(" ", "\n", 1).replace(".", "\n"), fontsize=9)
        heads = sorted({0, widths[role] // 2, widths[role] - 1}) if widths[role] > 1 else []
        axes.set_xticks(heads, [str(head + 1) for head in heads])
        axes.set_xlabel("head" if heads else "")
        axes.tick_params(left=False, labelsize=9)
    panels[0].set_yticks(range(len(layers)), [str(layer + 1) for layer in layers])
    panels[0].set_ylabel("layer")
    figure.colorbar(image, ax=panels, label="kept (%)", fraction=0.05)
    return figure


def cut_parts(phase: str, parts: Sequence[Mapping[str, Any]]) -> Figure | None:
    """Draw by layer what a cut has kept of each block or matrix, above the error of its outputs.

    `parts` are the records of a cut as JSON values.
    """
    if not parts:
        return None
    figure = drawing.new_figure(800, 480, f"{phase}: the cut, before any training")
    above, below = drawing.add_panels(figure, 2, 1, sharex=True)
    by_layer = cut_by_layer(parts)
    for colour, (name, cut) in zip(colours(by_layer), by_layer.items(), strict=True):
        most, layers = f" (of {max(part['count'] for part in cut):,})", range(1, 1 + len(cut))
        kept = [100 * part["kept"] / part["count"] for part in cut]
        above.plot(layers, kept, "o-", color=colour, label=label(name) + most)
        below.plot(layers, [100 * part["error"] for part in cut], "o-", color=colour)
    dress(above, "", "kept (%)")
    dress(below, "layer", "error of the outputs (%)")
    for axes in (above, below):
        axes.set_ylim(bottom=0)
    below.locator_params(axis="x", integer=True)
    above.legend(**LEGEND)
    return figure


def score_by_cost(metric: str, models: Mapping[str, tuple[float, Mapping[str, float]]]) -> Figure | None:
    """Draw the score of each model against each of its costs, a panel for each; None if all models cost the same.

    `models` has by name a score and the costs by the titles of their axes.
    """
    from matplotlib.ticker import EngFormatter

    models = {name: (score, costs) for name, (score, costs) in models.items() if math.isfinite(score)}
    axis_titles = dict.fromkeys(title for _, costs in models.values() for title in costs)
    compared = [t for t in axis_titles if len({costs[t] for _, costs in models.values() if t in costs}) > 1]
    if not compared:
        return None
    figure = drawing.new_figure(800, 100 + 300 * len(compared), f"{metric} against cost")
    panels = drawing.add_panels(figure, len(compared), 1, sharey=True)
    looks = dict(zip(models, zip(colours(models), drawing.markers(models), strict=True), strict=True))
    for axes, title in zip(panels, compared, strict=True):
        for name, (score, costs) in models.items():
            colour, marker = looks[name]
            at = ([costs[title]], [score]) if title in costs else ([], [])  # the legend has every model
            axes.plot(*at, marker, color=colour, markersize=9, label=label(name))
        most = max(costs[title] for _, costs in models.values() if title in costs)
        axes.set_xlim(0, 1.05 * most)
        if most >= 100_000:  # milliseconds stay as they are
            axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        dress(axes, title, drawing.score_name(metric))
    drawing.limit_scores(panels[0], [score for score, _ in models.values()])
    panels[0].legend(**LEGEND)
    return figure


def agreement(phase: str, records: LogRecords, final: float | None) -> Figure | None:
    """Draw the share of training examples with the teacher's answer, over steps, and `final`, that of validation."""
    steps, values = _series(records, "distill/agreement")
    if not np.isfinite(values).any():
        return None
    figure, axes = drawing.one_panel(800, 320, f"{phase}: agreement with the teacher")
    _line(axes, steps, 100 * values, color=COLOURS[0], label="training batches")
    if final is not None and math.isfinite(final):
        at_end = f"validation: {100 * final:.1f} %"
        axes.plot(steps[-1], 100 * final, "D", color=COLOURS[1], label=at_end, clip_on=False)
    dress(axes, "optimizer step", "examples (%)")
    axes.legend(**LEGEND)
    return figure


def exit_curves(phase: str, split: str, exits: Mapping[str, Any]) -> Figure | None:
    """Draw the main score against the expected speed-up, layers / mean layers used: a line for each exit criterion.

    Points show the head of each layer alone, and the policy of the phase. Scores that are not finite are left out.
    `exits` is the content of `eval/exits.json`.
    """
    results, layers = exits["splits"][split], exits["num_layers"]
    chosen, curves = results["early_exit"], results.get("curves", {})
    metric = next(iter(chosen["scores"]))
    figure, axes = drawing.one_panel(800, 440, f"{phase}: early exit on {split}")
    for index, (criterion, points) in enumerate(curves.items()):
        curve = _points(layers, ((point["mean_layers"], point["scores"][metric]) for point in points))
        # for two classes, entropy and confidence give the same line: the first is a pale band below the second
        band = index == 0 and len(curves) > 1
        style: dict[str, Any] = {"linewidth": 6, "alpha": 0.4} if band else {"linewidth": 1.5, "marker": "."}
        axes.plot(*curve.T, label=label(criterion), color=COLOURS[index % len(COLOURS)], **style)
    heads = _points(layers, ((int(layer), scores[metric]) for layer, scores in results["heads"].items()))
    axes.plot(*heads.T, "s", label="one head for all samples", color="0.35", mec="white", zorder=3)
    policy = _points(layers, [(chosen["mean_layers"], chosen["scores"][metric])])
    axes.plot(*policy.T, "*", label=_policy_name(exits["policy"]), color="black", markersize=15, mec="white")
    _speed_axis(axes, layers, heads)
    dress(axes, "expected speed-up (layers / mean layers used)", metric)
    axes.legend(**LEGEND)
    return figure


def exit_histogram(phase: str, split: str, exits: Mapping[str, Any]) -> Figure | None:
    """Draw the share of the samples that leave at each layer under the chosen policy."""
    counts = exits["splits"][split]["early_exit"].get("exit_counts")
    total = sum(counts.values()) if counts else 0
    if not total:
        return None
    figure, axes = drawing.one_panel(800, 360, f"{phase}: where the samples of {split} leave")
    layers = [str(layer) for layer in exits["layers"]]
    bars = axes.bar(layers, [100 * counts.get(layer, 0) / total for layer in layers], color=COLOURS[0])
    if len(layers) <= 12:
        axes.bar_label(bars, fmt="%.0f %%", padding=2, fontsize=9)
    axes.margins(y=0.12)
    dress(axes, "layer", f"share of {total:,} samples (%)")
    return figure


def _series(records: LogRecords, name: str) -> Series:
    """Return the values logged under a name; a value that was not finite is NaN, which is drawn as a gap."""
    rows = [(record["step"], record[name]) for record in records if name in record]
    steps, values = np.array(rows, float).reshape(-1, 2).T  # which makes NaN of None
    return steps, values


def _names(records: LogRecords, prefix: str) -> list[str]:
    """Return the names logged under a prefix, without it, in the order of their first appearance."""
    return list(dict.fromkeys(name[len(prefix) :] for record in records for name in record if name.startswith(prefix)))


def _points(layers: int, points: Iterable[tuple[float, float | None]]) -> Array:
    """Return speed-ups and scores, (points, 2), from mean layers and scores; without scores that are not finite."""
    finite = [(layers / mean, score) for mean, score in points if score is not None and math.isfinite(score)]
    return np.array(sorted(finite), float).reshape(-1, 2)


def _rates(axes: Axes, records: LogRecords) -> None:
    """Draw the learning rate of each parameter group; groups with the same rates throughout share a line."""
    groups: dict[bytes, list[str]] = {}
    series = {name: _series(records, f"train/lr/{name}") for name in _names(records, "train/lr/")}
    for name, (steps, values) in series.items():
        groups.setdefault(np.concatenate([steps, values]).tobytes(), []).append(name)
    peaks = []
    for colour, names in zip(colours(groups), groups.values(), strict=True):
        steps, values = series[names[0]]
        peaks.append(np.nanmax(values, initial=0))
        _line(axes, steps, values, color=colour, label=label(", ".join(names)))
    if peaks and max(peaks) > 20 * min(peaks) > 0:
        axes.set_yscale("log", nonpositive="mask")
    else:
        axes.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
    if groups:
        axes.legend(**LEGEND)


def _terms(axes: Axes, records: LogRecords) -> None:
    """Draw each term times its weight, dashed, and unweighted, dotted, if the weight is not 1 and there is room."""
    names = _names(records, "train/term/")
    terms = {name: _series(records, f"train/term/{name}") for name in names}
    weights = {name: _series(records, f"train/weight/{name}")[1][-1] for name in names}
    palette = dict(zip(names, colours(names), strict=True))
    for name, (steps, term) in terms.items():
        weight = weights[name]
        if weight != 0 and (len(names) > 1 or weight != 1):
            _line(axes, steps, weight * term, color=palette[name], linestyle="--", label=label(f"{weight:g} × {name}"))
    low, high = axes.dataLim.intervaly
    room = _ROOM * max(high - low, 0.1 * abs(high))
    for name, (steps, term) in terms.items():
        if weights[name] == 1:
            continue
        if np.nanmax(term, initial=high) - np.nanmin(term, initial=low) <= room:
            _line(axes, steps, term, color=palette[name], linestyle=":", label=label(f"{name}, unweighted"))
        else:
            axes.plot([], [], " ", label=label(f"off the scale: {name}", 34))


def _means(matrices: Mapping[str, Series], counts: KeptCounts, group_of: Callable[[str], str]) -> dict[str, Series]:
    """Return the mean density of each group of matrices, weighted by their numbers of weights."""
    groups: dict[str, list[str]] = {}
    for name in matrices:
        groups.setdefault(group_of(name), []).append(name)
    means = {}
    for group, names in groups.items():
        sizes = [counts.get(name, {}).get("total", 1) for name in names]
        steps, _ = matrices[names[0]]
        means[group] = (steps, np.average([matrices[name][1] for name in names], axis=0, weights=sizes))
    return means


def _density_by_layer(figure: Figure, axes: Axes, layers: Mapping[str, Series]) -> None:
    """Draw a line for each layer; a colour bar shows the layer's number."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import BoundaryNorm
    from matplotlib.ticker import MaxNLocator

    norm = BoundaryNorm(np.arange(0.5, len(layers) + 1), 256)
    mapped = ScalarMappable(norm, _colour_map())
    for number, (steps, values) in enumerate(layers.values(), start=1):
        _line(axes, steps, 100 * values, color=mapped.to_rgba(np.array(number)), linewidth=1)
    beside = axes.inset_axes((1.02, 0, 0.025, 1))
    figure.colorbar(mapped, cax=beside, label="layer", ticks=MaxNLocator(12, integer=True))


def _speed_axis(axes: Axes, layers: int, heads: Array) -> None:
    """Show speed-ups on a logarithmic scale, with the layer's number above each head."""
    axes.set_xscale("log")
    ticks = [tick for tick in _SPEED_UPS if tick <= layers]
    axes.set_xticks(ticks, [f"{tick:g}×" for tick in ticks])
    axes.set_xticks([], minor=True)
    axes.set_xlim(0.95, 1.1 * layers)
    if layers <= 12:  # the numbers of more layers would overlap
        style: dict[str, Any] = {"textcoords": "offset points", "ha": "center", "fontsize": 8}
        for speed_up, score in heads:
            axes.annotate(f"{layers / speed_up:.0f}", (speed_up, score), (0, 6), **style)


def _policy_name(policy: Mapping[str, Any]) -> str:
    """Name the chosen exit policy in words."""
    thresholds = policy.get("thresholds") or []
    limit = f"{thresholds[0]:.3g}" if len(set(thresholds)) == 1 else "by layer"
    return f"chosen: {policy['criterion']} {policy['patience'] if policy['criterion'] == 'patience' else limit}"


def _line(axes: Axes, steps: Array, values: Array, **options: Any) -> None:
    """Draw a line with gaps where values are NaN; few points are marked, since one alone would not be seen."""
    axes.plot(steps, values, marker="." if len(steps) <= 15 else "", **options)


def _colour_map() -> Any:
    """Return a colour map from few to many; missing cells are grey."""
    from matplotlib import colormaps

    return colormaps["viridis"].with_extremes(bad="0.8")
