"""Measure model folders side by side: sizes, FLOPs, scores, and times, taken in turns call by call.

The first folder is the base of all ratios. Measured in one process, on one device at a time.
"""

from __future__ import annotations

import contextlib
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
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import MODEL_MAPPING, AutoModel

from ds_trainer.config.jobs import DTYPES, OF_THE_TASK, BenchmarkJob
from ds_trainer.deploy.backends import compiled, compiling, onnx, placed
from ds_trainer.deploy.benchmark_page import clear, show, write, write_numbers
from ds_trainer.deploy.benchmark_settings import Setting, left_out, settings
from ds_trainer.deploy.latency import Run, batches, bytes_by_form, eager, fit, in_turns, summary
from ds_trainer.deploy.onnx_file import check_onnx, predictor, quantise, session, write_onnx
from ds_trainer.models.flops import encoder_flops
from ds_trainer.models.layers import blocks_of, count_weights, layers_of
from ds_trainer.models.loading import as_user_error
from ds_trainer.models.model_folder import INT8
from ds_trainer.models.pretrained import HeadKind, load_config, load_trained, load_with_head, positions_of
from ds_trainer.ranks import distributed, machine
from ds_trainer.ranks.failures import UserError, first_line, ran_out
from ds_trainer.ranks.interrupts import leaving
from ds_trainer.tasks.evaluation import evaluate
from ds_trainer.tasks.registry import build_task
from ds_trainer.tasks.task import Batch, Predict, Task
from ds_trainer.techniques.exits.early_exit import EarlyExitModel, with_exits
from ds_trainer.techniques.exits.heads import has_exits

CALLS = 200
"""Of each folder at a setting, where the time allows."""
_TRACED = 8
"""Tokens of the batch that an .onnx file is made with; it is for any."""
_CHECKED = 21
"""Tokens of the batch that it is checked with, where the model has so many positions."""
_HEADLESS = HeadKind("model without a head", AutoModel, MODEL_MAPPING)
Inputs = Mapping[str, Tensor]


@dataclass
class Subject:
    """A folder, its model on the CPU in fp32, the task that reads texts as it needs them, and how it exits early."""

    folder: Path
    model: Any
    task: Task | None = None
    early: EarlyExitModel | None = None
    onnx_files: dict[str, Path] = field(default_factory=dict)
    """By what the weights are in."""
    scores: dict[str, dict[str, float]] = field(default_factory=dict)

    def inputs(self, length: int | str, size: int) -> list[dict[str, Tensor]]:
        """The batches to time it on: whole ones of the task's texts, or one of random tokens."""
        if length != OF_THE_TASK:
            return [random_inputs(self.model, int(length), size)]
        assert self.task is not None, "the command has checked it"
        return [batch.inputs for batch in batches(self.task, size)]


def benchmark(job: BenchmarkJob) -> None:
    """Measure what a job asks for: tables on standard output, and the files of its output folder."""
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    distributed.keep_freed_memory()  # as training, evaluation and serving of this library do
    with leaving():
        found = measure(job, partial(_keep, folder=job.output) if job.output else lambda _: None)
    show(found)
    if job.output:
        write(found, job.output)
    if not any(measured["folders"] for measured in found["measurements"]):
        raise UserError("nothing could be measured: the lines above say why")


def _keep(found: dict[str, Any], folder: Path) -> None:
    """Write what is measured so far, and beside it nothing of an earlier benchmark."""
    if len(found["measurements"]) == 1:
        clear(folder)
    write_numbers(found, folder)


def measure(job: BenchmarkJob, keep: Callable[[dict[str, Any]], None] = lambda _: None) -> dict[str, Any]:
    """What `benchmark.json` holds: `finished`, `base`, `conditions`, `folders` by label, `measurements`, `notes`.

    It is given to `keep` after each setting. ValueError where a folder cannot be loaded, cannot be run at a length, has
    no trained head for the task, where the models do not fit into memory together, and where there is no setting. What
    a backend cannot do is a note in the place of its times.
    """
    devices = _devices(job)
    chosen = settings(job, devices)
    with tempfile.TemporaryDirectory() as aside:
        subjects = _load(job, devices)
        _check_lengths(job, subjects)
        notes = [*left_out(job, devices)]
        if "onnxruntime" in job.backends:
            notes += _export(subjects, Path(aside), INT8 in job.dtypes)
        if job.task:
            _score(subjects, job.eval_batch_size)
        folders = {label: _described(subject, job.lengths) for label, subject in subjects.items()}
        notes += [
            f"{label}: FLOPs of a {type(subject.model).__name__} are not counted: its layers are not of a known family"
            for label, subject in subjects.items()
            if not _is_counted(subject.model)
        ]
        measurements: list[dict[str, Any]] = []
        found: dict[str, Any] = {
            "finished": False,
            "base": next(iter(subjects)),
            "conditions": _conditions(job, devices),
        }
        found |= {"folders": folders, "measurements": measurements, "notes": notes}
        for setting in chosen:
            measurements.append(_measured(subjects, setting, job.seconds))
            keep(found)
        return found | {"finished": True}


