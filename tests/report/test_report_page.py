"""The report shows the files of a run, loads nothing from the network, and never ends a run."""

from __future__ import annotations

import json
import re
import shutil
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from PIL import Image
from support.report_runs import FIGURES, figures_of, write_run

from ds_trainer.ranks import distributed
from ds_trainer.report import page as report_page
from ds_trainer.report import plots
from ds_trainer.report.page import write_report
from ds_trainer.report.run_files import read_run


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A run's folder with its report, made once; to be read only."""
    folder = write_run(tmp_path_factory.mktemp("made") / "out")
    for phase in ("dense", "taught"):
        (folder / "tensorboard" / phase).mkdir(parents=True)
    write_report(folder)
    return folder


@pytest.fixture
def run(tmp_path) -> Path:
    return write_run(tmp_path / "out")


@pytest.fixture
def warnings(monkeypatch) -> list[str]:
    told: list[str] = []
    monkeypatch.setattr(distributed, "warn", told.append)
    return told


@pytest.fixture
def unrendered(monkeypatch) -> None:
    """Make every figure and save none, which takes most of the time, where its picture is not what is tested."""
    monkeypatch.setattr(report_page, "save", lambda figure, path: path.write_bytes(b""))


class Page(HTMLParser):
    """What a page refers to, the tags it is made of, and its text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.references: list[str] = []
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}
        self.references += [value for name, value in attrs if name in ("src", "href", "action", "data", "srcset")]

    def handle_data(self, data):
        self.text += data


def row_of(page: str, title: str) -> list[str]:
    (line,) = [line for line in page.splitlines() if line.startswith(f"| {title} |")]
    return [cell.strip() for cell in line.strip("|").split("|")][1:]


def test_every_figure_that_the_data_allow_and_no_other(made):
    """A dense phase has no density, a phase without teacher no agreement; 800 pixels wide; each once on the page."""
    assert figures_of(made) == FIGURES
    page = (made / "report.md").read_text()
    for name in FIGURES:
        assert Image.open(made / "plots" / f"{name}.png").width == 800
        assert page.count(f"](plots/{name}.png)") == 1
    assert not [path for path in made.rglob("*") if path.name.endswith(".tmp")]


def test_the_table_has_every_phase_s_figures(made):
    """The scores, what they cost and what they bring, side by side; a dash where a phase has none."""
    page = (made / "report.md").read_text()
    assert row_of(page, "") == ["dense", "taught", "exits"]
    assert row_of(page, "techniques") == ["none (dense)", "prune, distill", "exits"]
    assert row_of(page, "accuracy") == ["0.9000", "0.8000", "0.8100"]
    assert row_of(page, "agreement with the teacher") == ["–", "0.8800", "–"]
    assert row_of(page, "teacher's accuracy") == ["–", "0.9100", "–"]
    assert row_of(page, "encoder weights kept")[:2] == ["1,536 (100.0%)", "1,440 (93.8%)"]
    assert row_of(page, "parameters")[:2] == ["3,072", "3,072"]
    assert row_of(page, "parameters not 0")[:2] == ["3,072", "2,880"]
    assert row_of(page, "size on disk") == ["3.0 MiB", "–", "–"]
    assert row_of(page, "latency, batch 1") == ["3.25 ms (p95 4.50)", "2.50 ms (p95 3.00)", "–"]
    assert row_of(page, "times as fast as dense, batch 32") == ["1.00×", "2.00×", "–"]
    assert row_of(page, "early exit, times as fast as dense, batch 32") == ["–", "–", "1.00×"]
    assert row_of(page, "early-exit latency, batch 32") == ["–", "–", "50.00 ms"]
    line = "median of the calls, on cpu, 2 threads, float32: 64 examples of 21.2 tokens on average."
    assert page.count(f"Latency of dense, taught: {line}") == 1
    assert row_of(page, "early exit, mean layers") == ["–", "–", "1.7500"]
    assert row_of(page, "early exit, share of layers used") == ["–", "–", "0.5800"]
    for left_out in ("0.61", "0.62", "63", "64.0", "65.0"):
        assert f"| {left_out}" not in page, "of one head, or said in another way"
    assert row_of(page, "early exit, measured speed-up, batch 32") == ["–", "–", "1.60×"]


def test_the_page_begins_with_what_a_reader_decides_by(made):
    """The verdict in words, then the scores, how many times as fast, sizes, and only then how it was made."""
    page = (made / "report.md").read_text()
    said = "- taught: 1.3 times as fast as dense at batch 1, 2.0 times at batch 32, 10.0 points less accuracy."
    order = (said, "| accuracy", "| times as fast", "| size on", "| techniques", "| training")
    places = [page.index(text) for text in order]
    assert places == sorted(places)


def test_the_page_shows_the_files_and_the_command(made):
    """As they are, so that the run can be made again; the caption of the exit curves says how they were calibrated."""
    page = (made / "report.md").read_text()
    for name in ("recipe.json", "deepspeed_config.json"):
        assert (made / name).read_text() in page
    assert "deepspeed launch/train.py --recipe my.json" in page
    assert "The threshold 0.2 was set on 1,347 examples of held_out." in page
    assert "Model /models/bert, task mnli." in page


@pytest.mark.usefixtures("unrendered")
def test_an_engine_file_that_phases_share_is_shown_once(run):
    """And one of its own below its name."""
    whole = (run / "deepspeed_config.json").read_text()
    for phase, text in (("dense", whole), ("taught", whole.replace("8", "16"))):
        (run / phase).mkdir(exist_ok=True)
        (run / phase / "deepspeed_config.json").write_text(text)
    write_report(run)
    page = (run / "report.md").read_text()
    assert page.count(whole) == 1
    assert "## taught/deepspeed_config.json" in page
    assert "## dense/deepspeed" not in page


def test_the_html_page_asks_nothing_of_the_network(made):
    """Every image is in the page, there is no script and no stylesheet to load, and the policy forbids both."""
    text = (made / "report.html").read_text()
    page = Page(text)
    assert len(page.references) == len(FIGURES)
    assert all(reference.startswith("data:image/png;base64,") for reference in page.references)
    assert not page.tags & {"script", "link", "iframe", "object", "embed", "base", "form"}
    assert not re.search(r"url\(|@import|http", text.replace("http-equiv", ""))
    assert "default-src 'none'" in text
    assert "prefers-color-scheme: dark" in text
    assert {"table", "details", "img"} <= page.tags
    assert "0.8100" in page.text


def test_tensorboard_has_the_images(made):
    """In the folder of each phase that has TensorBoard files, at its last step; no folder is made for others."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = {}
    for phase in ("dense", "taught"):
        events = EventAccumulator(str(made / "tensorboard" / phase)).Reload()
        found[phase] = {tag: events.Images(tag) for tag in events.Tags()["images"]}
    assert set(found["dense"]) == {"plots/dense.loss"}
    assert set(found["taught"]) == {f"plots/{name}" for name in FIGURES if name.startswith("taught.")}
    (image,) = found["taught"]["plots/taught.loss"]
    assert (image.step, image.width, image.height) == (20, 800, 560)
    assert not (made / "tensorboard" / "exits").exists()


