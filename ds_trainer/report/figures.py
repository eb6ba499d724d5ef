"""The figures of a run: each function turns plain data, as the run's files hold them, into a figure.

A function returns None if its data are missing or hold nothing to compare, and raises ValueError if they contradict
themselves. Matplotlib draws with Agg and through its objects, without pyplot, whose state a notebook would share. It
comes with the extra `plots`, and is loaded when the first figure is made.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from ds_trainer.files.writing import file_aside
from ds_trainer.ranks.failures import UserError
from ds_trainer.recipe.task_specs import greater_is_better
from ds_trainer.report.run_files import LogRecords

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"
Series: TypeAlias = "tuple[Array, Array]"
"""Steps and the values at these steps."""
KeptCounts: TypeAlias = Mapping[str, Mapping[str, int]]
"""The numbers of `kept` and `total` weights of each linear layer of the encoder, by name."""

INSTALL = "pip install matplotlib markdown-it-py"
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f", "#8c564b")
"""Colours that colour-blind readers can distinguish too (Okabe and Ito, 2008)."""
MARKERS = "osD^vP*X"
LEGEND: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (1.01, 1), "borderaxespad": 0}
LEGEND |= {"frameon": False, "fontsize": 9}
"""A legend to the right of its panel, where it covers nothing."""
_DPI = 100
_SPEED_UPS = (1, 1.5, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96)
_QKV = ("query", "key", "value")
_ROLES = {
    **{f"attention.self.{name}": name for name in _QKV},
    **{f"attention.self.{name}_proj": name for name in _QKV},
    **{f"attention.{name[0]}_lin": name for name in _QKV},
    **dict.fromkeys(("attention.output.dense", "attention.out_lin"), "output"),
    **dict.fromkeys(("intermediate.dense", "ffn.lin1"), "ff in"),
    **dict.fromkeys(("output.dense", "ffn.lin2"), "ff out"),
}
"""Roles of the matrices of BERT, RoBERTa, ELECTRA, DeBERTa-v2 and DistilBERT, by their names inside a layer."""
_HEADS = {"query": 0, "key": 0, "value": 0, "output": 1}
"""The dimension of a weight, (out, in), along which the heads lie, by role."""


def losses(phase: str, records: LogRecords) -> Figure | None:
    """Draw the loss and each term times its weight, above the learning rates, over optimizer steps."""
    steps, loss = _series(records, "train/loss")
    if not np.isfinite(loss).any():
        return None
    figure, (above, below) = new_figure(800, 560, f"{phase}: loss", 2, sharex=True, height_ratios=[3, 2])
    # thick and below the dashes, so that a term that makes up the whole loss does not hide it
    _line(above, steps, loss, color="black", linewidth=3, label="loss")
    names = _names(records, "train/term/")
    for colour, name in zip(colours(names), names, strict=True):
        at, term = _series(records, f"train/term/{name}")
        weight = _series(records, f"train/weight/{name}")[1][-1]
        if weight != 0 and (len(names) > 1 or weight != 1):
            _line(above, at, weight * term, color=colour, linestyle="--", label=label(f"{weight:g} × {name}"))
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
    matrices = {name: _series(records, f"prune/density/{name}") for name in _names(records, "prune/density/")}
    figure, panels = new_figure(800, 640, f"{phase}: encoder weights kept", 2, sharex=True)
    for axes, group_of in zip(panels, (lambda name: f"layer {int(layer_of(name) or 0) + 1}", role_of), strict=True):
        groups = _means(matrices, counts, group_of)
        for place, (group, (at, values)) in zip(np.linspace(0, 1, len(groups)), groups.items(), strict=True):
            _line(axes, at, 100 * values, color=_colour_map()(place), label=label(group))
        dress(axes, "optimizer step" if axes is panels[-1] else "", "kept (%)")
        _line(axes, steps, 100 * overall, color="black", linewidth=2, linestyle="--", label="all")
        axes.set_ylim(0, 105)
        axes.legend(**LEGEND, ncols=1 + len(groups) // 15)
    return figure


def kept_weights(phase: str, counts: KeptCounts, model: Path, before: Mapping[str, int] | None = None) -> Figure | None:
    """Draw a heat map, layers by matrices, of the share of weights in a model folder that are not zero.

    Query, key, value and output have a cell for each head, every other matrix has one cell. If heads and neurons were
    cut out, every matrix has one cell, the share of its weights `before`. Heads that a layer has lost are grey.
    """
    shares = _kept_shares(counts, model, before)
    if not shares:
        return None
    layers = sorted({layer for by_layer in shares.values() for layer in by_layer})
    widths = {role: max(len(cells) for cells in by_layer.values()) for role, by_layer in shares.items()}
    ratios = [max(width, 0.45 * max(widths.values())) for width in widths.values()]
    height, options = min(800, 150 + 30 * max(4, len(layers))), {"sharey": True, "width_ratios": ratios}
    figure, panels = new_figure(800, height, f"{phase}: weights kept in the final model", 1, len(shares), **options)
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
    figure, (above, below) = new_figure(800, 480, f"{phase}: the cut, before any training", 2, sharex=True)
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
    models = {name: (score, costs) for name, (score, costs) in models.items() if math.isfinite(score)}
    axis_titles = dict.fromkeys(title for _, costs in models.values() for title in costs)
    compared = [t for t in axis_titles if len({costs[t] for _, costs in models.values() if t in costs}) > 1]
    if not compared:
        return None
    check_installed()
    from matplotlib.ticker import EngFormatter

    height = 100 + 300 * len(compared)
    figure, panels = new_figure(800, height, f"{metric} against cost", len(compared), sharey=True)
    for axes, title in zip(panels, compared, strict=True):
        for index, (name, (score, costs)) in enumerate(models.items()):
            at = ([costs[title]], [score]) if title in costs else ([], [])  # the legend has every model
            axes.plot(*at, MARKERS[index % 8], color=COLOURS[index % 8], markersize=9, label=label(name))
        most = max(costs[title] for _, costs in models.values() if title in costs)
        axes.set_xlim(0, 1.05 * most)
        if most >= 100_000:  # milliseconds stay as they are
            axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        dress(axes, title, score_name(metric))
    # at least 0.02, or 2 % of a score above 1, so that noise does not look like a result
    scores = [score for score, _ in models.values()]
    middle = (max(scores) + min(scores)) / 2
    half = max(1.3 * (max(scores) - min(scores)), 0.02 * max(1, *map(abs, scores))) / 2
    panels[0].set_ylim(middle - half, middle + half)
    panels[0].legend(**LEGEND)
    return figure


def agreement(phase: str, records: LogRecords, final: float | None) -> Figure | None:
    """Draw the share of training examples with the teacher's answer, over steps, and `final`, that of validation."""
    steps, values = _series(records, "distill/agreement")
    if not np.isfinite(values).any():
        return None
    figure, (axes,) = new_figure(800, 320, f"{phase}: agreement with the teacher")
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
    chosen, curves, policy = results["early_exit"], results.get("curves", {}), exits["policy"]
    metric = next(iter(chosen["scores"]))
    figure, (axes,) = new_figure(800, 440, f"{phase}: early exit on {split}")
    for index, (criterion, points) in enumerate(curves.items()):
        curve = _points(layers, ((point["mean_layers"], point["scores"][metric]) for point in points))
        # for two classes, entropy and confidence give the same line: the first is a pale band below the second
        band = index == 0 and len(curves) > 1
        style: dict[str, Any] = {"linewidth": 6, "alpha": 0.4} if band else {"linewidth": 1.5, "marker": "."}
        axes.plot(*curve.T, label=label(criterion), color=COLOURS[index % len(COLOURS)], **style)
    heads = _points(layers, ((int(layer), scores[metric]) for layer, scores in results["heads"].items()))
    axes.plot(*heads.T, "s", label="one head for all samples", color="0.35", mec="white", zorder=3)
    thresholds = policy.get("thresholds") or []
    limit = f"{thresholds[0]:.3g}" if len(set(thresholds)) == 1 else "by layer"
    limit = policy["patience"] if policy["criterion"] == "patience" else limit
    point, name = _points(layers, [(chosen["mean_layers"], chosen["scores"][metric])]), policy["criterion"]
    axes.plot(*point.T, "*", label=f"chosen: {name} {limit}", color="black", markersize=15, mec="white")
    axes.set_xscale("log")
    ticks = [tick for tick in _SPEED_UPS if tick <= layers]
    axes.set_xticks(ticks, [f"{tick:g}×" for tick in ticks])
    axes.set_xticks([], minor=True)
    axes.set_xlim(0.95, 1.1 * layers)
    for speed_up, score in heads if layers <= 12 else ():  # the numbers of more layers would overlap
        style = {"textcoords": "offset points", "ha": "center", "fontsize": 8}
        axes.annotate(f"{layers / speed_up:.0f}", (speed_up, score), (0, 6), **style)
    dress(axes, "expected speed-up (layers / mean layers used)", metric)
    axes.legend(**LEGEND)
    return figure


