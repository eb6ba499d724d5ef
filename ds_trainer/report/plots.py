"""The figures of a run, each a function from plain data, as its files hold them, to a figure.

Where the data are not there, or hold nothing to compare, a function gives None; data that contradict themselves are a
ValueError. What is on the page, under which name, is decided in `report_page`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence, Sized
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ds_trainer.ranks import distributed
from ds_trainer.report.figure import Figure
from ds_trainer.report.matrices import Array, Counts, kept_shares, layer_of, role_of
from ds_trainer.report.run_files import Records

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f", "#8c564b")
"""Told apart also by the colour-blind (Okabe and Ito, 2008)."""

MARKERS = "osD^vP*X"
_ROOM = 2
"""A panel of losses is at most so many times as high as what is part of the loss."""
LOWER_IS_BETTER = ("perplexity", "loss")


def losses(phase: str, records: Records) -> Figure | None:
    """The loss, and each term as logged and times its weight, above the learning rates; all over optimizer steps.

    Terms as logged that would squash the lines of the loss are only named.
    """
    steps, loss = _series(records, "train/loss")
    if not np.isfinite(loss).any():
        return None
    figure = Figure(800, 560)
    above, below = figure.panels(2, 1, sharex=True, height_ratios=[3, 2])
    # under dashes, so that a term that is all of it does not hide it
    _line(above, steps, loss, color="black", linewidth=3, label="loss")
    _terms(above, records)
    _rates(below, records)
    title(figure, f"{phase}: loss")
    dress(above, "", "loss")
    dress(below, "optimizer step", "learning rate")
    _legend(above)
    return figure


def densities(phase: str, records: Records, counts: Counts) -> Figure | None:
    """The share of the encoder's weights that is kept, over steps: of all, by layer, and by kind of matrix."""
    steps, overall = _series(records, "prune/density")
    if not np.isfinite(overall).any():
        return None
    names = _names(records, "prune/density/")
    each = {name: _series(records, f"prune/density/{name}") for name in names}
    alike = all(len(v) == len(overall) and np.nanmax(np.abs(v - overall)) < 0.005 for _, v in each.values())
    figure = Figure(800, 360 if alike else 640)
    panels = figure.panels(1 if alike else 2, 1, sharex=True)
    title(figure, f"{phase}: encoder weights kept" + (", the same in every matrix" if alike and each else ""))
    if not alike:
        _density_by_layer(figure, panels[0], _grouped(each, counts, layer_of))
        groups = _grouped(each, counts, role_of)
        for colour, (role, (at, values)) in zip(_colours(groups), groups.items(), strict=True):
            _line(panels[1], at, 100 * values, color=colour, label=label(role))
    for axes in panels:
        dress(axes, "optimizer step" if axes is panels[-1] else "", "kept (%)")
        _line(axes, steps, 100 * overall, color="black", linewidth=2, linestyle="-" if alike else "--", label="all")
        axes.set_ylim(0, 105)
    if not alike:
        _legend(panels[1])
    return figure