@pytest.mark.usefixtures("unrendered")
def test_nothing_in_a_run_s_files_becomes_markup(run):
    """Not names, not metrics, not the command, not text that ends a fence: it is shown as it was written."""
    evil = "<script>alert(1)</script>|![x](http://evil/x.png)[y](javascript:z)`&lt;*b*_c_"
    results = json.loads((run / "all_results.json").read_text())
    results[evil] = results.pop("exits")
    results[evil]["eval"] = {f"{evil}2": 0.5}
    (run / "all_results.json").write_text(json.dumps(results))
    (run / "log.jsonl").write_text(json.dumps({"phase": evil, "step": 1, "train/loss": 1.0}))
    recipe = '{"phases": [], "a": "</code></pre><script>alert(2)</script>",\n```\n<img src=x onerror=alert(3)>\n"b": 1}'
    (run / "deepspeed_config.json").write_text(recipe)
    (run / "command.json").write_text(json.dumps({"command": f"train\n```\n{evil}\n"}))
    write_report(run)
    page = Page((run / "report.html").read_text())
    assert not page.tags & {"script", "a", "em", "strong"}
    assert not {name for name in page.attributes if name.startswith("on")}
    assert all(reference.startswith("data:") for reference in page.references)
    assert page.text.count(evil) == 9  # the verdict, a column, a row, the command, and five captions
    assert recipe in page.text


