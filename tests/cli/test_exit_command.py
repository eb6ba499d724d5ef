"""The commands on a folder with exits: evaluation and calibration, their flags, and what they refuse."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.exit_folders import CLASSES, ENTROPY, json_of, make_folder
from support.launching import run_deepspeed, run_script

from ds_trainer.cli.evaluate import calibrate_command, read_calibrate_job, read_evaluate_job
from ds_trainer.recipe.exit_specs import ExitPolicy
from ds_trainer.tasks.task import Task
from ds_trainer.techniques.exits.early_exit import read_exits
from ds_trainer.techniques.exits.exit_evaluation import evaluate_exits

pytest_plugins = ("support.exit_fixtures",)


@pytest.fixture(scope="module")
def flags(tiny_recipe: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The task on a command line, as the recipe of a run."""
    path = tmp_path_factory.mktemp("run") / "recipe.json"
    path.write_text(json.dumps(tiny_recipe | {"task": tiny_recipe["task"] | {"held_out": 0.25}}))
    return ["--recipe", str(path)]


def test_evaluation_scores_the_exits_of_a_folder_on_any_number_of_ranks(
    task: Task, classifier: Path, flags: list[str], tmp_path: Path
) -> None:
    """Two ranks print the plain scores and those of the exits, as one process finds them; the file has the curves."""
    places = ["--output_file", str(tmp_path / "scores.json"), "--predictions_dir", str(tmp_path / "eval")]
    done = run_deepspeed(2, "launch/evaluate.py", str(classifier), *flags, *places)
    assert done.returncode == 0, done.stderr
    scores = json.loads((tmp_path / "scores.json").read_text())
    assert json.dumps(scores, indent=2) in done.stdout
    results = json.loads((tmp_path / "eval" / "exits.json").read_text())
    of_exits, alone = evaluate_exits(classifier, task, 64)
    own = ("accuracy", "macro_f1", *(f"f1/{name}" for name in task.label_names))
    assert results.keys() == alone.keys()
    assert scores.keys() == {*own, *of_exits}
    of_split, alone_of_split = (each["splits"]["validation"] for each in (results, alone))
    assert scores["accuracy"] == of_split["heads"]["4"]["accuracy"]
    for name in ("accuracy", "mean_layers", "expected_saving"):
        assert scores[f"early_exit/{name}"] == of_exits[f"early_exit/{name}"]
    assert of_split["heads"] == alone_of_split["heads"]
    assert of_split["early_exit"]["exit_counts"] == alone_of_split["early_exit"]["exit_counts"]
    _, *rows = (tmp_path / "eval" / "predictions.csv").read_text().splitlines()
    right = sum(label == answer for _, label, answer, *_ in (row.split(",") for row in rows))
    assert right / len(rows) == pytest.approx(scores["accuracy"])


