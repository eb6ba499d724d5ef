"""Costs of models side by side."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from ds_trainer.config.exit_specs import ExitPolicy, SavedExits
from ds_trainer.config.recipe import parse_task
from ds_trainer.deploy import latency
from ds_trainer.deploy.latency import TimedModel, bytes_by_form, bytes_on_disk, in_turns, measure_costs
from ds_trainer.models.compact import write_compact_folder
from ds_trainer.models.folders import create_folder, save_folder, train_tokenizer
from ds_trainer.models.model_folder import COMPACT_FILE
from ds_trainer.models.pretrained import load_trained
from ds_trainer.ranks import timing
from ds_trainer.tasks.registry import build_task
from ds_trainer.techniques.exits.heads import new_heads, save_heads


@pytest.fixture(scope="module")
def timed(tiny_recipe, tmp_path_factory) -> TimedModel:
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
    return TimedModel(root / "model", task)


@pytest.fixture
def no_clock(monkeypatch) -> None:
    """Every call takes as long, and none is made."""
    monkeypatch.setattr(latency, "in_turns", lambda calls, _: {key: [0.1] * len(each) for key, each in calls.items()})


def plain(timed: TimedModel, dtype: torch.dtype = torch.float32) -> TimedModel:
    """The same model without its exits, saved in another type."""
    folder = timed.folder.with_name(f"plain_{str(dtype)[6:]}")
    model = AutoModelForSequenceClassification.from_pretrained(timed.folder).to(dtype)
    if not folder.exists():
        save_folder(model, timed.task.tokenizer, folder)
    return TimedModel(folder, timed.task)


def test_each_way_to_run_a_model_is_measured(timed):
    """To its end and early, at both batch sizes; a plain folder only to its end. Bytes are those of the files."""
    other = plain(timed)
    found = measure_costs({"early": timed, "plain": other})
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
    assert bytes_on_disk(timed.folder) == found["early"]["size"]["bytes"]


def test_times_say_what_they_were_measured_on(timed, no_clock):
    """The threads, the device, the type, and how many texts of which length."""
    found = measure_costs({"a": timed})["a"]["measured_on"]
    lengths = timed.task.examples("validation").lengths
    assert found == {
        "threads": torch.get_num_threads(),
        "device": "cpu" if not torch.cuda.is_available() else torch.cuda.get_device_name(),
        "dtype": "float32",
        "examples": 61,
        "mean_tokens": pytest.approx(lengths.mean()),
    }


def test_leaving_halfway_takes_less_time(timed, monkeypatch):
    """The early way runs two of the four layers of the same model, which is loaded once."""
    built = []
    build_model = timed.task.build_model
    monkeypatch.setattr(timed.task, "build_model", lambda folder: built.append(build_model(folder)) or built[-1])
    forwards = latency._forwards(timed)
    (model,) = built
    calls = []
    for layer in model.bert.encoder.layer:
        layer.register_forward_hook(lambda *_: calls.append(1))
    (batch, *_) = latency.batches(timed.task, 1)
    for way, layers in (("latency", 4), ("early_exit_latency", 2)):
        calls.clear()
        forwards[way](batch.inputs)
        assert len(calls) == layers


def test_a_part_of_a_batch_is_no_batch(timed, no_clock):
    """61 examples have one batch of 32, and 31 would have none: there is no batch_32 then."""
    assert [len(batch.ids) for batch in latency.batches(timed.task, 32)] == [32]
    spec = timed.task.spec.model_copy(update={"max_eval_samples": 31})
    few = build_task(spec, timed.folder, timed.task.cache_dir)
    assert measure_costs({"a": TimedModel(timed.folder, few)})["a"]["latency"].keys() == {"batch_1"}


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
    """Not once a round: slow calls end in the middle of one, and a key that was not reached has no times."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(latency.time, "perf_counter", lambda: clock.now)

    def slow() -> None:
        clock.now += 10

    runs = {"a": [slow] * 50, "b": [slow] * 50}
    assert {name: len(found) for name, found in in_turns(runs, 25).items()} == {"a": 1, "b": 0}
    assert {name: len(found) for name, found in in_turns(runs, -1).items()} == {"a": 0, "b": 0}


