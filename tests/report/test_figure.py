"""A figure has the size and the colours that are asked for, in memory and in its files."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from support.launching import run_python

from ds_trainer.report.figure import Figure, encoded, write_whole

RED, BLUE = (255, 0, 0), (0, 0, 255)


@pytest.fixture
def band() -> Figure:
    """200 x 100 pixels, a red band across its whole width between a quarter and three quarters of its height."""
    figure = Figure(200, 100)
    figure.drawn.set_layout_engine("none")
    axes = figure.drawn.add_axes((0, 0, 1, 1))
    axes.patch.set_alpha(0)
    axes.axis((0, 1, 0, 1))
    axes.set_axis_off()
    axes.axhspan(0.25, 0.75, color="red", linewidth=0)
    return figure


def plain(colour: tuple[int, int, int], rows: int, columns: int) -> np.ndarray:
    return np.full((rows, columns, 3), colour, np.uint8)


def near(found: np.ndarray, colour: tuple[int, ...], most: int = 2) -> bool:
    return bool(np.abs(found.astype(int) - colour).max() <= most)


@pytest.mark.parametrize(
    "size", [(200, 100), (333, 111), (801, 449), (640, 480), (106, 449), (281, 300), (7, 5), (1, 1)]
)
@pytest.mark.filterwarnings("ignore:constrained_layout not applied")
def test_the_array_has_exactly_the_asked_size(size):
    """Height first, three channels of bytes, whatever rounding the drawing library does in inches."""
    width, height = size
    figure = Figure(400, 300)
    figure.panels()[0].set_xlabel("steps")
    found = figure.render(width, height)
    assert found.shape == (height, width, 3)
    assert found.dtype == np.uint8


def test_a_figure_scales_with_its_size(band):
    """Twice the size is the same picture: the band keeps its share of the height."""
    for factor in (1, 2, 3):
        found = band.render(200 * factor, 100 * factor)
        assert near(found[50 * factor, 100 * factor], RED)
        assert near(found[20 * factor, 100 * factor], (255, 255, 255))


@pytest.mark.parametrize("name", ["figure.png", "figure.jpg", "figure.JPEG"])
def test_red_is_red_in_a_file(band, tmp_path, name):
    """Also after OpenCV, which writes blue first, as another library reads it; the size is that of the array."""
    band.save(tmp_path / name, 160, 80)
    image = Image.open(tmp_path / name)
    assert (image.size, image.mode) == ((160, 80), "RGB")
    found = np.asarray(image)
    assert near(found[40, 80], RED, 12)
    assert near(found[10, 80], (255, 255, 255), 12)
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_png_holds_what_is_rendered(band, tmp_path):
    """To the last value, over a background, at another size, and half transparent."""
    below = np.random.default_rng(0).integers(0, 256, (30, 40, 3), np.uint8)
    for name, options in (("plain", {}), ("all", {"width": 90, "height": 70, "background": below, "alpha": 0.5})):
        band.save(tmp_path / f"{name}.png", **options)
        assert np.array_equal(np.asarray(Image.open(tmp_path / f"{name}.png")), band.render(**options))


def test_shapes_are_not_half_transparent(band, tmp_path):
    """`alpha` is for pixels: a vector format refuses it and writes nothing."""
    with pytest.raises(ValueError, match=r"the opacity of .*figure.svg is 0.5: shapes have 1; save a .jpeg .jpg .png"):
        band.save(tmp_path / "figure.svg", alpha=0.5)
    assert list(tmp_path.iterdir()) == []


def test_a_jpeg_of_more_than_its_format_holds_is_told():
    """Its limit and the way out, not an empty file."""
    with pytest.raises(ValueError, match=r"at most 65,500 pixels a side, and 65501 x 2 is asked: save a .png"):
        encoded(np.zeros((2, 65_501, 3), np.uint8), ".jpg")


def test_what_opencv_cannot_write_is_told(monkeypatch):
    """Its flag is looked at: no empty file."""
    import cv2

    monkeypatch.setattr(cv2, "imencode", lambda *_: (False, np.zeros(0, np.uint8)))
    with pytest.raises(ValueError, match=r"OpenCV cannot write 3 x 2 pixels as .png"):
        encoded(np.zeros((2, 3, 3), np.uint8), ".png")


def test_the_background_shows_where_nothing_is_drawn(band):
    """It is scaled to the figure, keeps its sides and its colours, and is hidden by what is drawn."""
    sides = np.concatenate([plain(RED, 10, 15), plain(BLUE, 10, 15)], axis=1)
    found = band.render(120, 60, background=sides)
    assert near(found[5, 10], RED)
    assert near(found[5, 110], BLUE)
    assert near(found[30, 110], RED)


def test_alpha_is_the_opacity_of_what_is_drawn(band):
    """0 gives the background alone, one half the mean of both; outside of 0 to 1 it is refused."""
    below = plain(BLUE, 100, 200)
    assert np.array_equal(band.render(background=below, alpha=0), below)
    assert near(band.render(background=below, alpha=0.5)[50, 100], (128, 0, 128))
    assert near(band.render(background=below, alpha=0.5)[10, 100], BLUE)
    with pytest.raises(ValueError, match=r"0 .* to 1"):
        band.render(alpha=1.5)


@pytest.mark.parametrize(
    "background", [plain(RED, 4, 4)[..., 0], plain(RED, 4, 4) / 255, np.zeros((4, 4, 4), np.uint8), plain(RED, 0, 4)]
)
def test_a_background_of_another_kind_is_told(band, background):
    """Grey, floating point, with an alpha channel, or empty."""
    with pytest.raises(ValueError, match=r"give \(height, width, 3\) uint8"):
        band.render(background=background)


@pytest.mark.parametrize("size", [(0, 10), (10, -1), (2.5, 10)])
def test_a_size_that_is_none_is_told(band, size):
    """Sizes are whole and positive."""
    with pytest.raises(ValueError, match="whole numbers of pixels"):
        band.render(*size)
    with pytest.raises(ValueError, match="whole numbers of pixels"):
        Figure(*size)


@pytest.mark.parametrize(("name", "start"), [("figure.pdf", b"%PDF"), ("figure.svg", b"<?xml")])
def test_shapes_are_saved_as_shapes(band, tmp_path, name, start):
    """.pdf and .svg; a background is an image below, and is gone from the next file."""
    band.save(tmp_path / name, background=plain(BLUE, 50, 50))
    band.save(tmp_path / f"bare_{name}")
    assert (tmp_path / name).read_bytes().startswith(start)
    if name.endswith("svg"):
        assert 'width="144pt" height="72pt"' in (tmp_path / name).read_text()
        assert "image/png" in (tmp_path / name).read_text()
        assert "#ff0000" in (tmp_path / f"bare_{name}").read_text()
    assert len(band.drawn.axes) == 1


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("figure.gif", r'".gif": allowed are .jpeg, .jpg, .png, .pdf, .svg'),
        ("figure", "no extension: allowed are"),
        ("gone/figure.png", "gone does not exist: name a folder"),
        ("file.txt/figure.png", "file.txt is a file: name a folder"),
        ("folder.png", "is a folder: name a file in it"),
        ("x" * 300 + ".png", "cannot be written: File name too long"),
    ],
)
def test_a_path_that_cannot_be_written_is_told(band, tmp_path, name, told):
    """What was found and what is allowed; nothing is left behind."""
    (tmp_path / "file.txt").write_text("")
    (tmp_path / "folder.png").mkdir()
    with pytest.raises(ValueError, match=told):
        band.save(tmp_path / name)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file.txt", "folder.png"]


def test_a_failed_write_leaves_the_file_as_it_was(tmp_path, monkeypatch):
    """Whole or not at all, and nothing beside it."""
    write_whole(tmp_path / "page.md", b"old")

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(ValueError, match=r"page\.md cannot be written: No space left"):
        write_whole(tmp_path / "page.md", b"new")
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("page.md", b"old")]


@pytest.mark.parametrize("library", ["matplotlib.figure", "cv2"])
def test_a_missing_library_is_told_with_the_way_out(monkeypatch, library):
    """Not an ImportError from deep down."""
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ValueError, match=r'pip install -e "\.\[plots\]" from the project'):
        Figure()


def test_nothing_is_loaded_before_a_figure_is_made_and_pyplot_never():
    """Importing the modules loads no drawing library and no torch; drawing touches no global state of a notebook."""
    code = (
        "import sys; from ds_trainer import figure, plots, report_page\n"
        "print({'matplotlib', 'cv2', 'torch', 'markdown_it'} & set(sys.modules))\n"
        "figure.Figure().render(); print('matplotlib.pyplot' in sys.modules)"
    )
    done = run_python("-c", code)
    assert done.stdout.split() == ["set()", "False"], done.stderr
