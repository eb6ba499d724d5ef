"""Phases without optimizer steps, by the command on 2 ranks, and a warning of classes that a model never gives."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.launching import log_of, read, run_script, train

UNANSWERED = "never answers these classes"


@pytest.fixture(scope="module")
def output(tiny_recipe, tmp_path_factory) -> Path:
    """Train two layers, take one of them as it is, and train that; then resumed, the run finds nothing more to do."""
    common = {"train_batch_size": 16, "learning_rate": 4e-3}
    half = {"name": "half", "num_train_epochs": 0, "student": {"layers": [1]}}
    phases = [{"name": "dense", "max_steps": 12, **common}, half, {"name": "again", "max_steps": 2, **common}]
    out = tmp_path_factory.mktemp("untrained") / "out"
    for more in ([], ["--resume"]):
        train(2, tiny_recipe | {"phases": phases, "report": True}, out, *more)
    return out


def test_a_phase_of_no_epochs_exports_the_model_that_it_starts_from(output):
    """The student of one layer, weight by weight; the next phase starts from it."""
    made, exported = (
        load_file(folder / "model.safetensors")
        for folder in (output / "starting_models" / "half", output / "half" / "model")
    )
    assert made.keys() == exported.keys()
    assert all(torch.equal(made[name], exported[name]) for name in made)
    assert read(output / "model" / "config.json")["num_hidden_layers"] == 1


def test_a_phase_of_no_epochs_is_scored_like_any_other(output, tmp_path):
    """Results, log, report and events have its scores, those that the command to evaluate gives for the folder."""
    half = read(output / "all_results.json")["half"]
    assert (half["train"]["steps"], half["train"]["epochs"]) == (0, 0)
    (record,) = log_of(output, "half", "step")
    assert (record["step"], record["eval/accuracy"]) == (0, half["eval"]["accuracy"])
    recipe = str(output.parent / "recipe.json")
    scores = str(tmp_path / "scores.json")
    done = run_script("launch/evaluate.py", str(output / "half" / "model"), "--recipe", recipe, "--output_file", scores)
    assert done.returncode == 0, done.stderr[-4000:]
    assert read(tmp_path / "scores.json")["accuracy"] == pytest.approx(half["eval"]["accuracy"])
    assert "| dense | half | again |" in (output / "report.md").read_text()
    assert list((output / "tensorboard" / "half").glob("events*"))


def test_a_model_that_gives_one_answer_to_everything_is_named(tiny_recipe, output, tmp_path):
    """On the console once, in the results and in the report, and by the command to evaluate."""
    folder = tmp_path / "blind"
    folder.mkdir()
    for path in (output / "model").iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    weights = load_file(folder / "model.safetensors")
    weights |= {name: torch.zeros_like(value) for name, value in weights.items() if name.startswith("classifier")}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    phase = {"name": "train", "max_steps": 1, "learning_rate": 0.0}
    recipe = tiny_recipe | {"phases": [phase], "model": {"name_or_path": str(folder)}, "report": True}
    run = tmp_path / "out"
    done = train(2, recipe, run)
    assert done.stderr.count(UNANSWERED) == 1
    (warning,) = read(run / "all_results.json")["train"]["warnings"]
    assert "though validation has them" in warning
    assert UNANSWERED in (run / "report.md").read_text()
    done = run_script("launch/evaluate.py", str(folder), "--recipe", str(tmp_path / "recipe.json"))
    assert done.stderr.count(UNANSWERED) == 1


def test_a_recipe_that_trains_nothing_asks_nothing_of_the_engine_file(tiny_recipe, output, tmp_path, write_json):
    """One that DeepSpeed refuses does."""
    refused = {"optimizer": {"type": "SGD"}, "zero_optimization": {"stage": 1}}
    recipe = tiny_recipe | {"model": {"name_or_path": str(output / "dense" / "model")}}
    recipe["phases"] = [{"name": "kept", "num_train_epochs": 0}]
    train(2, recipe, tmp_path / "out", engine=write_json("engine.json", refused))
    assert read(tmp_path / "out" / "all_results.json").keys() == {"kept"}
