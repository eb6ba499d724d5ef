"""Measure model folders side by side: sizes, FLOPs, scores, and times, taken in turns call by call.

All ratios are relative to the first folder. Everything is measured in one process, on one device at a time.
"""

import copy
import importlib.metadata
import inspect
import os
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ds_trainer.config.jobs import DTYPES, OF_THE_TASK, BenchmarkJob
from ds_trainer.deploy.benchmark_cases import BenchmarkCase, benchmark_cases
from ds_trainer.deploy.benchmark_page import show, write, write_numbers
from ds_trainer.deploy.latency import Inference, batches, bytes_by_form, eager, fit_in_memory, in_turns, summary
from ds_trainer.deploy.onnx_file import check_onnx, outputs, predictor, quantise, session, write_onnx
from ds_trainer.models import pretrained
from ds_trainer.models.flops import encoder_flops
from ds_trainer.models.layers import blocks_of, count_weights, layers_of
from ds_trainer.models.model_folder import INT8
from ds_trainer.ranks import distributed, machine
from ds_trainer.ranks.failures import UserError, first_line, ran_out
from ds_trainer.ranks.joining import silence_transformers
from ds_trainer.ranks.stopping import leaving
from ds_trainer.tasks.evaluation import evaluate
from ds_trainer.tasks.registry import build_task
from ds_trainer.tasks.task import Predict, Task
from ds_trainer.techniques.exits.early_exit import EarlyExitModel, with_exits
from ds_trainer.techniques.exits.heads import has_exits

CALLS = 200
"""How often each model is called in a case, where the time allows."""
_TRACED = 8
"""The length of the batch that an .onnx file is made with; the file takes any length."""
_CHECKED = 21
"""The length of the batch that an .onnx file is checked with, where the model has so many positions."""


@dataclass
class BenchmarkModel:
    """A folder, its model on the CPU in fp32, the task that reads texts as it needs them, and its early exits."""

    folder: Path
    model: Any
    task: Task | None = None
    early: EarlyExitModel | None = None
    onnx_files: dict[str, Path] = field(default_factory=dict)
    """By the type of their weights."""
    scores: dict[str, dict[str, float]] = field(default_factory=dict)

    def inputs(self, length: int | str, size: int) -> list[dict[str, Tensor]]:
        """The batches to time it on: whole batches of the task's texts, or one of random tokens."""
        if length != OF_THE_TASK:
            return [random_inputs(self.model, int(length), size)]
        assert self.task is not None, "the command has checked it"
        return [batch.inputs for batch in batches(self.task, size)]

    def mean_flops(self, lengths: Sequence[int]) -> float | None:
        """The mean over these lengths of the encoder's FLOPs for an example; None for a family that is not known.

        A family is known if all its layers can be counted: each has an attention block, or is DeBERTa's.
        """
        layers = layers_of(self.model).values()
        known = all(
            any(block.kind == "attention" for block in blocks_of(layer))
            or (blocks_of(layer) and any(hasattr(module, "pos_att_type") for module in layer.modules()))
            for layer in layers
        )
        return sum(encoder_flops(self.model, length) for length in lengths) / len(lengths) if layers and known else None


def benchmark(job: BenchmarkJob) -> None:
    """Measure what a job requests: tables on standard output, and the files of its output folder."""
    silence_transformers()
    distributed.keep_freed_memory()  # as this library does in training and evaluation
    with leaving():
        for results in measure(job):
            if job.output:
                write_numbers(results, job.output)
    show(results)
    if job.output:
        write(results, job.output)
    if not any(measured["folders"] for measured in results["measurements"]):
        raise UserError("nothing could be measured: the lines above say why")


def measure(job: BenchmarkJob) -> Iterator[dict[str, Any]]:
    """Yield the content of `benchmark.json` after each case; the last one is `finished`.

    Keys: `finished`, `base`, `conditions`, `folders` by label, `measurements`, `notes`. What a backend cannot do is a
    note in the place of its times. Raises UserError where a folder cannot be loaded, has fewer positions than a length
    or no trained head for the task, where the models do not fit into memory together, and where no case can be run.
    """
    devices = _devices(job)
    cases, notes = benchmark_cases(job, devices)
    with tempfile.TemporaryDirectory() as aside:
        models = _load(job, devices)
        _check_lengths(job, models)
        if "onnxruntime" in job.backends:
            notes += _export(models, Path(aside), INT8 in job.dtypes)
        if job.task:
            _score(models, job.eval_batch_size)
        results: dict[str, Any] = {
            "finished": False,
            "base": next(iter(models)),
            "conditions": _conditions(job, devices),
            "folders": {label: _described(model, job.lengths) for label, model in models.items()},
            "measurements": [],
            "notes": notes,
        }
        for case in cases:
            results["measurements"].append(_measured(models, case, job.seconds))
            results["finished"] = case is cases[-1]
            yield results


def random_inputs(model: Any, length: int, size: int) -> dict[str, Tensor]:
    """A batch of random ordinary tokens, (size, length), none padded; the same numbers for every call."""
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


