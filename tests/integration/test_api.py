"""The public API trains, scores and cuts as the commands do; tasks and techniques of a user's own train with it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.launching import ROOT, log_of, read, run_script, train

import ds_trainer
from ds_trainer.models.folders import create_folder, train_tokenizer

PENALTY, RATINGS = "examples/confidence_penalty.py", "examples/ratings.py"


@pytest.fixture(scope="module")
def recipe(tiny_recipe, tmp_path_factory) -> Path:
    """The second phase cuts heads and neurons out."""
    first, second = tiny_recipe["phases"]
    prune = {"granularity": "hybrid", "final_threshold": 0.4, "mask_init": "uniform", "mask_scale": 0.05}
    phases = [first | {"max_steps": 6}, second | {"techniques": {"prune": prune}, "shrink": True, "max_steps": 8}]
    path = tmp_path_factory.mktemp("api") / "recipe.json"
    path.write_text(json.dumps(tiny_recipe | {"phases": phases, "tensorboard": False}))
    return path


def test_a_notebook_gets_what_the_command_gives(recipe, tmp_path):
    """Two runs in one process; the model has the command's bits, and the scores and sizes are those of its report.

    A checkpoint is scored, cut and loaded like a model folder; the kept command names files that stay; and a flag that
    only prints trains nothing. The notebook of `examples/` runs to its end: its server answers with a label for a text.
    """
    done = run_script(__file__, str(recipe), str(tmp_path))
    assert done.returncode == 0, done.stderr[-4000:]
    seen = read(tmp_path / "seen.json")
    train(0, recipe, tmp_path / "command", engine="ds_configs/zero0.json")
    ours, its = (load_file(tmp_path / name / "model/model.safetensors") for name in ("first", "command"))
    assert all(torch.equal(ours[name], its[name]) for name in its)
    assert seen["results"]["prune"]["eval"] == seen["again"]["prune"]["eval"]
    assert seen["scores"]["accuracy"] == seen["again"]["prune"]["eval"]["accuracy"]
    assert seen["weights"] == seen["report"]["shrunk"]["weights"]["model"]["total"] < 20_000
    assert seen["of_checkpoint"] == seen["report"]["checkpoint"]["weights"]["model"]["total"] > 20_000
    assert seen["by_step"] == {"4": seen["by_step"]["4"], "8": seen["again"]["prune"]["eval"]}
    assert seen["dry"] == {}
    assert not (tmp_path / "dry").exists()
    assert seen["served"]["scores"].keys() == {"dense", "small", "model", "onnx", "int8"}
    assert seen["served"]["speed_ups"].keys() == {"1", "32"}
    assert len(seen["served"]["answer"]["labels"]) == 2
    kept = read(tmp_path / "second/command.json")["command"]
    assert all(str(tmp_path / "second" / name) in kept for name in ("recipe.json", "deepspeed_config.json"))


def be_a_notebook(recipe: str, out: Path) -> None:
    """What a notebook does with the public API, in one process; and what the notebook of `examples/` does."""
    results = ds_trainer.train(recipe, out / "first")
    content = read(Path(recipe))
    again = ds_trainer.train(content, out / "second", "--set", "phases.prune.shrink=false")
    scores = ds_trainer.evaluate(out / "second/model", recipe=out / "second/recipe.json")
    by_step = ds_trainer.evaluate(out / "second", "--all_checkpoints")
    report = ds_trainer.shrink(out / "second/checkpoint-8", out / "cut")
    seen = {"results": results, "again": again, "scores": scores, "by_step": by_step, "report": report}
    seen["dry"] = ds_trainer.train(recipe, out / "dry", "--dry_run")
    for name, folder in (("weights", "cut"), ("of_checkpoint", "second/checkpoint-8")):
        seen[name] = sum(parameter.numel() for parameter in ds_trainer.load_model(out / folder).parameters())
    settings = {"OUT": str(out / "served"), "TASK": content["task"], "MODEL": content["model"], "EPOCHS": 1}
    served = run_cells(ROOT / "examples/from_model_to_served.ipynb", settings)
    seen["served"] = {name: served[name] for name in ("scores", "speed_ups", "answer")}
    (out / "seen.json").write_text(json.dumps(seen))


def run_cells(notebook: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Run the code of a notebook, with these settings in place of its first cell's; return what it has defined."""
    names: dict[str, Any] = {"__name__": "__main__"}
    first, *others = ("".join(cell["source"]) for cell in read(notebook)["cells"] if cell["cell_type"] == "code")
    exec(first, names)
    assert settings.keys() < names.keys()
    names |= settings
    for source in others:
        exec(source, names)
    return names


