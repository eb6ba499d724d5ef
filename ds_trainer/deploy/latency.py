"""What the models of a run cost, side by side: bytes on disk, and latency, measured in turns on the same texts."""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ds_trainer.models.compact import numbers_of
from ds_trainer.models.model_folder import COMPACT_FILE, has_safetensors, is_compact, tensor_shapes
from ds_trainer.ranks import distributed
from ds_trainer.ranks.timing import seconds
from ds_trainer.tasks.data import spread
from ds_trainer.tasks.task import Batch, Task
from ds_trainer.techniques.exits.early_exit import with_exits
from ds_trainer.techniques.exits.heads import HEADS_FILE, has_exits

SIZES = (1, 32)
"""Batch sizes."""
_EXAMPLES = 64
_SECONDS = 60.0
"""Of measuring, for all models and batch sizes together."""
_ROUNDS = 5
FOR_P95 = 20
"""Of fewer calls, the 95th percentile is the slowest one."""
_PICKLES = "pytorch_model*.bin"
_SMALLEST_IN_PICKLES = 2
"""Bytes of a weight, in fp16."""
_SAME_DATA = ("name", "data_dir", "dataset")
"""Fields of a task's spec: where they are the same, so are the texts."""


Run: TypeAlias = Callable[[Mapping[str, Tensor]], Any]
"""A forward of a batch, its inputs by name and on the device; gives its outputs."""


@dataclass(frozen=True)
class Subject:
    """A model folder, and the task that reads its evaluation texts as this model needs them."""

    folder: Path
    task: Task


def bytes_on_disk(folder: Path) -> int:
    """Of the weights that the folder's model is read from, and of its exit heads."""
    return sum(path.stat().st_size for path in _weight_files(folder, _form(folder)))


def bytes_by_form(folder: Path) -> dict[str, int]:
    """Of each form of the weights that a folder has, exit heads counted with each: safetensors, pickle, compact."""
    forms = [_form(folder), *(["compact"] if (folder / COMPACT_FILE).is_file() else [])]
    files = {form: _weight_files(folder, form) for form in forms}
    return {form: sum(path.stat().st_size for path in paths) for form, paths in files.items() if paths}


def compare(subjects: Mapping[str, Subject]) -> dict[str, dict[str, Any]]:
    """Of each model its `size`, its `latency`, and where it has exit heads its `early_exit_latency`.

    Latency is by batch size, `{"batch_1": {"median_ms", "p95_ms", "calls"}}`, in fp32, without `p95_ms` where calls are
    few; `measured_on` says where, and on what. Measured are those whose task and data are the last one's, for at most a
    minute in all: what was not reached is left out, and so is all of it where the models are too large to be held
    together, as are folders that are not there. To be called on one rank.
    """
    subjects = {name: subject for name, subject in subjects.items() if subject.folder.is_dir()}
    found: dict[str, dict[str, Any]] = {
        name: {"size": {"bytes": bytes_on_disk(subject.folder)}} for name, subject in subjects.items()
    }
    alike = _of_the_last_task(subjects)
    if not fit([subject.folder for subject in alike.values()]):
        distributed.info("latency: the run's models together are too large to be measured side by side")
        return found
    ways = {name: _ways(subject) for name, subject in alike.items()}
    end = time.perf_counter() + _SECONDS
    for left, size in zip(range(len(SIZES), 0, -1), SIZES, strict=True):
        runs = {
            (name, way): [partial(eager(model), batch.inputs) for batch in texts]
            for name, models in ways.items()
            for texts in [batches(alike[name].task, size)]
            for way, model in models.items()
        }
        for (name, way), times in in_turns(runs, (end - time.perf_counter()) / left).items():
            if times:
                found[name].setdefault(way, {})[f"batch_{size}"] = summary(times)
                found[name]["measured_on"] = _conditions(alike[name].task)
    return found


def in_turns(
    runs: Mapping[Any, Sequence[Callable[[], object]]],
    limit: float,
    device: torch.device | None = None,
    calls: int = FOR_P95,
) -> dict[Any, list[float]]:
    """Seconds of the calls of each run, all runs in turns, call by call: what disturbs the machine disturbs all alike.

    After one call of each to warm up, five rounds or so many `calls`, unless `limit`, in seconds, is over: it is looked
    at before every call, and a run that did not come to its turn has no times. `device`: this rank's unless told.
    """
    device, end = device or distributed.device(), time.perf_counter() + limit
    times: dict[Any, list[float]] = {key: [] for key in runs}
    rounds = max([_ROUNDS, *(math.ceil(calls / len(run)) for run in runs.values() if run)])
    warm_up = [(None, run[0]) for run in runs.values() if run]
    turns = [
        (key, call)
        for one_of_each in zip_longest(*runs.values())
        for key, call in zip(runs, one_of_each, strict=True)
        if call is not None
    ]
    for key, call in [*warm_up, *turns * rounds]:
        if time.perf_counter() >= end:
            break
        taken = seconds(call, device)
        if key is not None:
            times[key].append(taken)
    return times


