"""Recipes, engine files, settings and whole command lines that are broken or hostile: taken, or told with exit code 2.

Nothing is trained: every check of a command comes before torch is loaded, and all of them are run here.
"""

from __future__ import annotations

import contextlib
import copy
import json
import string
import struct
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import fuzzing
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
    skip_unless_whole,
    spoilt_bytes,
    values,
    written,
)
from support.launching import ROOT

from ds_trainer.cli.calibrate import calibrate_parser, read_calibrate_job
from ds_trainer.cli.evaluate import evaluate_parser, read_evaluate_job
from ds_trainer.cli.train import read_train_job, train_parser
from ds_trainer.config.recipe import Recipe
from ds_trainer.config.settings import assign, parse_setting
from ds_trainer.engine.keys import key_table
from ds_trainer.hosts.hostfile import read_hostfile

RULE = Rule()
ENGINES = sorted((ROOT / "ds_configs").glob("*.json"))
SAVED = {
    "layers": [1, 2],
    "pooling": "first",
    "policy": {"criterion": "entropy", "thresholds": [0.1, 0.2]},
    "held_out": 0.1,
    "held_out_key": "x",
    "calibration": {"threshold": 0.1, "examples": 9, "split": "held_out"},
}
COMMON = {"train_batch_size": 16, "learning_rate": 4e-3, "max_steps": 6}
PRUNE = {"final_threshold": 0.25, "initial_warmup": 0, "final_warmup": 0.3, "regularization": "l1", "final_lambda": 1.0}
EXITS = {"layers": [1], "training": "joint", "early_exit_entropy": [0.1]}
DISTILL = {"teacher": "@finetune", "alpha_distil": 0.9, "alpha_ce": 0.1, "layer_pairs": [[-1, -1]]}


def _keys(schema: Any) -> Iterator[str]:
    """Every field's name in a JSON schema, and every word that a field takes."""
    for key, value in schema.items() if isinstance(schema, dict) else ():
        if key in ("properties", "$defs"):
            yield from (name for name in value if key == "properties")
            for inner in value.values():
                yield from _keys(inner)
        elif key == "enum":
            yield from map(str, value)
        elif isinstance(value, list):
            for inner in value:
                yield from _keys(inner)
        else:
            yield from _keys(value)


def _engine_keys(keys: dict[str, Any]) -> Iterator[str]:
    for key, entry in keys.items():
        yield key
        yield from _engine_keys(entry if isinstance(entry, dict) else {})


RECIPE_WORDS = sorted(set(_keys(Recipe.model_json_schema())))
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


FULL_ENGINE = {
    "train_batch_size": 16,
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
    "steps_per_print": 10,
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01}},
    "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_max_lr": "auto", "total_num_steps": "auto"}},
    "fp16": {"enabled": False, "loss_scale": 0, "loss_scale_window": 1000, "min_loss_scale": 1},
    "bf16": {"enabled": "auto"},
    "torch_autocast": {"enabled": False, "dtype": "bfloat16"},
    "data_types": {"grad_accum_dtype": "fp32"},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "ratio": 1.0},
        "offload_param": {"device": "cpu"},
        "reduce_bucket_size": "auto",
        "stage3_param_persistence_threshold": 1e4,
    },
    "tensorboard": {"enabled": False, "output_path": "x", "job_name": "y"},
    "flops_profiler": {"enabled": False},
}


def train(*more: str, recipe: str = "recipe.json", engine: str = "engine.json") -> list[str]:
    return ["--deepspeed_config", engine, "--recipe", recipe, *more]


def held(kind: str, read: Callable[[Sequence[str]], object], arguments: Sequence[str], *names: str) -> str:
    """What was told. A check writes nothing, wherever it ends."""
    with written() as places:
        message = RULE.outcome(kind, read, arguments, *names)
    assert places == []
    return message


@fuzzed(100)
@given(data=st.data())
def test_recipes(data: st.DataObject, folder: Path) -> None:
    """Whatever stands in a recipe's file, its fields are told by name, or the file is."""
    sound = data.draw(st.sampled_from(recipes(folder)), "recipe")
    (folder / "fuzzed.json").write_bytes(json_bytes(data, sound, RECIPE_WORDS))
    held("recipe", read_train_job, train(recipe="fuzzed.json"), "recipe", *RECIPE_WORDS)


