"""Recipes, engine files, settings and whole command lines that are broken or hostile: taken, or told with exit code 2.

Nothing is trained: every check of a command comes before torch is loaded, and all of them are run here.
"""

from __future__ import annotations

import contextlib
import json
import string
import struct
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fuzzing import (
    NUMBERS,
    ODD_FILES,
    ODD_NAMES,
    TEXTS,
    Rule,
    as_json,
    for_a_command_line,
    fuzzed,
    json_bytes,
    noise,
    odd_file,
    spoilt_bytes,
    values,
    written,
)
from support.launching import ROOT

from ds_trainer.cli.doctor import read_hostfile
from ds_trainer.cli.evaluate import calibrate_parser, evaluate_parser, read_calibrate_job, read_evaluate_job
from ds_trainer.cli.train import read_train_job, train_parser
from ds_trainer.engine.keys import key_table
from ds_trainer.recipe.recipe import Recipe

RULE = Rule()
ENGINES = [json.loads(path.read_text()) for path in sorted((ROOT / "ds_configs").glob("*.json"))]
SAVED = {"layers": [1, 2], "pooling": "first", "policy": {"criterion": "entropy", "thresholds": [0.1, 0.2]}}
SAVED |= {"held_out": 0.1, "held_out_key": "x", "calibration": {"threshold": 0.1, "examples": 9, "split": "held_out"}}
COMMON = {"train_batch_size": 16, "learning_rate": 4e-3, "max_steps": 6}
PRUNE = {"final_threshold": 0.25, "initial_warmup": 0, "final_warmup": 0.3, "regularization": "l1", "final_lambda": 1.0}
EXITS = {"layers": [1], "training": "joint", "early_exit_entropy": [0.1]}
DISTILL = {"teacher": "@finetune", "alpha_distil": 0.9, "alpha_ce": 0.1, "layer_pairs": [[-1, -1]]}
PARAMS = {"lr": "auto", "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01}
FULL_ENGINE = {"train_batch_size": 16, "gradient_accumulation_steps": 2, "gradient_clipping": 1.0}
FULL_ENGINE |= {"optimizer": {"type": "AdamW", "params": PARAMS}, "bf16": {"enabled": "auto"}}
FULL_ENGINE |= {"scheduler": {"type": "WarmupDecayLR", "params": {"warmup_max_lr": "auto", "total_num_steps": "auto"}}}
FULL_ENGINE |= {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 1.0}}}
FULL_ENGINE |= {"tensorboard": {"enabled": False, "output_path": "x", "job_name": "y"}}


def _words(schema: Any) -> Iterator[str]:
    """Every field's name in a schema, and every word that a field takes."""
    for key, value in schema.items() if isinstance(schema, dict) else ():
        if key in ("properties", "keys"):
            yield from value
        elif key == "enum":
            yield from map(str, value)
        for inner in value if isinstance(value, list) else value.values() if isinstance(value, dict) else ():
            yield from _words(inner)
        yield from _words(value)


def _engine_keys(keys: dict[str, Any]) -> Iterator[str]:
    for key, entry in keys.items():
        yield key
        yield from _engine_keys(entry if isinstance(entry, dict) else {})


RECIPE_WORDS = sorted(set(_words(Recipe.model_json_schema())))
ENGINE_WORDS = sorted({*_engine_keys(key_table()["keys"]), *key_table()["refused"], "adamw", "lion", "SGD", "WarmupLR"})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The current folder and the home of all commands here: sound data, a model's folder, sound files."""
    folder = tmp_path_factory.mktemp("commands")
    for split in ("train", "validation"):
        (folder / f"{split}.csv").write_text("text,kind\na pear,fruit\nan owl,bird\n")
        (folder / f"{split}.txt").write_text("a pear\nan owl\n")
        (folder / f"{'dev' if split == 'validation' else split}-v1.1.json").write_text("{}")
    put_model(folder / "model")
    (folder / "model" / "exits.json").write_text(json.dumps(SAVED))
    (folder / "engine.json").write_text(json.dumps({"train_batch_size": "auto"}))
    (folder / "full.json").write_text(json.dumps(FULL_ENGINE))
    (folder / "recipe.json").write_text(json.dumps(recipes(folder)[0]))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("HOME", str(folder))
        yield folder


