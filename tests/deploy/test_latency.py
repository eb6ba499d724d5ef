"""Costs of models side by side."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from ds_trainer.config.exit_specs import ExitPolicy, SavedExits
from ds_trainer.config.recipe import parse_task
from ds_trainer.deploy import latency
from ds_trainer.deploy.latency import Subject, bytes_by_form, bytes_on_disk, compare, in_turns
from ds_trainer.models.compact import write_compact_folder
from ds_trainer.models.folders import create_folder, save_folder, train_tokenizer
from ds_trainer.models.model_folder import COMPACT_FILE
from ds_trainer.models.pretrained import load_trained
from ds_trainer.ranks import timing
from ds_trainer.tasks.registry import build_task
from ds_trainer.techniques.exits.heads import new_heads, save_heads


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


def plain(subject: Subject, dtype: torch.dtype = torch.float32) -> Subject:
    """The same model without its exits, saved in another type."""
    folder = subject.folder.with_name(f"plain_{str(dtype)[6:]}")
    model = AutoModelForSequenceClassification.from_pretrained(subject.folder).to(dtype)
    if not folder.exists():
        save_folder(model, subject.task.tokenizer, folder)
    return Subject(folder, subject.task)


def test_each_way_to_run_a_model_is_measured(subject):
    """To its end and early, at both batch sizes; a plain folder only to its end. Bytes are those of the files."""
    other = plain(subject)
    found = compare({"early": subject, "plain": other})
    assert found["early"].keys() == {"size", "latency", "early_exit_latency", "measured_on"}
    assert found["plain"].keys() == {"size", "latency", "measured_on"}
    for entry in found.values():
        assert entry["latency"].keys() == {"batch_1", "batch_32"}
        for times in entry["latency"].values():
            assert 0 < times["median_ms"] <= times["p95_ms"]
            assert times["calls"] >= latency.FOR_P95
    (weights,) = other.folder.glob("*.safetensors")
    assert found["plain"]["size"] == {"bytes": weights.stat().st_size}
    assert found["early"]["size"]["bytes"] > found["plain"]["size"]["bytes"]
    assert bytes_on_disk(subject.folder) == found["early"]["size"]["bytes"]


def test_times_say_what_they_were_measured_on(subject):
    """The threads, the device, the type, and how many texts of which length."""
    found = compare({"a": subject})["a"]["measured_on"]
    lengths = subject.task.examples("validation").lengths
    assert found == {
        "threads": torch.get_num_threads(),
        "device": "cpu" if not torch.cuda.is_available() else torch.cuda.get_device_name(),
        "dtype": "float32",
        "examples": 61,
        "mean_tokens": pytest.approx(lengths.mean()),
    }


def test_leaving_halfway_takes_less_time(subject):
    """The early way runs two of the four layers of the same model, which is loaded once."""
    ways = latency._ways(subject)
    assert ways["early_exit_latency"].model is ways["latency"]
    calls = []
    for layer in ways["latency"].bert.encoder.layer:
        layer.register_forward_hook(lambda *_: calls.append(1))
    (batch, *_) = latency.batches(subject.task, 1)
    for way, layers in (("latency", 4), ("early_exit_latency", 2)):
        calls.clear()
        latency.eager(ways[way])(batch.inputs)
        assert len(calls) == layers


def test_a_part_of_a_batch_is_no_batch(subject):
    """61 examples have one batch of 32, and 31 would have none: there is no batch_32 then."""
    assert [len(batch.ids) for batch in latency.batches(subject.task, 32)] == [32]
    spec = subject.task.spec.model_copy(update={"max_eval_samples": 31})
    few = build_task(spec, subject.folder, subject.task.cache_dir)
    assert compare({"a": Subject(subject.folder, few)})["a"]["latency"].keys() == {"batch_1"}


def test_runs_take_turns():
    """One of each to warm up, then A B A B call by call; five rounds, or more where a round has few calls."""
    called: list[str] = []
    runs = {name: [lambda name=name, i=i: called.append(f"{name}{i}") for i in range(2)] for name in "ab"}
    times = in_turns(runs, 60.0)
    assert called[:6] == ["a0", "b0", "a0", "b0", "a1", "b1"]
    assert {name: len(found) for name, found in times.items()} == {"a": 20, "b": 20}
    many = in_turns({"a": [lambda: None] * 30}, 60.0)
    assert len(many["a"]) == 30 * latency._ROUNDS
    assert in_turns({"a": []}, 60.0) == {"a": []}


def test_the_time_is_looked_at_before_every_call(monkeypatch):
    """Not once a round: slow calls end in the middle of one, and of who was not reached there are no times."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(latency.time, "perf_counter", lambda: clock.now)

    def slow() -> None:
        clock.now += 10

    runs = {"a": [slow] * 50, "b": [slow] * 50}
    assert {name: len(found) for name, found in in_turns(runs, 25).items()} == {"a": 1, "b": 0}
    assert {name: len(found) for name, found in in_turns(runs, -1).items()} == {"a": 0, "b": 0}