@fuzzed(80)
@given(data=st.data())
def test_engine_files(data: st.DataObject, folder: Path) -> None:
    """Whatever stands in an engine file, its keys are told by name, or the file is."""
    sound = data.draw(st.sampled_from([FULL_ENGINE, *(json.loads(file.read_text()) for file in ENGINES)]), "engine")
    (folder / "fuzzed.json").write_bytes(json_bytes(data, sound, ENGINE_WORDS))
    held("engine file", read_train_job, train(engine="fuzzed.json"), "fuzzed.json", "xxxx", *ENGINE_WORDS)


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
    change = data.draw(st.sampled_from(["none", "value", "value", "number", "below", "path", "mark"]), "change")
    if change == "value":
        text = data.draw(values(RECIPE_WORDS + ENGINE_WORDS).map(as_json) | st.text(), "value")
    elif change == "number":
        text = data.draw(st.sampled_from(["0", "1", "2", "16", "0.5", "true", "null", "auto"]), "value")
    elif change == "below":
        path = f"{path}.{data.draw(part, 'key')}"
    elif change == "path":
        path = ".".join(data.draw(st.lists(part, min_size=1, max_size=4), "path"))
    return for_a_command_line(path + (data.draw(st.sampled_from(["", "==", "=@"])) if change == "mark" else "=") + text)


@fuzzed(80)
@given(data=st.data())
def test_settings(data: st.DataObject, folder: Path) -> None:
    """Whatever --set is given, for a field of either file or for none."""
    sound = [*_fields(recipes(folder)[0]), *_fields(FULL_ENGINE)]
    count = data.draw(st.integers(1, 3), "settings")
    settings = [part for _ in range(count) for part in ("--set", _setting(data, sound))]
    held("--set", read_train_job, train(*settings, engine="full.json"))


COMMANDS = {
    read_train_job: (train_parser, ["--deepspeed_config", "engine.json", "--recipe", "recipe.json"]),
    read_evaluate_job: (evaluate_parser, ["model", "--recipe", "recipe.json"]),
    read_calibrate_job: (calibrate_parser, ["model", "--recipe", "recipe.json", "--max_drop", "0.5"]),
}


@fuzzed(100)
@given(data=st.data())
def test_command_lines(data: st.DataObject, folder: Path) -> None:
    """Any flags of a command in any order, with good, wrong and missing values; beside the needed ones or without."""
    read = data.draw(st.sampled_from(list(COMMANDS)), "command")
    parser, sound = COMMANDS[read]
    flags = [flag for action in parser()._actions for flag in action.option_strings]
    good = st.sampled_from(["out", "recipe.json", "engine.json", "model", ".", "text", "sst2", "3", "0.5", "a=1"])
    wrong = st.sampled_from([*TEXTS, *map(str, NUMBERS[:10]), "9" * 5000, "1,2,3", "0.1,", *map(str, ODD_NAMES)])
    word = good | wrong | st.text(string.printable, max_size=9) | st.sampled_from([*flags, "--", "-x", "--no"])
    given_flags = data.draw(
        st.lists(st.tuples(st.sampled_from(flags), st.lists(word, max_size=2)), max_size=5), "flags"
    )
    words = [part for flag, after in given_flags for part in (flag, *after)]
    whole = [*sound, *words] if data.draw(st.integers(0, 3)) else words
    if data.draw(st.integers(0, 9)) == 0:
        whole = data.draw(st.permutations(whole), "order")
    held("command line", read, [for_a_command_line(part) for part in whole])


@fuzzed(40)
@given(data=st.data())
def test_exits_files(data: st.DataObject, folder: Path) -> None:
    """Whatever stands in a model folder's exits.json, calibration and evaluation name the file or the field."""
    words = ["layers", "pooling", "policy", "criterion", "patience", "thresholds", "held_out", "calibration", "version"]
    model = folder / "fuzzed model"
    put_model(model)
    (model / "exits.json").write_bytes(json_bytes(data, SAVED, words))
    asked = [["--max_drop", "1"], ["--target_speedup", "1.5"], ["--max_drop", "1", "--patience", "3"]]
    arguments = [str(model), "--recipe", "recipe.json", *data.draw(st.sampled_from(asked))]
    message = held("exits.json", read_calibrate_job, arguments)
    policy = data.draw(st.sampled_from([[], ["--early_exit_entropy", "0.1,0.2"], ["--patience", "2"]]))
    again = held("exits.json, once more", read_evaluate_job, [str(model), "--recipe", "recipe.json", *policy])
    assert "exits.json" in message or "exits.json" not in again