def kept_weights(phase: str, counts: Counts, model: Path, before: Mapping[str, int] | None = None) -> Figure | None:
    """A heat map, layers by matrices, of the share of the weights of a model folder that are not zero.

    Of query, key and value for each head's rows, of output for each head's columns, of every other matrix whole, from
    `counts`; where heads and neurons were cut out, of every matrix its share of the weights `before`. What a head would
    have in a layer where heads are gone is grey.
    """
    shares = kept_shares(counts, model, before)
    if not shares:
        return None
    layers = sorted({layer for found in shares.values() for layer in found})
    widths = {role: max(len(cells) for cells in found.values()) for role, found in shares.items()}
    figure = Figure(800, min(800, 150 + 30 * max(4, len(layers))))
    ratios = [max(width, 0.45 * max(widths.values())) for width in widths.values()]
    panels = figure.panels(1, len(shares), sharey=True, width_ratios=ratios)
    most = max(float(np.max(cells)) for found in shares.values() for cells in found.values())
    top = max(0.1, math.ceil(most * 10 - 1e-6) / 10)
    for axes, (role, found) in zip(panels, shares.items(), strict=True):
        rows = [found.get(layer, np.empty(0)) for layer in layers]
        grid = np.array([np.pad(row, (0, widths[role] - len(row)), constant_values=np.nan) for row in rows])
        drawn = axes.imshow(100 * grid, aspect="auto", vmin=0, vmax=100 * top, cmap=_colour_map())
        axes.set_title(label(role).replace(" ", "\n", 1).replace(".", "\n"), fontsize=9)
        heads = sorted({0, widths[role] // 2, widths[role] - 1}) if widths[role] > 1 else []
        axes.set_xticks(heads, [str(head + 1) for head in heads])
        axes.set_xlabel("head" if heads else "")
        axes.tick_params(left=False, labelsize=9)
    every = -(-len(layers) // 12)
    panels[0].set_yticks(range(0, len(layers), every), [str(layer + 1) for layer in layers[::every]])
    panels[0].set_ylabel("layer")
    figure.drawn.colorbar(drawn, ax=panels, label="kept (%)", fraction=0.05)
    title(figure, f"{phase}: weights kept in the final model")
    return figure


def score_by_density(metric: str, points: Mapping[str, tuple[int, float]]) -> Figure | None:
    """Each phase's score against the encoder weights it has kept, a number of weights; None where all keep as many.

    Up are at least 2 points, or 2 % of a score above 1, so that noise does not look like a result.
    """
    points = {name: (kept, score) for name, (kept, score) in points.items() if math.isfinite(score)}
    if len({kept for kept, _ in points.values()}) < 2:
        return None
    figure = Figure(800, 400)
    (axes,) = figure.panels()
    most = max(kept for kept, _ in points.values())
    scale, unit = next(
        (s, u) for s, u in ((1e9, "billions"), (1e6, "millions"), (1e3, "thousands"), (1, "")) if s <= most
    )
    for index, (name, (kept, score)) in enumerate(points.items()):
        mark: dict[str, Any] = {"color": COLOURS[index % len(COLOURS)], "marker": MARKERS[index % len(MARKERS)]}
        axes.plot(kept / scale, score, linestyle="", markersize=9, label=label(name), **mark)
    axes.set_xlim(0, 1.05 * most / scale)
    scores = [score for _, score in points.values()]
    middle, span = (max(scores) + min(scores)) / 2, max(scores) - min(scores)
    half = max(1.3 * span, 0.02 * max(1, *map(abs, scores))) / 2
    axes.set_ylim(middle - half, middle + half)
    lower = metric.rpartition("/")[2] in LOWER_IS_BETTER
    title(figure, f"{metric} against size")
    dress(axes, f"encoder weights kept ({unit})".replace(" ()", ""), f"{metric} (less is better)" if lower else metric)
    shares = axes.secondary_xaxis("top", functions=_times(100 * scale / most))
    shares.set_xlabel("share of the largest phase's (%)")
    _legend(axes)
    return figure


def agreement(phase: str, records: Records, final: float | None) -> Figure | None:
    """The share of training examples that get the teacher's answer, over steps, and at the end that of validation."""
    steps, values = _series(records, "distill/agreement")
    if not np.isfinite(values).any():
        return None
    figure = Figure(800, 320)
    (axes,) = figure.panels()
    _line(axes, steps, 100 * values, color=COLOURS[0], label="training batches")
    if final is not None and math.isfinite(final):
        axes.plot(
            steps[-1], 100 * final, "D", color=COLOURS[1], label=f"validation: {100 * final:.1f} %", clip_on=False
        )
    title(figure, f"{phase}: agreement with the teacher")
    dress(axes, "optimizer step", "examples (%)")
    _legend(axes)
    return figure


def exit_curves(phase: str, split: str, exits: Mapping[str, Any]) -> Figure | None:
    """The main score against the expected speed-up, layers / mean layers used: a line for each criterion of leaving.

    Beside them each layer's head alone, and the policy that the phase has chosen. A score that is not finite is left
    out with a warning. `exits` is what `eval/exits.json` holds.
    """
    found, layers = exits["splits"][split], exits["num_layers"]
    chosen = found["early_exit"]
    metric = next(iter(chosen["scores"]))
    figure = Figure(800, 440)
    (axes,) = figure.panels()
    drawn = 0
    for index, (criterion, points) in enumerate(found.get("curves", {}).items()):
        curve = _finite([(p["mean_layers"], p["scores"][metric]) for p in points], f"{phase}: {split}: {criterion}")
        # of two classes, entropy and confidence are the same line: the first is a pale band
        under = index == 0 and len(found["curves"]) > 1
        style: dict[str, Any] = {"linewidth": 6, "alpha": 0.4} if under else {"linewidth": 1.5, "marker": "."}
        curve = curve[curve[:, 0].argsort()]
        axes.plot(
            layers / curve[:, 0], curve[:, 1], label=label(criterion), color=COLOURS[index % len(COLOURS)], **style
        )
        drawn += len(curve)
    heads = _finite([(int(n), s[metric]) for n, s in found["heads"].items()], f"{phase}: {split}: heads")
    axes.plot(
        layers / heads[:, 0], heads[:, 1], "s", color="0.35", mec="white", label="one head for all samples", zorder=3
    )
    policy = _finite([(chosen["mean_layers"], chosen["scores"][metric])], f"{phase}: {split}: policy")
    axes.plot(
        layers / policy[:, 0],
        policy[:, 1],
        "*",
        color="black",
        markersize=15,
        mec="white",
        label=_policy(exits["policy"]),
    )
    if not drawn + len(heads) + len(policy):
        raise ValueError(f"no {metric} of the exits is a finite number")
    _speed_axis(axes, layers, heads)
    title(figure, f"{phase}: early exit on {split}")
    dress(axes, "expected speed-up (layers / mean layers used)", metric)
    _legend(axes)
    return figure


def exit_histogram(phase: str, split: str, exits: Mapping[str, Any]) -> Figure | None:
    """How many samples the chosen policy lets leave at each layer, and their share."""
    counts = exits["splits"][split]["early_exit"].get("exit_counts")
    total = sum(counts.values()) if counts else 0
    if not total:
        return None
    figure = Figure(800, 360)
    (axes,) = figure.panels()
    layers = [str(layer) for layer in exits["layers"]]
    left = [counts.get(layer, 0) for layer in layers]
    bars = axes.bar(layers, left, color=COLOURS[0])
    if len(layers) <= 12:
        axes.bar_label(bars, [f"{100 * count / total:.0f} %" for count in left], padding=2, fontsize=9)
    axes.margins(y=0.12)
    title(figure, f"{phase}: where the samples of {split} leave")
    dress(axes, "layer", "samples")
    shares = axes.secondary_yaxis("right", functions=_times(100 / total))
    shares.set_ylabel("share (%)")
    return figure


def _series(records: Records, name: str) -> tuple[Array, Array]:
    """Steps and values of a logged name; NaN, which is drawn as a gap, for a value that was not finite."""
    found = [(record["step"], record[name]) for record in records if name in record]
    values = [math.nan if value is None else value for _, value in found]
    return np.array([step for step, _ in found], float), np.array(values, float)


def _names(records: Records, prefix: str) -> list[str]:
    """What is logged under a prefix, in the order of first appearance."""
    return list(dict.fromkeys(name[len(prefix) :] for record in records for name in record if name.startswith(prefix)))


def _last(records: Records, name: str, default: float) -> float:
    return next((record[name] for record in reversed(records) if record.get(name) is not None), default)


def _finite(points: Sequence[tuple[float, float]], what: str) -> Array:
    """(points, 2); those that are not finite are left out, and told."""
    every = np.array([[math.nan if value is None else value for value in point] for point in points], float).reshape(
        -1, 2
    )
    kept = np.isfinite(every).all(1) & (every[:, 0] > 0)
    if not kept.all():
        distributed.warn(f"{what}: {int((~kept).sum())} of {len(every)} points are left out: they are not finite")
    return every[kept]


def _rates(axes: Axes, records: Records) -> None:
    """The learning rate of each group of parameters; those that are the same throughout share a line."""
    lines: dict[bytes, list[str]] = {}
    series = {name: _series(records, f"train/lr/{name}") for name in _names(records, "train/lr/")}
    for name, (steps, values) in series.items():
        lines.setdefault(np.concatenate([steps, values]).tobytes(), []).append(name)
    peaks = []
    for colour, names in zip(_colours(lines), lines.values(), strict=True):
        steps, values = series[names[0]]
        peaks.append(np.nanmax(values, initial=0))
        _line(axes, steps, values, color=colour, label=label(", ".join(names)))
    if peaks and max(peaks) > 20 * min(peaks) > 0:
        axes.set_yscale("log", nonpositive="mask")
    else:
        axes.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
    if lines:
        _legend(axes)


def _terms(axes: Axes, records: Records) -> None:
    """Each term times its weight, dashed; and where that is not 1, as logged, dotted, if it leaves the others room."""
    names = _names(records, "train/term/")
    terms = {
        name: (*_series(records, f"train/term/{name}"), _last(records, f"train/weight/{name}", 1.0)) for name in names
    }
    colours = dict(zip(names, _colours(names), strict=True))
    for name, (steps, term, weight) in terms.items():
        if weight != 0 and (len(names) > 1 or weight != 1):
            _line(axes, steps, weight * term, color=colours[name], linestyle="--", label=label(f"{weight:g} × {name}"))
    low, high = axes.dataLim.intervaly
    room = _ROOM * max(high - low, 0.1 * abs(high))
    for name, (steps, term, weight) in terms.items():
        if weight == 1:
            continue
        if np.nanmax(term, initial=high) - np.nanmin(term, initial=low) <= room:
            _line(axes, steps, term, color=colours[name], linestyle=":", label=label(f"{name}, unweighted"))
        else:
            axes.plot([], [], " ", label=label(f"off the scale: {name}", 34))


def _grouped(
    each: Mapping[str, tuple[Array, Array]], counts: Counts, key: Callable[[str], str]
) -> dict[str, tuple[Array, Array]]:
    """Mean density of the matrices with the same key, each by the number of its weights."""
    groups: dict[str, list[str]] = {}
    for name in each:
        groups.setdefault(key(name), []).append(name)
    means = {}
    for group, names in groups.items():
        sizes = [counts.get(name, {}).get("total", 1) for name in names]
        means[group] = (each[names[0]][0], np.average([each[name][1] for name in names], axis=0, weights=sizes))
    return means


def _density_by_layer(figure: Figure, axes: Axes, layers: Mapping[str, tuple[Array, Array]]) -> None:
    """A line for each layer, its number told by a colour bar."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import BoundaryNorm
    from matplotlib.ticker import MaxNLocator

    norm = BoundaryNorm(np.arange(0.5, len(layers) + 1), 256)
    colours = ScalarMappable(norm, _colour_map())
    for number, (steps, values) in enumerate(layers.values(), start=1):
        _line(axes, steps, 100 * values, color=colours.to_rgba(np.array(number)), linewidth=1)
    beside = axes.inset_axes((1.02, 0, 0.025, 1))
    figure.drawn.colorbar(colours, cax=beside, label="layer", ticks=MaxNLocator(12, integer=True))


def _speed_axis(axes: Axes, layers: int, heads: Array) -> None:
    """Speed-ups on a scale of factors; heads carry their layer's number where there is room for it."""
    from matplotlib.patheffects import withStroke

    axes.set_xscale("log")
    ticks = [tick for tick in (1, 1.5, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96) if tick <= layers]
    axes.set_xticks(ticks, [f"{tick:g}×" for tick in ticks])
    axes.set_xticks([], minor=True)
    axes.set_xlim(0.95, 1.1 * layers)
    beside = math.inf
    for layer, score in heads[heads[:, 0].argsort()]:
        place = math.log(layers / layer) / math.log(layers + 1)
        if beside - place > 0.035:
            axes.annotate(
                f"{layer:.0f}", (layers / layer, score), (0, 6), textcoords="offset points", ha="center", fontsize=8
            ).set_path_effects([withStroke(linewidth=2, foreground="white")])
            beside = place


def _policy(policy: Mapping[str, Any]) -> str:
    """The chosen policy in words."""
    if policy["criterion"] == "patience":
        return f"chosen: patience {policy['patience']}"
    thresholds = policy.get("thresholds") or []
    limit = f"{thresholds[0]:.3g}" if len(set(thresholds)) == 1 else "by layer"
    return f"chosen: {policy['criterion']} {limit}"


def _line(axes: Axes, steps: Array, values: Array, **options: Any) -> None:
    """A line with gaps where values are NaN; few points are marked, since one alone would not be seen."""
    axes.plot(steps, values, marker="." if len(steps) <= 15 else "", **options)


def title(figure: Figure, text: str) -> None:
    figure.drawn.suptitle(label(text, 80), fontsize=12)


def dress(axes: Axes, across: str, up: str) -> None:
    axes.set_xlabel(across)
    axes.set_ylabel(label(up))
    if across == "optimizer step":
        axes.locator_params(axis="x", integer=True)
    axes.grid(alpha=0.3)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=9)


def _times(factor: float) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    """From an axis to its secondary one, and back."""
    return lambda x: x * factor, lambda x: x / factor


def _legend(axes: Axes) -> None:
    """Right of the panel, where it covers nothing."""
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1), borderaxespad=0, frameon=False, fontsize=9)


def label(text: str, most: int = 28) -> str:
    """Text that Matplotlib draws as it is: no formulas, no hidden labels, not too long."""
    short = text if len(text) <= most else text[: most // 2] + "…" + text[1 - most // 2 :]
    return (" " if short.startswith("_") else "") + short.replace("$", r"\$")


def _colours(things: Sized) -> list[str]:
    """A colour for each; they come again after the eighth."""
    return [COLOURS[index % len(COLOURS)] for index in range(len(things))]


def _colour_map() -> Any:
    """From few to many; grey for what is not there."""
    from matplotlib import colormaps

    return colormaps["viridis"].with_extremes(bad="0.8")
