"""The rehearsal of a run: every phase is built before any is trained, so that a mistake in the last one shows now.

A dry run also measures each phase on a few of its examples: what it will hold on each rank, ZeRO by arithmetic and
activations by forwards and backwards, and how long its steps will take on this machine.
"""

import gc
import shutil
import tempfile
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ds_trainer.engine.engine import check_with_deepspeed
from ds_trainer.engine.engine_file import MICRO, STEPS
from ds_trainer.engine.keys import flag_at, precision_of, value_at
from ds_trainer.engine.memory import ModelSizes, PhaseMemory
from ds_trainer.ranks import distributed, machine
from ds_trainer.ranks.machine import seconds
from ds_trainer.ranks.progress import progress
from ds_trainer.recipe.jobs import TrainJob
from ds_trainer.run.phase import PhasePlan, PreparedPhase, plan_phase
from ds_trainer.run.starting_models import RehearsedModels
from ds_trainer.tasks.data import ExampleIds
from ds_trainer.tasks.task import Forward

_PLACES = 3
"""The places in the order of the examples' lengths from which batches are timed."""
_SECONDS = 1.0
"""A batch that is timed has fewer examples than a micro-batch where that would take longer than this."""


@contextmanager
def rehearsal_folder() -> Iterator[Path]:
    """Make a temporary folder for the models of a rehearsal, of one path on all hosts; remove it at the end."""
    folder = Path(distributed.on_main(tempfile.mkdtemp))
    try:
        yield folder
        distributed.barrier()  # all ranks of a host share it
    finally:
        if distributed.local_rank() == 0:
            shutil.rmtree(folder, ignore_errors=True)


def rehearse_phases(job: TrainJob, folder: Path) -> list[dict[str, Any]]:
    """Build every phase, and return what `dry_run` prints of each. Raises UserError.

    A phase that starts from the model of an earlier one is built from the model that the earlier phase starts from.
    Students and new models are made in `folder`, and cuts in about their shape. DeepSpeed checks the engine
    file once for each precision, and with a scheduler in it for each list of rates; whatever else differs between the
    phases is set by this library and needs no check.
    """
    models, descriptions = RehearsedModels(job.recipe, folder), []
    checked: set[tuple[str, tuple[float, ...]]] = set()
    for phase in progress(job.recipe.phases, "checking the phases", "phase"):
        plan = plan_phase(job, phase, models)
        descriptions.append(_rehearsed(job, plan, models, checked))
        models.add(phase.name, plan.source)
    return descriptions


def _rehearsed(
    job: TrainJob, plan: PhasePlan, models: RehearsedModels, checked: set[tuple[str, tuple[float, ...]]]
) -> dict[str, Any]:
    phase, task = plan.phase, plan.task
    for split in task.splits:  # a mistake in one would otherwise show after the training
        task.examples(split)
    for place, model in plan.techniques.models.items():
        if job.recipe.earlier(phase, phase.techniques.models[place]) is None:  # no phase of this run will train it
            task.check_trained(model)
    gc.collect()
    distributed.give_back_freed_memory()
    process = distributed.resident_memory()
    prepared = plan.prepare()
    rates = tuple(group.learning_rate for group in prepared.groups)
    # only a scheduler of the engine file can undo the rates of the groups
    asked = precision_of(plan.engine_config), rates if "scheduler" in plan.engine_config else ()
    if phase.trains and asked not in checked:
        check_with_deepspeed(plan.engine_config, plan.base, rates)
        checked.add(asked)
    optimizer = str(value_at(plan.engine_config, "optimizer.type") or "")
    for warning in filter(None, [one.check(optimizer, plan.travel) for one in prepared.objective.techniques]):
        distributed.warn(f"{phase.name}: {warning}")
    description: dict[str, Any] = {
        "phase": phase.name,
        "starts_from": plan.source,
        "steps": {"total": plan.length.total, "warmup": plan.length.warmup},
        "engine_file": plan.engine_config,
        "parameter_groups": [
            {"name": g.name, "parameters": g.size, "learning_rate": g.learning_rate, "weight_decay": g.weight_decay}
            for g in prepared.groups
        ],
        "frozen_parameters": sum(p.numel() for p in prepared.model.parameters() if not p.requires_grad),
    }
    if job.dry_run and phase.trains:
        with begun(plan, prepared) as sizes:
            description["time"] = measure_time(plan, prepared)
            memory = measure_memory(plan, prepared, sizes, process)
        description["memory_per_rank"] = memory.describe(plan.engine_config)
    return description


@contextmanager
def begun(plan: PhasePlan, prepared: PreparedPhase) -> Iterator[ModelSizes]:
    """Bring a phase's model and techniques to where step 0 begins, without an engine, for the length of the context.

    Gradients are freed at once. Yields the sizes of the model before anything is frozen to be measured.
    """
    sizes = ModelSizes.of(prepared.model, prepared.groups)
    device, precision = distributed.device(), precision_of(plan.engine_config)
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16  # a CPU has no fp16, and the sizes are the same
    prepared.model.to(device, dtype).train()
    for parameter in prepared.model.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(lambda one: setattr(one, "grad", None))
    try:
        for technique in prepared.objective.techniques:
            technique.rehearse(device)
            technique.on_step(0)
        yield sizes
    finally:
        for technique in prepared.objective.techniques:
            technique.stop()


