"""Model folders side by side: what is measured, in which turns, notes, files and errors. No time is asserted."""

import json
import math
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.exit_folders import make_classifier
from transformers import AlbertConfig, AlbertModel, GPT2Config, GPT2ForSequenceClassification

from ds_trainer.cli.command import run_command
from ds_trainer.cli.export import benchmark_command, read_benchmark_job
from ds_trainer.deploy import benchmark, measuring
from ds_trainer.deploy.benchmark import cases_of, measure
from ds_trainer.deploy.measuring import (
    FOR_P95,
    bytes_by_form,
    bytes_on_disk,
    eager,
    fit_in_memory,
    in_turns,
    measure_costs,
    random_inputs,
    sample_inputs,
    summary,
)
from ds_trainer.files.messages import aligned
from ds_trainer.models.costs import encoder_flops
from ds_trainer.models.folders import COMPACT_FILE
from ds_trainer.models.pretrained import load_trained
from ds_trainer.ranks import machine
from ds_trainer.recipe.recipe import parse_task
from ds_trainer.tasks.registry import build_task

BOTH = ["--backends", "torch", "onnxruntime"]
FAST = ["--batch_sizes", "1", "--lengths", "8", "--threads", "1", "--devices", "cpu"]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def exiting(tmp_path_factory: pytest.TempPathFactory, csv_folder: Path, cache: Path) -> Path:
    """A classifier of the CSV task with exit heads."""
    return make_classifier(tmp_path_factory.mktemp("exiting") / "model", csv_folder, cache)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory, exiting: Path) -> Path:
    """The same without."""
    return shutil.copytree(exiting, tmp_path_factory.mktemp("plain") / "model", ignore=shutil.ignore_patterns("exit*"))


@pytest.fixture(scope="module")
def task_flags(tiny_recipe: dict[str, Any], tmp_path_factory: pytest.TempPathFactory, cache: Path) -> list[str]:
    path = tmp_path_factory.mktemp("run") / "recipe.json"
    path.write_text(json.dumps(tiny_recipe))
    return ["--recipe", str(path), "--cache_dir", str(cache)]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The calls of a key take the times that the test gives, those of the base first: no clock is used."""
    times = SimpleNamespace(of_keys=[[0.010]])

    def timed(runs: Any, limit: float, device: Any, calls: int) -> dict[Any, list[float]]:
        given = times.of_keys
        return {key: (given[place % len(given)] * calls)[:calls] for place, key in enumerate(runs) if runs[key]}

    monkeypatch.setattr(measuring, "in_turns", timed)
    return times


def measured(*arguments: Any) -> dict[str, Any]:
    return measure(read_benchmark_job([str(argument) for argument in arguments]))


def test_each_folder_is_measured_at_each_setting(plain: Path, clock: SimpleNamespace) -> None:
    """At every batch size and length the folders are timed together; what needs no clock is counted from the files.

    A machine that slows down in some turns changes no ratio.
    """
    clock.of_keys = [[0.010, 0.010, 0.1, 0.1, 0.1], [0.004, 0.004, 0.04, 0.04, 0.04]]
    (plain / COMPACT_FILE).write_bytes(b"123")
    try:
        flags = ["--batch_sizes", 1, 4, "--lengths", 8, 16, "--threads", 1, "--devices", "cpu"]
        results = measured(plain, plain, *flags, "--names", "model", "other")
    finally:
        (plain / COMPACT_FILE).unlink()
    at = [(one["length"], one["batch_size"]) for one in results["measurements"]]
    assert at == [(8, 1), (8, 4), (16, 1), (16, 4)]
    for one in results["measurements"]:
        assert (one["backend"], one["mean_tokens"]) == ("torch", one["length"])
        base, other = one["folders"]["model"], one["folders"]["other"]
        assert (base["median_ms"], other["p95_ms"]) == (pytest.approx(100), pytest.approx(40))
        assert other["examples_per_s"] == pytest.approx(one["batch_size"] / 0.0256)
        assert (base["speed_up"], other["speed_up"]) == (1, pytest.approx(2.5))
        assert other["calls"] == benchmark.CALLS
    described, model = results["folders"]["model"], load_trained(plain)
    assert described["parameters"]["total"] == sum(weight.numel() for weight in model.parameters())
    assert described["encoder"]["total"] == 4 * (4 * 16 * 16 + 2 * 16 * 16)
    assert described["flops_per_example"] == {str(length): encoder_flops(model, length) for length in (8, 16)}
    assert described["bytes"] == {"safetensors": (plain / "model.safetensors").stat().st_size, "compact": 3}
    assert described["scores"] == {}


def test_runs_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of each warms up, then A B A B call by call, for five rounds or more where a round has few calls.

    The time is looked at before every call: slow calls end in the middle of a round, and a key may have no times.
    """
    called: list[str] = []
    runs = {name: [lambda name=name, i=i: called.append(f"{name}{i}") for i in range(2)] for name in "ab"}
    times = in_turns(runs, 60.0)
    assert called[:6] == ["a0", "b0", "a0", "b0", "a1", "b1"]
    assert {name: len(each) for name, each in times.items()} == {"a": 20, "b": 20}
    assert len(in_turns({"a": [lambda: None] * 30}, 60.0)["a"]) == 30 * measuring._ROUNDS
    assert in_turns({"a": []}, 60.0) == {"a": []}
    now = [0.0]
    monkeypatch.setattr(measuring.time, "perf_counter", lambda: now[0])
    slow = {name: [lambda: now.__setitem__(0, now[0] + 10)] * 50 for name in "ab"}
    assert {name: len(each) for name, each in in_turns(slow, 25).items()} == {"a": 1, "b": 0}