def eager(model: Any) -> Run:
    """Forwards of a model as torch runs it, without gradients."""

    def run(inputs: Mapping[str, Tensor]) -> Any:
        with torch.inference_mode():
            return model(**inputs)

    return run


def fit(folders: Sequence[Path], device: torch.device | None = None) -> bool:
    """Whether the weights of all, in fp32, take at most a quarter of the memory that is left, on host and device.

    The device is this rank's unless told.
    """
    room, device = [_available_bytes()], device or distributed.device()
    if device.type == "cuda":
        room.append(torch.cuda.mem_get_info(device)[0])
    return 4 * sum(map(_parameters, folders)) <= min(room) / 4


def batches(task: Task, size: int) -> list[Batch]:
    """Whole batches of the chosen examples; what is left over is no measure of this size."""
    examples, chosen = task.examples(task.splits[0]), _chosen(task)
    parts = [chosen[start : start + size] for start in range(0, len(chosen) - size + 1, size)]
    return [task.collate(examples, part).to(distributed.device()) for part in parts]


def summary(times: Sequence[float]) -> dict[str, float]:
    """Of times in seconds: median, calls and, where they are not too few for it, the 95th percentile."""
    ordered = sorted(times)
    found = {"median_ms": 1e3 * statistics.median(ordered), "calls": len(ordered)}
    if len(ordered) >= FOR_P95:
        found["p95_ms"] = 1e3 * ordered[math.ceil(0.95 * len(ordered)) - 1]
    return found


def _of_the_last_task(subjects: Mapping[str, Subject]) -> dict[str, Subject]:
    """Those that read the same texts as the last one, so that their times can be compared."""

    def data(subject: Subject) -> list[Any]:
        return [getattr(subject.task.spec, field) for field in _SAME_DATA]

    last = [data(subject) for subject in subjects.values()][-1:]
    return {name: subject for name, subject in subjects.items() if [data(subject)] == last}


def _parameters(folder: Path) -> int:
    """How many weights a folder holds, from its files' headers, as types differ in bytes; of a pickle at most."""
    return sum(map(_numbers, _weight_files(folder, _form(folder))))


def _numbers(path: Path) -> int:
    if path.name == COMPACT_FILE:
        return numbers_of(path)
    if path.suffix != ".safetensors":
        return path.stat().st_size // _SMALLEST_IN_PICKLES
    return sum(map(math.prod, tensor_shapes(path).values()))


def _form(folder: Path) -> str:
    """What a folder's model is read from."""
    if is_compact(folder):
        return "compact"
    return "safetensors" if has_safetensors(folder) or not any(folder.glob(_PICKLES)) else "pickle"


def _weight_files(folder: Path, form: str) -> list[Path]:
    if form == "safetensors":
        return [path for path in folder.glob("*.safetensors") if path.name != COMPACT_FILE]
    heads = [folder / HEADS_FILE] if (folder / HEADS_FILE).is_file() else []
    return [folder / COMPACT_FILE, *heads] if form == "compact" else [*folder.glob(_PICKLES), *heads]


def _available_bytes() -> int:
    """The host's memory that can be had without swapping."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        lines = []
    for line in lines:
        if line.startswith("MemAvailable:"):
            return 1024 * int(line.split()[1])
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _ways(subject: Subject) -> dict[str, Any]:
    """The ways to run a folder's model, loaded once: to its end, and with early exits where it has them."""
    device = distributed.device()
    model = subject.task.build_model(subject.folder).to(device).eval()
    if not has_exits(subject.folder):
        return {"latency": model}
    early = with_exits(model, subject.folder).to(device).eval()
    return {"latency": early.model, "early_exit_latency": early}


def _chosen(task: Task) -> list[int]:
    """The same examples for each model of a run, evenly spread over the first evaluation split."""
    return list(spread(len(task.examples(task.splits[0])), _EXAMPLES))


def _conditions(task: Task) -> dict[str, Any]:
    device, chosen = distributed.device(), _chosen(task)
    return {
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "dtype": "float32",
        "examples": len(chosen),
        "mean_tokens": float(task.examples(task.splits[0]).lengths[chosen].mean()),
    }
