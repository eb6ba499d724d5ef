"""All three techniques one after another, by the command on 2 ranks, and what the run leaves: exits, costs, report."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from support.launching import run_deepspeed, run_script

from ds_trainer.checkpoint_model import export_checkpoint
from ds_trainer.config.saved_checkpoint import read_checkpoint
from ds_trainer.techniques.exits.early_exit import load_for_inference

NAMES = ["dense", "compress", "exits"]
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
            {"name": "dense", "max_steps": 40, **common},
            {"name": "compress", "max_steps": 10, "techniques": {"prune": prune, "distill": distill}, **common},
            {"name": "exits", "max_steps": 20, "save_steps": 20, "techniques": {"exits": {"max_drop": 5.0}}, **common},
        ],
    }


@pytest.fixture(scope="module")
def output(tiny_recipe, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    (folder / "recipe.json").write_text(json.dumps(recipe_for(tiny_recipe)))
    command = ("--deepspeed_config", "ds_configs/zero2.json", "--recipe", str(folder / "recipe.json"))
    done = run_deepspeed(2, "launch/train.py", *command, "--output_dir", str(folder / "out"))
    assert done.returncode == 0, done.stderr[-4000:]
    return folder / "out"


def results_of(output: Path) -> dict:
    return json.loads((output / "all_results.json").read_text())


def test_the_thresholds_are_those_found_on_held_out_examples(output):
    """Calibrated on a fifth of the training rows, which no phase has trained on; folder, results and file agree."""
    exits = results_of(output)["exits"]["exits"]
    assert exits["calibration"]["split"] == "held_out"
    assert exits["calibration"]["examples"] == 48
    saved = json.loads((output / "model" / "exits.json").read_text())
    assert saved["policy"] == exits["policy"]
    assert saved["held_out"] == 0.2
    assert load_for_inference(output / "model").policy.thresholds == exits["policy"]["thresholds"]
    best = exits["calibration"]
    assert best["scores"]["accuracy"] >= best["full_scores"]["accuracy"] - 0.05 - 1e-6


def test_the_exits_are_in_the_results(output):
    """Every head's score, counts of all samples, share of layers, measured speed-up; the curves lie beside."""
    results = results_of(output)["exits"]
    (found,) = results["exits"]["splits"].values()
    assert found["heads"].keys() == {"1", "2", "3"}
    early = found["early_exit"]
    assert sum(early["exit_counts"].values()) == 61
    mean = sum(int(layer) * count for layer, count in early["exit_counts"].items()) / 61
    assert early["mean_layers"] == pytest.approx(mean)
    assert early["expected_saving"] == pytest.approx(mean / LAYERS)
    assert set(early["measured"]) == {"batch_1", "batch_8"}
    for name, value in {"accuracy": early["scores"]["accuracy"], "mean_layers": mean}.items():
        assert results["eval"][f"early_exit/{name}"] == pytest.approx(value)
    assert results["eval"]["early_exit/speedup"] > 0
    assert "curves" not in found
    curves = json.loads((output / "eval" / "exits.json").read_text())["splits"]["validation"]["curves"]
    assert curves.keys() == {"entropy", "confidence", "patience"}
    full = [point for point in curves["entropy"] if point["mean_layers"] == LAYERS]
    assert full[0]["scores"]["accuracy"] == pytest.approx(found["heads"]["3"]["accuracy"])


def test_what_each_model_costs_is_in_the_results(output):
    """Size and latency of every phase's model; early-exit latency where there are heads."""
    for name, found in results_of(output).items():
        assert found["size"]["bytes"] > 0
        assert found["latency"]["batch_1"]["median_ms"] > 0
        assert ("early_exit_latency" in found) == (name == "exits")