def put_model(folder: Path) -> None:
    """What a command's checks take for a model: a config, and a file of weights that holds none."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "bert"}))
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", 2) + b"{}")


def recipes(folder: Path) -> list[dict[str, Any]]:
    """One of each family and technique, with most fields that there are."""
    model = {"config": {"model_type": "bert", "hidden_size": 32}, "tokenizer": {"vocab_size": 128}}
    text = {"name": "text", "text_columns": ["text"], "label_column": "kind", "max_seq_length": 24, "held_out": 0.1}
    text |= {"data_dir": str(folder), "train_file": "train.csv", "validation_file": "validation.csv"}
    squad = {"name": "squad", "data_dir": str(folder), "doc_stride": 128, "max_seq_length": 384}
    lm = {"name": "mlm", "data_dir": str(folder), "train_file": "train.txt", "validation_file": "*.txt"}
    groups = [{"params": "*.bias", "weight_decay": 0.0}, {"params": "*embeddings*", "frozen": True}]
    phases = [
        {"name": "finetune", "eval_steps": 30, "warmup_steps": 0.1, "groups": groups, **COMMON},
        {"name": "prune", "techniques": {"prune": PRUNE, "distill": DISTILL}, "save_steps": 4, **COMMON},
        {"name": "exits", "start_from": "@prune", "techniques": {"exits": EXITS}, "loss": {"exits.heads": 1}, **COMMON},
    ]
    student = {"name": "small", "student": {"layers": [0, 1]}, "task": lm, **COMMON}
    plain = {"output_dir": str(folder / "out"), "seed": 7}
    return [
        {"model": model, "task": text, "phases": phases, **plain},
        {"model": {"name_or_path": str(folder / "model")}, "task": squad, "phases": [COMMON], **plain},
        {"model": {"name_or_path": str(folder / "model")}, "task": lm, "phases": [COMMON, student], **plain},
    ]


def train(*more: str, recipe: str = "recipe.json", engine: str = "engine.json") -> list[str]:
    return ["--deepspeed_config", engine, "--recipe", recipe, *more]


def held(kind: str, read: Callable[[Sequence[str]], object], arguments: Sequence[str], *names: str) -> str:
    """What was told. A check writes nothing, wherever it ends."""
    with written() as places:
        message = RULE.outcome(kind, read, arguments, *names)
    assert places == []
    return message


def _fields(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Every field of a file: its path, as --set takes it, and its value."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in pairs:
        here = f"{path}.{key}" if path else str(key)
        yield here, json.dumps(inner)
        yield from _fields(inner, here)


def _setting(data: st.DataObject, sound: list[tuple[str, str]]) -> str:
    """PATH=JSON: a field's own, or with another value, or another path."""
    path, text = data.draw(st.sampled_from(sound), "field")
    part = st.sampled_from([*RECIPE_WORDS, *ENGINE_WORDS, "0", "1", "*", "prune", "-1", "", *TEXTS])
    change = data.draw(st.sampled_from(["none", "value", "value", "below", "path", "mark"]), "change")
    if change == "value":
        text = data.draw(values(RECIPE_WORDS + ENGINE_WORDS).map(as_json) | st.text(), "value")
    elif change == "below":
        path = f"{path}.{data.draw(part, 'key')}"
    elif change == "path":
        path = ".".join(data.draw(st.lists(part, min_size=1, max_size=4), "path"))
    return for_a_command_line(path + (data.draw(st.sampled_from(["", "==", "=@"])) if change == "mark" else "=") + text)


COMMANDS = {
    read_train_job: (train_parser, ["--deepspeed_config", "engine.json", "--recipe", "recipe.json"]),
    read_evaluate_job: (evaluate_parser, ["model", "--recipe", "recipe.json"]),
    read_calibrate_job: (calibrate_parser, ["model", "--recipe", "recipe.json", "--max_drop", "0.5"]),
}


def _command_line(data: st.DataObject, parser: Any, sound: list[str]) -> list[str]:
    """Any flags in any order, with good, wrong and missing values; beside the needed ones or without."""
    flags = [flag for action in parser()._actions for flag in action.option_strings]
    good = st.sampled_from(["out", "recipe.json", "engine.json", "model", ".", "text", "sst2", "3", "0.5", "a=1"])
    wrong = st.sampled_from([*TEXTS, *map(str, NUMBERS[:10]), "9" * 5000, "1,2,3", "0.1,", *map(str, ODD_NAMES)])
    word = good | wrong | st.text(string.printable, max_size=9) | st.sampled_from([*flags, "--", "-x", "--no"])
    pairs = data.draw(st.lists(st.tuples(st.sampled_from(flags), st.lists(word, max_size=2)), max_size=5), "flags")
    words = [part for flag, after in pairs for part in (flag, *after)]
    whole = [*sound, *words] if data.draw(st.integers(0, 3)) else words
    return [for_a_command_line(part) for part in whole]