@pytest.fixture(scope="module")
def own(tiny_recipe, tmp_path_factory) -> tuple[Path, Path]:
    """A recipe with a task and a technique of plugins, beside pruning; and the folder of its run."""
    folder = tmp_path_factory.mktemp("own")
    words = ("bad", "fair", "good")
    rows = [f"{a} {b},{stars}" for stars, a in enumerate(words, 1) for b in ("ball", "kite") for _ in range(8)]
    (folder / "train.csv").write_text("\n".join(["text,stars", *rows]) + "\n")
    task = {"name": "ratings", "stars": 3, "data_dir": str(folder), "max_seq_length": 8}
    task |= {"train_file": "train.csv", "validation_file": "train.csv", "max_eval_samples": 21}
    techniques = {"confidence": {"temperature": 2.0}, "prune": {"final_threshold": 0.5}}
    loss = {"task": 1.0, "confidence.penalty": 0.1}
    phase = {"max_steps": 30, "learning_rate": 1e-2, "train_batch_size": 16, "logging_steps": 10, "save_steps": 10}
    tokenizer = train_tokenizer([row.split(",")[0] for row in rows], 64, True)
    create_folder(tiny_recipe["model"]["config"], tokenizer, folder / "model", 0)
    phases = [phase | {"techniques": techniques, "loss": loss}]
    recipe = {"model": {"name_or_path": str(folder / "model")}, "task": task, "phases": phases}
    (folder / "recipe.json").write_text(json.dumps(recipe))
    return folder / "recipe.json", folder / "out"


def test_a_task_and_a_technique_of_ones_own_train_under_zero_3(own):
    """On 2 ranks, with pruning: it learns, logs the term and what the technique reads, and is exported and scored."""
    recipe, out = own
    plugins = ("--plugin", PENALTY, "--plugin", RATINGS)
    train(2, recipe, out, *plugins, engine="ds_configs/zero3.json")
    records = log_of(out, "train")
    assert all(record["train/term/confidence.penalty"] < 0 for record in records)
    assert 0 < records[0]["confidence/entropy"] < 0.7
    scores = read(out / "eval_results.json")["train"]
    assert scores["stars_off"] < 0.3
    done = run_script("launch/evaluate.py", str(out / "checkpoint-30"), *plugins)
    assert done.returncode == 0, done.stderr[-4000:]
    assert json.loads(done.stdout[done.stdout.index("{") :]) == {"stars_off": scores["stars_off"]}


def test_a_plugin_is_named_by_the_command_and_by_no_recipe(own, tmp_path):
    """`--recipe_schema` has the specs of the plugins that it is given; without them a recipe's technique is unknown."""
    schema = run_script("launch/train.py", "--recipe_schema", "--plugin", PENALTY, "--plugin", RATINGS).stdout
    definitions = json.loads(schema)["$defs"]
    assert {"ConfidenceSpec", "RatingsSpec"} <= definitions.keys()
    assert "confidence" in definitions["Techniques"]["properties"]
    files = ("--deepspeed_config", "ds_configs/zero3.json", "--recipe", str(own[0]), "--output_dir", str(tmp_path))
    done = run_script("launch/train.py", *files)
    assert done.returncode == 2
    assert "techniques.confidence: unknown key" in done.stderr


if __name__ == "__main__":
    be_a_notebook(sys.argv[1], Path(sys.argv[2]))
