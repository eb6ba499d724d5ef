"""Draw figures without a display, and give them a common look.

Matplotlib draws them with Agg and through its objects, without pyplot, whose state a notebook would share. It comes
with the extra `plots`, and is loaded when the first figure is made.
"""

from __future__ import annotations

from collections.abc import Sequence, Sized
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from ds_trainer.config.task_specs import greater_is_better
from ds_trainer.files.writing import file_aside
from ds_trainer.ranks.failures import UserError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Pixels: TypeAlias = "np.ndarray[Any, np.dtype[np.uint8]]"
"""(height, width, 3), RGB."""

INSTALL = "pip install matplotlib markdown-it-py"
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f", "#8c564b")
"""Colours that colour-blind readers can distinguish too (Okabe and Ito, 2008)."""
MARKERS = "osD^vP*X"
LEGEND: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (1.01, 1), "borderaxespad": 0}
LEGEND |= {"frameon": False, "fontsize": 9}
"""A legend to the right of its panel, where it covers nothing."""
_DPI = 100


def check_installed() -> None:
    """Raise UserError with the way out if Matplotlib cannot be loaded."""
    try:
        import matplotlib.backends.backend_agg
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise UserError(f"figures need Matplotlib ({error}): {INSTALL}") from error


def new_figure(width: int, height: int, title: str) -> Figure:
    """Return a new figure without panels; its size is in pixels."""
    check_installed()
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    # Agg rounds down to whole pixels, and width / dpi * dpi may be a little less than width
    inches = ((width + 0.1) / _DPI, (height + 0.1) / _DPI)
    figure = Figure(figsize=inches, dpi=_DPI, layout=ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.08))
    figure.suptitle(label(title, 80), fontsize=12)
    return figure


def add_panels(figure: Figure, rows: int = 1, columns: int = 1, **options: Any) -> list[Axes]:
    """Add axes in a grid and return them row by row; `options` are those of Matplotlib's `subplots`."""
    return list(figure.subplots(rows, columns, squeeze=False, **options).flat)


def one_panel(width: int, height: int, title: str) -> tuple[Figure, Axes]:
    """Make a figure with a single panel."""
    figure = new_figure(width, height, title)
    return figure, add_panels(figure)[0]


def pixels(figure: Figure) -> Pixels:
    """Draw a figure into an array."""
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


def score_name(metric: str, greater: bool | None = None) -> str:
    """Name a metric on an axis, with a note where less of it is better, by `greater` or the tasks that give it."""
    if greater is None:
        greater = greater_is_better(metric)
    return f"{metric} (less is better)" if greater is False else metric


def limit_scores(axes: Axes, scores: Sequence[float]) -> None:
    """Let the axis span at least 0.02, or 2 % of a score above 1, so that noise does not look like a result."""
    middle, span = (max(scores) + min(scores)) / 2, max(scores) - min(scores)
    half = max(1.3 * span, 0.02 * max(1, *map(abs, scores))) / 2
    axes.set_ylim(middle - half, middle + half)


def label(text: str, most: int = 28) -> str:
    """Shorten a text and escape characters that have a meaning for Matplotlib."""
    short = text if len(text) <= most else text[: most // 2] + "…" + text[1 - most // 2 :]
    return (" " if short.startswith("_") else "") + short.replace("$", r"\$")


def colours(things: Sized) -> list[str]:
    """Return a colour for each thing; colours repeat after the eighth."""
    return [COLOURS[index % len(COLOURS)] for index in range(len(things))]


def markers(things: Sized) -> list[str]:
    """Return a marker for each thing; markers repeat after the eighth."""
    return [MARKERS[index % len(MARKERS)] for index in range(len(things))]