@pytest.mark.usefixtures("unrendered")
def test_a_broken_plot_is_a_warning_and_the_others_are_there(run, warnings):
    """Exits that are no JSON, a missing model, a loss that is no number: each is a warning and a line on the page."""
    (run / "eval" / "exits.json").write_text('{"layers": [1,')
    shutil.rmtree(run / "taught" / "model")
    with (run / "log.jsonl").open("a") as log:
        log.write(json.dumps({"phase": "dense", "step": 4, "train/loss": "high"}) + "\n")
    write_report(run)
    gone = {name for name in FIGURES if name.startswith("exits.exit")} | {"taught.kept_weights", "dense.loss"}
    assert figures_of(run) == FIGURES - gone
    told = "\n".join(warnings)
    page = (run / "report.md").read_text()
    for cause in (
        "plots of exits",
        "exits.json cannot be read",
        "plot taught.kept_weights",
        "config.json",
        "plot dense.loss: ",
    ):
        assert cause in told
        assert cause in page
    assert (run / "report.html").is_file()


@pytest.mark.usefixtures("unrendered")
def test_a_report_never_ends_a_run(run, warnings, monkeypatch):
    """An error of a plot, of the table or of a file is a warning."""

    def broken(*_: object) -> None:
        raise ZeroDivisionError("no such luck")

    monkeypatch.setattr(plots, "losses", broken)
    monkeypatch.setattr(report_page, "_cells", broken)
    write_report(run)
    assert "plot dense.loss: ZeroDivisionError: no such luck" in warnings
    assert "the table of results: ZeroDivisionError: no such luck" in warnings
    (run / "all_results.json").write_text("{")
    write_report(run)
    assert "all_results.json cannot be read" in warnings[-1]


def test_without_matplotlib_there_is_a_page_without_figures(run, warnings, monkeypatch):
    """One warning says how to get them; the table is on the page."""
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    write_report(run)
    assert not (run / "plots").exists()
    assert len(warnings) == 1
    assert "pip install matplotlib" in warnings[0]
    for name in ("report.md", "report.html"):
        page = (run / name).read_text()
        assert "pip install" in page
        assert "0.8100" in page


@pytest.mark.usefixtures("unrendered")
def test_without_markdown_it_there_is_no_html(run, warnings, monkeypatch):
    """The Markdown page is there, and the warning says what is missing."""
    monkeypatch.setitem(sys.modules, "markdown_it", None)
    write_report(run)
    assert (run / "report.md").is_file()
    assert not (run / "report.html").exists()
    assert "markdown-it-py" in warnings[0]
    assert "pip install matplotlib markdown-it-py" in warnings[0]


@pytest.mark.usefixtures("unrendered")
def test_only_a_dense_model_is_called_dense(run):
    """A phase without techniques may go on with a pruned model, or make a smaller one."""
    recipe = json.loads((run / "recipe.json").read_text())
    recipe["phases"][0] |= {"student": {"num_hidden_layers": 2}}
    recipe["phases"][1] |= {"techniques": {}}
    (run / "recipe.json").write_text(json.dumps(recipe))
    write_report(run)
    assert row_of((run / "report.md").read_text(), "techniques") == ["smaller model", "none", "exits"]