def exit_histogram(phase: str, split: str, exits: Mapping[str, Any]) -> Figure | None:
    """Draw the share of the samples that leave at each layer under the chosen policy."""
    counts = exits["splits"][split]["early_exit"].get("exit_counts") or {}
    total = sum(counts.values())
    if not total:
        return None
    figure, (axes,) = new_figure(800, 360, f"{phase}: where the samples of {split} leave")
    layers = [str(layer) for layer in exits["layers"]]
    bars = axes.bar(layers, [100 * counts.get(layer, 0) / total for layer in layers], color=COLOURS[0])
    if len(layers) <= 12:
        axes.bar_label(bars, fmt="%.0f %%", padding=2, fontsize=9)
    axes.margins(y=0.12)
    dress(axes, "layer", f"share of {total:,} samples (%)")
    return figure


def new_figure(
    width: int, height: int, title: str, rows: int = 1, columns: int = 1, **options: Any
) -> tuple[Figure, list[Axes]]:
    """Return a new figure, whose size is in pixels, and its panels row by row; `options` are those of `subplots`."""
    check_installed()
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    # Agg rounds down to whole pixels, and width / dpi * dpi may be a little less than width
    inches = ((width + 0.1) / _DPI, (height + 0.1) / _DPI)
    figure = Figure(figsize=inches, dpi=_DPI, layout=ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.08))
    figure.suptitle(label(title, 80), fontsize=12)
    return figure, list(figure.subplots(rows, columns, squeeze=False, **options).flat)


