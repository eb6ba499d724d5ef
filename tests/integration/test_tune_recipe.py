"""`launch/tune.py --recipe_space` with real runs: one is scored on held-out examples, and one fails."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path

import pytest
from support.launching import Done, run_python

from ds_trainer.cli.train import read_train_job

RATE = "phases.train.learning_rate"


@pytest.fixture(scope="module")
def outcome(tiny_recipe, csv_folder, tmp_path_factory) -> tuple[Path, Done]:
    """The output folder and the end of a tuning whose evaluation set has a row that no run can read."""
    folder = tmp_path_factory.mktemp("tune_recipe")
    shutil.copy(csv_folder / "train.csv", folder)
    row = (csv_folder / "validation.csv").read_text().splitlines()[1]
    (folder / "validation.csv").write_text(f"text,kind\n{row}\nthe poison,a label that training has not\n")
    recipe = copy.deepcopy(tiny_recipe)
    recipe["task"] |= {"data_dir": str(folder), "held_out": 0.2}
    recipe["phases"] = [recipe["phases"][0] | {"name": "train", "max_steps": 12, "eval_steps": 6}]
    (folder / "recipe.json").write_text(json.dumps(recipe))
    words = ["--deepspeed_config", "ds_configs/zero0.json", "--recipe", str(folder / "recipe.json")]
    words += ["--recipe_space", json.dumps({RATE: [1e30]}), "--metric", "eval/accuracy"]
    return folder / "out", run_python("launch/tune.py", *words, "--output_dir", str(folder / "out"))


def test_a_failed_run_is_a_result(outcome):
    out, done = outcome
    assert done.returncode == 0, done.stderr[-3000:]
    trials = [json.loads(line) for line in (out / "trials.jsonl").read_text().splitlines()]
    assert [trial["outcome"] for trial in trials] == ["measured", "not finite"]
    assert "is not finite" in (out / "tuned_recipe.md").read_text()


def test_trials_are_scored_on_held_out_examples_alone(outcome):
    """A fifth of 240 training rows; a run that read the evaluation set would have ended with an error."""
    out, done = outcome
    own = json.loads((out / "trials.jsonl").read_text().splitlines()[0])
    assert [step for step, _ in own["curve"]] == [6, 12]
    assert own["score"] == own["curve"][-1][1]
    assert own["score"] * 48 == pytest.approx(round(own["score"] * 48), abs=1e-4)
    assert "on 48 held-out examples" in done.stderr
    results = json.loads((out / "trials" / own["run"] / "all_results.json").read_text())
    assert results["train"]["measured_on"]["examples"] == 48
    assert "text validation" not in (out / "trials" / own["run"] / "output.log").read_text()


def test_the_result_is_a_recipe_for_training(outcome, capsys):
    """Its model is kept, since nothing beats it."""
    out, _ = outcome
    files = ["--deepspeed_config", "ds_configs/zero0.json", "--recipe", str(out / "tuned_recipe.json")]
    job = read_train_job([*files, "--output_dir", str(out / "new")])
    assert job.recipe.phases[0].learning_rate == 4e-3
    assert not job.recipe.task.score_held_out
    assert list(out.glob("trials/*/model/config.json"))