@pytest.mark.usefixtures("unrendered")
def test_exits_that_were_set_again_are_told(run):
    """A note says so where the folder's thresholds differ from those of the figures."""
    exits = json.loads((run / "eval" / "exits.json").read_text())
    saved = {"version": 1, "layers": [1, 2], "policy": exits["policy"], "calibration": exits["calibration"]}
    (run / "model" / "exits.json").write_text(json.dumps(saved))
    write_report(run)
    assert "calibrated again" not in (run / "report.md").read_text()
    for other in ({"policy": exits["policy"] | {"thresholds": [0.3, 0.3]}}, {"calibration": None}):
        (run / "model" / "exits.json").write_text(json.dumps(saved | other))
        write_report(run)
        assert "The exits of exits were calibrated again" in (run / "report.md").read_text()


@pytest.mark.usefixtures("unrendered")
def test_a_threshold_for_each_head_is_said_so(run):
    """Where there is a list there is no single one, which is null."""
    exits = json.loads((run / "eval" / "exits.json").read_text())
    for thresholds, said in (([0.1, 0.2], "A threshold for each head was set on"), (None, "The policy was set on")):
        exits["calibration"] |= {"threshold": None, "thresholds": thresholds}
        (run / "eval" / "exits.json").write_text(json.dumps(exits))
        write_report(run)
        assert said in (run / "report.md").read_text()


def test_of_a_step_logged_twice_the_last_holds(run, warnings):
    """A resumed run repeats steps; evaluations add to a step's record; a line cut short is left out, with a warning."""
    with (run / "log.jsonl").open("a") as log:
        for row in ({"step": 3, "train/loss": 9.0}, {"step": 3, "eval/accuracy": 0.5}, {"step": 2, "train/loss": 7.0}):
            log.write(json.dumps({"phase": "dense", **row}) + "\n")
        log.write('{"phase": "dense", "step": 4, "train/lo')
    records = read_run(run).records["dense"]
    assert [record["train/loss"] for record in records] == [1.0, 7.0, 9.0]
    assert records[-1]["eval/accuracy"] == 0.5
    assert warnings == [f"{run / 'log.jsonl'}: left out line 30, which is no record of a step"]


@pytest.mark.usefixtures("unrendered")
def test_a_run_that_is_not_done_has_a_report(run):
    """From its log alone, before any phase has finished; the second phase's model is not taken for the last's."""
    results = json.loads((run / "all_results.json").read_text())
    del results["exits"]
    (run / "all_results.json").write_text(json.dumps(results))
    assert read_run(run).folder_of("taught") == run / "taught"
    (run / "all_results.json").unlink()
    write_report(run)
    assert "No phase has finished." in (run / "report.md").read_text()
    assert "taught.loss" in figures_of(run)


@pytest.mark.usefixtures("unrendered")
def test_phases_of_other_tasks_are_not_compared(run):
    """An accuracy on one task says nothing beside that on another."""
    recipe = json.loads((run / "recipe.json").read_text())
    for phase in recipe["phases"][:2]:
        phase["task"] = {"name": "sst2"}
    (run / "recipe.json").write_text(json.dumps(recipe))
    write_report(run)
    assert "score_by_density" not in figures_of(run)


@pytest.mark.usefixtures("unrendered")
def test_a_report_says_what_it_wrote(run, warnings):
    """An image that the user has put in the folder is kept, is a warning, and is not on the page."""
    (run / "plots").mkdir()
    (run / "plots" / "dense.loss.png").write_bytes(b"mine")
    write_report(run)
    names = [f"plots/{name}.png" for name in FIGURES - {"dense.loss"}]
    assert all((run / name).is_file() for name in (*names, "report.md", "report.html"))
    assert (run / "plots" / "dense.loss.png").read_bytes() == b"mine"
    assert "plots/dense.loss.png exists and was not written by this program" in warnings[0]
    assert "(plots/dense.loss.png)" not in (run / "report.md").read_text()
