"""Measure model folders side by side: sizes, FLOPs, scores, and times, taken in turns call by call.

All ratios are relative to the first folder. Everything is measured in one process, on one device at a time.
"""

import copy
import importlib.metadata
import inspect
import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ds_trainer.deploy.benchmark_page import show, words, write_page
from ds_trainer.deploy.latency import (
    FOR_P95,
    Inference,
    batches,
    bytes_by_form,
    bytes_on_disk,
    chosen_examples,
    eager,
    fit_in_memory,
    in_turns,
    summary,
)
from ds_trainer.deploy.onnx_file import check_onnx, outputs, predictor, quantise, session, write_onnx
from ds_trainer.models import pretrained
from ds_trainer.models.costs import encoder_flops
from ds_trainer.models.layers import blocks_of, count_weights, layers_of
from ds_trainer.ranks import distributed, machine
from ds_trainer.ranks.failures import UserError, first_line, ran_out
from ds_trainer.ranks.joining import silence_transformers
from ds_trainer.ranks.stopping import leaving
from ds_trainer.recipe.jobs import DTYPES, INT8, OF_THE_TASK, BenchmarkJob
from ds_trainer.tasks.evaluation import evaluate, forward_of
from ds_trainer.tasks.registry import build_task
from ds_trainer.tasks.task import Predict, Task
from ds_trainer.techniques.exits.early_exit import EarlyExitModel, has_exits, with_exits

CALLS = 200
"""How often each model is called in a case, where the time allows."""
BATCH_SIZES = (1, 32)
"""Those of the report of a run."""
_SECONDS = 60.0
"""The time limit for all models and batch sizes of a report together."""
_SAME_DATA = ("name", "data_dir", "dataset", "validation_file")
"""Fields of a task's spec that decide which texts it reads."""
_EARLY, _NOT_REACHED = ", early exit", "not reached: raise --seconds"
ONLY = "onnxruntime runs here on the CPU in fp32 and int8, torch in all types but int8"
_TRACED, _CHECKED = 8, 21
"""The lengths of the batches that an .onnx file is made with and checked with; the file takes any length."""

CASE = ("backend", "device", "dtype", "threads", "length", "batch_size")
Case: TypeAlias = dict[str, Any]
"""What all models are timed under together, by these names."""


@dataclass
class MeasuredModel:
    """A folder, its model on the CPU in fp32, the task that reads texts as it needs them, and its early exits."""

    folder: Path
    model: Any
    task: Task | None = None
    early: EarlyExitModel | None = None
    onnx_files: dict[str, Path] = field(default_factory=dict)
    """By the type of their weights."""

    def inputs(self, length: int | str, size: int) -> list[dict[str, Tensor]]:
        """Return the batches to time it on: whole batches of the task's texts, or one of random tokens."""
        if length != OF_THE_TASK:
            return [random_inputs(self.model, int(length), size)]
        assert self.task is not None, "the command has checked it"
        return [batch.inputs for batch in batches(self.task, size)]

    def mean_flops(self, length: int | str) -> float | None:
        """Return the encoder's FLOPs for an example, the mean over this length's; None for a family that is not known.

        A family is known if all its layers can be counted: each has an attention block, or is DeBERTa's.
        """
        layers = layers_of(self.model).values()
        known = all(
            any(block.kind == "attention" for block in blocks_of(layer))
            or (blocks_of(layer) and any(hasattr(module, "pos_att_type") for module in layer.modules()))
            for layer in layers
        )
        tokens = [batch["input_ids"].shape[1] for batch in self.inputs(length, 1)]
        return statistics.mean(encoder_flops(self.model, each) for each in tokens) if layers and known else None


def benchmark(job: BenchmarkJob) -> None:
    """Measure what a job requests: tables on standard output, and the files of its output folder."""
    silence_transformers()
    distributed.keep_freed_memory()  # as this library does in training and evaluation
    with leaving():
        results = measure(job)
    show(results)
    if job.output:
        write_page(results, job.output)
    if not any(measured["folders"] for measured in results["measurements"]):
        raise UserError("nothing could be measured: the lines above say why")