def random_inputs(model: Any, length: int, size: int) -> dict[str, Tensor]:
    """A batch of random ordinary tokens, (size, length), none padded; the same numbers for every call.

    ValueError where all of the model's tokens are special ones.
    """
    config, vocabulary = model.config, model.get_input_embeddings().num_embeddings
    names = ("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id", "mask_token_id")
    special = {token for name in names for token in _tokens(getattr(config, name, None))}
    ordinary = torch.tensor([token for token in range(vocabulary) if token not in special])
    if not len(ordinary):
        raise UserError(f"a model of {vocabulary} tokens, all of them special ones, cannot be run on random ones")
    chosen = torch.randint(len(ordinary), (size, length), generator=torch.Generator().manual_seed(0))
    inputs = {"input_ids": ordinary[chosen], "attention_mask": torch.ones(size, length, dtype=torch.int64)}
    ends = [token for token in _tokens(getattr(config, "eos_token_id", None)) if 0 <= token < vocabulary]
    if ends:  # encoder-decoders look for it, to pool it
        inputs["input_ids"][:, -1] = ends[0]
    if getattr(config, "type_vocab_size", 0) > 1:
        inputs["token_type_ids"] = torch.zeros_like(inputs["input_ids"])
    taken = inspect.signature(model.forward).parameters
    return {name: value for name, value in inputs.items() if name in taken}


def ratios(
    times: Mapping[str, dict[str, float]],
    taken: Mapping[str, Sequence[float]],
    flops: Mapping[str, float | None],
    base: str,
) -> None:
    """Add to the times of each folder its `speed_up` to the base, and that over the ratio of their FLOPs.

    A speed-up is the median of the ratios of calls of one turn, which what disturbs the machine leaves as they are;
    where the folders have not as many calls, the ratio of the medians.
    """
    for label, found in times.items():
        if base not in times:
            continue
        if abs(len(taken[base]) - len(taken[label])) <= 1:  # the last turn may not have come to all
            pairs = zip(taken[base], taken[label], strict=False)
            found["speed_up"] = statistics.median(first / second for first, second in pairs)
        else:
            found["speed_up"] = times[base]["median_ms"] / found["median_ms"]
        own, of_base = flops.get(label), flops.get(base)
        if own and of_base:
            found["speed_up_per_flop_ratio"] = found["speed_up"] * own / of_base


def _tokens(value: Any) -> list[int]:
    """Of a field of a config: a token, several or none."""
    return [token for token in (value if isinstance(value, list) else [value]) if isinstance(token, int)]


def _devices(job: BenchmarkJob) -> list[str]:
    there = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    missing = [device for device in job.devices or () if device not in there]
    if missing:
        raise UserError(f"--devices {missing[0]}: torch finds no such device here: give {' '.join(there)}")
    return list(job.devices or there)


def _load(job: BenchmarkJob, devices: Sequence[str]) -> dict[str, Subject]:
    folders = list(job.folders.values())
    if not all(fit(folders, torch.device(device)) for device in devices):
        raise UserError(
            f"the {len(folders)} models together, which are measured in turns, would take more than a quarter of the "
            f"free memory in fp32: give fewer folders, or close what else holds memory"
        )
    return {label: _subject(folder, job) for label, folder in job.folders.items()}


def _subject(folder: Path, job: BenchmarkJob) -> Subject:
    if job.task is None:
        headless = _HEADLESS.trained_in(load_config(folder, _HEADLESS))
        model: Any = (load_with_head(folder, _HEADLESS) if headless else load_trained(folder)).eval()
        if model.config.pad_token_id is None:  # decoders without one classify one text at a time
            model.config.pad_token_id = 0
        return Subject(folder, model)
    task = build_task(job.task, folder, job.cache_dir)
    task.check_trained(folder)
    model = task.build_model(folder).eval()
    early = with_exits(copy.deepcopy(model), folder).eval() if has_exits(folder) else None
    return Subject(folder, model, task, early)