def test_the_commands_calibrate_and_then_evaluate_by_other_thresholds(
    classifier: Path, flags: list[str], tmp_path: Path, csv_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Calibration prints what it writes, and needs no validation file; a flag overrides it for one evaluation.

    Where the disk is full, the scores are printed all the same, and the error is one line.
    """
    folder = shutil.copytree(classifier, tmp_path / "model")
    data = shutil.copytree(csv_folder, tmp_path / "data", ignore=shutil.ignore_patterns("validation*"))
    more = ["--data_dir", str(data), "--target_speedup", "1.4", "--criterion", "confidence"]
    calibrate_command([str(folder), *flags, *more])
    record = json_of(capsys.readouterr().out)
    assert record["expected_speedup"] >= 1.4
    assert read_exits(folder).calibration == record
    written = (folder / "exits.json").read_bytes()
    full = ["--early_exit_entropy", "0,0,10", "--output_file", "/dev/full"]
    done = run_script("launch/evaluate.py", str(folder), *flags, *full)
    assert done.returncode == 1, done.stderr
    assert "error: [Errno 28] No space left on device" in done.stderr
    assert "Traceback" not in done.stderr
    scores = json_of(done.stdout)
    assert (scores["early_exit/mean_layers"], scores["early_exit/expected_saving"]) == (3, 0.75)
    assert (folder / "exits.json").read_bytes() == written


@pytest.mark.parametrize(
    ("read", "more", "message"),
    [
        (read_calibrate_job, ["--target_speedup", "0.5"], "--target_speedup is 0.5: it must be greater than or equal"),
        (read_calibrate_job, ["--max_drop", "1", "--patience", "2"], "--patience 2: it goes with a regression"),
        (read_calibrate_job, ["--max_drop", "1", "--set", "held_out=0.3"], "task.held_out is 0.3, and the exit heads"),
        (read_calibrate_job, ["--max_drop", "1", "--set", "held_out=0"], "give --set held_out=0.25"),
        (read_evaluate_job, ["--early_exit_entropy", "0.1,0.2"], "2 thresholds for 3 heads by entropy: give 3"),
        (read_evaluate_job, ["--early_exit_confidence", "0.9,"], "write a number, or several with commas"),
        (read_evaluate_job, ["--early_exit_confidence", "95"], "--early_exit_confidence is 95.0: write a number from"),
    ],
)
def test_mistakes_of_flags_are_told(
    classifier: Path, flags: list[str], read: Any, more: list[str], message: str
) -> None:
    """One ValueError each, before anything is loaded."""
    with pytest.raises(ValueError) as caught:
        read([str(classifier), *flags, *more])
    assert message in str(caught.value)


def test_a_folder_that_does_not_suit_is_told(classifier: Path, flags: list[str], tmp_path: Path) -> None:
    """One without exits, and heads that have seen all training examples."""
    plain = shutil.copytree(classifier, tmp_path / "plain", ignore=shutil.ignore_patterns("exit*"))
    seen = make_folder(tmp_path / "seen", CLASSES, ENTROPY, held_out=0.0)
    for folder, message in (
        (plain, "has no exits.json: it has no exit heads to calibrate"),
        (seen, "train them with task.held_out"),
    ):
        with pytest.raises(ValueError) as caught:
            read_calibrate_job([str(folder), *flags, "--max_drop", "1"])
        assert message in str(caught.value)
    assert read_evaluate_job([str(plain), *flags]).exit_policy(None) is None
    with pytest.raises(ValueError, match=r"an exit policy is given, and .*plain has no exits\.json"):
        read_evaluate_job([str(plain), *flags, "--patience", "1"])


def test_a_policy_on_the_command_line_is_taken(
    classifier: Path, regressor: Path, flags: list[str], tmp_path: Path
) -> None:
    """One threshold is every head's; the tolerances of a regression stay when its patience changes."""

    def policy(folder: Path, *more: str) -> ExitPolicy | None:
        return read_evaluate_job([str(folder), *flags, *more]).exit_policy(read_exits(folder))

    assert policy(classifier) is None
    assert policy(classifier, "--early_exit_entropy", "0.1") == ExitPolicy(criterion="entropy", thresholds=[0.1] * 3)
    each = policy(classifier, "--early_exit_confidence", "0.7,0.8,0.9")
    assert each == ExitPolicy(criterion="confidence", thresholds=[0.7, 0.8, 0.9])
    assert policy(classifier, "--patience", "3") == ExitPolicy(criterion="patience", patience=3)
    (tmp_path / "train.csv").write_text("text,kind\na pear,0.5\nan owl,0.25\n")
    shutil.copy(tmp_path / "train.csv", tmp_path / "validation.csv")
    regression = ["--set", "regression=true", "--data_dir", str(tmp_path)]
    patient = policy(regressor, *regression, "--patience", "3")
    assert patient == ExitPolicy(criterion="patience", thresholds=[0.3] * 3, patience=3)
    with pytest.raises(ValueError, match="a regression has no probabilities"):
        policy(regressor, *regression, "--early_exit_entropy", "0.1")
