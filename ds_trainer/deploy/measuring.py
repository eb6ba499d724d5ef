"""Measure models: the sizes of their files, and times taken in turns, call by call, for runs and for the benchmark.

Everything is measured in one process, on one device at a time. The first model is the base of all ratios.
"""

import copy
import inspect
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from ds_trainer.deploy.onnx_file import outputs, session
from ds_trainer.files.reading import free_memory
from ds_trainer.models import pretrained
from ds_trainer.models.folders import COMPACT_FILE, is_compact
from ds_trainer.ranks import distributed, machine
from ds_trainer.ranks.failures import first_line, ran_out
from ds_trainer.recipe.jobs import DTYPES, OF_THE_TASK
from ds_trainer.tasks.data import spread
from ds_trainer.tasks.task import Task
from ds_trainer.techniques.exits.early_exit import HEADS_FILE, EarlyExitModel, has_exits, with_exits

FOR_P95 = 20
"""With fewer calls, the 95th percentile would be the slowest one."""
EARLY = ", early exit"
"""Ends the label of a model that exits early, beside the label of the same model run to its end."""
BATCH_SIZES = (1, 32)
"""Those of the report of a run."""
_SECONDS = 60.0
"""The time limit for all models and batch sizes of a report together."""
_EXAMPLES = 64
"""How many texts are timed, or one batch of them where a batch is larger."""
_ROUNDS = 5
_NOT_REACHED = "not reached: raise --seconds"

Inference: TypeAlias = Callable[[Mapping[str, Tensor]], Any]
"""A model's forward: takes a batch, its inputs by name and on the device, and returns the outputs."""

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
        """Return the batches to time it on: whole batches of the task's texts, or one of random tokens.

        A smaller last batch would not measure this size.
        """
        if length != OF_THE_TASK:
            return [random_inputs(self.model, int(length), size)]
        assert self.task is not None, "the command has checked it"
        examples, chosen = self.task.examples(self.task.splits[0]), chosen_examples(self.task, size)
        parts = [chosen[start : start + size] for start in range(0, len(chosen) - size + 1, size)]
        device, timed = distributed.device(), (self.task.timed_inputs(examples, part) for part in parts)
        return [{name: value.to(device) for name, value in inputs.items()} for inputs in timed]

    def ways(self, label: str, case: Case) -> dict[str, Callable[[], Inference]]:
        """Return functions that build its forwards in a case, to its end and with early exits, by their labels."""
        if case["backend"] == "onnxruntime":
            path = self.onnx_files.get(case["dtype"])
            return {label: lambda: partial(outputs, session(path, case["threads"]))} if path else {}
        place = torch.device(case["device"]), getattr(torch, DTYPES[case["dtype"]])
        ways: dict[str, Callable[[], Inference]] = {label: lambda: eager(placed(self.model, *place))}
        if self.early and case["length"] == OF_THE_TASK:  # where random tokens leave would mean nothing
            ways[f"{label}{EARLY}"] = lambda: eager(placed(self.early, *place))
        return ways


def load_measured(folder: Path, task: Task | None) -> MeasuredModel:
    """Load the model of a folder, for a task if there is one, on the CPU and in fp32."""
    if task is None:
        model = pretrained.load_trained(folder)
        pretrained.set_padding(model, 0)
        return MeasuredModel(folder, model.eval())
    model = task.build_model(folder).eval()
    early = with_exits(copy.deepcopy(model), folder).eval() if has_exits(folder) else None
    return MeasuredModel(folder, model, task, early)


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
    specs = {name: task.spec for name, (_, task) in models.items()}
    timed = {name: each for name, each in models.items() if specs[name] == list(specs.values())[-1]}
    if not fit_in_memory([path for path, _ in timed.values()]):
        distributed.info("latency: the models of the run are too large to be held in memory together")
        return costs
    loaded = {name: load_measured(*each) for name, each in timed.items()}
    end, device, threads = time.perf_counter() + _SECONDS, distributed.device(), torch.get_num_threads()
    for remaining, size in zip(range(len(BATCH_SIZES), 0, -1), BATCH_SIZES, strict=True):
        case = dict(zip(CASE, ("torch", device.type, "fp32", threads, OF_THE_TASK, size), strict=True))
        times = measured_in(loaded, case, (end - time.perf_counter()) / remaining, FOR_P95)
        for label, note in times["notes"].items():
            if note != _NOT_REACHED:
                distributed.warn(f"the latency of {label} at batch {size} is not measured: {note}")
        for name in timed:
            for way, label in (("latency", name), ("early_exit_latency", f"{name}{EARLY}")):
                if label in times["folders"]:
                    costs[name].setdefault(way, {})[f"batch_{size}"] = times["folders"][label]
    for name, (_, task) in timed.items():
        if "latency" in costs[name]:
            chosen = chosen_examples(task, max(BATCH_SIZES))
            sequences, rows = task.examples(task.splits[0]).batch_rows(np.array(chosen))
            costs[name]["measured_on"] = {
                "threads": threads,
                "device": machine.device_name(),
                "dtype": "float32",
                "examples": len(chosen),
                "mean_tokens": float(sequences.lengths[rows].mean()),
            }
    return costs