def test_all_sizes_together_keep_the_limit(timed, monkeypatch):
    """The first batch size leaves the second its half; without any time there are only sizes."""
    limits = []
    monkeypatch.setattr(latency, "in_turns", lambda runs, limit: limits.append(limit) or {key: [0.1] for key in runs})
    measure_costs({"a": timed})
    assert limits[0] == pytest.approx(latency._SECONDS / 2, abs=5)
    assert limits[1] == pytest.approx(latency._SECONDS, abs=5)
    monkeypatch.undo()
    monkeypatch.setattr(latency, "_SECONDS", 0.0)
    assert measure_costs({"a": timed})["a"].keys() == {"size"}


def test_of_few_calls_there_is_no_95th_percentile():
    """Below 20 it would be the slowest; of 20 it is the last but one."""
    assert latency.summary([0.001 * n for n in range(1, 20)]).keys() == {"median_ms", "calls"}
    assert latency.summary([0.001 * n for n in range(1, 21)])["p95_ms"] == pytest.approx(19)


def test_a_folder_that_is_not_there_is_left_out(timed, no_clock):
    """As that of a phase whose model was moved: the others are measured."""
    gone = TimedModel(timed.folder.with_name("gone"), timed.task)
    assert measure_costs({"a": timed, "gone": gone}).keys() == {"a"}
    assert measure_costs({"gone": gone}) == {}


@pytest.mark.parametrize("field", ["name", "data_dir", "dataset"])
def test_models_of_other_texts_are_not_timed(timed, field, no_clock):
    """They have sizes only: times on other texts cannot be compared with these."""
    other = SimpleNamespace(spec=timed.task.spec.model_copy(update={field: "other"}))
    found = measure_costs({"other": replace(timed, task=other), "last": timed})
    assert found["other"].keys() == {"size"}
    assert "latency" in found["last"]


def test_models_too_large_to_be_held_together_are_not_measured(timed, no_clock, monkeypatch):
    """Their sizes are reported, and no model is loaded; weights in fp16 take twice as much in memory as on disk.

    The limit is half of the memory that is free.
    """
    half = plain(timed, torch.bfloat16)
    room = [4 * bytes_on_disk(half.folder)]
    monkeypatch.setattr(latency, "free_memory", lambda: room[0])
    assert "latency" in measure_costs({"fits": half})["fits"]
    room[0] -= 1
    monkeypatch.setattr(latency, "_forwards", lambda _: pytest.fail("a model was loaded"))
    assert measure_costs({"large": half})["large"].keys() == {"size"}


def test_other_forms_of_weights_count(timed, tmp_path):
    """A compact folder and a pickle have their size, exit heads included."""
    half = plain(timed)
    model = load_trained(half.folder)
    (tmp_path / "compact").mkdir()
    write_compact_folder(half.folder, model, tmp_path / "compact", "fp16")
    size = (tmp_path / "compact" / COMPACT_FILE).stat().st_size
    assert bytes_on_disk(tmp_path / "compact") == size
    assert bytes_by_form(tmp_path / "compact") == {"compact": size}
    (tmp_path / "pickle").mkdir()
    torch.save(model.state_dict(), tmp_path / "pickle" / "pytorch_model.bin")
    assert bytes_by_form(tmp_path / "pickle").keys() == {"pickle"}


def test_a_gpu_s_memory_counts_too(timed, monkeypatch):
    """Its free memory, beside the host's."""
    monkeypatch.setattr(latency.torch.cuda, "mem_get_info", lambda _: (10, 10**12))
    assert not latency.fit_in_memory([timed.folder], torch.device("cuda", 0))


def test_a_gpu_is_waited_for_before_and_after(monkeypatch):
    """Otherwise the time would be that of launching kernels, and include earlier ones."""
    done = []
    monkeypatch.setattr(timing.torch.cuda, "synchronize", lambda device: done.append(device.type))
    assert timing.seconds(lambda: done.append("call"), torch.device("cuda", 0)) >= 0
    assert done == ["cuda", "call", "cuda"]
    timing.seconds(lambda: done.append("call"), torch.device("cpu"))
    assert done[3:] == ["call"]
