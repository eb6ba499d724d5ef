"""Model folders side by side: measurements, notes, files and errors. No time is asserted."""

import json
import shutil
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ds_trainer.deploy.benchmark_cases import ONLY, benchmark_cases
from support.exit_folders import make_classifier
from transformers import (
    AlbertConfig,
    AlbertModel,
    AutoTokenizer,
    GPT2Config,
    GPT2ForSequenceClassification,
)

from ds_trainer.cli.benchmark import benchmark_command, read_benchmark_job
from ds_trainer.cli.command import run_command
from ds_trainer.deploy import benchmark, benchmark_page, latency
from ds_trainer.deploy.benchmark import add_ratios, compile_anew, measure, random_inputs
from ds_trainer.deploy.latency import FOR_P95, eager, summary
from ds_trainer.files.tables import aligned
from ds_trainer.models.flops import encoder_flops
from ds_trainer.models.folders import save_folder
from ds_trainer.models.layers import layers_of
from ds_trainer.models.model_folder import COMPACT_FILE
from ds_trainer.models.pretrained import load_trained
from ds_trainer.models.shrink import shrink

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
    """Calls take the times that the test gives, the base's first: no clock is used."""
    times = SimpleNamespace(each=[0.010])

    def in_turns(runs: Any, limit: float, device: Any, calls: int) -> dict[Any, list[float]]:
        return {key: [times.each[place % len(times.each)]] * calls for place, key in enumerate(runs)}

    monkeypatch.setattr(benchmark, "in_turns", in_turns)
    return times


def found(*arguments: Any) -> dict[str, Any]:
    """The results of a benchmark, which are yielded anew after each case."""
    *_, last = measure(read_benchmark_job([str(argument) for argument in arguments]))
    return last


def test_each_folder_is_measured_at_each_setting(plain: Path, clock: SimpleNamespace) -> None:
    """Every batch size, length and number of threads, the folders together; throughput counts examples."""
    clock.each = [0.010, 0.004]
    told = found(plain, plain, "--batch_sizes", 1, 4, "--lengths", 8, 16, "--threads", 1, "--devices", "cpu")
    at = [(one["length"], one["batch_size"]) for one in told["measurements"]]
    assert at == [(8, 1), (8, 4), (16, 1), (16, 4)]
    for one in told["measurements"]:
        assert (one["backend"], one["mean_tokens"]) == ("torch", one["length"])
        base, other = one["folders"]["model"], one["folders"]["model (2)"]
        assert (base["median_ms"], other["p95_ms"]) == (pytest.approx(10), pytest.approx(4))
        assert other["examples_per_s"] == pytest.approx(250 * one["batch_size"])
        assert (base["speed_up"], other["speed_up"]) == (1, pytest.approx(2.5))
        assert other["calls"] == benchmark.CALLS


def test_a_folder_is_described_without_a_clock(plain: Path, clock: SimpleNamespace) -> None:
    """Weights, FLOPs at each length, and bytes, those of the compact form apart."""
    (plain / COMPACT_FILE).write_bytes(b"123")
    try:
        described = found(plain, *FAST)["folders"]["model"]
    finally:
        (plain / COMPACT_FILE).unlink()
    model = load_trained(plain)
    assert described["parameters"]["total"] == sum(weight.numel() for weight in model.parameters())
    assert described["encoder"]["total"] == 4 * (4 * 16 * 16 + 2 * 16 * 16)
    assert described["flops_per_example"] == {"8": encoder_flops(model, 8)}
    assert described["bytes"] == {"safetensors": (plain / "model.safetensors").stat().st_size, "compact": 3}
    assert described["scores"] == {}