def test_times_are_summed_up_and_a_gpu_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of fewer than 20 calls there is no 95th percentile, of 20 it is the last but one; a GPU is idle at both ends."""
    assert summary([0.001 * n for n in range(1, 20)]) == {"median_ms": pytest.approx(10), "calls": 19}
    assert summary([0.001 * n for n in range(1, 21)])["p95_ms"] == pytest.approx(19)
    done: list[str] = []
    monkeypatch.setattr(machine.torch.cuda, "synchronize", lambda device: done.append(device.type))
    assert machine.seconds(lambda: done.append("call"), torch.device("cuda", 0)) >= 0
    assert done == ["cuda", "call", "cuda"]


def test_what_a_backend_cannot_do_is_a_note(
    plain: Path, tmp_path: Path, clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the exporter fails, or memory does not suffice, a note says so and all else is measured."""

    def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError("No such operator\nmore")

    def too_large(_: Any) -> Any:
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes.")

    monkeypatch.setattr(benchmark, "write_checked", fail)
    monkeypatch.setattr(measuring, "eager", lambda model: too_large if model.config.num_labels == 2 else eager(model))
    AlbertModel(AlbertConfig(hidden_size=16, num_attention_heads=2, vocab_size=40)).save_pretrained(tmp_path / "large")
    results = measured(plain, tmp_path / "large", *FAST, *BOTH, "--names", "model", "large")
    assert [one["folders"].keys() for one in results["measurements"]] == [{"model"}, set()]
    note = "out of memory: give smaller --batch_sizes or --lengths"
    assert results["measurements"][0]["notes"] == {"large": note}
    failed = "no ONNX file: RuntimeError: No such operator"
    assert results["notes"] == [f"{label}: {failed}" for label in ("model", "large")]
    assert "see below" in aligned(benchmark.times(results))
    assert f"large, torch, cpu, fp32, threads 1, 8 tokens, batch 1: {note}" in benchmark.remarks(results)


