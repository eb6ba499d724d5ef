"""The page of a run: what it shows, that it never ends a run, and that it loads nothing; the command that makes it."""

from __future__ import annotations

import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from PIL import Image
from support.report_runs import FIGURES, write_run

from ds_trainer.cli.command import run_command
from ds_trainer.cli.train import report_command
from ds_trainer.files.run_folder import RunFolder
from ds_trainer.ranks import distributed
from ds_trainer.report import figures
from ds_trainer.report.page import write_report
from ds_trainer.report.results import read_run


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A run with its report."""
    folder = write_run(tmp_path_factory.mktemp("made") / "out")
    write_report(folder)
    return folder


@pytest.fixture
def run(tmp_path, monkeypatch) -> Path:
    """A run whose figures are made and not saved, which takes most of the time."""
    monkeypatch.setattr(figures, "save", lambda figure, path: path.write_bytes(b""))
    return write_run(tmp_path / "out")


@pytest.fixture
def warnings(monkeypatch) -> list[str]:
    messages: list[str] = []
    monkeypatch.setattr(distributed, "warn", messages.append)
    return messages


class Page(HTMLParser):
    """What a page refers to, the tags and attributes it is made of, and its text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.references: list[str] = []
        self.names: set[str] = set()
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.names |= {tag, *(name for name, _ in attrs)}
        self.references += [value for name, value in attrs if name in ("src", "href", "action", "data", "srcset")]

    def handle_data(self, data):
        self.text += data


def row_of(page: str, title: str) -> list[str]:
    (line,) = [line for line in page.splitlines() if line.startswith(f"| {title} |")]
    return [cell.strip() for cell in line.strip("|").split("|")][1:]


def figures_of(folder: Path) -> set[str]:
    return {path.stem for path in (folder / "plots").glob("*.png")}


def test_the_page_has_every_figure_that_the_data_allow(made):
    """A dense phase has no density, a phase without teacher no agreement; 800 pixels wide, each once on the page."""
    assert figures_of(made) == FIGURES
    page = (made / "report.md").read_text()
    for name in FIGURES:
        assert Image.open(made / "plots" / f"{name}.png").width == 800
        assert page.count(f"](plots/{name}.png)") == 1
    assert not [path for path in made.rglob("*") if path.name.endswith(".tmp")]


def test_the_page_has_what_a_reader_decides_by(made):
    """The verdict in words comes first, then scores, what they cost, and how the models were made; notes follow.

    A dash stands where a phase has no such value; scores of one head, or those said in another way, are left out.
    """
    page = (made / "report.md").read_text()
    for title, cells in {
        "": ["dense", "taught", "exits"],
        "accuracy": ["0.9000", "0.8000", "0.8100"],
        "teacher/agreement": ["–", "0.8800", "–"],
        "early_exit/mean_layers": ["–", "–", "1.7500"],
        "encoder weights": ["1,152 (100.0%)", "1,104 (95.8%)", "1,104 (95.8%)"],
        "MiB": ["3.0", "–", "–"],
        "ms (batch 1)": ["3.25", "2.50", "–"],
        "early exit, ms (batch 32)": ["–", "–", "50.00"],
        "seconds": ["12"] * 3,
        "techniques": ["smaller model", "prune, distill", "exits"],
        "parameters not 0": ["2,304", "2,208", "2,208"],
        "cut": ["–", "8.1 s, 512 examples", "–"],
        "accuracy of the cut, before any training": ["–", "0.8624", "–"],
        "peak memory, resident": ["–", "–", "2.00 GiB (rank 1)"],
    }.items():
        assert row_of(page, title) == cells, title
    for one_head in ("0.61", "0.62", "63", "64.0", "65.0"):
        assert f"| {one_head}" not in page
    sentence = "- taught: 1.3 times as fast as dense at batch 1, 2.0 times at batch 32, 10.0 points less accuracy."
    order = (sentence, "| accuracy", "| teacher/", "| early&#95;", "| encoder", "| MiB", "| ms ", "exits: it rains.")
    places = [page.index(text) for text in order if text in page]
    assert places == sorted(places)
    line = "median of the calls, on cpu, 2 threads, float32: 64 examples of 21.2 tokens on average."
    assert page.count(f"Latency of dense, taught: {line}") == 1
    assert "\n\n    deepspeed launch/train.py --recipe my.json\n\n" in page
    assert "The policy was set on 1,347 examples of held_out." in page
    assert "Model /models/bert, task mnli." in page