def _check_lengths(job: BenchmarkJob, subjects: Mapping[str, Subject]) -> None:
    """Refuse lengths that a model has no positions for, or cannot be run at, and batches that a task cannot fill."""
    for label, subject in subjects.items():
        positions = positions_of(subject.model)
        for length in job.lengths:
            if length == OF_THE_TASK:
                largest = max(job.batch_sizes)
                if not subject.inputs(length, largest):
                    raise UserError(f"--batch_sizes {largest}: the task has fewer texts to measure on: lower it")
            elif positions is not None and int(length) > positions:
                raise UserError(f"--lengths {length}: {label} has {positions} positions: give {positions} at most")
            else:
                inputs = random_inputs(subject.model, int(length), 1)
                with as_user_error(f"{label} cannot be run on {length} tokens"):
                    eager(subject.model)(inputs)


def _export(subjects: Mapping[str, Subject], aside: Path, int8: bool) -> Iterator[str]:
    """Write the .onnx file of each folder, and a copy in int8 if wanted; gives a line for each that has none."""
    for number, (label, subject) in enumerate(subjects.items()):
        path = aside / str(number) / "model.onnx"
        path.parent.mkdir()
        try:
            write_onnx(subject.model, random_inputs(subject.model, _TRACED, 2), path)
            check_onnx(subject.model, path, [_padded(subject.model)])
            subject.onnx_files["fp32"] = path
            if int8:
                quantise(path, quantised := path.with_name(f"model.{INT8}.onnx"))
                subject.onnx_files[INT8] = quantised
        except Exception as error:  # noqa: BLE001 - whatever an exporter trips over, other backends are measured
            yield f"{label}: no ONNX file: {_named(error)}"
        if subject.task and subject.task.own_inputs:
            yield f"{label}: onnxruntime runs the head at every token, torch on texts only where it is scored"


def _padded(model: Any) -> dict[str, Tensor]:
    """A batch of another length than an .onnx file is made with, whose second text is shorter than the first."""
    length = min(_CHECKED, positions_of(model) or _CHECKED)
    inputs, left = random_inputs(model, length, 2), length // 2
    ids = inputs["input_ids"]
    ids[1, left - 1] = ids[1, -1]
    ids[1, left:] = model.config.pad_token_id or 0
    if "attention_mask" in inputs:
        inputs["attention_mask"][1, left:] = 0
    return inputs


def _score(subjects: Mapping[str, Subject], batch_size: int) -> None:
    """Score each folder on the task: by torch, where it exits early so too, and by onnxruntime where it has files."""
    for label, subject in subjects.items():
        assert subject.task is not None, "there is one for each or for none"
        distributed.info(f"{label}: scoring")
        device = distributed.device()
        ways: dict[str, Predict] = {"torch": partial(_by_model, placed(subject.model, device, torch.float32))}
        if subject.early:
            ways["torch, early exit"] = partial(_by_model, placed(subject.early, device, torch.float32))
        for dtype, path in subject.onnx_files.items():
            opened = session(path, torch.get_num_threads())
            ways[_in("onnxruntime", dtype)] = partial(_by_file, predictor(opened))
        for way, predict in ways.items():
            subject.scores[way] = evaluate(predict, subject.task, batch_size).scores


def _in(name: str, dtype: str) -> str:
    """As scores and sizes are called: fp32 goes without saying."""
    return name if dtype == "fp32" else f"{name}, {dtype}"


def _by_model(model: Any, batch: Batch) -> Any:
    return model(**batch.inputs)


def _by_file(predict: Predict, batch: Batch) -> Any:
    """On the CPU; the outputs go where the batch is."""
    found = predict(batch.to(torch.device("cpu")))
    return SimpleNamespace(**{name: value.to(batch.labels.device) for name, value in vars(found).items()})


def _measured(subjects: Mapping[str, Subject], setting: Setting, limit: float) -> dict[str, Any]:
    """The times of all folders at a setting, and notes on those that have none."""
    distributed.info(str(setting))
    device = torch.device(setting.device)
    texts = {label: subject.inputs(setting.length, setting.batch_size) for label, subject in subjects.items()}
    with _threads(setting.threads), compiling() if setting.backend == "compile" else contextlib.nullcontext():
        ready, notes = _ready(subjects, setting, texts)
        with_times = in_turns(ready, limit, device, CALLS)
    times = {
        label: summary(found) | {"examples_per_s": setting.batch_size * len(found) / sum(found)}
        for label, found in with_times.items()
        if found
    }
    notes |= {label: "not reached: raise --seconds" for label, found in with_times.items() if not found}
    lengths = {label: [batch["input_ids"].shape[1] for batch in found] for label, found in texts.items()}
    flops = {label: _mean_flops(subjects[label].model, found) for label, found in lengths.items()}
    ratios(times, with_times, flops, next(iter(subjects)))
    tokens = next(iter(lengths.values()))
    return asdict(setting) | {"mean_tokens": sum(tokens) / len(tokens), "folders": times, "notes": notes}


