"""All three techniques one after another, by the command on 2 ranks, and what the run leaves: exits, costs, report."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.launching import read, train

from ds_trainer.recipe.saved_checkpoint import read_checkpoint
from ds_trainer.run.scoring import export_checkpoint
from ds_trainer.techniques.exits.early_exit import load_for_inference

LAYERS = 3


def recipe_for(tiny: dict) -> dict:
    common = {"train_batch_size": 8, "learning_rate": 4e-3, "logging_steps": 5, "per_device_eval_batch_size": 8}
    prune = {"final_threshold": 0.5, "initial_warmup": 0, "final_warmup": 0.3}
    distill = {"teacher": "@dense", "alpha_ce": 0.2, "alpha_distil": 0.8}
    config = tiny["model"]["config"] | {"num_hidden_layers": LAYERS}
    return tiny | {
        "report": True,
        "model": tiny["model"] | {"config": config},
        "task": tiny["task"] | {"held_out": 0.2},
        "phases": [
            {"name": "dense", "max_steps": 20, **common},
            {"name": "compress", "max_steps": 5, "techniques": {"prune": prune, "distill": distill}, **common},
            {"name": "exits", "max_steps": 10, "save_steps": 10, "techniques": {"exits": {"max_drop": 5.0}}, **common},
        ],
    }


@pytest.fixture(scope="module")
def output(tiny_recipe, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    train(2, recipe_for(tiny_recipe), folder / "out")
    return folder / "out"


def test_the_exits_are_calibrated_on_held_out_examples(output):
    """On a fifth of the training rows, which no phase has trained on; folder and results agree. Curves lie beside."""
    results = read(output / "all_results.json")["exits"]
    exits = results["exits"]
    assert exits["calibration"]["split"] == "held_out"
    assert exits["calibration"]["examples"] == 48
    saved = read(output / "model" / "exits.json")
    assert saved["policy"] == exits["policy"]
    assert saved["held_out"] == 0.2
    assert load_for_inference(output / "model").policy.thresholds == exits["policy"]["thresholds"]
    best = exits["calibration"]
    assert best["scores"]["accuracy"] >= best["full_scores"]["accuracy"] - 0.05 - 1e-6
    (split,) = exits["splits"].values()
    assert results["eval"]["early_exit/mean_layers"] == pytest.approx(split["early_exit"]["mean_layers"])
    assert "curves" not in split
    curves = read(output / "eval" / "exits.json")["splits"]["validation"]["curves"]
    assert curves.keys() == {"entropy", "confidence", "patience"}


def test_the_report_has_every_figure(output):
    """The costs of each model are measured; the page has a figure of each kind, and the command."""
    for name, costs in read(output / "all_results.json").items():
        assert costs["size"]["bytes"] > 0
        assert costs["latency"]["batch_1"]["median_ms"] > 0
        assert ("early_exit_latency" in costs) == (name == "exits")
    page = (output / "report.md").read_text()
    assert "ds-train --deepspeed_config" in page
    for kind in ("loss", "readings", "exits", "exit_histogram"):
        assert [path for path in (output / "plots").glob(f"*{kind}*.png") if f"plots/{path.name}" in page], kind
    assert (output / "report.html").stat().st_size > 50_000


def test_the_exits_of_a_checkpoint_are_calibrated_too(output, tmp_path):
    """By one process as by the 2 ranks of the run: the same files, the thresholds up to the order of sums."""
    export_checkpoint(read_checkpoint(output / "checkpoint-10"), None, tmp_path / "model")
    files, expected = (
        {path.name: path.read_bytes() for path in folder.iterdir()} for folder in (tmp_path / "model", output / "model")
    )
    found, saved = (json.loads(each.pop("exits.json")) for each in (files, expected))
    assert b"ms (batch 1)" in expected.pop("README.md")
    assert files == expected
    assert found["policy"]["thresholds"] == pytest.approx(saved["policy"]["thresholds"], abs=1e-5)
    assert found["calibration"]["mean_layers"] == saved["calibration"]["mean_layers"]
    assert found["held_out_key"] == saved["held_out_key"]
