"""The figures of a run: each function turns plain data, as the run's files hold them, into a figure.

A function returns None if its data are missing or hold nothing to compare, and raises ValueError if they contradict
themselves. Matplotlib draws with Agg and through its objects, without pyplot, whose state a notebook would share. It
comes with the extra `plots`, and is loaded when the first figure is made.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from ds_trainer.files.writing import file_aside
from ds_trainer.ranks.failures import UserError
from ds_trainer.report.results import LogRecords

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"

INSTALL = "pip install matplotlib markdown-it-py"
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f", "#8c564b")
"""Colours that colour-blind readers can distinguish too (Okabe and Ito, 2008)."""
STYLES = ("-", "--", ":", "-.")
"""Styles that show where one line lies below another."""
_DPI = 100
_OWN_PARTS = ("train", "eval", "memory")
"""The first parts of the names in the log that are no technique's."""


def losses(phase: str, records: LogRecords) -> Figure | None:
    """Draw the loss and each term times its weight, above the learning rates, over optimizer steps."""
    steps, loss = _series(records, "train/loss")
    if not np.isfinite(loss).any():
        return None
    figure, (above, below) = new_figure(800, 560, f"{phase}: loss", 2, sharex=True, height_ratios=[3, 2])
    # thick and below the dashes, so that a term that makes up the whole loss does not hide it
    _line(above, steps, loss, color="black", linewidth=3, label="loss")
    for index, name in enumerate(_names(records, "train/term/")):
        at, term = _series(records, f"train/term/{name}")
        if weight := _series(records, f"train/weight/{name}")[1][-1]:
            _line(above, at, weight * term, index, linestyle="--", label=label(f"{weight:g} × {name}"))
    peaks = []
    for index, name in enumerate(_names(records, "train/lr/")):
        at, rates = _series(records, f"train/lr/{name}")
        peaks.append(np.nanmax(rates, initial=0))
        _line(below, at, rates, index, linestyle=STYLES[index % 4], label=label(name))
    if peaks and max(peaks) > 20 * min(peaks) > 0:
        below.set_yscale("log", nonpositive="mask")
    dress(above, "", "loss")
    dress(below, "optimizer step", "learning rate")
    return figure


def readings(phase: str, records: LogRecords) -> Figure | None:
    """Draw what the techniques read of themselves over steps, a panel for each name such as `prune/density`.

    Names below it are those of matrices, heads or layers: a coloured line is the mean over those of one layer.
    """
    logged = dict.fromkeys(name for record in records for name in record if "/" in name)
    names = dict.fromkeys("/".join(name.split("/")[:2]) for name in logged if name.split("/")[0] not in _OWN_PARTS)
    if not names:
        return None
    check_installed()
    from matplotlib import colormaps

    figure, panels = new_figure(800, 100 + 220 * len(names), f"{phase}: readings", len(names), sharex=True)
    for axes, name in zip(panels, names, strict=True):
        by_layer: dict[int, list[Array]] = {}
        for part in _names(records, f"{name}/"):
            steps, values = _series(records, f"{name}/{part}")
            by_layer.setdefault(layer_of(part), []).append(values)
        for layer, of_layer in by_layer.items():
            shade = colormaps["viridis"](layer / max(by_layer) if layer else 0.0)
            _line(axes, steps, np.mean(of_layer, 0), color=shade, label=f"layer {layer}")
        steps, values = _series(records, name)
        if len(steps):
            _line(axes, steps, values, color="black", linewidth=2, linestyle="--", label="all" if by_layer else "")
        dress(axes, "optimizer step" if axes is panels[-1] else "", name, 1 + len(by_layer) // 10)
    return figure


def cut_parts(
    phase: str, parts: Sequence[Mapping[str, Any]], reconstruction: Sequence[Mapping[str, Any]]
) -> Figure | None:
    """Draw by layer what a cut has kept of each block or matrix, above the error of its outputs.

    `parts` are the records of a cut as JSON values. What has no record in a layer was left whole there. Those of
    `reconstruction` say the error of each layer's states that are held out, before its weights were trained and after.
    """
    if not parts:
        return None
    figure, (above, below) = new_figure(800, 480, f"{phase}: the cut, before any training", 2, sharex=True)
    by_part: dict[str, dict[int, Mapping[str, Any]]] = {}
    for record in parts:
        part = _in_layer(record["name"]) if record["unit"] == "weights" else record["unit"]
        by_part.setdefault(part, {})[layer_of(record["name"])] = record
    layers, whole = range(1 + max(layer_of(record["name"]) for record in parts)), {"kept": 1, "count": 1, "error": 0.0}
    for index, (part, by_layer) in enumerate(by_part.items()):
        cut = [by_layer.get(layer, whole) for layer in layers]
        name = f"{label(part)} (of {max(record['count'] for record in cut):,})"
        above.plot(layers, [100 * each["kept"] / each["count"] for each in cut], "o-", color=colour(index), label=name)
        below.plot(layers, [100 * each["error"] for each in cut], "o-", color=colour(index))
    for when, style in (("before", ":"), ("after", "-")) if reconstruction else ():
        errors = [100 * record[when] for record in reconstruction]
        below.plot(errors, style, color="black", label=f"whole layer, {when} its reconstruction")
    dress(above, "", "kept (%)")
    dress(below, "layer", "error of the outputs (%)")
    for axes in (above, below):
        axes.set_ylim(bottom=0)
    return figure


def exit_curves(phase: str, split: str, exits: Mapping[str, Any]) -> Figure | None:
    """Draw the main score against the expected speed-up, layers / mean layers used: a line for each exit criterion.

    Points show the head of each layer alone, and the policy of the phase. Scores that are not finite are left out.
    `exits` is the content of `eval/exits.json`.
    """
    results, layers = exits["splits"][split], exits["num_layers"]
    chosen = results["early_exit"]
    metric = next(iter(chosen["scores"]))
    figure, (axes,) = new_figure(800, 440, f"{phase}: early exit on {split}")
    for index, (criterion, points) in enumerate(results.get("curves", {}).items()):
        curve = _points(layers, ((point["mean_layers"], point["scores"][metric]) for point in points))
        axes.plot(*curve.T, marker=".", linestyle=STYLES[index % 4], color=colour(index), label=label(criterion))
    heads = _points(layers, ((int(layer), scores[metric]) for layer, scores in results["heads"].items()))
    axes.plot(*heads.T, "s", label="one head for all samples", color="0.35", mec="white", zorder=3)
    point, name = _points(layers, [(chosen["mean_layers"], chosen["scores"][metric])]), exits["policy"]["criterion"]
    axes.plot(*point.T, "*", label=f"chosen: {name}", color="black", markersize=15, mec="white")
    dress(axes, "expected speed-up (layers / mean layers used)", metric)
    return figure


def exit_histogram(phase: str, split: str, exits: Mapping[str, Any]) -> Figure | None:
    """Draw the share of the samples that leave at each layer under the chosen policy."""
    counts = exits["splits"][split]["early_exit"].get("exit_counts") or {}
    total = sum(counts.values())
    if not total:
        return None
    figure, (axes,) = new_figure(800, 360, f"{phase}: where the samples of {split} leave")
    layers = [str(layer) for layer in exits["layers"]]
    axes.bar(layers, [100 * counts.get(layer, 0) / total for layer in layers], color=COLOURS[0])
    dress(axes, "layer", f"share of {total:,} samples (%)")
    return figure


def new_figure(width: int, height: int, title: str, rows: int = 1, **options: Any) -> tuple[Figure, list[Axes]]:
    """Return a new figure, whose size is in pixels, and its panels from the top; `options` are those of `subplots`."""
    check_installed()
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    # Agg rounds down to whole pixels, and width / dpi * dpi may be a little less than width
    inches = ((width + 0.1) / _DPI, (height + 0.1) / _DPI)
    figure = Figure(figsize=inches, dpi=_DPI, layout=ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.08))
    figure.suptitle(label(title, 80), fontsize=12)
    return figure, list(figure.subplots(rows, squeeze=False, **options).flat)


