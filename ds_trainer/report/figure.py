"""A figure: drawn without a display, given as an array of pixels or saved as a file.

Matplotlib draws it (Agg, through its objects: no pyplot, no state shared with a notebook), OpenCV scales backgrounds
and writes raster files. Both come with the extra `plots` and are loaded when the first figure is made.
"""

from __future__ import annotations

import contextlib
import io
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Drawn

Pixels: TypeAlias = "np.ndarray[Any, np.dtype[np.uint8]]"
"""(height, width, 3), RGB."""

DPI = 100
INSTALL = """pip install -e ".[plots]" from the project's folder"""

_LEAST_DPI = 20
"""Below, fonts have less than a pixel."""
_JPEG_SIDE = 65_500
"""More, and OpenCV's encoder writes nothing."""
_RASTER, _VECTOR = (".jpeg", ".jpg", ".png"), (".pdf", ".svg")


def check_installed() -> None:
    """Raise ValueError, with the way out, where Matplotlib or OpenCV cannot be loaded."""
    try:
        import cv2  # noqa: F401
        import matplotlib.backends.backend_agg
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise ValueError(f"figures need Matplotlib and OpenCV ({error}): {INSTALL}") from error


def write_whole(target: Path, data: bytes) -> None:
    """Write a file whole or not at all. Raises ValueError where it cannot be written."""
    aside = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        aside.write_bytes(data)
        aside.replace(target)
    except OSError as error:
        raise ValueError(f"{target} cannot be written: {error.strerror}") from error
    finally:
        with contextlib.suppress(OSError):
            aside.unlink(missing_ok=True)


def encoded(pixels: Pixels, kind: str) -> bytes:
    """Pixels as the bytes of a .png, .jpg or .jpeg file. Raises ValueError for a size that a format does not hold."""
    import cv2

    height, width = pixels.shape[:2]
    if kind != ".png" and max(width, height) > _JPEG_SIDE:
        raise ValueError(
            f"a JPEG has at most {_JPEG_SIDE:,} pixels a side, and {width} x {height} is asked: save a .png"
        )
    done, data = cv2.imencode(kind, cv2.cvtColor(pixels, cv2.COLOR_RGB2BGR))  # OpenCV writes BGR
    if not done:
        raise ValueError(f"OpenCV cannot write {width} x {height} pixels as {kind}")
    return bytes(data)