@fuzzed(40)
@given(data=st.data())
def test_hostfiles(data: st.DataObject, folder: Path) -> None:
    """Lines of any kind, for DeepSpeed's launcher."""
    sound = b"worker-1 slots=8\nuser@worker-2 slots=4 # a comment\n# another\n10.0.0.3 slots=1\n"
    raw = data.draw(noise()) if data.draw(st.integers(0, 4)) == 0 else spoilt_bytes(data, sound)
    (folder / "hostfile").write_bytes(raw)
    held("hostfile", lambda _: read_hostfile(folder / "hostfile"), [], "line", "hostfile")


HUGE = {
    "task.max_seq_length": ["1000000000000", "9" * 100_000, "1e400"],
    "phases.0.train_batch_size": ["1000000000000000000", "1" + "0" * 400],
    "train_batch_size": ["1000000000000000000", "1e308"],
    "phases.exits.techniques.exits.layers": [json.dumps([1] * 1_000_000)],
    "phases": [json.dumps([{"name": f"p{n}", "max_steps": 1} for n in range(500)])],
    "model.config": ["[" * 100_000],
}


@pytest.mark.parametrize(("field", "text"), [(field, text) for field, texts in HUGE.items() for text in texts])
def test_huge_numbers_and_lists_take_no_memory(field: str, text: str, folder: Path) -> None:
    """Nothing is made in the size that a number says; checking takes a small multiple of what was written."""
    recipe, engine = copy.deepcopy(recipes(folder)[0]), {"train_batch_size": "auto"}
    assign(engine if field in ENGINE_WORDS or "zero" in field else recipe, field.split("."), "@huge@", "test")
    for name, value in (("recipe", recipe), ("engine", engine)):
        (folder / f"huge {name}.json").write_text(json.dumps(value).replace('"@huge@"', text))
    arguments = train(recipe="huge recipe.json", engine="huge engine.json")
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
        assert held("no file", read_calibrate_job, arguments, "exits.json", str(tmp_path))
        return
    place = odd_file(tmp_path / "odd.json", kind)
    arguments = [*train(), flag, str(place)]
    assert held("no file", read_train_job, arguments, "odd.json")


@pytest.mark.parametrize("name", ODD_NAMES)
@pytest.mark.parametrize(
    "field",
    [
        *("task.data_dir", "task.train_file", "task.validation_file", "model.name_or_path", "output_dir", "cache_dir"),
        *("phases.0.start_from", "phases.prune.techniques.distill.teacher", "phases.0.name"),
    ],
)
def test_odd_names(name: str, field: str, folder: Path) -> None:
    """Names that are too long, of control characters, or of other folders name nothing, and the error says so."""
    (folder / "named.json").write_text(json.dumps(recipes(folder)[0]))
    setting = f"{field}={json.dumps(name)}"
    held("odd name", read_train_job, train("--set", setting, recipe="named.json"))


def _spin(seconds: float) -> None:
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


def _raise(error: Exception) -> None:
    raise error


@pytest.mark.parametrize(
    "broken",
    [
        lambda _: _raise(KeyError("x")),
        lambda _: int("x"),
        lambda _: parse_setting("<class 'int'>"),
        lambda _: _spin(0.2),
    ],
)
def test_the_rule_can_be_broken(broken: Callable[[Sequence[str]], object], monkeypatch: pytest.MonkeyPatch) -> None:
    """An error that this library does not raise itself, Python's words in a message, and slowness are all found."""
    monkeypatch.setattr(fuzzing, "MOST_SECONDS", 0.1)
    with pytest.raises(AssertionError):
        Rule().outcome("broken", broken, [])


def test_what_is_written_is_found(tmp_path: Path) -> None:
    """A file, a folder, and what is deleted again."""
    with written() as places:
        (tmp_path / "a").mkdir()
        (tmp_path / "a" / "b").write_text("")
        (tmp_path / "a" / "b").unlink()
    assert places == [str(tmp_path / "a"), *[str(tmp_path / "a" / "b")] * 2]


def test_the_count(request: pytest.FixtureRequest) -> None:
    """At least 400 inputs that hypothesis made were run, of every kind some sound: else one check might be all.

    What was named by hand, or run a second time by another command, is not counted.
    """
    skip_unless_whole(request)
    print(f"taken {dict(RULE.taken)}, told {dict(RULE.told)}")
    kinds = ("recipe", "engine file", "--set", "command line", "exits.json", "hostfile")
    assert sum(RULE.taken[kind] + RULE.told[kind] for kind in kinds) >= 400
    assert min(min(RULE.taken[kind], RULE.told[kind]) for kind in kinds) > 0
