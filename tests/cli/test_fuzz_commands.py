"""Recipes, engine files, settings and command lines that are broken or hostile: taken, or refused with exit code 2.

Nothing is trained: every check of a command comes before torch is loaded, and all of them are run here.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fuzzing import NOISY, TEXTS, as_json, fuzzed, places, refusal, spoilt_json, values
from support.launching import ROOT

from ds_trainer.cli.evaluate import read_calibrate_job, read_evaluate_job
from ds_trainer.cli.train import read_train_job
from ds_trainer.engine.keys import key_table
from ds_trainer.files.reading import read_json
from ds_trainer.recipe.recipe import Recipe

SAVED = {"layers": [1, 2], "pooling": "first", "policy": {"criterion": "entropy", "thresholds": [0.1, 0.2]}}
SAVED |= {"held_out": 0.1, "held_out_key": "x", "calibration": {"threshold": 0.1, "examples": 9, "split": "held_out"}}
ENGINES = [read_json(path, "engine file") for path in sorted((ROOT / "ds_configs").glob("*.json"))]
RECIPES = [read_json(path, "recipe") for path in sorted((ROOT / "ds_configs/recipes").glob("*.json"))]
ENGINES.append({"optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": [0.9, 0.999], "weight_decay": 0.01}}})
ENGINES[-1]["scheduler"] = {"type": "WarmupDecayLR", "params": {"warmup_max_lr": "auto", "total_num_steps": "auto"}}
ENGINES[-1]["tensorboard"] = {"enabled": True, "output_path": "x", "job_name": "y"}
WORDS = sorted({*Recipe.model_fields, *key_table()["keys"], *key_table()["refused"], "name", "type", "stage", "steps"})
COMMANDS = {
    read_train_job: ["--deepspeed_config", "engine.json", "--recipe", "recipe.json"],
    read_evaluate_job: ["model", "--recipe", "recipe.json"],
    read_calibrate_job: ["model", "--recipe", "recipe.json", "--max_drop", "0.5"],
}
TRAIN = COMMANDS[read_train_job]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The current folder and the home of all commands here: sound data, a model's folder, sound files."""
    folder = tmp_path_factory.mktemp("commands")
    for split in ("train", "validation"):
        (folder / f"{split}.csv").write_text("text,kind\na pear,fruit\nan owl,bird\n")
    (folder / "model").mkdir()
    (folder / "model/config.json").write_text('{"model_type": "bert"}')
    (folder / "model/model.safetensors").write_bytes(struct.pack("<Q", 2) + b"{}")
    (folder / "model/exits.json").write_text(json.dumps(SAVED))
    (folder / "engine.json").write_text('{"train_batch_size": "auto"}')
    task = {"name": "text", "text_columns": ["text"], "label_column": "kind", "data_dir": str(folder), "held_out": 0.1}
    task |= {"train_file": "train.csv", "validation_file": "validation.csv"}
    model, phase = {"name_or_path": str(folder / "model")}, {"max_steps": 1}
    recipe = {"model": model, "task": task, "phases": [phase], "output_dir": str(folder / "out")}
    (folder / "recipe.json").write_text(json.dumps(recipe))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("HOME", str(folder))
        yield folder


@pytest.mark.parametrize("kind", ["recipe", "engine file", "setting", "exits.json"])
@fuzzed(80)
@given(data=st.data())
def test_whatever_is_given_is_taken_or_refused_by_name(kind: str, data: st.DataObject, folder: Path) -> None:
    """In a shipped recipe, an engine file, a `--set` of any path, a model's exits.json; and nothing is written."""
    file = folder / "fuzzed.json"
    before = sorted({*folder.rglob("*"), file})
    if kind == "recipe":
        file.write_bytes(data.draw(spoilt_json(data.draw(st.sampled_from(RECIPES)), WORDS) | NOISY))
        refusal(read_train_job, [*TRAIN, "--recipe", str(file), "--data_dir", "."])
    elif kind == "engine file":
        file.write_bytes(data.draw(spoilt_json(data.draw(st.sampled_from(ENGINES)), WORDS) | NOISY))
        refusal(read_train_job, [*TRAIN, "--deepspeed_config", str(file)])
    elif kind == "setting":
        parts = st.lists(st.sampled_from(["0", "*", "train", "", *WORDS, *TEXTS]), min_size=1, max_size=4)
        path = data.draw(parts | st.sampled_from([*places(data.draw(st.sampled_from(RECIPES)))]))
        setting = f"{'.'.join(map(str, path))}={as_json(data.draw(values(WORDS))).decode(errors='replace')}"
        read = data.draw(st.sampled_from(list(COMMANDS)), "command")
        refusal(read, [*COMMANDS[read], f"--set={setting}"])
    else:
        exits = folder / "model/exits.json"
        exits.write_bytes(data.draw(spoilt_json(SAVED, [*SAVED, "criterion", "thresholds"]) | NOISY))
        message = refusal(read_calibrate_job, COMMANDS[read_calibrate_job])
        again = refusal(read_evaluate_job, [*COMMANDS[read_evaluate_job], "--patience", "2"])
        exits.write_text(json.dumps(SAVED))
        assert "exits.json" in message or "exits.json" not in again
    assert sorted({*folder.rglob("*"), file}) == before


def test_what_is_not_spoilt_is_taken(folder: Path) -> None:
    """Else a check that comes first might be all that is run."""
    for read, arguments in COMMANDS.items():
        assert refusal(read, arguments) == ""
