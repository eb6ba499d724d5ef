"""The command that makes a run's report again: the files it writes, keeps and refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.launching import run_python
from support.report_runs import draw_only_losses, figures_of, write_run

from ds_trainer.cli.command import run_command
from ds_trainer.cli.report import report_command
from ds_trainer.files.run_folder import RunFolder
from ds_trainer.report import page
from ds_trainer.report.page import write_report


@pytest.fixture
def run(tmp_path) -> Path:
    return write_run(tmp_path / "out")


@pytest.fixture
def few_figures(monkeypatch) -> None:
    """Draw only the loss and save no picture, where the figures are not what is tested."""
    draw_only_losses(monkeypatch)
    monkeypatch.setattr(page, "save", lambda figure, path: path.write_bytes(b""))


@pytest.mark.usefixtures("few_figures")
def test_the_command_leaves_tensorboard_alone(run):
    """Its images come of the run's own end: made again, they would pile up."""
    (run / "tensorboard" / "dense").mkdir(parents=True)
    report_command([str(run)])
    assert list((run / "tensorboard").rglob("*tfevents*")) == []
    write_report(run)
    report_command([str(run)])
    assert len(list((run / "tensorboard").rglob("*tfevents*"))) == 1


@pytest.mark.parametrize("name", ["recipe.json", "all_results.json"])
def test_the_command_is_strict(run, name, capsys):
    """A broken file is an error of the command, with exit code 2."""
    (run / name).write_text("{")
    assert run_command(report_command, [str(run)]) == 2
    assert f"{name} cannot be read" in capsys.readouterr().err


def test_a_folder_without_a_run_is_told(tmp_path, capsys):
    """Exit code 2 and one line; neither a missing folder nor an empty one gets a report."""
    assert run_command(report_command, [str(tmp_path / "gone")]) == 2
    assert run_command(report_command, [str(tmp_path)]) == 2
    told = capsys.readouterr().err
    assert "gone is no folder: name the output folder of a run" in told
    assert "holds no run: it has neither log.jsonl nor all_results.json" in told
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("few_figures")
def test_the_command_keeps_what_it_did_not_write(run, capsys):
    """A page of the user's stops it; its own it makes again, and a later run may delete it."""
    (run / "report.md").write_text("my notes")
    assert run_command(report_command, [str(run)]) == 2
    assert "was not written by this program" in capsys.readouterr().err
    assert (run / "report.md").read_text() == "my notes"
    (run / "report.md").unlink()
    assert [run_command(report_command, [str(run)]) for _ in range(2)] == [0, 0]
    RunFolder(run).open(overwrite=True)
    assert not [path for path in run.rglob("*") if path.suffix in (".md", ".html", ".png")]
    assert not (run / "plots").exists()


def test_the_entry_point_makes_the_report_again(run):
    """`python launch/report.py OUT`, of a run that has only begun."""
    for name in ("all_results.json", "recipe.json", "eval/exits.json"):
        (run / name).unlink()
    (run / "log.jsonl").write_text('{"phase": "dense", "step": 1, "train/loss": 1.0}\n')
    done = run_python("launch/report.py", str(run))
    assert done.returncode == 0, done.stderr
    assert done.stderr.strip() == f"report: {run / 'report.md'}"
    assert figures_of(run) == {"dense.loss"}
