"""What the models of a run cost, side by side: bytes on disk, and latency, measured in turns on the same texts."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ds_trainer import distributed
from ds_trainer.data import spread
from ds_trainer.tasks.task import Batch, Task
from ds_trainer.techniques.early_exit import with_exits
from ds_trainer.techniques.exit_heads import has_exits

SIZES = (1, 32)
"""Batch sizes."""
_EXAMPLES = 64
_SECONDS = 6.0
"""Of measuring, at most about so many for each model and batch size."""
_ROUNDS = 5


@dataclass(frozen=True)
class Subject:
    """A model folder, and the task that reads its evaluation texts as this model needs them."""

    folder: Path
    task: Task


def bytes_on_disk(folder: Path) -> int:
    """Of the weights: all `.safetensors` of a model folder."""
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def compare(subjects: Mapping[str, Subject]) -> dict[str, dict[str, Any]]:
    """Of each model its `size`, its `latency`, and where it has exit heads its `early_exit_latency`.

    Latency is by batch size, `{"batch_1": {"median_ms", "p95_ms"}}`, of this process with its threads; models that
    together take more than a quarter of the memory are not measured. To be called on one rank.
    """
    found: dict[str, dict[str, Any]] = {
        name: {"size": {"bytes": bytes_on_disk(subject.folder)}} for name, subject in subjects.items()
    }
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if 4 * sum(entry["size"]["bytes"] for entry in found.values()) > memory:
        distributed.info("latency: the run's models together are too large to be measured side by side")
        return found
    ways = {name: _ways(subject) for name, subject in subjects.items()}
    for size in SIZES:
        batches = {name: _batches(subject.task, size) for name, subject in subjects.items()}
        runs = {
            (name, way): [_forward(model, batch) for batch in batches[name]]
            for name, models in ways.items()
            for way, model in models.items()
        }
        for (name, way), times in in_turns(runs, _SECONDS).items():
            found[name].setdefault(way, {})[f"batch_{size}"] = _summary(times)
    return found


def in_turns(runs: Mapping[Any, Sequence[Callable[[], object]]], seconds: float) -> dict[Any, list[float]]:
    """Seconds of every call of each run, all runs in turns, so that what disturbs the machine disturbs all alike.

    After one round to warm up, at most five, and as many as fit in so many seconds a run, but one at least.
    """
    times: dict[Any, list[float]] = {key: [] for key in runs}
    end = None
    for _ in range(1 + _ROUNDS):
        if end is not None and time.perf_counter() > end and all(times.values()):
            break
        for key, calls in runs.items():
            taken = [_seconds(call) for call in calls]
            times[key] += taken if end is not None else []
        end = end or time.perf_counter() + seconds * len(runs)
    return times


def _ways(subject: Subject) -> dict[str, Any]:
    """The ways to run a folder's model: to its end, and with early exits where it has them."""
    device = distributed.device()
    model = subject.task.build_model(subject.folder).to(device).eval()
    if not has_exits(subject.folder):
        return {"latency": model}
    other = subject.task.build_model(subject.folder)
    return {"latency": model, "early_exit_latency": with_exits(other, subject.folder).to(device).eval()}


def _batches(task: Task, size: int) -> list[Batch]:
    """The same examples for each model of a run, evenly spread over the first evaluation split."""
    examples = task.examples(task.splits[0])
    chosen = list(spread(len(examples), max(size, _EXAMPLES)))
    parts = [chosen[start : start + size] for start in range(0, len(chosen), size)]
    return [task.collate(examples, part).to(distributed.device()) for part in parts]


def _forward(model: Any, batch: Batch) -> Callable[[], object]:
    def run() -> None:
        with torch.no_grad():
            model(**batch.inputs)
        if batch.labels.is_cuda:
            torch.cuda.synchronize()

    return run


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _summary(times: Sequence[float]) -> dict[str, float]:
    ordered = sorted(times)
    last = ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]
    return {"median_ms": 1e3 * statistics.median(ordered), "p95_ms": 1e3 * last}
