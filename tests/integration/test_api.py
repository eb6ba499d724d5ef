"""The public API trains, scores and cuts as the commands do; tasks and techniques of a user's own train with it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.launching import ROOT, run_deepspeed, run_python, run_script

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
    done = run_script("tests/support/notebook.py", str(recipe), str(tmp_path))
    assert done.returncode == 0, done.stderr[-4000:]
    seen = json.loads((tmp_path / "seen.json").read_text())
    files = ("--deepspeed_config", "ds_configs/zero0.json", "--recipe", str(recipe))
    command = run_script("launch/train.py", *files, "--output_dir", str(tmp_path / "command"))
    assert command.returncode == 0, command.stderr[-4000:]
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
    kept = json.loads((tmp_path / "second/command.json").read_text())["command"]
    assert [str(tmp_path / "second" / name) in kept for name in ("recipe.json", "deepspeed_config.json")] == [True] * 2


def test_importing_the_package_loads_no_torch():
    """The names are there, and found by type checkers, before any is used; another name is an AttributeError."""
    code = "import sys, ds_trainer as d; print('torch' in sys.modules, hasattr(d, 'train'), hasattr(d, 'x'))"
    assert run_python("-c", code).stdout.split() == ["False", "True", "False"]
    assert (ROOT / "ds_trainer/py.typed").exists()


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
    files = ("--deepspeed_config", "ds_configs/zero3.json", "--recipe", str(recipe), "--output_dir", str(out))
    done = run_deepspeed(2, "launch/train.py", *files, *plugins)
    assert done.returncode == 0, done.stderr[-4000:]
    records = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    assert all(record["train/term/confidence.penalty"] < 0 for record in records if "train/loss" in record)
    assert 0 < records[0]["confidence/entropy"] < 0.7
    scores = json.loads((out / "eval_results.json").read_text())["train"]
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
