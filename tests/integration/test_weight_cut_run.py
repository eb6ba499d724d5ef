"""Cuts of single weights in a run, by the command on 2 ranks under ZeRO-3: pruned on, then cut again and trained."""

import json

import pytest
from safetensors.torch import load_file
from support.launching import run_deepspeed
from support.trained_runs import read


@pytest.fixture(scope="module")
def output(tiny_recipe, tmp_path_factory):
    """Half of the weights cut and pruned on to 40%; of that 30% by one budget for all, trained with its zeros."""
    folder = tmp_path_factory.mktemp("weight_cut")
    common = {"train_batch_size": 16, "learning_rate": 4e-3}
    cut = {"granularity": "weight", "calibration_examples": 64, "uniform": True}
    prune = {"mask_init": "cut", "final_threshold": 0.4, "initial_warmup": 2, "final_warmup": 0.3}
    phases = [
        {"name": "dense", "max_steps": 30, **common},
        {
            "name": "masked",
            "max_steps": 8,
            "logging_steps": 1,
            "cut": cut | {"keep": 0.5},
            "techniques": {"prune": prune},
            **common,
        },
        {
            "name": "filled",
            "max_steps": 4,
            "cut": cut | {"keep": 0.3, "uniform": False},
            "techniques": {"keep_zeros": True},
            **common,
        },
    ]
    (folder / "recipe.json").write_text(json.dumps(tiny_recipe | {"phases": phases}))
    (folder / "engine.json").write_text(json.dumps({"zero_optimization": {"stage": 3}}))
    files = ["--deepspeed_config", str(folder / "engine.json"), "--recipe", str(folder / "recipe.json")]
    done = run_deepspeed(2, "launch/train.py", *files, "--output_dir", str(folder / "out"))
    assert done.returncode == 0, done.stderr[-4000:]
    return folder / "out"


def densities(folder):
    weights = load_file(folder / "model.safetensors")
    matrices = [value for name, value in weights.items() if ".layer" in name and value.dim() == 2]
    return [float((matrix != 0).double().mean()) for matrix in matrices]


def test_pruning_goes_on_from_the_cut_and_the_next_cut_from_that(output):
    """Each matrix keeps 50% after the first cut, 40% after pruning, then unequal shares of 30% that training keeps."""
    made = output / "starting_models"
    assert densities(made / "masked") == pytest.approx([0.5] * len(densities(made / "masked")), abs=0.01)
    assert densities(output / "masked" / "model") == pytest.approx([0.4] * len(densities(made / "masked")), abs=0.01)
    shares = densities(made / "filled")
    assert max(shares) - min(shares) > 0.05
    assert densities(output / "model") == pytest.approx(shares)


def test_masks_start_at_the_density_of_the_cut(output):
    """The first record of the log has the cut's density, though the recipe names none."""
    records = [json.loads(line) for line in (output / "log.jsonl").read_text().splitlines()]
    masked = [record for record in records if record["phase"] == "masked" and "prune/density" in record]
    assert masked[0]["prune/density"] == pytest.approx(0.5, abs=0.01)


def test_the_report_of_a_cut_has_every_matrix(output):
    """`cut.json` tells what each matrix keeps, and the error of its outputs."""
    parts = read(output / "starting_models" / "filled" / "cut.json")["parts"]
    assert len(parts) == len(densities(output / "model"))
    assert sum(part["kept"] for part in parts) == pytest.approx(0.3 * sum(part["count"] for part in parts), rel=0.01)
    assert all(part["error"] > 0 for part in parts)
