"""A cut in the report: its seconds, the scores before any training, and what each layer kept at which error."""

from __future__ import annotations

import json
from pathlib import Path

from support.report_runs import write_run

from ds_trainer.report import plots
from ds_trainer.report.log import results_table
from ds_trainer.report.page import write_report


def parts() -> list[dict]:
    """The attention and the feed-forward of three layers; the second layer has lost more."""
    names = {"attention.output.dense": 12, "output.dense": 1536}
    return [
        {
            "name": f"bert.encoder.layer.{i}.{name}",
            "unit": "heads" if count == 12 else "neurons",
            "count": count,
            "kept": count // (4 if i == 1 else 2),
            "error": i / 10,
        }
        for i in range(3)
        for name, count in names.items()
    ]


def test_the_figure_has_what_each_layer_kept_and_its_error() -> None:
    """A line for each kind of block, at 100% where one was left whole; no figure where only tokens were cut."""
    figure = plots.cut_parts("quarter", parts()[:-1])
    assert figure is not None
    above, below = figure.axes
    kept = {str(line.get_label()): list(line.get_ydata()) for line in above.get_lines()}
    assert kept == {"heads (of 12)": [50, 25, 50], "neurons (of 1,536)": [50, 25, 100]}
    assert [list(line.get_ydata()) for line in below.get_lines()] == [[0, 10, 20], [0, 10, 0]]
    assert plots.cut_parts("quarter", []) is None


def test_the_page_has_a_cut_beside_phases_without_one(tmp_path: Path) -> None:
    """Seconds, scores before the first step, sizes and errors by layer; a dash where a phase has none."""
    folder = write_run(tmp_path / "out")
    results = json.loads((folder / "all_results.json").read_text())
    records = parts()[:-1]
    records[-1]["error"], records[0]["error"] = 0.9999, 1.2e-8  # not "1e+02%"
    results["taught"]["cut"] = {"seconds": 8.14, "examples": 512, "parts": records, "scores": {"accuracy": 0.8624}}
    (folder / "all_results.json").write_text(json.dumps(results))
    write_report(folder)
    page = (folder / "report.md").read_text()
    assert "| cut | – | 8.1 s, 512 examples | – |" in page
    assert "| accuracy of the cut, before any training | – | 0.8624 | – |" in page
    assert "| cut: neurons, kept in each layer | – | 768, 384, all | – |" in page
    assert "| cut: heads, error of the outputs | – | 0%, 10%, 100% | – |" in page
    assert page.count("](plots/taught.cut.png)") == 1
    assert (folder / "plots" / "taught.cut.png").is_file()
    assert "What is missing" not in page


def test_the_closing_table_has_sizes_and_latencies_where_they_were_measured() -> None:
    """A run without a report has neither."""
    train = {"train_seconds": 70.0, "examples_per_s": 500.0}
    dense = {"train": train, "eval": {"accuracy": 0.7}, "size": {"bytes": 3 * 2**20}}
    dense["latency"] = {"batch_1": {"median_ms": 1.5}, "batch_32": {"median_ms": 18.25}}
    lines = results_table({"dense": dense}).splitlines()
    assert lines[0].split("  ")[-5:] == ["MiB", "ms (batch 1)", "ms (batch 32)", "seconds", "examples/s"]
    assert lines[1].split()[-5:] == ["3.0", "1.50", "18.25", "70", "500"]
    assert "MiB" not in results_table({"dense": {"train": train, "eval": {}}})