def add_ratios(
    times: Mapping[str, dict[str, float]],
    taken: Mapping[str, Sequence[float]],
    flops: Mapping[str, float | None],
    base: str,
) -> None:
    """Add to the times of each model its `speed_up` relative to the base, and that over the ratio of their FLOPs.

    A speed-up is the median over the turns of the ratio of two calls in one turn: what disturbs the machine for some
    turns does not change it.
    """
    for label, each in times.items() if base in times else ():
        turns = zip(taken[base], taken[label], strict=False)  # the time limit may cut the last turn short
        each["speed_up"] = statistics.median(first / second for first, second in turns)
        of_model, of_base = flops.get(label), flops.get(base)
        if of_model and of_base:
            each["speed_up_per_flop_ratio"] = each["speed_up"] * of_model / of_base


def compile_anew() -> None:
    """Forget compiled code, since it is for a number of threads, and let torch.compile compile any number of models.

    By default models of one class together are compiled eight times, and then run uncompiled without any message.
    """
    import torch._dynamo

    torch._dynamo.reset()
    torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = 1000


def _tokens(value: Any) -> list[int]:
    """The tokens in a field of a config, which holds one, several or none."""
    return [token for token in (value if isinstance(value, list) else [value]) if isinstance(token, int)]


def _devices(job: BenchmarkJob) -> list[str]:
    available = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    missing = [device for device in job.devices or () if device not in available]
    if missing:
        raise UserError(f"--devices {missing[0]}: torch has no such device here: give {' '.join(available)}")
    return list(job.devices or available)


def _load(job: BenchmarkJob, devices: Sequence[str]) -> dict[str, BenchmarkModel]:
    folders = list(job.folders.values())
    if not all(fit_in_memory(folders, torch.device(device)) for device in devices):
        raise UserError(
            f"the {len(folders)} models are measured in turns, and would take more than half of the free memory "
            f"together, in fp32: give fewer folders"
        )
    return {label: _load_one(folder, job) for label, folder in job.folders.items()}


def _load_one(folder: Path, job: BenchmarkJob) -> BenchmarkModel:
    if job.task is None:
        model = pretrained.load_trained(folder, (*pretrained.TRAINED, pretrained.HEADLESS))
        pretrained.set_padding(model, 0)
        return BenchmarkModel(folder, model.eval())
    task = build_task(job.task, folder, job.cache_dir)
    task.check_trained(folder)
    model = task.build_model(folder).eval()
    early = with_exits(copy.deepcopy(model), folder).eval() if has_exits(folder) else None
    return BenchmarkModel(folder, model, task, early)


def _check_lengths(job: BenchmarkJob, models: Mapping[str, BenchmarkModel]) -> None:
    """Refuse lengths that a model has no positions for, and batches that the task has too few texts for."""
    longest = max((int(length) for length in job.lengths if length != OF_THE_TASK), default=0)
    largest = max(job.batch_sizes)
    for label, model in models.items():
        positions = pretrained.positions_of(model.model)
        if positions is not None and longest > positions:
            raise UserError(f"--lengths {longest}: {label} has {positions} positions: give {positions} at most")
        if OF_THE_TASK in job.lengths and not model.inputs(OF_THE_TASK, largest):
            raise UserError(f"--batch_sizes {largest}: the task has fewer texts to measure on: lower it")