def test_speed_ups_are_set_against_flops() -> None:
    """Twice as fast with half the FLOPs is 1, with a quarter 0.5; without the base's times there is no ratio."""
    taken = {"a": [8.0, 8.0], "b": [4.0, 4.0], "c": [4.0, 4.0]}
    times: dict[str, dict[str, float]] = {name: {"median_ms": own[0]} for name, own in taken.items()}
    add_ratios(times, taken, {"a": 100.0, "b": 50.0, "c": 25.0}, "a")
    assert [found["speed_up"] for found in times.values()] == [1, 2, 2]
    assert [found["speed_up_per_flop_ratio"] for found in times.values()] == [1, 1, 0.5]
    alone = {"b": {"median_ms": 4.0}}
    add_ratios(alone, taken, {"b": 1.0}, "a")
    assert alone == {"b": {"median_ms": 4.0}}


def test_speed_ups_are_of_one_turn() -> None:
    """A machine that slows down in some turns changes no ratio, also where the last turn was cut short."""
    taken = {"a": [8.0, 8.0, 80.0, 80.0, 80.0], "b": [4.0, 4.0, 40.0, 40.0]}
    times: dict[str, dict[str, float]] = {name: {"median_ms": summary(own)["median_ms"]} for name, own in taken.items()}
    add_ratios(times, taken, {"a": None, "b": 1.0}, "a")
    assert [found["speed_up"] for found in times.values()] == [1, 2]
    assert not [found for found in times.values() if "speed_up_per_flop_ratio" in found]


def test_a_task_gives_texts_and_scores(
    plain: Path, exiting: Path, task_flags: list[str], clock: SimpleNamespace
) -> None:
    """By default at the texts' own lengths; a folder that exits early is run, and scored, both ways."""
    told = found(plain, exiting, "--names", "a", "b", "--batch_sizes", 4, "--threads", 1, *task_flags)
    (one,) = told["measurements"]
    assert one["length"] == "task"
    assert 4 < one["mean_tokens"] < 24
    assert one["folders"].keys() == {"a", "b", "b, early exit"}
    assert "speed_up_per_flop_ratio" not in one["folders"]["b, early exit"]
    scores = {label: folder["scores"] for label, folder in told["folders"].items()}
    assert scores["a"].keys() == {"torch"}
    assert scores["b"].keys() == {"torch", "torch, early exit"}
    assert scores["a"]["torch"] == scores["b"]["torch"]
    assert 0 <= scores["b"]["torch, early exit"]["accuracy"] <= 1
    metric, points = benchmark_page.measured_models(told)
    assert metric == "accuracy"
    assert [point.name for point in points] == ["a", "b", "b, early exit"]


def test_exits_are_not_measured_on_random_tokens(exiting: Path, task_flags: list[str], clock: SimpleNamespace) -> None:
    """Where they leave would mean nothing."""
    (one,) = found(exiting, *FAST, *task_flags)["measurements"]
    assert one["folders"].keys() == {"model"}


def test_what_a_backend_cannot_do_is_a_note(
    plain: Path, clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No compiler, say: its rows say so, all else is measured."""

    def compile_nothing(*_: Any, **__: Any) -> Any:
        raise RuntimeError("No working C++ compiler found\nmore")

    monkeypatch.setattr(torch, "compile", compile_nothing)
    told = found(plain, *FAST, "--backends", "compile", "torch")
    first, second = told["measurements"]
    assert first["folders"] == {}
    assert first["notes"] == {"model": "RuntimeError: No working C++ compiler found"}
    assert second["folders"].keys() == {"model"}
    assert "see below" in aligned(benchmark_page.times(told))
    (line,) = [line for line in benchmark_page.remarks(told) if "compiler" in line]
    assert line.startswith(
        "model, compile: RuntimeError: No working C++ compiler found (cpu, fp32, threads 1, 8 tokens"
    )


def test_compiled_models_of_one_class_are_all_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each for its sizes, however many models there are: none is run uncompiled in silence."""
    graphs: list[Any] = []

    class Scaled(torch.nn.Module):
        def __init__(self, size: int) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(size))

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return hidden * self.weight

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    compile_anew()
    runs = {size: eager(torch.compile(Scaled(size), dynamic=False)) for size in range(4, 14)}
    for _ in range(2):
        for size, run in runs.items():
            run({"hidden": torch.ones(size)})
    assert len(graphs) == len(runs)