def test_the_report_has_every_phase_and_figure(output):
    """One page with the phases side by side, a figure of each kind, both files and the command."""
    page = (output / "report.md").read_text()
    header = next(line for line in page.splitlines() if line.startswith("|"))
    assert [cell.strip() for cell in header.strip("|").split("|")][1:] == NAMES
    assert "latency, batch 1" in page
    assert "deepspeed --num_gpus 2 --module ds_trainer.cli.train --deepspeed_config" in page
    for kind in ("loss", "density", "agreement", "exits", "exit_histogram"):
        assert [path for path in (output / "plots").glob(f"*{kind}*.png") if f"plots/{path.name}" in page], kind
    assert (output / "report.html").stat().st_size > 50_000


def test_the_exits_of_a_checkpoint_are_calibrated_too(output, tmp_path):
    """As the run does with the model that it exports: the same files, the thresholds up to the order of sums."""
    export_checkpoint(read_checkpoint(output / "checkpoint-20"), None, tmp_path / "model")
    files, expected = (
        {path.name: path.read_bytes() for path in folder.iterdir()} for folder in (tmp_path / "model", output / "model")
    )
    found, saved = (json.loads(each.pop("exits.json")) for each in (files, expected))
    assert b"latency, batch 1" in expected.pop("README.md")
    assert files == expected
    assert found["policy"]["thresholds"] == pytest.approx(saved["policy"]["thresholds"], abs=1e-5)
    assert found["calibration"]["mean_layers"] == saved["calibration"]["mean_layers"]
    assert found["held_out_key"] == saved["held_out_key"]


def test_a_folder_is_calibrated_again_on_two_ranks(output, tmp_path):
    """`launch/calibrate.py` on 2 ranks finds what one process does, and the folder has it."""
    command = ("--recipe", str(output / "recipe.json"), "--target_speedup", "1.2", "--criterion", "confidence")
    found = []
    for ranks in (1, 2):
        model = tmp_path / str(ranks)
        shutil.copytree(output / "model", model)
        arguments = ("launch/calibrate.py", str(model), *command)
        done = run_script(*arguments) if ranks == 1 else run_deepspeed(2, *arguments)
        assert done.returncode == 0, done.stderr[-3000:]
        saved = json.loads((model / "exits.json").read_text())
        assert saved["policy"]["criterion"] == "confidence"
        assert saved["calibration"]["expected_speedup"] >= 1.2
        found.append(saved["calibration"])
    one, other = ({name: value for name, value in each.items() if name != "threshold"} for each in found)
    assert one == other
    assert found[0]["threshold"] == pytest.approx(found[1]["threshold"], abs=1e-5)


def test_overwriting_leaves_nothing_of_the_report_and_the_exits(output, tmp_path):
    """A run of one phase, without a report, in the same folder: what the first one wrote is gone, and only that."""
    again = tmp_path / "run"
    shutil.copytree(output, again)
    (again / "plots" / "mine.png").write_bytes(b"mine")
    recipe = json.loads((again / "recipe.json").read_text())
    path = tmp_path / "recipe.json"
    path.write_text(json.dumps(recipe | {"phases": recipe["phases"][:1], "report": False}))
    command = ("launch/train.py", "--deepspeed_config", "ds_configs/zero0.json", "--recipe", str(path))
    done = run_script(*command, "--output_dir", str(again), "--overwrite_output_dir", "--set", "phases.0.max_steps=2")
    assert done.returncode == 0, done.stderr[-3000:]
    left = {str(file.relative_to(again)) for file in again.rglob("*") if file.is_file()}
    assert not [name for name in left if "exit" in name or name.startswith(("report", "compress/"))]
    assert [name for name in left if name.startswith("plots/")] == ["plots/mine.png"]
    assert "latency" not in results_of(again)["dense"]


def test_a_measurement_that_fails_does_not_end_the_run(output, tmp_path):
    """A phase's model that is gone is left out when a resumed run makes its report again."""
    again = tmp_path / "run"
    shutil.copytree(output, again)
    shutil.rmtree(again / "compress" / "model")
    command = ("launch/train.py", "--deepspeed_config", "ds_configs/zero2.json", "--recipe", str(again / "recipe.json"))
    done = run_script(*command, "--output_dir", str(again), "--resume")
    assert done.returncode == 0, done.stderr[-3000:]
    assert (again / "report.md").is_file()
