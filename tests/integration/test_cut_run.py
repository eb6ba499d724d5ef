"""Runs with cuts of tokens, heads, neurons and single weights, by the command on two ranks, and what they leave."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file
from support.launching import Done, read, train


@pytest.fixture(scope="module")
def recipe(tagged_recipe, tmp_path_factory) -> Path:
    """Train two layers; cut half of their weights, then 70% by one budget, each time trained on with its zeros.

    Then cut half of the trained heads and neurons and teach that, and cut half of this and of the tokens.
    """
    common = {"train_batch_size": 16, "learning_rate": 4e-3, "logging_steps": 1}
    cut = {"keep": 0.5, "calibration_examples": 32, "reconstruct": {"tokens": 512, "steps": 4}}
    weights = cut | {"granularity": "weight", "uniform": True}
    distill = {"teacher": "@dense", "cache_teacher": True, "alpha_ce": 0.5, "alpha_distil": 0.5}
    zeros = {"max_steps": 2, "techniques": {"keep_zeros": True}}
    half = {"cut": cut | {"uniform": True}, "start_from": "@dense", "techniques": {"distill": distill}}
    phases = [
        common | {"name": "dense", "max_steps": 8},
        common | zeros | {"name": "sparse", "cut": weights},
        common | zeros | {"name": "sparser", "cut": weights | {"keep": 0.3, "uniform": False}},
        common | {"name": "half", "max_steps": 2} | half,
        {"name": "neurons", "num_train_epochs": 0, "cut": cut | {"granularity": "neuron", "vocabulary": {"keep": 40}}},
    ]
    folder = tmp_path_factory.mktemp("cut")
    (folder / "recipe.json").write_text(json.dumps(tagged_recipe | {"phases": phases, "report": True}))
    return folder / "recipe.json"


@pytest.fixture(scope="module")
def done(recipe) -> Done:
    return train(2, recipe, recipe.parent / "out")


def densities(folder: Path) -> list[float]:
    weights = load_file(folder / "model.safetensors")
    matrices = [value for name, value in weights.items() if ".layer" in name and value.dim() == 2]
    return [float((matrix != 0).double().mean()) for matrix in matrices]


def test_the_console_has_a_line_for_each_cut_and_its_scores(done) -> None:
    """Nothing is said of the rehearsal's cuts; what is left untrained is scored once, as its phase."""
    said = done.stdout + done.stderr
    assert said.count("half: cutting ") == said.count("half: cut in ") == said.count("neurons: cut in ") == 1
    assert said.count("half: cut  f1 ") == said.count("neurons: cut in ") == 1
    assert said.count("(before any training)") == 3


def test_the_results_have_the_cut_and_its_scores(done, recipe) -> None:
    """The report of the cut beside the model, and the score before the first step; a phase without a cut has none.

    The predictions are beside the scores, as CoNLL: the share of right tags in the file is the accuracy.
    """
    out = recipe.parent / "out"
    results = read(out / "all_results.json")
    assert "cut" not in results["dense"]
    for phase in ("sparse", "half", "neurons"):
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
    lines = (out / "eval" / "predictions.conll").read_text().splitlines()
    rows = [line.split("\t") for line in lines if line]
    accuracy = sum(tag == predicted for _, tag, predicted in rows) / len(rows)
    assert accuracy == pytest.approx(results["neurons"]["eval"]["accuracy"])


def test_a_cut_goes_on_from_the_cut_before_and_training_keeps_its_zeros(done, recipe) -> None:
    """Each matrix keeps half after the first cut, then unequal shares of 30%; `cut.json` has every matrix."""
    out = recipe.parent / "out"
    made, count = out / "starting_models", len(densities(out / "dense" / "model"))
    for place in (made / "sparse", out / "sparse" / "model"):
        assert densities(place) == pytest.approx([0.5] * count, abs=0.01)
    shares = densities(made / "sparser")
    assert max(shares) - min(shares) > 0.05
    assert densities(out / "sparser" / "model") == pytest.approx(shares)
    parts = read(made / "sparser" / "cut.json")["parts"]
    assert len(parts) == count
    assert sum(part["kept"] for part in parts) == pytest.approx(0.3 * sum(part["count"] for part in parts), rel=0.01)
    assert all(part["error"] > 0 for part in parts)