def check_installed() -> None:
    """Raise UserError with the way out if Matplotlib cannot be loaded."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise UserError(f"figures need Matplotlib ({error}): {INSTALL}") from error


def save(figure: Figure, path: Path) -> None:
    """Save a figure as .png or .svg, by the file's extension. The file appears whole or not at all."""
    with file_aside(path) as aside:
        figure.savefig(aside, format=path.suffix[1:])


def dress(axes: Axes, across: str, up: str, columns: int = 1) -> None:
    """Name the axes of a panel, and give it the common look and a legend at its right, where that covers nothing.

    Steps and layers are whole numbers.
    """
    axes.set_xlabel(across)
    axes.set_ylabel(label(up))
    if across in ("optimizer step", "layer") and axes.lines:
        axes.locator_params(axis="x", integer=True)
    axes.grid(alpha=0.3)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=9)
    if axes.get_legend_handles_labels()[1]:
        place: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (1.01, 1), "borderaxespad": 0}
        axes.legend(**place, frameon=False, fontsize=9, ncols=columns)


def label(text: str, most: int = 28) -> str:
    """Shorten a text and escape characters that have a meaning for Matplotlib."""
    short = text if len(text) <= most else text[: most // 2] + "…" + text[1 - most // 2 :]
    return (" " if short.startswith("_") else "") + short.replace("$", r"\$")


def colour(index: int) -> str:
    """Return the colour of the thing with this number; colours repeat after the eighth."""
    return COLOURS[index % len(COLOURS)]


def layer_of(name: str) -> int:
    """Return the layer's number in a name: the first part that is a number, or 0."""
    return next((int(part) for part in name.split(".") if part.isdigit()), 0)


def _in_layer(name: str) -> str:
    """Return the name of a matrix inside its layer."""
    return re.split(r"(?:^|\.)\d+\.", name, maxsplit=1)[-1]


def _series(records: LogRecords, name: str) -> tuple[Array, Array]:
    """Return the steps and values logged under a name; a value that was not finite is NaN, which is drawn as a gap."""
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


def _line(axes: Axes, steps: Array, values: Array, index: int = 0, **options: Any) -> None:
    """Draw a line with gaps where values are NaN; few points are marked, since one alone would not be seen."""
    axes.plot(steps, values, marker="." if len(steps) <= 15 else "", **{"color": colour(index), **options})