@pytest.mark.parametrize("kind", ["recipe", "engine file", "--set", "command line", "exits.json", "hostfile"])
@fuzzed(60)
@given(data=st.data())
def test_whatever_is_given_is_taken_or_told_by_name(kind: str, data: st.DataObject, folder: Path) -> None:
    """In a recipe, an engine file, settings, flags, a model's exits.json, a hostfile; see `Rule`."""
    file = folder / "fuzzed.json"
    if kind == "recipe":
        file.write_bytes(json_bytes(data, data.draw(st.sampled_from(recipes(folder)), "recipe"), RECIPE_WORDS))
        held(kind, read_train_job, train(recipe="fuzzed.json"), "recipe", *RECIPE_WORDS)
    elif kind == "engine file":
        file.write_bytes(json_bytes(data, data.draw(st.sampled_from([FULL_ENGINE, *ENGINES]), "engine"), ENGINE_WORDS))
        held(kind, read_train_job, train(engine="fuzzed.json"), "fuzzed.json", "xxxx", *ENGINE_WORDS)
    elif kind == "--set":
        sound = [*_fields(recipes(folder)[0]), *_fields(FULL_ENGINE)]
        settings = [_setting(data, sound) for _ in range(data.draw(st.integers(1, 3), "settings"))]
        held(kind, read_train_job, train(*(f"--set={setting}" for setting in settings), engine="full.json"))
    elif kind == "command line":
        read = data.draw(st.sampled_from(list(COMMANDS)), "command")
        held(kind, read, _command_line(data, *COMMANDS[read]))
    elif kind == "exits.json":
        put_model(model := folder / "fuzzed model")
        words = ["layers", "pooling", "policy", "criterion", "patience", "thresholds", "held_out", "calibration"]
        (model / "exits.json").write_bytes(json_bytes(data, SAVED, words))
        message = held(kind, read_calibrate_job, [str(model), "--recipe", "recipe.json", "--max_drop", "1"])
        again = held(kind, read_evaluate_job, [str(model), "--recipe", "recipe.json", "--patience", "2"])
        assert "exits.json" in message or "exits.json" not in again
    else:
        sound = b"worker-1 slots=8\nuser@worker-2 slots=4 # a comment\n# another\n10.0.0.3 slots=1\n"
        raw = data.draw(noise()) if data.draw(st.integers(0, 4)) == 0 else spoilt_bytes(data, sound)
        (folder / "hostfile").write_bytes(raw)
        held(kind, lambda _: read_hostfile(folder / "hostfile"), [], "line", "hostfile")


def test_of_every_kind_some_are_taken_and_some_told() -> None:
    """Else the check that comes first might be all that was run."""
    kinds = {*RULE.taken, *RULE.told}
    assert all(min(RULE.taken[kind], RULE.told[kind]) > 0 for kind in kinds), (RULE.taken, RULE.told)


HUGE = {
    "task.max_seq_length": ["1000000000000", "9" * 100_000, "1e400"],
    "phases.0.train_batch_size": ["1" + "0" * 400],
    "phases.exits.techniques.exits.layers": [json.dumps([1] * 1_000_000)],
    "phases": [json.dumps([{"name": f"p{n}", "max_steps": 1} for n in range(500)])],
    "model.config": ["[" * 100_000],
}


@pytest.mark.parametrize(("field", "text"), [(field, text) for field, texts in HUGE.items() for text in texts])
def test_huge_numbers_and_lists_take_no_memory(field: str, text: str, folder: Path) -> None:
    """Nothing is made in the size that a number says; checking takes a small multiple of what was written."""
    arguments = train("--set", f"{field}={text}")
    held("huge", read_train_job, arguments)
    tracemalloc.start()
    try:
        with contextlib.suppress(ValueError):
            read_train_job(arguments)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 20e6 + 100 * len(text)


@pytest.mark.parametrize("kind", ODD_FILES)
@pytest.mark.parametrize("flag", ["--recipe", "--deepspeed_config", "exits.json"])
def test_what_is_no_file_is_not_read(kind: str, flag: str, folder: Path, tmp_path: Path) -> None:
    """A folder, a pipe nobody writes to, a device without an end, a file beyond any memory: told by name, at once."""
    if flag == "exits.json":
        put_model(tmp_path)
        odd_file(tmp_path / flag, kind)
        arguments = [str(tmp_path), "--recipe", "recipe.json", "--max_drop", "1"]
        assert held("odd", read_calibrate_job, arguments, "exits.json", str(tmp_path))
    else:
        assert held("odd", read_train_job, [*train(), flag, str(odd_file(tmp_path / "odd.json", kind))], "odd.json")


FIELDS = ["data_dir", "train_file", "validation_file"]
PLACES = ["model.name_or_path", "output_dir", "cache_dir", "phases.0.start_from", "phases.0.name"]


@pytest.mark.parametrize("field", [*(f"task.{name}" for name in FIELDS), *PLACES])
def test_odd_names(field: str, folder: Path) -> None:
    """Names that are too long, of control characters, or of other folders name nothing, and the error says so."""
    for name in ODD_NAMES:
        held("odd", read_train_job, train("--set", f"{field}={json.dumps(name)}"))
