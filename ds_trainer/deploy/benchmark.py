"""The benchmark of model folders: what it measures, its tables, and the files `benchmark.json` and `benchmark.md`."""

import importlib.metadata
import itertools
import os
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ds_trainer.deploy.measuring import (
    CASE,
    EARLY,
    FOR_P95,
    Case,
    MeasuredModel,
    bytes_by_form,
    fit_in_memory,
    in_a_line,
    load_measured,
    measured_in,
    placed,
    sample_inputs,
)
from ds_trainer.deploy.onnx_file import predictor, session, write_checked
from ds_trainer.files.messages import aligned, markdown
from ds_trainer.files.writing import write_json, write_whole
from ds_trainer.models import pretrained
from ds_trainer.models.costs import encoder_flops
from ds_trainer.models.layers import count_weights, layers_of
from ds_trainer.ranks import distributed, machine
from ds_trainer.ranks.failures import UserError
from ds_trainer.ranks.joining import silence_transformers
from ds_trainer.ranks.stopping import leaving
from ds_trainer.recipe.jobs import DTYPES, INT8, OF_THE_TASK, BenchmarkJob
from ds_trainer.tasks.evaluation import evaluate, forward_of
from ds_trainer.tasks.registry import build_task
from ds_trainer.tasks.task import Predict

CALLS = 200
"""How often each model is called in a case, where the time allows."""
_COLUMNS = {"median_ms": "median ms", "p95_ms": "p95 ms", "examples_per_s": "examples/s", "speed_up": "speed-up"}


def benchmark(job: BenchmarkJob) -> None:
    """Measure what a job requests: tables on standard output, and the files of its output folder."""
    silence_transformers()
    distributed.keep_freed_memory()  # as this library does in training and evaluation
    with leaving():
        results = measure(job)
    print("\n".join(["", aligned(sizes(results)), "", aligned(times(results)), "", *remarks(results)]), flush=True)
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
    cases, notes = cases_of(job, devices), list[str]()
    if not all(fit_in_memory([*job.folders.values()], torch.device(device)) for device in devices):
        raise UserError(
            f"the {len(job.folders)} models are measured in turns, and would take more than half of the free memory "
            f"together, in fp32: give fewer folders"
        )
    models = {}
    for label, folder in job.folders.items():
        task = build_task(job.task, folder, job.cache_dir) if job.task else None
        if task:
            task.check_trained(folder)
        models[label] = load_measured(folder, task)
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
            distributed.info(_in_words(case))
            measurements.append(measured_in(models, case, job.seconds, CALLS))
    results = {"base": next(iter(models)), "conditions": conditions, "folders": folders}
    return results | {"measurements": measurements, "notes": notes}


def cases_of(job: BenchmarkJob, devices: Sequence[str]) -> list[Case]:
    """Return every requested combination that can be run. UserError where none can be.

    A GPU is measured with the first number of threads alone, since they are the host's.
    """
    fields = (job.backends, devices, job.dtypes, job.threads, job.lengths, job.batch_sizes)
    requested: list[Case] = [dict(zip(CASE, values, strict=True)) for values in itertools.product(*fields)]
    requested = [case for case in requested if case["device"] == "cpu" or case["threads"] == job.threads[0]]
    can_run = {("onnxruntime", "cpu", "fp32"), ("onnxruntime", "cpu", INT8)}
    can_run |= {("torch", device, dtype) for device in devices for dtype in DTYPES}
    cases = [case for case in requested if (case["backend"], case["device"], case["dtype"]) in can_run]
    if not cases:
        raise UserError(
            "there is nothing to measure: onnxruntime runs here on the CPU in fp32 and int8, torch in all types but "
            "int8: give --dtypes fp32 and --devices cpu, or another backend"
        )
    return cases


def _export(model: MeasuredModel, stem: Path, int8: bool) -> Iterator[str]:
    """Write the .onnx file of a model, and a copy in int8 if requested; yield notes on what is not as in torch."""
    path, small = stem.with_suffix(".onnx"), stem.with_suffix(f".{INT8}.onnx") if int8 else None
    try:
        write_checked(model.model, sample_inputs(model.model), path, small)
        model.onnx_files = {"fp32": path} | ({INT8: small} if small else {})
    except Exception as error:  # noqa: BLE001 - exporters raise many kinds of errors; other backends are measured
        yield f"no ONNX file: {in_a_line(error)}"
    if model.task and model.task.own_inputs:
        yield "onnxruntime runs the head at every token, torch on texts only where it is scored"


