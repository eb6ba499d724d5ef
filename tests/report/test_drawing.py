"""A figure has the size that was requested and its own colours, in memory and in its files."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import numpy as np
import pytest
from ds_trainer.report.drawing import new_figure, one_panel, pixels, save
from PIL import Image
from support.launching import run_python

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@pytest.fixture
def band() -> Figure:
    """200 x 100 pixels, a red band across its whole width between a quarter and three quarters of its height."""
    figure = new_figure(200, 100, "")
    figure.set_layout_engine("none")
    axes = figure.add_axes((0, 0, 1, 1))
    axes.axis((0, 1, 0, 1))
    axes.set_axis_off()
    axes.axhspan(0.25, 0.75, color="red", linewidth=0)
    return figure


@pytest.mark.parametrize("size", [(801, 449), (333, 111)])
def test_the_array_has_exactly_the_requested_size(size):
    """Height first, three channels of bytes, whatever rounding Matplotlib does in inches."""
    width, height = size
    figure, axes = one_panel(width, height, "a title")
    axes.set_xlabel("steps")
    array = pixels(figure)
    assert array.shape == (height, width, 3)
    assert array.dtype == np.uint8


def test_a_png_holds_what_is_drawn(band, tmp_path):
    """Red is red, the paper is white, and no other file remains beside it."""
    save(band, tmp_path / "figure.png")
    image = Image.open(tmp_path / "figure.png").convert("RGB")
    assert image.size == (200, 100)
    assert np.array_equal(np.asarray(image), pixels(band))
    assert image.getpixel((100, 50)) == (255, 0, 0)
    assert image.getpixel((100, 10)) == (255, 255, 255)
    assert [path.name for path in tmp_path.iterdir()] == ["figure.png"]


def test_an_svg_holds_shapes(band, tmp_path):
    """Not the image of a figure."""
    save(band, tmp_path / "figure.svg")
    text = (tmp_path / "figure.svg").read_text()
    assert text.startswith("<?xml")
    assert "#ff0000" in text
    assert "image/png" not in text


def test_a_missing_library_is_an_error_with_the_way_out(monkeypatch):
    """Not an ImportError from deep down."""
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ValueError, match="pip install matplotlib"):
        new_figure(80, 40, "")


def test_nothing_is_loaded_before_a_figure_is_made_and_pyplot_never():
    """Importing the modules loads no drawing library; drawing touches no global state of a notebook."""
    code = (
        "import sys; from ds_trainer.report import drawing, plots, page\n"
        "print({'matplotlib', 'markdown_it'} & set(sys.modules))\n"
        "drawing.pixels(drawing.new_figure(80, 40, 'a')); print('matplotlib.pyplot' in sys.modules)"
    )
    done = run_python("-c", code)
    assert done.stdout.split() == ["set()", "False"], done.stderr
