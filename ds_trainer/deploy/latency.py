"""Costs of models side by side: bytes on disk, and latency, measured in turns on the same texts.

`in_turns` and `summary` measure all latencies of this library: for the report of a run, here, and for the benchmark.
"""

import math
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

from ds_trainer.files.reading import free_memory
from ds_trainer.models.model_folder import COMPACT_FILE, is_compact
from ds_trainer.ranks import distributed
from ds_trainer.ranks.timing import seconds
from ds_trainer.tasks.data import spread
from ds_trainer.tasks.evaluation import load_on_device
from ds_trainer.tasks.task import Batch, Task
from ds_trainer.techniques.exits.early_exit import with_exits
from ds_trainer.techniques.exits.heads import HEADS_FILE, has_exits

BATCH_SIZES = (1, 32)
FOR_P95 = 20
"""With fewer calls, the 95th percentile would be the slowest one."""
_EXAMPLES = 64
"""How many texts are timed, or one batch of them where a batch is larger."""
_SECONDS = 60.0
"""The time limit for all models and batch sizes together."""
_ROUNDS = 5
_SAME_DATA = ("name", "data_dir", "dataset", "validation_file")
"""Fields of a task's spec that decide which texts it reads."""

Inference: TypeAlias = Callable[[Mapping[str, Tensor]], Any]
"""A model's forward: takes a batch, its inputs by name and on the device, and returns the outputs."""


@dataclass(frozen=True)
class TimedModel:
    """A model folder, and the task that reads its evaluation texts as this model needs them."""

    folder: Path
    task: Task


def measure_costs(models: Mapping[str, TimedModel]) -> dict[str, dict[str, Any]]:
    """Measure each model's `size`, its `latency`, and where it has exit heads its `early_exit_latency`.

    Latency is by batch size, `{"batch_1": {"median_ms", "p95_ms", "calls"}}`, in fp32, without `p95_ms` where there are
    few calls; `measured_on` says on which device and texts. Only models with the last one's task and data are timed,
    for at most a minute in all. Latencies are missing for batch sizes that were not reached, and for all models where
    these are too large to be held together. Folders that do not exist are left out. To be called on one rank.
    """
    models = {name: model for name, model in models.items() if model.folder.is_dir()}
    costs: dict[str, dict[str, Any]] = {
        name: {"size": {"bytes": bytes_on_disk(model.folder)}} for name, model in models.items()
    }
    data = {name: [getattr(model.task.spec, field) for field in _SAME_DATA] for name, model in models.items()}
    timed = {name: model for name, model in models.items() if data[name] == list(data.values())[-1]}
    if not fit_in_memory([model.folder for model in timed.values()]):
        distributed.info("latency: the models of the run are too large to be held in memory together")
        return costs
    forwards = {name: _forwards(model) for name, model in timed.items()}
    end = time.perf_counter() + _SECONDS
    for remaining, size in zip(range(len(BATCH_SIZES), 0, -1), BATCH_SIZES, strict=True):
        inputs = {name: [batch.inputs for batch in batches(model.task, size)] for name, model in timed.items()}
        calls = {
            (name, way): [partial(forward, batch) for batch in inputs[name]]
            for name, ways in forwards.items()
            for way, forward in ways.items()
        }
        for (name, way), times in in_turns(calls, (end - time.perf_counter()) / remaining).items():
            if times:
                costs[name].setdefault(way, {})[f"batch_{size}"] = summary(times)
                costs[name]["measured_on"] = _conditions(timed[name].task)
    return costs