def measure(job: BenchmarkJob) -> dict[str, Any]:
    """Return what a benchmark measures: `base`, `conditions`, `folders` by label, `measurements` and `notes`.

    What a backend cannot do is a note in the place of its times. Raises UserError where a folder cannot be loaded, has
    fewer positions than a length or no trained head for the task, where the models do not fit into memory together,
    and where no case can be run.
    """
    available = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    devices = list(job.devices or available)
    if missing := [device for device in devices if device not in available]:
        raise UserError(f"--devices {missing[0]}: torch has no such device here: give {' '.join(available)}")
    cases, notes = cases_of(job, devices)
    if not all(fit_in_memory([*job.folders.values()], torch.device(device)) for device in devices):
        raise UserError(
            f"the {len(job.folders)} models are measured in turns, and would take more than half of the free memory "
            f"together, in fp32: give fewer folders"
        )
    models = {label: _load(folder, job) for label, folder in job.folders.items()}
    longest = max((int(length) for length in job.lengths if length != OF_THE_TASK), default=0)
    for label, model in models.items():
        positions = pretrained.positions_of(model.model)
        if positions is not None and longest > positions:
            raise UserError(f"--lengths {longest}: {label} has {positions} positions: give {positions} at most")
        if OF_THE_TASK in job.lengths and not model.inputs(OF_THE_TASK, max(job.batch_sizes)):
            raise UserError(f"--batch_sizes {max(job.batch_sizes)}: the task has fewer texts to measure on: lower it")
    versions = machine.versions()
    if "onnxruntime" in job.backends:
        versions["onnxruntime"] = importlib.metadata.version("onnxruntime")
    cores = len(os.sched_getaffinity(0))
    conditions = {"cpu": machine.cpu_name(), "cores": cores, "versions": versions, "seconds": job.seconds}
    conditions |= {"gpu": torch.cuda.get_device_name()} if "cuda" in devices else {}
    conditions |= {"task": job.task.model_dump(mode="json")} if job.task else {}
    with tempfile.TemporaryDirectory() as aside:
        if "onnxruntime" in job.backends:
            for number, (label, model) in enumerate(models.items()):
                notes += [f"{label}: {note}" for note in _export(model, Path(aside, str(number)), INT8 in job.dtypes)]
        folders = {label: _described(label, model, job) for label, model in models.items()}
        measurements = []
        for case in cases:
            distributed.info(", ".join(words(case).values()))
            measurements.append(_measured(models, case, job.seconds, CALLS))
    results = {"base": next(iter(models)), "conditions": conditions, "folders": folders}
    return results | {"measurements": measurements, "notes": notes}


def measure_costs(models: Mapping[str, tuple[Path, Task]]) -> dict[str, dict[str, Any]]:
    """Measure for the report of a run each model's `size`, its `latency`, and with exit heads its `early_exit_latency`.

    `models` has the folders by phase, and the task that reads its evaluation texts as each model needs them. Latency is
    by batch size, `{"batch_1": {"median_ms", "p95_ms", "calls", ...}}`, in fp32, without `p95_ms` where there are few
    calls; `measured_on` says on which device and texts. Only models with the last one's task and data are timed, for at
    most a minute in all. Latencies are missing for batch sizes that were not reached, and for all models where these
    are too large to be held together. Folders that do not exist are left out. To be called on one rank.
    """
    models = {name: each for name, each in models.items() if each[0].is_dir()}
    costs: dict[str, dict[str, Any]] = {n: {"size": {"bytes": bytes_on_disk(path)}} for n, (path, _) in models.items()}
    data = {name: [getattr(task.spec, field) for field in _SAME_DATA] for name, (_, task) in models.items()}
    timed = {name: each for name, each in models.items() if data[name] == list(data.values())[-1]}
    if not fit_in_memory([path for path, _ in timed.values()]):
        distributed.info("latency: the models of the run are too large to be held in memory together")
        return costs
    loaded = {name: load_measured(*each) for name, each in timed.items()}
    end, device, threads = time.perf_counter() + _SECONDS, distributed.device(), torch.get_num_threads()
    for remaining, size in zip(range(len(BATCH_SIZES), 0, -1), BATCH_SIZES, strict=True):
        case = dict(zip(CASE, ("torch", device.type, "fp32", threads, OF_THE_TASK, size), strict=True))
        measured = _measured(loaded, case, (end - time.perf_counter()) / remaining, FOR_P95)
        times, notes = measured["folders"], measured["notes"]
        for label in [label for label, note in notes.items() if note != _NOT_REACHED]:
            distributed.warn(f"the latency of {label} at batch {size} is not measured: {notes[label]}")
        for name, (_, task) in timed.items():
            for way, label in (("latency", name), ("early_exit_latency", f"{name}{_EARLY}")):
                if label in times:
                    costs[name].setdefault(way, {})[f"batch_{size}"] = times[label]
                    chosen = chosen_examples(task, max(BATCH_SIZES))
                    costs[name]["measured_on"] = {
                        "threads": threads,
                        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
                        "dtype": "float32",
                        "examples": len(chosen),
                        "mean_tokens": float(task.examples(task.splits[0]).lengths[chosen].mean()),
                    }
    return costs