def _described(label: str, model: MeasuredModel, job: BenchmarkJob) -> dict[str, Any]:
    """Return the measures of a model that need no clock; its scores are by the way in which it was run.

    FLOPs are those of the encoder for an example, the mean over a length's; None where no layers are known.
    """
    weights, files, device = count_weights(model.model), bytes_by_form(model.folder), distributed.device()
    ways: dict[str, Predict] = {}
    for name, forward in (("torch", model.model), (f"torch{EARLY}", model.early)):
        if forward:
            ways[name] = forward_of(placed(forward, device, torch.float32))
    for dtype, path in model.onnx_files.items():
        name = "" if dtype == "fp32" else f", {dtype}"
        files[f"onnx{name}"] = path.stat().st_size
        ways[f"onnxruntime{name}"] = predictor(session(path, torch.get_num_threads()))
    flops, scores = dict[str, float | None](), {}
    for length in job.lengths:
        tokens = [batch["input_ids"].shape[1] for batch in model.inputs(length, 1)]
        mean = statistics.mean(encoder_flops(model.model, each) for each in tokens)
        flops[str(length)] = mean if layers_of(model.model) else None
    if task := model.task:
        distributed.info(f"{label}: scoring")
        scores = {way: evaluate(predict, task, job.eval_batch_size).scores for way, predict in ways.items()}
    of_model = {"parameters": weights["model"], "encoder": weights["encoder"], "flops_per_example": flops}
    return {"folder": str(model.folder), **of_model, "bytes": files, "scores": scores}


def write_page(results: Mapping[str, Any], folder: Path) -> None:
    """Write the numbers, and the tables as a page."""
    write_json(folder / "benchmark.json", results)
    lines = ["# Benchmark", "", markdown(sizes(results)), "", markdown(times(results)), ""]
    write_whole(folder / "benchmark.md", "\n".join([*lines, *(f"- {line}" for line in remarks(results))]) + "\n")
    distributed.info(f"benchmark: {folder / 'benchmark.md'}")


def sizes(results: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return a row for each folder, with the measures that need no clock."""
    rows = []
    whole = max(results["folders"][results["base"]]["encoder"]["total"], 1)
    for label, folder in results["folders"].items():
        kept = folder["encoder"]["kept"]
        row = {"folder": label, "parameters": f"{folder['parameters']['total']:,}"}
        row["encoder weights not 0"] = f"{kept:,} ({100 * kept / whole:.1f}%)"
        for length, flops in folder["flops_per_example"].items():
            row[f"GFLOPs, {length}"] = "–" if flops is None else f"{flops / 1e9:.3g}"
        row |= {f"{kind}, MiB": f"{size / 2**20:,.1f}" for kind, size in folder["bytes"].items()}
        for way, scores in folder["scores"].items():
            row |= {name if way == "torch" else f"{name} ({way})": f"{value:.4f}" for name, value in scores.items()}
        rows.append(row)
    return rows


def times(results: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return a row for each folder in each case."""
    rows = []
    for measured in results["measurements"]:
        case = {name: str(measured[name]) for name in ("backend", "device", "dtype", "threads")}
        tokens = measured["length"] if measured["length"] != OF_THE_TASK else f"~{measured['mean_tokens']:.1f}"
        case |= {"tokens": str(tokens), "batch": str(measured["batch_size"])}
        for label, numbers in measured["folders"].items():
            shown = {name: f"{numbers[key]:,.2f}" if key in numbers else "–" for key, name in _COLUMNS.items()}
            rows.append({"folder": label} | case | shown)
        rows += [{"folder": label} | case | {"median ms": "see below"} for label in measured["notes"]]
    return rows


def remarks(results: Mapping[str, Any]) -> list[str]:
    """Say where and how the folders were measured, and give all notes."""
    conditions = results["conditions"]
    versions = ", ".join(f"{name} {version}" for name, version in conditions["versions"].items())
    where = f"{conditions['cpu']}, {conditions['cores']} cores"
    where += f"; {conditions['gpu']}" if "gpu" in conditions else ""
    lines = [
        f"Speed-ups are relative to {results['base']}. The folders took turns, call by call; a speed-up is the median "
        f"of the ratios within a turn. p95: of {FOR_P95} calls or more. Tokens with ~: the average over the task's "
        f"texts, padded to the longest of each batch.",
        f"Measured on {where}. {versions}. The threads of onnxruntime sleep between calls.",
        *results["notes"],
    ]
    for measured in results["measurements"]:
        lines += [f"{label}, {_in_words(measured)}: {note}" for label, note in measured["notes"].items()]
    return lines


def _in_words(case: Mapping[str, Any]) -> str:
    length = "the task's texts" if case["length"] == OF_THE_TASK else f"{case['length']} tokens"
    place = (case["backend"], case["device"], case["dtype"], f"threads {case['threads']}")
    return ", ".join([*place, length, f"batch {case['batch_size']}"])
