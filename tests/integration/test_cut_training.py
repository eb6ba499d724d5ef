"""A model cut by what its layers give to training examples, then trained with a teacher, on two ranks under ZeRO."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.killing import alike
from support.launching import becomes_model, read, train

from ds_trainer.engine.checkpoint import Checkpoints

RUNS = {"zero0": (2, "zero0"), "zero3": (2, "zero3"), "alone": (1, "zero2")}
"""The ranks and the engine file of each run."""
COMMON = {"train_batch_size": 16, "learning_rate": 2e-3, "per_device_eval_batch_size": 16, "logging_steps": 1}
DENSE = COMMON | {"name": "dense", "max_steps": 12}
FILLED = COMMON | {
    "name": "filled",
    "cut": {"keep": 0.5, "calibration_examples": 64, "reconstruct": {"tokens": 1024, "steps": 8}},
    "techniques": {"distill": {"teacher": "@model", "alpha_ce": 0.1, "alpha_distil": 0.9}},
    "max_steps": 6,
    "save_steps": 2,
}


@pytest.fixture(scope="module")
def runs(tiny_recipe, tmp_path_factory) -> Path:
    """Runs of a recipe that cuts a trained model by loss, and fills it with that as its teacher."""
    folder = tmp_path_factory.mktemp("runs")
    recipe = tiny_recipe | {"tensorboard": False}
    train(0, recipe | {"phases": [DENSE]}, folder / "dense", engine="ds_configs/zero0.json")
    recipe |= {"model": {"name_or_path": str(folder / "dense" / "model")}, "phases": [FILLED]}
    for name, (ranks, stage) in RUNS.items():
        train(ranks, recipe, folder / name, engine=f"ds_configs/{stage}.json")
    return folder


def cut_of(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "starting_models" / "filled" / "model.safetensors")


@pytest.mark.parametrize("name", [name for name in RUNS if name != "zero0"])
def test_the_cut_does_not_depend_on_ranks_or_stages(runs, name):
    """The same sizes; weights bit by bit for the same ranks, and for one rank to the last digit of fp32."""
    first, other = (cut_of(runs / run) for run in ("zero0", name))
    assert first.keys() == other.keys()
    tolerance = {"rtol": 2e-6, "atol": 1e-7} if name == "alone" else {"rtol": 0, "atol": 0}
    for key, weight in first.items():
        torch.testing.assert_close(other[key], weight, **tolerance)
    reports = [read(runs / run / "starting_models" / "filled" / "cut.json")["parts"] for run in ("zero0", name)]
    sizes = [[(part["name"], part["kept"]) for part in parts] for parts in reports]
    assert sizes[0] == sizes[1]


def test_a_cut_run_is_resumed_with_the_same_cut(runs, server, tmp_path):
    """Killed after a checkpoint, it goes on with the cut that it has, and ends as the run that nothing stops."""
    words = ("--recipe", str(runs / "recipe.json"))
    run = server.run(2, tmp_path / "run", *words, engine="ds_configs/zero3.json")
    assert run.wait_until(lambda: Checkpoints(run.output).all())
    run.kill()
    made = {path: path.stat().st_mtime_ns for path in (run.output / "starting_models").rglob("*")}
    changed = server.run(2, run.output, *words, "--resume", "--set", "phases.filled.cut.damping=0.5")
    assert set(changed.codes()) == {2}
    assert ": the cut.damping: 0.01 before, 0.5 now" in changed.text
    resumed = server.run(2, run.output, *words, "--resume", engine="ds_configs/zero3.json")
    assert resumed.codes() == [0, 0], resumed.text[-4000:]
    assert "filled: resumed from " in resumed.text
    assert "cutting" not in resumed.text
    assert made == {path: path.stat().st_mtime_ns for path in (run.output / "starting_models").rglob("*")}
    assert alike(run.output, runs / "zero3")
    assert becomes_model(run.output / "checkpoint-6", run.output / "model", tmp_path / "exported")