def _export(models: Mapping[str, BenchmarkModel], aside: Path, int8: bool) -> Iterator[str]:
    """Write the .onnx file of each model, and a copy in int8 if requested; yield a line for each that has none."""
    for number, (label, model) in enumerate(models.items()):
        path = aside / f"{number}.onnx"
        try:
            write_onnx(model.model, random_inputs(model.model, _TRACED, 2), path)
            checked = random_inputs(model.model, min(_CHECKED, pretrained.positions_of(model.model) or _CHECKED), 2)
            if "attention_mask" in checked:  # half of the second text is padding
                checked["attention_mask"][1, _CHECKED // 2 :] = 0
            check_onnx(model.model, path, [checked])
            model.onnx_files["fp32"] = path
            if int8:
                quantise(path, aside / f"{number}.{INT8}.onnx")
                model.onnx_files[INT8] = aside / f"{number}.{INT8}.onnx"
        except Exception as error:  # noqa: BLE001 - exporters raise many kinds of errors; other backends are measured
            yield f"{label}: no ONNX file: {_named(error)}"
        if model.task and model.task.own_inputs:
            yield f"{label}: onnxruntime runs the head at every token, torch on texts only where it is scored"


def _score(models: Mapping[str, BenchmarkModel], batch_size: int) -> None:
    """Score each model on the task: by torch, also with early exits, and by onnxruntime where it has files."""
    for label, model in models.items():
        assert model.task is not None, "all models have one or none has"
        distributed.info(f"{label}: scoring")
        device = distributed.device()
        ways: dict[str, Predict] = {"torch": _predictor(_placed(model.model, device, torch.float32))}
        if model.early:
            ways["torch, early exit"] = _predictor(_placed(model.early, device, torch.float32))
        for dtype, path in model.onnx_files.items():
            ways[_named_with("onnxruntime", dtype)] = predictor(session(path, torch.get_num_threads()))
        for way, predict in ways.items():
            model.scores[way] = evaluate(predict, model.task, batch_size).scores


def _predictor(model: Any) -> Predict:
    return lambda batch: model(**batch.inputs)


def _named_with(name: str, dtype: str) -> str:
    """The name of a score or a size, with its type where that is not fp32."""
    return name if dtype == "fp32" else f"{name}, {dtype}"


def _placed(model: Any, device: torch.device, dtype: torch.dtype) -> Any:
    """The model, which is on the CPU and in fp32, or a copy elsewhere or in another type."""
    if device.type == "cpu" and dtype == torch.float32:
        return model
    return copy.deepcopy(model).to(device, dtype)


def _measured(models: Mapping[str, BenchmarkModel], case: BenchmarkCase, limit: float) -> dict[str, Any]:
    """The times of all models in a case, and notes on those that have none."""
    distributed.info(str(case))
    inputs = {label: model.inputs(case.length, case.batch_size) for label, model in models.items()}
    calls: dict[str, list[partial[Any]]] = {}
    notes: dict[str, str] = {}
    torch.set_num_threads(case.threads)
    if case.backend == "compile":
        compile_anew()
    for label, model in models.items():
        for name, build in _ways(label, model, case).items():
            try:
                calls[name] = _warm_calls(build(), inputs[label], case.device)
            except Exception as error:  # noqa: BLE001, PERF203 - compilers raise many kinds of errors
                notes[name] = _named(error)
    taken = in_turns(calls, limit, torch.device(case.device), CALLS)
    times = {
        label: summary(each) | {"examples_per_s": case.batch_size * len(each) / sum(each)}
        for label, each in taken.items()
        if each
    }
    notes |= {label: "not reached: raise --seconds" for label, each in taken.items() if not each}
    lengths = {label: [batch["input_ids"].shape[1] for batch in each] for label, each in inputs.items()}
    flops = {label: models[label].mean_flops(each) for label, each in lengths.items()}
    add_ratios(times, taken, flops, next(iter(models)))
    tokens = next(iter(lengths.values()))
    return asdict(case) | {"mean_tokens": sum(tokens) / len(tokens), "folders": times, "notes": notes}


def _warm_calls(forward: Inference, inputs: Sequence[Mapping[str, Tensor]], device: str) -> list[partial[Any]]:
    """A call for each batch, already made once."""
    calls = [partial(forward, {name: value.to(device) for name, value in batch.items()}) for batch in inputs]
    for call in calls:
        call()
    return calls


def _ways(label: str, model: BenchmarkModel, case: BenchmarkCase) -> dict[str, Callable[[], Inference]]:
    """The ways to run a model in a case: functions that build its forward, by the label of the row."""
    if case.backend == "onnxruntime":
        path = model.onnx_files.get(case.dtype)
        return {label: lambda: partial(outputs, session(path, case.threads))} if path else {}
    place = torch.device(case.device), getattr(torch, DTYPES[case.dtype])
    of_the_task = case.length == OF_THE_TASK
    if case.backend == "compile":  # for inputs of one shape, or of any
        dynamic = None if of_the_task else False
        return {label: lambda: eager(torch.compile(_placed(model.model, *place), dynamic=dynamic))}
    ways: dict[str, Callable[[], Inference]] = {label: lambda: eager(_placed(model.model, *place))}
    if model.early and of_the_task:  # where random tokens leave would mean nothing
        ways[f"{label}, early exit"] = lambda: eager(_placed(model.early, *place))
    return ways


def _described(model: BenchmarkModel, lengths: Sequence[int | str]) -> dict[str, Any]:
    """The measures of a model that need no clock."""
    weights = count_weights(model.model)
    files = bytes_by_form(model.folder)
    files |= {_named_with("onnx", dtype): path.stat().st_size for dtype, path in model.onnx_files.items()}
    tokens = {str(length): [batch["input_ids"].shape[1] for batch in model.inputs(length, 1)] for length in lengths}
    return {
        "folder": str(model.folder),
        "parameters": weights["model"],
        "encoder": weights["encoder"],
        "flops_per_example": {length: model.mean_flops(each) for length, each in tokens.items()},
        "bytes": files,
        "scores": model.scores,
    }


def _conditions(job: BenchmarkJob, devices: Sequence[str]) -> dict[str, Any]:
    versions = machine.versions()
    if "onnxruntime" in job.backends:
        versions["onnxruntime"] = importlib.metadata.version("onnxruntime")
    cores = len(os.sched_getaffinity(0))
    conditions = {"cpu": machine.cpu_name(), "cores": cores, "versions": versions, "seconds": job.seconds}
    if "cuda" in devices:
        conditions["gpu"] = torch.cuda.get_device_name()
    if job.task:
        conditions["task"] = job.task.model_dump(mode="json")
    return conditions


def _named(error: Exception) -> str:
    """An error in a line."""
    if ran_out(error):
        return "out of memory: give smaller --batch_sizes or --lengths"
    line = first_line(error)[:200]
    return f"{type(error).__name__}: {line}" if line else type(error).__name__