def in_turns(
    calls: Mapping[Any, Sequence[Callable[[], object]]],
    limit: float,
    device: torch.device | None = None,
    least: int = FOR_P95,
) -> dict[Any, list[float]]:
    """Measure the seconds of calls. The keys take turns call by call, so that a disturbance affects all of them alike.

    After one call of each key to warm up come five rounds, or more until each key has `least` calls. `limit`, in
    seconds, is checked before every call: a key whose turn did not come has no times. `device`: by default this rank's.
    """
    device, end = device or distributed.device(), time.perf_counter() + limit
    times: dict[Any, list[float]] = {key: [] for key in calls}
    rounds = max([_ROUNDS, *(math.ceil(least / len(each)) for each in calls.values() if each)])
    warm_up = [(None, each[0]) for each in calls.values() if each]
    turns = [
        (key, call)
        for one_of_each in zip_longest(*calls.values())
        for key, call in zip(calls, one_of_each, strict=True)
        if call is not None
    ]
    for key, call in [*warm_up, *turns * rounds]:
        if time.perf_counter() >= end:
            break
        taken = seconds(call, device)
        if key is not None:
            times[key].append(taken)
    return times


def summary(times: Sequence[float]) -> dict[str, float]:
    """The median of times in seconds, their number and, where there are enough of them, the 95th percentile."""
    ordered = sorted(times)
    result = {"median_ms": 1e3 * statistics.median(ordered), "calls": len(ordered)}
    if len(ordered) >= FOR_P95:
        result["p95_ms"] = 1e3 * ordered[math.ceil(0.95 * len(ordered)) - 1]
    return result


def eager(model: Any) -> Inference:
    """The forward of a model as torch runs it, without gradients."""

    def run(inputs: Mapping[str, Tensor]) -> Any:
        with torch.inference_mode():
            return model(**inputs)

    return run


def batches(task: Task, size: int) -> list[Batch]:
    """Whole batches of the chosen examples; a smaller last batch would not measure this size."""
    examples, chosen = task.examples(task.splits[0]), _chosen(task, size)
    parts = [chosen[start : start + size] for start in range(0, len(chosen) - size + 1, size)]
    return [task.collate(examples, part).to(distributed.device()) for part in parts]


def bytes_by_form(folder: Path) -> dict[str, int]:
    """The bytes of each form of a folder's weights, with the exit heads; the model is read from the first form."""
    files = {
        "safetensors": [*folder.glob("model.safetensors"), *folder.glob("model-*.safetensors")],
        "compact": [*folder.glob(COMPACT_FILE)],
        "pickle": [*folder.glob("pytorch_model*.bin")],
    }
    heads = [*folder.glob(HEADS_FILE)]
    return {form: sum(path.stat().st_size for path in [*paths, *heads]) for form, paths in files.items() if paths}


def bytes_on_disk(folder: Path) -> int:
    """The size of the weights that the folder's model is read from, and of its exit heads."""
    return next(iter(bytes_by_form(folder).values()), 0)


def fit_in_memory(folders: Sequence[Path], device: torch.device | None = None) -> bool:
    """Whether the weights of all folders, in fp32, take at most about half of the memory that is free.

    Free is the least of host, container and device. Weights are taken to be twice as large in fp32 as on disk, where
    they may be in fp16, and eight times as large as a compact file.
    """
    room, device = free_memory(), device or distributed.device()
    if device.type == "cuda":
        room = min(room, torch.cuda.mem_get_info(device)[0])
    return sum(bytes_on_disk(folder) * (8 if is_compact(folder) else 2) for folder in folders) <= room / 2


def _forwards(timed: TimedModel) -> dict[str, Inference]:
    """The ways to run a folder's model, loaded once: to its end, and with early exits where it has them."""
    model = load_on_device(timed.task, timed.folder)
    if not has_exits(timed.folder):
        return {"latency": eager(model)}
    early = with_exits(model, timed.folder).eval()
    return {"latency": eager(early.model), "early_exit_latency": eager(early)}


def _chosen(task: Task, size: int) -> list[int]:
    """The same examples for each model, evenly spread over the first evaluation split; enough for a batch of `size`."""
    return list(spread(len(task.examples(task.splits[0])), max(_EXAMPLES, size)))


def _conditions(task: Task) -> dict[str, Any]:
    """What latencies depend on beside the model."""
    device, chosen = distributed.device(), _chosen(task, max(BATCH_SIZES))
    return {
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "dtype": "float32",
        "examples": len(chosen),
        "mean_tokens": float(task.examples(task.splits[0]).lengths[chosen].mean()),
    }