def measure_time(plan: PhasePlan, prepared: PreparedPhase) -> dict[str, Any]:
    """Return the seconds of all steps of a phase, and on what they were measured, as JSON values; inside of `begun`.

    A teacher that answers in every step is in them, but not the optimizer's steps, evaluations, and what is done once.
    Each rank takes equally many batches.
    """
    micro, device = plan.engine_config[MICRO], distributed.device()

    def slowest(batches: Sequence[ExampleIds]) -> float:
        """Return the mean seconds of a batch on the slowest rank."""
        taken = 0.0
        for take in (partial(_forward_and_backward, plan, prepared, ids) for ids in batches):
            take()  # the first time something may be loaded, or kept for the second
            taken += seconds(take, device)
        return max(distributed.broadcast(distributed.gather(taken))) / len(batches)

    lengths = plan.task.examples("train").lengths
    examples = min(micro, max(1, int(_SECONDS / slowest(batches_by_length(lengths, 1, 1)))))
    micro_batch = slowest(batches_by_length(lengths, examples, _PLACES)) * micro / examples
    measured_on = {"device": machine.device_name(), "threads": torch.get_num_threads()}
    in_all = plan.length.total * plan.engine_config[STEPS] * micro_batch
    return {"seconds": in_all, "batches": _PLACES, "examples": examples, "micro_batch": micro, **measured_on}


def batches_by_length(lengths: np.ndarray[Any, Any], size: int, count: int) -> list[ExampleIds]:
    """Return `count` batches from evenly spaced places in the order of the lengths, the longest first.

    A batch has examples of like lengths, as training's batches have (`BatchPlan`). A training set that is smaller than
    a batch is repeated.
    """
    order = np.resize(np.argsort(-lengths, kind="stable"), max(size, len(lengths)))
    last = len(order) - size
    starts = [round(last * (place + 0.5) / count) for place in range(count)]
    return [order[start : start + size] for start in starts]


def measure_memory(plan: PhasePlan, prepared: PreparedPhase, sizes: ModelSizes, process: int) -> PhaseMemory:
    """Measure a phase's activations on its two longest examples; the model is used up. Inside of `begun`.

    `process` is what Python held, in bytes, before the model was built.
    """
    longest = np.argsort(-plan.task.examples("train").lengths, kind="stable")
    for module in prepared.model.modules():
        if isinstance(module, nn.Embedding):  # their gradients are large, and no activations
            module.weight.requires_grad_(False)

    def peak(ids: ExampleIds) -> int:
        with LiveMemory() as live:
            _forward_and_backward(plan, prepared, ids)
        return live.peak

    peak(longest[-1:])  # loads what waits for the first forward, such as a teacher
    # the first time an operation or a teacher may keep something for good
    one, two = (min(peak(longest[:rows]), peak(longest[:rows])) for rows in (1, 2))
    held = [technique.bytes_held() for technique in prepared.objective.techniques]
    whole, shared = (sum(column) for column in zip(*held, strict=True)) if held else (0, 0)
    return PhaseMemory(sizes, 2 * one - two, two - one, whole, shared, process, torch.cuda.is_available())


def _forward_and_backward(plan: PhasePlan, prepared: PreparedPhase, ids: ExampleIds) -> None:
    """Run a micro-batch of these examples."""
    device, task, objective = distributed.device(), plan.task, prepared.objective
    batch = task.collate(task.examples("train"), ids, 1).to(device)
    autocast = bool(flag_at(plan.engine_config, "torch_autocast.enabled"))
    with torch.autocast(device.type, torch.bfloat16) if autocast else nullcontext():
        loss, _ = objective(Forward(batch, prepared.model(**batch.inputs), 0))
        loss.backward()


class LiveMemory(TorchDispatchMode):
    """While it is on, keep the sum of the storages that operations have made and that are not yet freed.

    It works on any device: a CPU has no allocator that could be asked. What an operation needs only inside itself is
    not counted, nor is what existed before.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {_address(value) for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)}
        for value in tree_leaves(out):
            if isinstance(value, Tensor) and value.device.type != "meta" and _address(value) not in given:
                storage: Any = value.untyped_storage()
                if storage._cdata not in self._sizes:
                    self._sizes[storage._cdata] = storage.nbytes()
                    self.now += storage.nbytes()
                    self.peak = max(self.peak, self.now)
                    weakref.finalize(storage, self._drop, storage._cdata)
        return out

    def _drop(self, address: int) -> None:
        self.now -= self._sizes.pop(address)


def _address(value: Tensor) -> int:
    return int(value.untyped_storage()._cdata) if value.layout == torch.strided else 0
