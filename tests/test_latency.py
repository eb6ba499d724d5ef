"""Costs of models side by side."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoModelForSequenceClassification

from ds_trainer import latency
from ds_trainer.exit_specs import ExitPolicy, SavedExits
from ds_trainer.latency import Subject, bytes_on_disk, compare, in_turns
from ds_trainer.models import create_folder, save_folder, train_tokenizer
from ds_trainer.recipe import parse_task
from ds_trainer.tasks import build_task
from ds_trainer.techniques.exit_heads import new_heads, save_heads

FAR_BELOW = 1e-6


@pytest.fixture(scope="module")
def subject(tiny_recipe, tmp_path_factory) -> Subject:
    """A tiny classifier of the csv task, 4 layers, and a head after the second at which every sample leaves."""
    root = tmp_path_factory.mktemp("models")
    config = tiny_recipe["model"]["config"] | {"num_hidden_layers": 4}
    create_folder(config, train_tokenizer(["apple saw wren the old"], 64, True), root / "new", seed=0)
    task = build_task(parse_task(tiny_recipe["task"]), root / "new", root / "cache")
    model = task.build_model(root / "new")
    policy = ExitPolicy(criterion="entropy", thresholds=[99.0])

    def add_heads(folder: Path) -> None:
        save_heads(folder, new_heads(model, [2], None), SavedExits(layers=[2], pooling="first", policy=policy))

    save_folder(model, task.tokenizer, root / "model", add_heads)
    return Subject(root / "model", task)


def test_each_way_to_run_a_model_is_measured(subject):
    """To its end and early, at both batch sizes; a plain folder only to its end. Bytes are those of the files."""
    plain = subject.folder.with_name("plain")
    save_folder(AutoModelForSequenceClassification.from_pretrained(subject.folder), subject.task.tokenizer, plain)
    found = compare({"early": subject, "plain": Subject(plain, subject.task)})
    assert found["early"].keys() == {"size", "latency", "early_exit_latency"}
    assert found["plain"].keys() == {"size", "latency"}
    for entry in found.values():
        assert entry["latency"].keys() == {"batch_1", "batch_32"}
        for times in entry["latency"].values():
            assert 0 < times["median_ms"] <= times["p95_ms"]
    (weights,) = plain.glob("*.safetensors")
    assert found["plain"]["size"] == {"bytes": weights.stat().st_size}
    assert found["early"]["size"]["bytes"] > found["plain"]["size"]["bytes"]
    assert bytes_on_disk(subject.folder) == found["early"]["size"]["bytes"]


def test_leaving_halfway_takes_less_time(subject, monkeypatch):
    """The early way runs two of the four layers: fewer calls of a layer, whatever a clock says."""
    calls = []
    original = latency._ways

    def counted(one):
        ways = original(one)
        for name, model in ways.items():
            for layer in getattr(model, "model", model).bert.encoder.layer:
                layer.register_forward_hook(lambda *_, name=name: calls.append(name))
        return ways

    monkeypatch.setattr(latency, "_ways", counted)
    compare({"early": subject})
    assert calls.count("latency") == 2 * calls.count("early_exit_latency") > 0


def test_runs_take_turns():
    """A B A B, every call of each, the first round thrown away; one round at least, however short the time."""
    called: list[str] = []
    runs = {name: [lambda name=name: called.append(name)] * 2 for name in "ab"}
    times = in_turns(runs, FAR_BELOW)
    assert called == ["a", "a", "b", "b"] * 2
    assert {name: len(found) for name, found in times.items()} == {"a": 2, "b": 2}
    assert len(in_turns(runs, 60.0)["a"]) == 2 * latency._ROUNDS


def test_models_too_large_to_be_held_together_are_not_measured(subject, monkeypatch):
    """Their sizes are told, and no model is loaded."""
    monkeypatch.setattr(latency.os, "sysconf", lambda name: 1)
    monkeypatch.setattr(latency, "_ways", lambda _: pytest.fail("a model was loaded"))
    assert compare({"large": subject})["large"].keys() == {"size"}
