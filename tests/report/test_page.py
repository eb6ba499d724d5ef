"""The page of a run: what it shows, that it never ends a run, and that it loads nothing; the command that makes it.

The verdict says in words what the phases' models gain and lose beside the first one that was timed.
"""

from __future__ import annotations

import json
import math
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from support.report_runs import FIGURES, write_run

from ds_trainer.cli.command import run_command
from ds_trainer.cli.train import report_command
from ds_trainer.files.run_folder import RunFolder
from ds_trainer.ranks import distributed
from ds_trainer.report import figures
from ds_trainer.report.page import write_report
from ds_trainer.report.results import read_run, results_table, verdict


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
        assert page.splitlines().count(f"| {' | '.join((title, *cells))} |") == 1, title
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


def phase(metric: str, score: float, *ms: float, **more: Any) -> dict[str, Any]:
    """The results of a phase whose model takes these milliseconds at batch 1 and 32."""
    latency = {f"batch_{size}": {"median_ms": value} for size, value in zip((1, 32), ms, strict=False)}
    return {"eval": {metric: score, **more.pop("eval", {})}, "latency": latency, **more}


@pytest.mark.parametrize(
    ("metric", "before", "after", "words"),
    [
        ("accuracy", 0.875, 0.873, "0.2 points less accuracy"),
        ("accuracy", 0.873, 0.875, "0.2 points more accuracy"),
        ("f1", 0.8731, 0.8733, "equal f1"),
        ("matthews", 0.05, -0.05, "10.0 points less matthews"),
        ("exact_match", 0.5, 0.3, "0.2 points less exact_match"),  # of SQuAD, in percent
        ("f1", 88.1, 86.9, "1.2 points less f1"),
        ("perplexity", 24.93, 28428.2, "perplexity 28,428.2 instead of 24.9300, which is worse"),
        ("loss", 0.4, 0.31, "loss 0.3100 instead of 0.4000, which is better"),
    ],
)
def test_scores_are_compared_in_points_or_where_less_is_better_as_they_are(metric, before, after, words):
    """A share has a hundred points, a percentage is points already, and a perplexity has none."""
    results = {"dense": phase(metric, before, 4, 38), "half": phase(metric, after, 2.9, 20)}
    assert verdict(results) == [f"half: 1.4 times as fast as dense at batch 1, 1.9 times at batch 32, {words}."]


def test_only_what_was_measured_is_compared():
    """A batch size that both have; no score that is not finite; early exits by their own times and score."""
    early = {"early_exit_latency": {"batch_32": {"median_ms": 10.0}}, "eval": {"early_exit/accuracy": 0.86}}
    results = {
        "other_task": {"eval": {"f1": 0.5}},
        "dense": phase("accuracy", 0.88, 4, 40),
        "broken": phase("accuracy", math.nan, 8),
        "exits": phase("accuracy", 0.87, 4, 40, **early),
    }
    assert verdict(results) == [
        "broken: 0.5 times as fast as dense at batch 1.",
        "exits: 1.0 times as fast as dense at batch 1, 1.0 times at batch 32, 1.0 points less accuracy.",
        "exits, leaving early: 4.0 times as fast as dense at batch 32, 2.0 points less accuracy.",
    ]
    assert verdict({}) == verdict({"dense": results["dense"]}) == verdict({"untimed": {"eval": {"f1": 1.0}}}) == []


def test_the_closing_table_ends_in_the_verdict():
    """Below the rows, whose scores stand together before the costs, which a run without a report has not measured."""
    train = {"train_seconds": 70.0, "examples_per_s": 500.0}
    half = phase("accuracy", 0.87, 2, 18.25, eval={"teacher/agreement": 0.98}, train=train, size={"bytes": 3 * 2**20})
    results = {"dense": phase("accuracy", 0.88, 4, train=train), "half": half}
    lines = results_table(results).splitlines()
    assert lines[0].split("  ")[1:3] == ["accuracy", "teacher/agreement"]
    assert lines[1].split()[:3] == ["dense", "0.8800", "–"]
    assert lines[3:] == ["", *verdict(results)]
    first, row = results_table({"half": half}).splitlines()
    assert first.split("  ")[-5:] == ["MiB", "ms (batch 1)", "ms (batch 32)", "seconds", "examples/s"]
    assert row.split()[-5:] == ["3.0", "2.00", "18.25", "70", "500"]
    assert "MiB" not in results_table({"dense": {"train": train, "eval": {}}})