class Figure:
    """A figure of so many pixels at its own size; drawn at another, its text and lines are scaled with it."""

    def __init__(self, width: int = 800, height: int = 450) -> None:
        """Raises ValueError for a size that is not positive, or where Matplotlib or OpenCV is missing."""
        check_installed()
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure as Drawn
        from matplotlib.layout_engine import ConstrainedLayoutEngine

        _check_size(width, height)
        self.width, self.height = width, height
        layout = ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.08)  # inches
        self.drawn: Drawn = Drawn(figsize=(width / DPI, height / DPI), dpi=DPI, layout=layout)
        self.drawn.patch.set_alpha(0)
        self._canvas = FigureCanvasAgg(self.drawn)

    def panels(self, rows: int = 1, columns: int = 1, **options: Any) -> list[Axes]:
        """Axes in a grid, row by row, that let a background through; `options` as `matplotlib`'s `subplots` takes."""
        panels = list(self.drawn.subplots(rows, columns, squeeze=False, **options).flat)
        for axes in panels:
            axes.patch.set_alpha(0)
        return panels

    def render(
        self,
        width: int | None = None,
        height: int | None = None,
        background: Pixels | None = None,
        alpha: float = 1.0,
    ) -> Pixels:
        """Draw it over `background`, or over white: (height, width, 3) uint8 RGB, its own size unless told.

        The background, (rows, columns, 3) uint8 RGB, is scaled to the size and shows through where nothing is drawn.
        `alpha` is the opacity of what is drawn, 0 to 1. Raises ValueError for arguments of other shapes or ranges.
        """
        width, height = self._size(width, height)
        if not 0 <= alpha <= 1:
            raise ValueError(f"the opacity of a figure is {alpha}: give 0 (only the background) to 1")
        below = _white(width, height) if background is None else _resized(background, width, height)
        self._fit(width, height)
        self._canvas.draw()
        over = np.asarray(self._canvas.buffer_rgba())
        opacity = over[..., 3:].astype(np.float32) * (alpha / 255)  # Agg's colours are not multiplied by it
        return np.rint(below + (over[..., :3].astype(np.float32) - below) * opacity).astype(np.uint8)

    def save(
        self,
        path: str | Path,
        width: int | None = None,
        height: int | None = None,
        background: Pixels | None = None,
        alpha: float = 1.0,
    ) -> None:
        """Write it by its extension: .png .jpg .jpeg as `render` gives it, .pdf .svg as shapes, 100 pixels to the inch.

        The file appears whole or not at all. Raises ValueError for another extension, a size that a format does not
        hold, a path that cannot be written, or shapes with an `alpha` other than 1.
        """
        target = Path(path)
        kind = _checked_extension(target)
        if kind in _RASTER:
            data = encoded(self.render(width, height, background, alpha), kind)
        elif alpha != 1:
            raise ValueError(f"the opacity of {target} is {alpha}: shapes have 1; save a {' '.join(_RASTER)}")
        else:
            data = self._vector(kind, *self._size(width, height), background)
        write_whole(target, data)

    def _vector(self, kind: str, width: int, height: int, background: Pixels | None) -> bytes:
        below = _white(1, 1) if background is None else _checked_background(background)
        self._fit(width, height)
        self.drawn.set_dpi(DPI)
        self.drawn.set_size_inches(width / DPI, height / DPI)
        axes = self.drawn.add_axes((0, 0, 1, 1), zorder=-1)
        axes.imshow(below, aspect="auto", extent=(0, 1, 0, 1))
        axes.set_axis_off()
        data = io.BytesIO()
        try:
            self.drawn.savefig(data, format=kind[1:])
        finally:
            axes.remove()
        return data.getvalue()

    def _fit(self, width: int, height: int) -> None:
        """Take a size in pixels; text and lines are scaled by the side that has shrunk more, or grown less."""
        dpi = max(_LEAST_DPI, DPI * min(width / self.width, height / self.height))
        self.drawn.set_dpi(dpi)
        # Agg cuts off what is behind the point, and width / dpi * dpi may be a little less than width
        self.drawn.set_size_inches((width + 0.1) / dpi, (height + 0.1) / dpi)

    def _size(self, width: int | None, height: int | None) -> tuple[int, int]:
        size = self.width if width is None else width, self.height if height is None else height
        _check_size(*size)
        return size


def _check_size(width: int, height: int) -> None:
    if not all(isinstance(side, int | np.integer) and side > 0 for side in (width, height)):
        raise ValueError(f"the size of a figure is {width} x {height}: give whole numbers of pixels, 1 or more")


def _white(width: int, height: int) -> Pixels:
    return np.full((height, width, 3), 255, np.uint8)


def _checked_background(background: Pixels) -> Pixels:
    if background.dtype != np.uint8 or background.ndim != 3 or background.shape[2] != 3 or not background.size:
        raise ValueError(f"a background is {background.shape} {background.dtype}: give (height, width, 3) uint8, RGB")
    return background


def _resized(background: Pixels, width: int, height: int) -> Pixels:
    import cv2

    rows, columns = _checked_background(background).shape[:2]
    if (columns, rows) == (width, height):
        return background
    shrinks = width < columns and height < rows
    resized = cv2.resize(background, (width, height), interpolation=cv2.INTER_AREA if shrinks else cv2.INTER_LINEAR)
    return np.asarray(resized, np.uint8)


def _checked_extension(target: Path) -> str:
    """The path's extension in lower case, once all is there to write it."""
    parent = target.absolute().parent
    if os.path.isdir(target):  # pathlib raises where a name is too long to be one
        raise ValueError(f"the figure {target} is a folder: name a file in it, e.g. {target / 'figure.png'}")
    kind = target.suffix.lower()
    if kind not in (*_RASTER, *_VECTOR):
        found = f'has the extension "{target.suffix}"' if kind else "has no extension"
        raise ValueError(f"the figure {target} {found}: allowed are {', '.join((*_RASTER, *_VECTOR))}")
    if not os.path.isdir(parent):
        there = "is a file" if os.path.exists(parent) else "does not exist"
        raise ValueError(f"the figure {target} cannot be written: {parent} {there}: name a folder that is there")
    return kind