def test_all_sizes_together_keep_the_limit(subject, monkeypatch):
    """The first batch size leaves the second its half; without any time only sizes are told."""
    limits = []
    monkeypatch.setattr(latency, "in_turns", lambda runs, limit: limits.append(limit) or {key: [0.1] for key in runs})
    compare({"a": subject})
    assert limits[0] == pytest.approx(latency._SECONDS / 2, abs=5)
    assert limits[1] == pytest.approx(latency._SECONDS, abs=5)
    monkeypatch.undo()
    monkeypatch.setattr(latency, "_SECONDS", 0.0)
    assert compare({"a": subject})["a"].keys() == {"size"}


def test_of_few_calls_there_is_no_95th_percentile():
    """Below 20 it would be the slowest; of 20 it is the last but one."""
    assert latency.summary([0.001 * n for n in range(1, 20)]).keys() == {"median_ms", "calls"}
    assert latency.summary([0.001 * n for n in range(1, 21)])["p95_ms"] == pytest.approx(19)


def test_a_folder_that_is_not_there_is_left_out(subject):
    """As that of a phase whose model was moved: the others are measured."""
    gone = Subject(subject.folder.with_name("gone"), subject.task)
    assert compare({"a": subject, "gone": gone}).keys() == {"a"}
    assert compare({"gone": gone}) == {}


@pytest.mark.parametrize("field", ["name", "data_dir", "dataset"])
def test_models_of_other_texts_are_not_timed(subject, field):
    """Their sizes are told; times on other texts say nothing beside these."""
    other = SimpleNamespace(spec=subject.task.spec.model_copy(update={field: "other"}))
    found = compare({"other": replace(subject, task=other), "last": subject})
    assert found["other"].keys() == {"size"}
    assert "latency" in found["last"]


def test_models_too_large_to_be_held_together_are_not_measured(subject, monkeypatch):
    """Their sizes are told, and no model is loaded. What counts is their size in fp32, whatever it is on disk."""
    half = plain(subject, torch.bfloat16)
    weights = sum(math.prod(p.shape) for p in subject.task.build_model(half.folder).parameters())
    assert latency._parameters(half.folder) == weights
    monkeypatch.setattr(latency, "_available_bytes", lambda: 16 * weights)
    assert "latency" in compare({"fits": half})["fits"]
    monkeypatch.setattr(latency, "_available_bytes", lambda: 16 * weights - 1)
    monkeypatch.setattr(latency, "_ways", lambda _: pytest.fail("a model was loaded"))
    assert compare({"large": half})["large"].keys() == {"size"}


def test_other_forms_of_weights_count(subject, tmp_path):
    """A compact folder by its header, a pickle as if of the smallest type: neither is of no weights and no bytes."""
    half = plain(subject)
    model = load_trained(half.folder)
    weights = latency._parameters(half.folder)
    (tmp_path / "compact").mkdir()
    write_compact_folder(half.folder, model, tmp_path / "compact", "fp16")
    assert latency._parameters(tmp_path / "compact") == weights
    size = (tmp_path / "compact" / COMPACT_FILE).stat().st_size
    assert bytes_on_disk(tmp_path / "compact") == size
    assert bytes_by_form(tmp_path / "compact") == {"compact": size}
    (tmp_path / "pickle").mkdir()
    torch.save(model.state_dict(), tmp_path / "pickle" / "pytorch_model.bin")
    assert bytes_by_form(tmp_path / "pickle").keys() == {"pickle"}
    assert latency._parameters(tmp_path / "pickle") >= weights


def test_a_gpu_s_memory_counts_too(subject, monkeypatch):
    """What is free there, beside the host's."""
    monkeypatch.setattr(latency.distributed, "device", lambda: torch.device("cuda", 0))
    monkeypatch.setattr(latency.torch.cuda, "mem_get_info", lambda _: (10, 10**12))
    assert not latency.fit([subject.folder])


def test_a_gpu_is_waited_for_before_and_after(monkeypatch):
    """Else the time would be that of asking, with what was asked before in it."""
    done = []
    monkeypatch.setattr(timing.torch.cuda, "synchronize", lambda device: done.append(device.type))
    assert timing.seconds(lambda: done.append("call"), torch.device("cuda", 0)) >= 0
    assert done == ["cuda", "call", "cuda"]
    timing.seconds(lambda: done.append("call"), torch.device("cpu"))
    assert done[3:] == ["call"]