def test_onnxruntime_runs_what_was_exported(plain: Path, task_flags: list[str], clock: SimpleNamespace) -> None:
    """From a temporary file; its outputs are scored as torch's are."""
    told = found(plain, *FAST, "--lengths", 8, "task", *task_flags, "--backends", "onnxruntime")
    described = told["folders"]["model"]
    assert described["bytes"]["onnx"] > described["bytes"]["safetensors"] / 2
    assert described["scores"]["onnxruntime"] == described["scores"]["torch"]
    assert [one["folders"].keys() for one in told["measurements"]] == [{"model"}, {"model"}]
    assert not [one["notes"] for one in told["measurements"] if one["notes"]]
    assert "onnxruntime" in told["conditions"]["versions"]
    assert not list(plain.glob("*.onnx"))


def test_int8_is_another_model_of_onnxruntime(
    plain: Path, task_flags: list[str], clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its file, score and times are its own, and torch runs none."""
    opened = []
    session = benchmark.session
    monkeypatch.setattr(benchmark, "session", lambda path, threads: opened.append(path.name) or session(path, threads))
    flags = [*FAST, *task_flags, "--backends", "torch", "onnxruntime", "--dtypes", "int8", "fp32"]
    told = found(plain, *flags)
    described = told["folders"]["model"]
    assert described["bytes"]["onnx, int8"] != described["bytes"]["onnx"]
    assert described["scores"].keys() == {"torch", "onnxruntime", "onnxruntime, int8"}
    at = [(one["backend"], one["dtype"], [*one["folders"]]) for one in told["measurements"]]
    assert at == [(*way, ["model"]) for way in (("torch", "fp32"), ("onnxruntime", "int8"), ("onnxruntime", "fp32"))]
    assert opened[-2:] == ["0.int8.onnx", "0.onnx"]
    assert told["notes"] == [f"not all combinations were measured: {ONLY}"]


def test_a_folder_that_cannot_be_exported_is_noted(
    plain: Path, clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others are measured by onnxruntime, it by torch."""

    def refuse(*_: Any) -> None:
        raise ValueError("no such operator")

    monkeypatch.setattr(benchmark, "write_onnx", refuse)
    told = found(plain, *FAST, "--backends", "torch", "onnxruntime")
    assert told["notes"] == ["model: no ONNX file: ValueError: no such operator"]
    assert [one["folders"].keys() for one in told["measurements"]] == [{"model"}, set()]


def test_cases_are_those_that_can_run(plain: Path) -> None:
    """onnxruntime on the CPU in fp32 and int8, torch in all but int8; a GPU with one number of the CPU's threads."""
    flags = ["--backends", "torch", "onnxruntime", "--dtypes", "fp32", "bf16", "int8", "--batch_sizes", "1"]
    job = read_benchmark_job([str(plain), *flags]).model_copy(update={"threads": (1, 2)})
    cases, notes = benchmark_cases(job, ["cpu", "cuda"])
    assert [(case.backend, case.device, case.dtype, case.threads) for case in cases] == [
        *[("torch", "cpu", dtype, threads) for dtype in ("fp32", "bf16") for threads in (1, 2)],
        *[("torch", "cuda", dtype, 1) for dtype in ("fp32", "bf16")],
        *[("onnxruntime", "cpu", dtype, threads) for dtype in ("fp32", "int8") for threads in (1, 2)],
    ]
    assert notes == [f"not all combinations were measured: {ONLY}"]
    with pytest.raises(ValueError, match="nothing to measure: onnxruntime"):
        benchmark_cases(job.model_copy(update={"backends": ("onnxruntime",)}), ["cuda"])


def test_threads_and_types_are_those_asked_for(plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """During the calls, whatever OMP_NUM_THREADS says."""
    seen = []

    def in_turns(runs: Any, *_: Any) -> dict[Any, list[float]]:
        ((call,),) = runs.values()
        seen.append((torch.get_num_threads(), call().logits.dtype))
        return {key: [1.0] for key in runs}

    monkeypatch.setattr(benchmark, "in_turns", in_turns)
    monkeypatch.setattr("ds_trainer.cli.benchmark.os.sched_getaffinity", lambda _: {0, 1, 2})
    before = torch.get_num_threads()
    found(plain, *FAST, "--threads", 3, 1, "--dtypes", "fp32", "bf16")
    assert seen == [(3, torch.float32), (1, torch.float32), (3, torch.bfloat16), (1, torch.bfloat16)]
    torch.set_num_threads(before)


def test_random_tokens_are_ordinary_ones(plain: Path) -> None:
    """Exactly as long as asked, the same each time, none that means padding or an end, and what the model takes."""
    model: Any = load_trained(plain)
    inputs = random_inputs(model, 7, 3)
    assert inputs.keys() == {"input_ids", "attention_mask", "token_type_ids"}
    assert all(value.shape == (3, 7) for value in inputs.values())
    assert inputs["attention_mask"].all()
    assert model.config.pad_token_id not in inputs["input_ids"]
    assert torch.equal(inputs["input_ids"], random_inputs(model, 7, 3)["input_ids"])


@pytest.mark.parametrize("ends", [3, [3, 4], []])
def test_ends_may_be_several(plain: Path, ends: Any) -> None:
    """As in a config of Llama 3: none is an ordinary token, and the first ends a text."""
    model: Any = load_trained(plain)
    model.config.eos_token_id = ends
    ids = random_inputs(model, 30, 4)["input_ids"]
    special = [ends] if isinstance(ends, int) else ends
    assert not set(special) & set(ids[:, :-1].flatten().tolist())
    assert not special or set(ids[:, -1].tolist()) == {3}


def test_a_decoder_that_classifies_is_measured(tmp_path: Path, clock: SimpleNamespace) -> None:
    """Without a padding token too, at any batch size, by torch and onnxruntime."""
    torch.manual_seed(0)
    config = GPT2Config(n_embd=16, n_layer=1, n_head=2, n_positions=32, vocab_size=40, eos_token_id=[1, 2])
    GPT2ForSequenceClassification(config).save_pretrained(tmp_path / "gpt2")
    flags = ["--batch_sizes", "3", "--lengths", "8", "--threads", "1", "--devices", "cpu"]
    told = found(tmp_path / "gpt2", *flags, "--backends", "torch", "onnxruntime")
    assert told["notes"] == []
    assert [one["folders"].keys() for one in told["measurements"]] == [{"gpt2"}, {"gpt2"}]


def test_flops_of_unknown_families_are_not_told(tmp_path: Path, clock: SimpleNamespace) -> None:
    """ALBERT has one layer that runs several times: a dash and a line, not a number."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "embedding_size": 16, "num_attention_heads": 2, "intermediate_size": 16}
    AlbertModel(AlbertConfig(**sizes, vocab_size=40, num_hidden_layers=2)).save_pretrained(tmp_path / "albert")
    told = found(tmp_path / "albert", tmp_path / "albert", *FAST)
    assert told["folders"]["albert"]["flops_per_example"] == {"8": None}
    assert "speed_up_per_flop_ratio" not in told["measurements"][0]["folders"]["albert (2)"]
    assert benchmark_page.sizes(told)[0]["GFLOPs at 8"] == "–"
    assert any("FLOPs are not counted" in line for line in benchmark_page.remarks(told))


def test_a_wrong_file_is_not_measured(plain: Path, clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """An .onnx file is compared with its model at another length and masked: a note says where they differ."""
    monkeypatch.setitem(benchmark.check_onnx.__globals__, "TOLERANCE", -1.0)
    told = found(plain, *FAST, "--backends", "onnxruntime")
    assert "differ from the model's" in told["notes"][0]
    assert told["measurements"][0]["folders"] == {}


def test_nothing_measured_is_no_success(
    plain: Path, tmp_path: Path, clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """More than the memory holds, say, at every setting: why stands in the tables, and the code is no 0."""

    def too_large(_: Any) -> Any:
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes.")

    monkeypatch.setattr(benchmark, "eager", lambda _: too_large)
    monkeypatch.setattr(benchmark, "_check_lengths", lambda *_: None)
    assert run_command(benchmark_command, [str(plain), *FAST, "--output_dir", str(tmp_path)]) == 2
    printed = capsys.readouterr()
    assert "out of memory: give smaller --batch_sizes or --lengths" in printed.out
    assert "nothing could be measured" in printed.err
    assert (tmp_path / "benchmark.md").is_file()


def test_what_was_measured_is_kept(
    plain: Path, tmp_path: Path, clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A benchmark that is stopped half-way says so, beside no page and figure of an earlier one."""
    out = tmp_path / "out"
    arguments = [str(plain), *FAST, "--batch_sizes", "1", "2", "--output_dir", str(out)]

    def kept() -> tuple[bool, int]:
        results = json.loads((out / "benchmark.json").read_text())
        return results["finished"], len(results["measurements"])

    assert run_command(benchmark_command, arguments) == 0
    assert kept() == (True, 2)
    measured = benchmark._measured

    def stopped(models: Any, case: Any, limit: float) -> Any:
        if case.batch_size == 2:
            raise KeyboardInterrupt
        return measured(models, case, limit)

    monkeypatch.setattr(benchmark, "_measured", stopped)
    assert run_command(benchmark_command, arguments) == 130
    assert kept() == (False, 1)
    assert [path.name for path in out.iterdir()] == ["benchmark.json"]
    monkeypatch.setattr(benchmark, "_measured", measured)
    monkeypatch.setattr(benchmark_page, "size_speed_score", lambda *_: 1 / 0)
    assert run_command(benchmark_command, arguments) == 0
    assert kept() == (True, 2)
    assert "size_speed_score" not in (out / "benchmark.md").read_text()
    assert run_command(benchmark_command, [*arguments, "--lengths", "9999"]) == 2
    assert (out / "benchmark.md").is_file(), "a mistake takes nothing away"


def test_a_base_without_an_encoder_has_a_figure() -> None:
    """Where all of it was cut out, shares are 0 and nothing is divided by zero."""
    folder = {"encoder": {"total": 0, "kept": 0}, "bytes": {"pickle": 1}, "scores": {}}
    measured = {"backend": "torch", "device": "cpu", "dtype": "fp32", "threads": 1, "length": 8, "batch_size": 1}
    measured["folders"] = {name: {"speed_up": 1.0} for name in "ab"}
    _, points = benchmark_page.measured_models(
        {"base": "a", "folders": {"a": folder, "b": folder}, "measurements": [measured]}
    )
    assert [(point.kept, point.bytes) for point in points] == [(0, 1), (0, 1)]


def test_models_that_do_not_fit_are_not_loaded(plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is an error that says what to change."""
    monkeypatch.setattr(benchmark, "fit_in_memory", lambda *_: False)
    monkeypatch.setattr(benchmark.pretrained, "load_trained", lambda *_: pytest.fail("a model was loaded"))
    with pytest.raises(ValueError, match=r"the 2 models are measured in turns.* give fewer folders"):
        found(plain, plain, *FAST)


def test_a_folder_without_a_head_is_measured(plain: Path, tmp_path: Path, clock: SimpleNamespace) -> None:
    """As pre-trained ones come."""
    load_trained(plain).base_model.save_pretrained(tmp_path / "bare")
    assert found(tmp_path / "bare", *FAST)["measurements"][0]["folders"].keys() == {"bare"}


def test_a_shrunk_folder_is_measured_by_what_is_left(plain: Path, tmp_path: Path, clock: SimpleNamespace) -> None:
    """Against the one it came from: fewer weights, bytes and FLOPs, by torch and by onnxruntime."""
    model: Any = load_trained(plain)
    for layer in layers_of(model).values():
        for weight in layer.get_submodule("intermediate.dense").parameters():
            weight.data[4:] = 0
    save_folder(shrink(model), AutoTokenizer.from_pretrained(plain), tmp_path / "shrunk")
    told = found(plain, tmp_path / "shrunk", *FAST, "--backends", "torch", "onnxruntime")
    whole, shrunk = told["folders"].values()
    assert shrunk["encoder"] == {"kept": 4 * (4 * 16 * 16 + 2 * 16 * 4), "total": 4 * (4 * 16 * 16 + 2 * 16 * 4)}
    assert shrunk["bytes"]["onnx"] < whole["bytes"]["onnx"]
    share = shrunk["flops_per_example"]["8"] / whole["flops_per_example"]["8"]
    assert share < 0.8
    for one in told["measurements"]:  # all calls take as long by this clock
        assert one["folders"]["shrunk"]["speed_up_per_flop_ratio"] == pytest.approx(share)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--lengths", "129"], "--lengths 129: model has 128 positions: give 128 at most"),
        (["--devices", "cuda"], "--devices cuda: torch has no such device here: give cpu"),
    ],
)
def test_what_only_shows_with_torch_ends_with_2_too(
    plain: Path, more: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """One line, and nothing is written."""
    if torch.cuda.is_available() and "cuda" in more:
        pytest.skip("there is one")
    out = tmp_path / "out"
    assert run_command(benchmark_command, [str(plain), *FAST, *more, "--output_dir", str(out)]) == 2
    assert capsys.readouterr().err.strip().splitlines()[-1] == f"error: {message}"
    assert not out.exists()


def test_a_batch_may_be_larger_than_the_texts_that_are_timed_by_default(
    plain: Path, task_flags: list[str], clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many texts are taken as the largest batch needs; an error says so only where the task has fewer, 61 here."""
    monkeypatch.setattr(latency, "_EXAMPLES", 8)
    (one,) = found(plain, "--batch_sizes", 32, "--threads", 1, "--devices", "cpu", *task_flags)["measurements"]
    assert one["folders"].keys() == {"model"}
    with pytest.raises(ValueError, match="--batch_sizes 62: the task has fewer texts"):
        found(plain, "--batch_sizes", 62, *task_flags)


def test_the_command_measures_and_writes(
    plain: Path,
    exiting: Path,
    task_flags: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Real times, with tables of them on standard output, the same in Markdown, all numbers in JSON, and a figure.

    What else is in the folder stays.
    """
    out = tmp_path / "out"
    out.mkdir()
    (out / "notes.md").write_text("mine")
    flags = ["--names", "dense", "a|b", "--batch_sizes", "2", "--lengths", "8", "task", "--threads", "1"]
    more = ["--seconds", "30", "--output_dir", str(out)]
    monkeypatch.setattr(benchmark, "CALLS", FOR_P95)
    assert run_command(benchmark_command, [str(plain), str(exiting), *flags, *more, *task_flags]) == 0
    told = json.loads((out / "benchmark.json").read_text())
    assert [one["length"] for one in told["measurements"]] == [8, "task"]
    assert told["measurements"][1]["folders"].keys() == {"dense", "a|b", "a|b, early exit"}
    for one in told["measurements"]:
        for times in one["folders"].values():
            assert 0 < times["median_ms"] <= times["p95_ms"]
    assert told["base"] == "dense"
    assert told["conditions"]["versions"]["torch"] == torch.__version__
    assert aligned(benchmark_page.times(told)) in capsys.readouterr().out
    page = (out / "benchmark.md").read_text()
    assert "| a\\|b, early exit | torch | cpu | fp32 | 1 |" in page
    assert "![sizes, speed-ups and scores](size_speed_score.png)" in page
    names = {path.name for path in out.iterdir()}
    assert names == {"notes.md", "benchmark.json", "benchmark.md", "size_speed_score.png", "size_speed_score.svg"}
