"""Time calls in turns, choose the texts to time models on, and count their bytes: for runs and for the benchmark."""

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ds_trainer.files.reading import free_memory
from ds_trainer.models.folders import COMPACT_FILE, is_compact
from ds_trainer.ranks import distributed
from ds_trainer.ranks.machine import seconds
from ds_trainer.tasks.data import spread
from ds_trainer.tasks.task import Batch, Task
from ds_trainer.techniques.exits.early_exit import HEADS_FILE

FOR_P95 = 20
"""With fewer calls, the 95th percentile would be the slowest one."""
_EXAMPLES = 64
"""How many texts are timed, or one batch of them where a batch is larger."""
_ROUNDS = 5

Inference: TypeAlias = Callable[[Mapping[str, Tensor]], Any]
"""A model's forward: takes a batch, its inputs by name and on the device, and returns the outputs."""


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
    """Return the median of times in seconds, their number and, where there are enough, the 95th percentile."""
    ordered = sorted(times)
    result = {"median_ms": 1e3 * statistics.median(ordered), "calls": len(ordered)}
    if len(ordered) >= FOR_P95:
        result["p95_ms"] = 1e3 * ordered[math.ceil(0.95 * len(ordered)) - 1]
    return result


def eager(model: Any) -> Inference:
    """Return the forward of a model as torch runs it, without gradients."""
    return torch.inference_mode()(lambda inputs: model(**inputs))


def batches(task: Task, size: int) -> list[Batch]:
    """Return whole batches of the chosen examples; a smaller last batch would not measure this size."""
    examples, chosen = task.examples(task.splits[0]), chosen_examples(task, size)
    parts = [chosen[start : start + size] for start in range(0, len(chosen) - size + 1, size)]
    return [task.collate(examples, part).to(distributed.device()) for part in parts]


def bytes_by_form(folder: Path) -> dict[str, int]:
    """Return the bytes of each form of a folder's weights, with exit heads; the model is read from the first form."""
    files = {
        "safetensors": [*folder.glob("model.safetensors"), *folder.glob("model-*.safetensors")],
        "compact": [*folder.glob(COMPACT_FILE)],
        "pickle": [*folder.glob("pytorch_model*.bin")],
    }
    heads = [*folder.glob(HEADS_FILE)]
    return {form: sum(path.stat().st_size for path in [*paths, *heads]) for form, paths in files.items() if paths}


def bytes_on_disk(folder: Path) -> int:
    """Return the bytes of the weights that the folder's model is read from, and of its exit heads."""
    return next(iter(bytes_by_form(folder).values()), 0)


def fit_in_memory(folders: Sequence[Path], device: torch.device | None = None) -> bool:
    """Return whether the weights of all folders, in fp32, take at most about half of the memory that is free.

    Free is the least of host, container and device. Weights are taken to be twice as large in fp32 as on disk, where
    they may be in fp16, and eight times as large as a compact file.
    """
    room, device = free_memory(), device or distributed.device()
    if device.type == "cuda":
        room = min(room, torch.cuda.mem_get_info(device)[0])
    return sum(bytes_on_disk(folder) * (8 if is_compact(folder) else 2) for folder in folders) <= room / 2


def chosen_examples(task: Task, size: int) -> list[int]:
    """Choose the same examples for each model, spread evenly over the first evaluation split, `size` at the least."""
    return list(spread(len(task.examples(task.splits[0])), max(_EXAMPLES, size)))