def cases_of(job: BenchmarkJob, devices: Sequence[str]) -> tuple[list[Case], list[str]]:
    """Return every combination that can be run, and a note where others were requested. UserError where none can be.

    A GPU is measured with the first number of threads alone, since they are the host's.
    """
    fields = (job.backends, devices, job.dtypes, job.threads, job.lengths, job.batch_sizes)
    requested: list[Case] = [dict(zip(CASE, values, strict=True)) for values in itertools.product(*fields)]
    requested = [case for case in requested if case["device"] == "cpu" or case["threads"] == job.threads[0]]
    places = {"onnxruntime": [("cpu", "fp32"), ("cpu", INT8)]}
    by_torch = [(device, dtype) for device in devices for dtype in DTYPES]
    cases = [case for case in requested if (case["device"], case["dtype"]) in places.get(case["backend"], by_torch)]
    if not cases:
        raise UserError(
            f"there is nothing to measure: {ONLY}: give --dtypes fp32 and --devices cpu, or another backend"
        )
    return cases, [f"not all combinations were measured: {ONLY}"] if len(cases) < len(requested) else []


def random_inputs(model: Any, length: int, size: int) -> dict[str, Tensor]:
    """Return a batch of random ordinary tokens, (size, length), none padded; they are the same for every call."""
    config, vocabulary = model.config, model.get_input_embeddings().num_embeddings
    names = ("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id", "mask_token_id")
    special = {token for name in names for token in _tokens(getattr(config, name, None))}
    ordinary = torch.tensor([token for token in range(vocabulary) if token not in special])
    chosen = torch.randint(len(ordinary), (size, length), generator=torch.Generator().manual_seed(0))
    inputs = {"input_ids": ordinary[chosen], "attention_mask": torch.ones(size, length, dtype=torch.int64)}
    ends = [token for token in _tokens(getattr(config, "eos_token_id", None)) if 0 <= token < vocabulary]
    if ends:  # encoder-decoders look for it, to pool it
        inputs["input_ids"][:, -1] = ends[0]
    if getattr(config, "type_vocab_size", 0) > 1:
        inputs["token_type_ids"] = torch.zeros_like(inputs["input_ids"])
    accepted = inspect.signature(model.forward).parameters
    return {name: value for name, value in inputs.items() if name in accepted}


def add_speed_ups(times: Mapping[str, dict[str, float]], taken: Mapping[str, Sequence[float]], base: str) -> None:
    """Add to the times of each model its `speed_up` relative to the base.

    It is the median over the turns of the ratio of two calls in one turn: what disturbs the machine for some turns does
    not change it.
    """
    for label, each in times.items() if base in times else ():
        turns = zip(taken[base], taken[label], strict=False)  # the time limit may cut the last turn short
        each["speed_up"] = statistics.median(first / second for first, second in turns)


def _tokens(value: Any) -> list[int]:
    """Return the tokens in a field of a config, which holds one, several or none."""
    return [token for token in (value if isinstance(value, list) else [value]) if isinstance(token, int)]


def _load(folder: Path, job: BenchmarkJob) -> MeasuredModel:
    if job.task:
        task = build_task(job.task, folder, job.cache_dir)
        task.check_trained(folder)
        return load_measured(folder, task)
    model = pretrained.load_trained(folder, (*pretrained.TRAINED, pretrained.HEADLESS))
    pretrained.set_padding(model, 0)
    return MeasuredModel(folder, model.eval())


def load_measured(folder: Path, task: Task) -> MeasuredModel:
    """Load the model of a folder for a task, on the CPU and in fp32."""
    model = task.build_model(folder).eval()
    early = with_exits(copy.deepcopy(model), folder).eval() if has_exits(folder) else None
    return MeasuredModel(folder, model, task, early)