def test_the_html_page_asks_nothing_of_the_network(made):
    """Every image is in the page, there is no script and no stylesheet to load, and the policy forbids both."""
    text = (made / "report.html").read_text()
    page = Page(text)
    assert len(page.references) == len(FIGURES)
    assert all(reference.startswith("data:image/png;base64,") for reference in page.references)
    assert not page.names & {"script", "link", "iframe", "object", "embed", "base", "form"}
    assert not re.search(r"url\(|@import|http", text.replace("http-equiv", ""))
    assert "default-src 'none'" in text
    assert "0.8100" in page.text


def test_nothing_in_a_run_s_files_becomes_markup(run):
    """Neither names nor metrics nor a command of several lines: each is shown as it was written."""
    evil = "<script>alert(1)</script>|![x](http://evil/x.png)[y](javascript:z)`&lt;*b*_c_"
    results = json.loads((run / "all_results.json").read_text())
    results[evil] = results.pop("exits")
    results[evil]["eval"] = {f"{evil}2": 0.5}
    (run / "all_results.json").write_text(json.dumps(results))
    (run / "log.jsonl").write_text(json.dumps({"phase": evil, "step": 1, "train/loss": 1.0}))
    command = f"train\n```\n{evil}\n</code></pre><img src=x onerror=alert(3)>"
    (run / "command.json").write_text(json.dumps({"command": command}))
    (run / "recipe.json").write_text("{}")
    write_report(run)
    page = Page((run / "report.html").read_text())
    assert not {name for name in page.names if name in ("script", "a", "em", "strong") or name.startswith("on")}
    assert all(reference.startswith("data:") for reference in page.references)
    assert command in page.text
    assert page.text.count(evil) >= 8  # verdict, column, row, note, command, captions


def test_what_is_broken_is_a_warning_and_the_rest_is_there(run, warnings):
    """A loss that is no number costs the figures, broken results the report; neither ends a run."""
    with (run / "log.jsonl").open("a") as log:
        log.write(json.dumps({"phase": "dense", "step": 4, "train/loss": "high"}) + "\n")
    write_report(run)
    assert "the report lacks figures: could not convert string to float" in warnings[-1]
    assert "0.8100" in (run / "report.md").read_text()
    (run / "all_results.json").write_text("{")
    write_report(run)
    assert "all_results.json cannot be read" in warnings[-1]


@pytest.mark.parametrize(("module", "missing"), [("matplotlib.figure", ["plots"]), ("markdown_it", ["report.html"])])
def test_without_an_optional_library_there_is_a_smaller_report(run, warnings, monkeypatch, module, missing):
    """One warning says how to get it; the table is on the page."""
    monkeypatch.setitem(sys.modules, module, None)
    write_report(run)
    assert [name for name in ("plots", "report.html") if not (run / name).exists()] == missing
    (warning,) = warnings
    assert "pip install matplotlib markdown-it-py" in warning
    assert "0.8100" in (run / "report.md").read_text()


def test_of_a_step_logged_twice_the_last_holds(run):
    """A resumed run repeats steps; evaluations add to a step's record; a line cut short is left out."""
    with (run / "log.jsonl").open("a") as log:
        for row in ({"step": 3, "train/loss": 9.0}, {"step": 3, "eval/accuracy": 0.5}, {"step": 2, "train/loss": 7.0}):
            log.write(json.dumps({"phase": "dense", **row}) + "\n")
        log.write('{"phase": "dense", "step": 4, "train/lo')
    records = read_run(run).records["dense"]
    assert [record["train/loss"] for record in records] == [1.0, 7.0, 9.0]
    assert records[-1]["eval/accuracy"] == 0.5


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


def test_the_command_makes_only_pages_that_are_its_own(run, tmp_path, capsys):
    """A user's page stops it; a later run may delete what it wrote. What is no run is one line, with exit code 2."""
    (run / "report.md").write_text("my notes")
    assert run_command(report_command, [str(run)]) == 2
    assert "was not written by this program" in capsys.readouterr().err
    assert (run / "report.md").read_text() == "my notes"
    (run / "report.md").unlink()
    assert [run_command(report_command, [str(run)]) for _ in range(2)] == [0, 0]
    RunFolder(run).open(overwrite=True)
    assert not [path for path in run.rglob("*") if path.suffix in (".md", ".html", ".png")]
    for folder, message in ((run / "gone", "gone is no folder: name the output"), (tmp_path, "holds no run: it has")):
        assert run_command(report_command, [str(folder)]) == 2
        assert message in capsys.readouterr().err