def check_installed() -> None:
    """Raise UserError with the way out if Matplotlib cannot be loaded."""
    try:
        import matplotlib.backends.backend_agg
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise UserError(f"figures need Matplotlib ({error}): {INSTALL}") from error


def pixels(figure: Figure) -> Array:
    """Draw a figure into an array of bytes, (height, width, 3), RGB."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3]


def save(figure: Figure, path: Path) -> None:
    """Save a figure as .png or .svg, by the file's extension. The file appears whole or not at all."""
    with file_aside(path) as aside:
        figure.savefig(aside, format=path.suffix[1:])


def dress(axes: Axes, across: str, up: str) -> None:
    """Name the axes of a panel and give it the common look; steps are whole numbers."""
    axes.set_xlabel(across)
    axes.set_ylabel(label(up))
    if across == "optimizer step":
        axes.locator_params(axis="x", integer=True)
    axes.grid(alpha=0.3)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=9)


def score_name(metric: str) -> str:
    """Name a metric on an axis, with a note where less of it is better."""
    return f"{metric} (less is better)" if greater_is_better(metric) is False else metric


def label(text: str, most: int = 28) -> str:
    """Shorten a text and escape characters that have a meaning for Matplotlib."""
    short = text if len(text) <= most else text[: most // 2] + "…" + text[1 - most // 2 :]
    return (" " if short.startswith("_") else "") + short.replace("$", r"\$")


def colours(things: Sized) -> list[str]:
    """Return a colour for each thing; colours repeat after the eighth."""
    return [COLOURS[index % len(COLOURS)] for index in range(len(things))]


def layer_of(name: str) -> str:
    """Return the layer's number in a linear layer's name, from 0: the first part that is a number."""
    return next((part for part in name.split(".") if part.isdigit()), "")


def role_of(name: str) -> str:
    """Return the role of a matrix, such as "query", if its model family is known; otherwise its name in its layer."""
    inside = re.split(r"(?:^|\.)\d+\.", name, maxsplit=1)[-1]
    return _ROLES.get(inside, inside)


def cut_by_layer(records: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """Return the records of a cut for every layer, by what they are about: heads, neurons, or a role of matrices.

    What has no record in a layer was left whole there.
    """
    by_layer: dict[str, dict[int, Mapping[str, Any]]] = {}
    for record in records:
        part = role_of(record["name"]) if record["unit"] == "weights" else record["unit"]
        by_layer.setdefault(part, {})[int(layer_of(record["name"]) or 0)] = record
    layers = range(1 + max((layer for of_part in by_layer.values() for layer in of_part), default=0))
    whole = {"kept": 1, "count": 1, "error": 0.0}
    return {part: [of_part.get(layer, whole) for layer in layers] for part, of_part in by_layer.items()}


def _kept_shares(counts: KeptCounts, model: Path, before: Mapping[str, int] | None) -> dict[str, dict[int, Array]]:
    """Return the kept share of each matrix, by role and layer: (heads,) if the heads are known, otherwise (1,).

    If heads and neurons were cut out, `before` has the number of weights that each matrix had. The shares are then
    shares of these numbers, one for each matrix, since the remaining weights do not show which heads they belonged to.
    """
    shares: dict[str, dict[int, Array]] = {}
    heads = hidden = 0
    if not before and any(role_of(name) in _HEADS for name in counts):
        config = json.loads((model / "config.json").read_text(encoding="utf-8"))
        heads = config.get("num_attention_heads") or config.get("n_heads") or 0
        hidden = config.get("hidden_size") or config.get("dim") or 0
    for name in before or counts:
        role, count = role_of(name), counts.get(name, {"kept": 0, "total": 0})
        whole = before[name] if before else count["total"]
        share = np.array([count["kept"] / max(whole, 1)])
        if hidden >= heads > 0 and role in _HEADS:
            kept, size = np.moveaxis(_nonzero(model, f"{name}.weight"), _HEADS[role], 0), hidden // heads
            if len(kept) % size == 0:
                share = kept.reshape(len(kept) // size, -1).mean(1)
        shares.setdefault(role, {})[int(layer_of(name) or 0)] = share
    roles = dict.fromkeys([*_ROLES.values(), *shares])  # in the order in which a layer uses them
    return {role: shares[role] for role in roles if role in shares}


def _nonzero(model: Path, name: str) -> Array:
    """Return where a weight of a model folder is not zero, (out, in); UserError if the folder lacks the weight."""
    from safetensors import safe_open

    for file in sorted(model.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:  # NumPy has no bfloat16
            if name in tensors.keys():  # noqa: SIM118  (no mapping)
                return np.asarray((tensors.get_tensor(name) != 0).numpy())
    raise UserError(f"{model} has no weight {name}")


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
    """Draw the learning rate of each parameter group, each in a style that shows where another lies below it."""
    peaks = []
    names = _names(records, "train/lr/")
    for index, (colour, name) in enumerate(zip(colours(names), names, strict=True)):
        steps, values = _series(records, f"train/lr/{name}")
        peaks.append(np.nanmax(values, initial=0))
        _line(axes, steps, values, color=colour, linestyle=("-", "--", ":", "-.")[index % 4], label=label(name))
    if peaks and max(peaks) > 20 * min(peaks) > 0:
        axes.set_yscale("log", nonpositive="mask")
    else:
        axes.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
    if names:
        axes.legend(**LEGEND)


def _means(matrices: Mapping[str, Series], counts: KeptCounts, group_of: Callable[[str], str]) -> dict[str, Series]:
    """Return the mean density of each group of matrices, weighted by their numbers of weights."""
    groups: dict[str, list[str]] = {}
    for name in matrices:
        groups.setdefault(group_of(name), []).append(name)
    means = {}
    for group, names in groups.items():
        sizes = [counts.get(name, {}).get("total", 1) for name in names]
        means[group] = (matrices[names[0]][0], np.average([matrices[name][1] for name in names], 0, sizes))
    return means


def _line(axes: Axes, steps: Array, values: Array, **options: Any) -> None:
    """Draw a line with gaps where values are NaN; few points are marked, since one alone would not be seen."""
    axes.plot(steps, values, marker="." if len(steps) <= 15 else "", **options)


def _colour_map() -> Any:
    """Return a colour map from few to many; missing cells are grey."""
    from matplotlib import colormaps

    return colormaps["viridis"].with_extremes(bad="0.8")