def measured_in(models: Mapping[str, MeasuredModel], case: Case, limit: float, least: int) -> dict[str, Any]:
    """Time all models in a case, by `least` calls or more each; a model that cannot be run gets a note.

    The `speed_up` of a model over the base is the median over the turns of the ratio of two calls in one turn: what
    disturbs the machine for some turns does not change it.
    """
    inputs = {label: model.inputs(case["length"], case["batch_size"]) for label, model in models.items()}
    calls: dict[str, list[partial[Any]]] = {}
    notes: dict[str, str] = {}
    torch.set_num_threads(case["threads"])
    for label, model in models.items():
        for name, build in model.ways(label, case).items():
            try:
                forward = build()
                on_device = [{key: value.to(case["device"]) for key, value in batch.items()} for batch in inputs[label]]
                calls[name] = [partial(forward, batch) for batch in on_device]
                for call in calls[name][:1]:  # what does not fit into memory is a note, and the others are timed
                    call()
            except Exception as error:  # noqa: BLE001, PERF203 - runtimes raise many kinds of errors
                calls.pop(name, None)
                notes[name] = in_a_line(error)
    taken = in_turns(calls, limit, torch.device(case["device"]), least)
    base, times = next(iter(models)), dict[str, dict[str, float]]()
    for label, each in taken.items():
        if not each:
            notes[label] = _NOT_REACHED
            continue
        times[label] = summary(each) | {"examples_per_s": case["batch_size"] * len(each) / sum(each)}
        if taken.get(base):
            turns = zip(taken[base], each, strict=False)  # the time limit may cut the last turn short
            times[label]["speed_up"] = statistics.median(first / second for first, second in turns)
    tokens = [batch["input_ids"].shape[1] for batch in inputs[base]]
    return case | {"mean_tokens": sum(tokens) / max(1, len(tokens)), "folders": times, "notes": notes}


def in_turns(
    calls: Mapping[Any, Sequence[Callable[[], object]]],
    limit: float,
    device: torch.device | None = None,
    least: int = FOR_P95,
) -> dict[Any, list[float]]:
    """Measure the seconds of calls. The keys take turns call by call, so that a disturbance affects all of them alike.

    After one call of each key to warm up come five rounds, or more until each key has `least` calls. A key with more
    calls than another, whose tokenizer makes fewer texts, leaves out its last. `limit`, in seconds, is checked before
    every call: a key whose turn did not come has no times. `device`: by default this rank's.
    """
    device, end = device or distributed.device(), time.perf_counter() + limit
    times: dict[Any, list[float]] = {key: [] for key in calls}
    turns: list[tuple[Any, Callable[[], object]]] = []
    for one_of_each in zip(*calls.values(), strict=False):
        turns += zip(calls, one_of_each, strict=True)
    rounds = max(_ROUNDS, math.ceil(least * len(calls) / max(1, len(turns))))
    for place, (key, call) in enumerate([*turns[: len(calls)], *turns * rounds]):
        if time.perf_counter() >= end:
            break
        taken = machine.seconds(call, device)
        if place >= len(calls):  # those before warm up
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


def placed(model: Any, device: torch.device, dtype: torch.dtype) -> Any:
    """Return the model, which is on the CPU and in fp32, or a copy on another device or in another type."""
    if device.type == "cpu" and dtype == torch.float32:
        return model
    return copy.deepcopy(model).to(device, dtype)


def in_a_line(error: Exception) -> str:
    """Say in a note why something could not be measured."""
    if ran_out(error):
        return "out of memory: give smaller --batch_sizes or --lengths"
    return f"{type(error).__name__}: {first_line(error)[:200]}".removesuffix(": ")


def chosen_examples(task: Task, size: int) -> list[int]:
    """Choose the same examples for each model, spread evenly over the first evaluation split, `size` at the least."""
    return list(spread(len(task.examples(task.splits[0])), max(_EXAMPLES, size)))


def random_inputs(model: Any, length: int, size: int) -> dict[str, Tensor]:
    """Return a batch of random ordinary tokens, (size, length), none padded; they are the same for every call."""
    config, vocabulary = model.config, model.get_input_embeddings().num_embeddings
    special = {name: value for name, value in config.to_dict().items() if name.endswith("_token_id")}
    tokens = {name: value if isinstance(value, list) else [value] for name, value in special.items()}
    allowed = torch.ones(vocabulary)
    allowed[[token for values in tokens.values() for token in values if token is not None and token < vocabulary]] = 0
    ids = torch.multinomial(allowed, size * length, True, generator=torch.Generator().manual_seed(0))
    inputs = {"input_ids": ids.view(size, length), "attention_mask": torch.ones(size, length, dtype=torch.int64)}
    ends = [token for token in tokens.get("eos_token_id", []) if token is not None and token < vocabulary]
    if ends:  # encoder-decoders look for it, to pool it
        inputs["input_ids"][:, -1] = ends[0]
    if getattr(config, "type_vocab_size", 0) > 1:
        inputs["token_type_ids"] = torch.zeros_like(inputs["input_ids"])
    accepted = inspect.signature(model.forward).parameters
    return {name: value for name, value in inputs.items() if name in accepted}


def sample_inputs(model: Any) -> list[dict[str, Tensor]]:
    """Return batches of random tokens in several shapes, padded and not, to compare two forms of a model on.

    The longest has more than the 128 tokens that some models see around a token.
    """
    longest = min(160, pretrained.positions_of(model) or 160)
    samples = [
        random_inputs(model, min(length, longest), rows) for rows, length in ((2, 21), (1, 8), (4, 32), (1, 160))
    ]
    for inputs in samples:
        if "attention_mask" in inputs:
            inputs["attention_mask"][1:, inputs["attention_mask"].shape[1] // 2 :] = 0
    return samples


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