def test_onnxruntime_runs_what_was_exported(
    plain: Path, task_flags: list[str], clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files are temporary, and scored as torch is; int8 has a file, a score and times for itself."""
    opened = []
    session = measuring.session
    monkeypatch.setattr(measuring, "session", lambda path, threads: opened.append(path.name) or session(path, threads))
    flags = ["--lengths", 8, "task", *task_flags, *BOTH, "--dtypes", "int8", "fp32", "--names", "model"]
    results = measured(plain, *FAST, *flags)
    described = results["folders"]["model"]
    assert described["bytes"]["onnx"] > described["bytes"]["safetensors"] / 2
    assert described["bytes"]["onnx, int8"] != described["bytes"]["onnx"]
    assert described["scores"]["onnxruntime"] == described["scores"]["torch"]
    assert described["scores"].keys() == {"torch", "onnxruntime", "onnxruntime, int8"}
    at = [(one["backend"], one["dtype"], one["length"], [*one["folders"]]) for one in results["measurements"]]
    ways = (("torch", "fp32"), ("onnxruntime", "int8"), ("onnxruntime", "fp32"))
    assert at == [(*way, length, ["model"]) for way in ways for length in (8, "task")]
    assert opened == ["0.int8.onnx"] * 2 + ["0.onnx"] * 2
    assert results["notes"] == []
    assert "onnxruntime" in results["conditions"]["versions"]
    assert not list(plain.glob("*.onnx"))


def test_cases_are_those_that_can_run(plain: Path) -> None:
    """A GPU is measured with one number of the CPU's threads, and by torch alone."""
    flags = [*BOTH, "--dtypes", "fp32", "int8", "--batch_sizes", "1"]
    job = read_benchmark_job([str(plain), *flags]).model_copy(update={"threads": (1, 2)})
    (case,) = cases_of(job, ["cuda"])
    assert (case["backend"], case["dtype"], case["threads"]) == ("torch", "fp32", 1)
    with pytest.raises(ValueError, match="nothing to measure: onnxruntime"):
        cases_of(job.model_copy(update={"backends": ("onnxruntime",)}), ["cuda"])


def test_threads_and_types_are_those_asked_for(plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """During the calls, whatever OMP_NUM_THREADS says."""
    seen = []

    def timed(runs: Any, *_: Any) -> dict[Any, list[float]]:
        ((call,),) = runs.values()
        seen.append((torch.get_num_threads(), call().logits.dtype))
        return {key: [1.0] for key in runs}

    monkeypatch.setattr(measuring, "in_turns", timed)
    monkeypatch.setattr("ds_trainer.cli.export.os.sched_getaffinity", lambda _: {0, 1, 2})
    before = torch.get_num_threads()
    measured(plain, *FAST, "--threads", 3, 1, "--dtypes", "fp32", "bf16")
    assert seen == [(3, torch.float32), (1, torch.float32), (3, torch.bfloat16), (1, torch.bfloat16)]
    torch.set_num_threads(before)


@pytest.mark.parametrize("ends", [3, [3, 4], None])
def test_random_tokens_are_ordinary_ones(plain: Path, ends: Any) -> None:
    """Exactly as long as asked and the same each time; none means padding or an end, of which there may be several.

    Of the batches that two forms of a model are compared on some are padded, and one has as many tokens as may be.
    """
    model: Any = load_trained(plain)
    model.config.eos_token_id = ends
    inputs = random_inputs(model, 30, 4)
    assert inputs.keys() == {"input_ids", "attention_mask", "token_type_ids"}
    assert all(value.shape == (4, 30) for value in inputs.values())
    assert inputs["attention_mask"].all()
    ids, special = inputs["input_ids"], [ends] if isinstance(ends, int) else ends or []
    assert not {*special, model.config.pad_token_id} & set(ids[:, :-1].flatten().tolist())
    assert not special or set(ids[:, -1].tolist()) == {3}
    assert torch.equal(ids, random_inputs(model, 30, 4)["input_ids"])
    samples = sample_inputs(model)
    assert samples[-1]["input_ids"].shape == (1, 128)
    assert [bool(batch["attention_mask"].all()) for batch in samples] == [False, True, False, True]


def test_folders_of_other_kinds_are_measured(plain: Path, tmp_path: Path, clock: SimpleNamespace) -> None:
    """A decoder without a padding token, and a model without a head."""
    torch.manual_seed(0)
    config = GPT2Config(n_embd=16, n_layer=1, n_head=2, n_positions=32, vocab_size=40, eos_token_id=[1, 2])
    GPT2ForSequenceClassification(config).save_pretrained(tmp_path / "gpt2")
    load_trained(plain).base_model.save_pretrained(tmp_path / "bare")
    flags = [*FAST, "--batch_sizes", 3, *BOTH, "--names", "gpt2", "bare"]
    results = measured(tmp_path / "gpt2", tmp_path / "bare", *flags)
    assert results["notes"] == []
    assert [one["folders"].keys() for one in results["measurements"]] == [{"gpt2", "bare"}] * 2


def test_what_only_shows_with_torch_ends_with_2_too(
    plain: Path, task_flags: list[str], capsys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line says what to change, and nothing is written."""
    out = tmp_path / "out"
    monkeypatch.setattr(measuring, "_EXAMPLES", 8)  # as many texts are taken as the largest batch needs, 61 at most
    for more, message in (
        (["--lengths", "129"], f"--lengths 129: {plain} has 128 positions: give 128 at most"),
        (["--devices", "cuda"], "--devices cuda: torch has no such device here: give cpu"),
        (["--lengths", "task", "--batch_sizes", "62", *task_flags], "--batch_sizes 62: the task has fewer texts"),
    ):
        if "cuda" not in more or not torch.cuda.is_available():
            assert run_command(benchmark_command, [str(plain), *FAST, *more, "--output_dir", str(out)]) == 2
            assert f"error: {message}" in capsys.readouterr().err.strip().splitlines()[-1]
    assert not out.exists()


def test_the_command_measures_and_writes(
    plain: Path, exiting: Path, task_flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Real times: tables on standard output, the same in Markdown, and all numbers in JSON; what else is there stays.

    A folder that exits early is run, and scored, both ways; on random tokens it is run to its end alone, since where
    these leave would mean nothing. Where nothing could be measured the exit code is 2.
    """
    out = tmp_path / "out"
    out.mkdir()
    (out / "notes.md").write_text("mine")
    flags = ["--names", "dense", "a|b", "--batch_sizes", "2", "--lengths", "8", "task", "--threads", "1"]
    words = [str(plain), str(exiting), *flags, "--seconds", "30", "--output_dir", str(out), *task_flags]
    monkeypatch.setattr(benchmark, "CALLS", FOR_P95)
    assert run_command(benchmark_command, words) == 0
    results = json.loads((out / "benchmark.json").read_text())
    of_tokens, of_task = results["measurements"]
    assert (of_tokens["length"], of_task["length"]) == (8, "task")
    assert of_tokens["folders"].keys() == {"dense", "a|b"}
    assert of_task["folders"].keys() == {"dense", "a|b", "a|b, early exit"}
    assert 4 < of_task["mean_tokens"] < 24
    for times in (*of_tokens["folders"].values(), *of_task["folders"].values()):
        assert 0 < times["median_ms"] <= times["p95_ms"]
    scores = {label: folder["scores"] for label, folder in results["folders"].items()}
    assert scores["dense"].keys() == {"torch"}
    assert scores["a|b"].keys() == {"torch", "torch, early exit"}
    assert scores["dense"]["torch"] == scores["a|b"]["torch"]
    assert results["base"] == "dense"
    assert results["conditions"]["versions"]["torch"] == torch.__version__
    assert aligned(benchmark.times(results)) in capsys.readouterr().out
    assert "| a\\|b, early exit | torch | cpu | fp32 | 1 |" in (out / "benchmark.md").read_text()
    assert {path.name for path in out.iterdir()} == {"notes.md", "benchmark.json", "benchmark.md"}
    monkeypatch.setattr(measuring, "eager", lambda _: 1 / 0)
    assert run_command(benchmark_command, words) == 2
    assert "nothing could be measured" in capsys.readouterr().err


@pytest.fixture
def task_of(tiny_recipe: dict[str, Any], cache: Path) -> Any:
    def build(folder: Path, **fields: Any) -> tuple[Path, Any]:
        return folder, build_task(parse_task(tiny_recipe["task"]).model_copy(update=fields), folder, cache)

    return build


def test_a_run_s_models_have_size_and_latency(
    plain: Path, exiting: Path, task_of: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At both batch sizes, and early where a model has exits; times say what they were measured on.

    A folder that was deleted is left out, and models of other texts are not timed. Batch sizes share the time.
    """
    limits: list[float] = []

    def timed(runs: Any, limit: float, device: Any, least: int) -> Any:
        limits.append(limit)
        return in_turns(runs, limit, device, least)

    monkeypatch.setattr(measuring, "in_turns", timed)
    other = SimpleNamespace(spec=task_of(plain)[1].spec.model_copy(update={"data_dir": "other"}))
    models = {"other": (plain, other), "gone": (tmp_path / "gone", None)}
    costs = measure_costs(models | {"early": task_of(exiting), "plain": task_of(plain)})
    assert {name: {*of_model} for name, of_model in costs.items()} == {
        "other": {"size"},
        "early": {"size", "latency", "early_exit_latency", "measured_on"},
        "plain": {"size", "latency", "measured_on"},
    }
    assert costs["early"]["latency"].keys() == {"batch_1", "batch_32"}
    assert costs["plain"]["latency"]["batch_32"]["calls"] >= FOR_P95
    assert costs["early"]["size"]["bytes"] == bytes_on_disk(exiting) > costs["plain"]["size"]["bytes"]
    assert costs["plain"]["measured_on"] == {
        "threads": torch.get_num_threads(),
        "device": machine.device_name(),
        "dtype": "float32",
        "examples": 61,
        "mean_tokens": pytest.approx(task_of(plain)[1].examples("validation").lengths.mean()),
    }
    assert limits[0] <= measuring._SECONDS / 2 < limits[1] <= measuring._SECONDS
    few = measure_costs({"few": task_of(plain, max_eval_samples=31)})["few"]
    assert few["latency"].keys() == {"batch_1"}, "a part of a batch is no batch"
    warnings: list[str] = []
    monkeypatch.setattr(measuring.distributed, "warn", warnings.append)
    monkeypatch.setattr(measuring, "_SECONDS", 0.0)
    assert measure_costs({"a": task_of(plain)})["a"].keys() == {"size"}
    assert warnings == []
    monkeypatch.setattr(measuring, "eager", lambda _: 1 / 0)
    measure_costs({"a": task_of(plain)})
    assert warnings[0] == "the latency of a at batch 1 is not measured: ZeroDivisionError: division by zero"


def test_models_too_large_to_be_held_together_are_not_loaded(
    plain: Path, task_of: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit is half of the free memory; weights take twice as much in fp32 as on disk, where they may be in fp16.

    Those of a compact file take eight times as much, and a GPU's free memory counts, too.
    """
    room = [4 * bytes_on_disk(plain)]
    monkeypatch.setattr(measuring, "free_memory", lambda: room[0])
    assert fit_in_memory([plain])
    room[0] -= 1
    assert not fit_in_memory([plain])
    for module in (measuring, benchmark):
        monkeypatch.setattr(module, "load_measured", lambda *_: pytest.fail("a model was loaded"))
    assert measure_costs({"large": task_of(plain)})["large"].keys() == {"size"}
    monkeypatch.setattr(benchmark, "fit_in_memory", lambda *_: False)
    with pytest.raises(ValueError, match=r"the 2 models are measured in turns.* give fewer folders"):
        measured(plain, plain, *FAST, "--names", "a", "b")
    (tmp_path / COMPACT_FILE).write_bytes(b"1234")
    room[0] = 64
    assert fit_in_memory([tmp_path])
    assert not fit_in_memory([tmp_path, tmp_path])
    (tmp_path / "pytorch_model.bin").write_bytes(b"12")
    assert bytes_by_form(tmp_path) == {"compact": 4, "pickle": 2}
    monkeypatch.setattr(measuring.torch.cuda, "mem_get_info", lambda _: (10, 10**12))
    room[0] = math.inf
    assert fit_in_memory([plain])
    assert not fit_in_memory([plain], torch.device("cuda", 0))