def _export(model: MeasuredModel, stem: Path, int8: bool) -> Iterator[str]:
    """Write the .onnx file of a model, and a copy in int8 if requested; yield notes on what is not as in torch."""
    path, small = stem.with_suffix(".onnx"), stem.with_suffix(f".{INT8}.onnx")
    try:
        write_onnx(model.model, random_inputs(model.model, _TRACED, 2), path)
        checked = random_inputs(model.model, min(_CHECKED, pretrained.positions_of(model.model) or _CHECKED), 2)
        if "attention_mask" in checked:  # half of the second text is padding
            checked["attention_mask"][1, _CHECKED // 2 :] = 0
        check_onnx(model.model, path, [checked])
        model.onnx_files["fp32"] = path
        if int8:
            quantise(path, small)
            model.onnx_files[INT8] = small
    except Exception as error:  # noqa: BLE001 - exporters raise many kinds of errors; other backends are measured
        yield f"no ONNX file: {_in_a_line(error)}"
    if model.task and model.task.own_inputs:
        yield "onnxruntime runs the head at every token, torch on texts only where it is scored"


def _described(label: str, model: MeasuredModel, job: BenchmarkJob) -> dict[str, Any]:
    """Return the measures of a model that need no clock; its scores are by the way in which it was run."""
    weights, files, device = count_weights(model.model), bytes_by_form(model.folder), distributed.device()
    ways: dict[str, Predict] = {}
    for name, forward in (("torch", model.model), ("torch, early exit", model.early)):
        if forward:
            ways[name] = forward_of(_placed(forward, device, torch.float32))
    for dtype, path in model.onnx_files.items():
        name = "" if dtype == "fp32" else f", {dtype}"
        files[f"onnx{name}"] = path.stat().st_size
        ways[f"onnxruntime{name}"] = predictor(session(path, torch.get_num_threads()))
    scores = {}
    if task := model.task:
        distributed.info(f"{label}: scoring")
        scores = {way: evaluate(predict, task, job.eval_batch_size).scores for way, predict in ways.items()}
    return {
        "folder": str(model.folder),
        "parameters": weights["model"],
        "encoder": weights["encoder"],
        "flops_per_example": {str(length): model.mean_flops(length) for length in job.lengths},
        "bytes": files,
        "scores": scores,
    }


def _placed(model: Any, device: torch.device, dtype: torch.dtype) -> Any:
    """Return the model, which is on the CPU and in fp32, or a copy on another device or in another type."""
    if device.type == "cpu" and dtype == torch.float32:
        return model
    return copy.deepcopy(model).to(device, dtype)


def _measured(models: Mapping[str, MeasuredModel], case: Case, limit: float, least: int) -> dict[str, Any]:
    """Time all models in a case, by `least` calls or more each; a model that cannot be run gets a note."""
    inputs = {label: model.inputs(case["length"], case["batch_size"]) for label, model in models.items()}
    calls: dict[str, list[partial[Any]]] = {}
    notes: dict[str, str] = {}
    torch.set_num_threads(case["threads"])
    for label, model in models.items():
        for name, build in _ways(label, model, case).items():
            try:
                forward = build()
                placed = [{key: value.to(case["device"]) for key, value in batch.items()} for batch in inputs[label]]
                calls[name] = [partial(forward, batch) for batch in placed]
                for call in calls[name][:1]:  # what does not fit into memory is a note, and the others are timed
                    call()
            except Exception as error:  # noqa: BLE001, PERF203 - runtimes raise many kinds of errors
                calls.pop(name, None)
                notes[name] = _in_a_line(error)
    taken = in_turns(calls, limit, torch.device(case["device"]), least)
    times = {
        label: summary(each) | {"examples_per_s": case["batch_size"] * len(each) / sum(each)}
        for label, each in taken.items()
        if each
    }
    notes |= {label: _NOT_REACHED for label, each in taken.items() if not each}
    base = next(iter(models))
    add_speed_ups(times, taken, base)
    tokens = [batch["input_ids"].shape[1] for batch in inputs[base]]
    return case | {"mean_tokens": sum(tokens) / max(1, len(tokens)), "folders": times, "notes": notes}


def _ways(label: str, model: MeasuredModel, case: Case) -> dict[str, Callable[[], Inference]]:
    """Return functions that build a model's forwards in a case, to its end and with early exits, by the row's label."""
    if case["backend"] == "onnxruntime":
        path = model.onnx_files.get(case["dtype"])
        return {label: lambda: partial(outputs, session(path, case["threads"]))} if path else {}
    place = torch.device(case["device"]), getattr(torch, DTYPES[case["dtype"]])
    ways: dict[str, Callable[[], Inference]] = {label: lambda: eager(_placed(model.model, *place))}
    if model.early and case["length"] == OF_THE_TASK:  # where random tokens leave would mean nothing
        ways[f"{label}{_EARLY}"] = lambda: eager(_placed(model.early, *place))
    return ways


def _in_a_line(error: Exception) -> str:
    if ran_out(error):
        return "out of memory: give smaller --batch_sizes or --lengths"
    return f"{type(error).__name__}: {first_line(error)[:200]}".removesuffix(": ")