def _ready(
    subjects: Mapping[str, Subject], setting: Setting, texts: Mapping[str, Sequence[Inputs]]
) -> tuple[dict[str, list[partial[Any]]], dict[str, str]]:
    """The calls of each folder, each made once; and why folders have none."""
    ready, notes = {}, {}
    device = torch.device(setting.device)
    for label, subject in subjects.items():
        inputs = [{name: value.to(device) for name, value in batch.items()} for batch in texts[label]]
        for name, make in _ways(label, subject, setting).items():
            calls, failure = _calls(make, inputs)
            if failure:
                notes[name] = failure
            else:
                ready[name] = calls
    return ready, notes


def _calls(make: Callable[[], Run], inputs: Sequence[Inputs]) -> tuple[list[partial[Any]], str | None]:
    """A run of each batch, already made once; or why there is none."""
    try:
        run = make()
        calls = [partial(run, batch) for batch in inputs]
        for call in calls:
            call()
    except Exception as error:  # noqa: BLE001 - compilers and runtimes raise what they like; the rest is measured
        return [], _named(error)
    return calls, None


def _ways(label: str, subject: Subject, setting: Setting) -> dict[str, Callable[[], Run]]:
    """How a folder is run at a setting, by the row's label: each makes its `Run`."""
    if setting.backend == "onnxruntime":
        path = subject.onnx_files.get(setting.dtype)
        return {label: partial(onnx, path, setting.threads)} if path else {}
    place = torch.device(setting.device), getattr(torch, DTYPES[setting.dtype])
    of_the_task = setting.length == OF_THE_TASK
    if setting.backend == "compile":
        return {label: lambda: compiled(placed(subject.model, *place), not of_the_task)}
    ways: dict[str, Callable[[], Run]] = {label: lambda: eager(placed(subject.model, *place))}
    if subject.early and of_the_task:  # random tokens leave anywhere
        ways[f"{label}, early exit"] = lambda: eager(placed(subject.early, *place))
    return ways


@contextlib.contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _mean_flops(model: Any, lengths: Sequence[int]) -> float | None:
    """None where they are not counted."""
    return sum(encoder_flops(model, length) for length in lengths) / len(lengths) if _is_counted(model) else None


def _is_counted(model: Any) -> bool:
    """Whether all that costs in the model's layers is known: attention by its block, or DeBERTa's."""
    layers = layers_of(model).values()
    return bool(layers) and all(
        any(block.kind == "attention" for block in blocks_of(layer))
        or (bool(blocks_of(layer)) and any(hasattr(module, "pos_att_type") for module in layer.modules()))
        for layer in layers
    )


def _described(subject: Subject, lengths: Sequence[int | str]) -> dict[str, Any]:
    """What a folder is, without a clock."""
    weights = count_weights(subject.model)
    files = bytes_by_form(subject.folder)
    files |= {_in("onnx", dtype): path.stat().st_size for dtype, path in subject.onnx_files.items()}
    flops = {}
    for length in lengths:
        tokens = [batch["input_ids"].shape[1] for batch in subject.inputs(length, 1)]
        flops[str(length)] = _mean_flops(subject.model, tokens)
    return {
        "folder": str(subject.folder),
        "parameters": weights["model"],
        "encoder": weights["encoder"],
        "flops_per_example": flops,
        "bytes": files,
        "scores": subject.scores,
    }


def _conditions(job: BenchmarkJob, devices: Sequence[str]) -> dict[str, Any]:
    versions = machine.versions()
    if "onnxruntime" in job.backends:
        versions["onnxruntime"] = importlib.metadata.version("onnxruntime")
    found = {
        "cpu": machine.cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "versions": versions,
        "seconds": job.seconds,
    }
    if "cuda" in devices:
        found["gpu"] = torch.cuda.get_device_name()
    if job.task:
        found["task"] = job.task.model_dump(mode="json")
    return found


def _named(error: Exception) -> str:
    said = first_line(error)[:200]
    if ran_out(error):
        return "out of memory: give smaller --batch_sizes or --lengths"
    return f"{type(error).__name__}: {said}" if said else type(error).__name__
