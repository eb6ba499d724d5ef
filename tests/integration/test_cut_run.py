"""A run with a cut tells what it did, and what the cut model scores before it is trained: on the tags of words."""

from __future__ import annotations

import json
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from support.launching import run_deepspeed
from support.trained_runs import read


@pytest.fixture(scope="module")
def recipe(tagged_recipe, tmp_path_factory) -> Path:
    """Train two layers, cut half of them and teach that, cut half of this and of the tokens, and leave it."""
    common = {"train_batch_size": 16, "learning_rate": 4e-3, "logging_steps": 4}
    cut = {"keep": 0.5, "calibration_examples": 32}
    distill = {"teacher": "@dense", "cache_teacher": True, "alpha_ce": 0.5, "alpha_distil": 0.5}
    phases = [
        common | {"name": "dense", "max_steps": 12},
        common | {"name": "half", "max_steps": 4, "cut": cut | {"uniform": True}, "techniques": {"distill": distill}},
        {"name": "neurons", "num_train_epochs": 0, "cut": cut | {"granularity": "neuron", "vocabulary": {"keep": 40}}},
    ]
    file = tmp_path_factory.mktemp("cut") / "recipe.json"
    file.write_text(json.dumps(tagged_recipe | {"phases": phases, "report": True}))
    return file


def trained(recipe: Path, *more: str) -> CompletedProcess[str]:
    words = ["launch/train.py", "--deepspeed_config", "ds_configs/zero2.json", "--recipe", str(recipe)]
    done = run_deepspeed(2, *words, "--output_dir", str(recipe.parent / "out"), *more)
    assert done.returncode == 0, done.stderr[-4000:]
    return done


@pytest.fixture(scope="module")
def done(recipe) -> CompletedProcess[str]:
    return trained(recipe)


def test_the_console_has_a_line_for_each_cut_and_its_scores(done) -> None:
    """Nothing is said of the rehearsal's cuts; what is left untrained is scored once, as its phase."""
    told = done.stdout + done.stderr
    assert told.count("half: cutting ") == told.count("half: cut in ") == told.count("neurons: cut in ") == 1
    assert told.count("half: cut  f1 ") == told.count("(before any training)") == 1


def test_the_results_have_the_cut_and_its_scores(done, recipe) -> None:
    """The report of the cut beside the model, and the score before the first step; a phase without a cut has none."""
    out = recipe.parent / "out"
    results = read(out / "all_results.json")
    assert "cut" not in results["dense"]
    for phase in ("half", "neurons"):
        cut = results[phase]["cut"]
        scores = cut.pop("scores")
        assert cut == read(out / "starting_models" / phase / "cut.json")
        assert cut["examples"] == 32
        assert cut["parameters"]["after"] == results[phase]["weights"]["model"]["total"]
        assert scores.keys() == {name for name in results[phase]["eval"] if not name.startswith("teacher/")}
    assert scores == results["neurons"]["eval"]
    assert read(out / "model" / "config.json")["vocab_size"] == cut["tokens"]["after"] < cut["tokens"]["before"]
    page = (out / "report.md").read_text()
    assert page.count("of the cut, before any training") == len(scores)
    assert {"half.cut.png", "neurons.cut.png"} <= {path.name for path in (out / "plots").iterdir()}


def test_the_predictions_are_beside_the_scores(done, recipe) -> None:
    """As CoNLL, of all words; the share of right tags in the file is the accuracy."""
    out = recipe.parent / "out"
    lines = (out / "eval" / "predictions.conll").read_text().splitlines()
    rows = [line.split("\t") for line in lines if line]
    accuracy = sum(tag == predicted for _, tag, predicted in rows) / len(rows)
    assert accuracy == pytest.approx(read(out / "all_results.json")["neurons"]["eval"]["accuracy"])


def test_a_dry_run_says_what_the_cuts_cost(recipe) -> None:
    """Operations, bytes and an estimate of seconds, of the phases with a cut only; the second cut is of the first's."""
    phases = json.loads(trained(recipe, "--dry_run", "json").stdout)["phases"]
    costs = {phase["phase"]: phase["cut"] for phase in phases if "cut" in phase}
    assert list(costs) == ["half", "neurons"]
    for cost in costs.values():
        assert cost.keys() == {"operations", "bytes", "estimated_seconds"}
        assert min(cost["operations"].values()) > 0
        assert cost["bytes"]["total"] > cost["bytes"]["model"] > 0
    assert costs["neurons"]["bytes"]["model"] < costs["half"]["bytes"]["model"]
