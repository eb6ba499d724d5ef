"""What a phase will hold on each rank: ZeRO by arithmetic, and activations as measured on the phase's own examples."""

import gc
from contextlib import nullcontext
from functools import partial

import numpy as np
import torch
from torch import nn

from ds_trainer.engine.keys import flag_at, precision_of
from ds_trainer.engine.live_memory import LiveMemory
from ds_trainer.engine.rank_memory import Activations, ModelSizes, PhaseMemory
from ds_trainer.models.recomputing import can_recompute, set_recomputing
from ds_trainer.objective import Objective
from ds_trainer.phase import PhasePlan
from ds_trainer.ranks import distributed
from ds_trainer.tasks.data import ExampleIds
from ds_trainer.tasks.task import Forward

_ROWS = (1, 2)
"""The examples of the two batches through which the line of the activations is drawn."""


def measure_memory(plan: PhasePlan) -> PhaseMemory:
    """Measure a phase's activations by forwards and backwards of its longest and its middling examples."""
    gc.collect()
    distributed.give_back_freed_memory()
    process = distributed.resident_memory()
    model, groups, objective = plan.prepare()
    sizes = ModelSizes.of(model, groups)
    scores = sum(p.numel() for name, p in model.named_parameters() if name.endswith("mask_scores"))
    activations = measure_activations(plan, model, objective)
    held = [technique.bytes_held() for technique in objective.techniques]
    for technique in objective.techniques:
        technique.stop()
    whole, shared = (sum(sizes) for sizes in zip(*held, strict=True)) if held else (0, 0)
    return PhaseMemory(sizes, scores, activations, whole, shared, process, torch.cuda.is_available())


def measure_activations(plan: PhasePlan, model: nn.Module, objective: Objective) -> tuple[Activations, ...]:
    """Return the activations with and without checkpointing, at two lengths; the model and its hooks are used up."""
    lengths = plan.task.examples("train").lengths
    by_length = np.argsort(-lengths, kind="stable")
    begin(plan, model, objective)
    peak = partial(_peak_of_a_step, plan, model, objective)
    measured = []
    for module in model.modules():
        if isinstance(module, nn.Embedding):  # their gradients are large, and no activations
            module.weight.requires_grad_(False)
    drop_gradients(model)
    peak(by_length[-1:])  # loads what waits for the first forward, such as a teacher
    for checkpointing in (False, True) if can_recompute(model) else (False,):
        set_recomputing(model, checkpointing)
        for start in (len(by_length) // 2, 0):
            # the first time an operation or a teacher may keep something for good
            first, second = (min(peak(ids), peak(ids)) for ids in (by_length[start : start + rows] for rows in _ROWS))
            tokens, slope = int(lengths[by_length[start]]), second - first
            measured.append(Activations(tokens, checkpointing, first - slope, slope))
    return tuple(measured)


def begin(plan: PhasePlan, model: nn.Module, objective: Objective) -> None:
    """Bring a phase's model and techniques to where step 0 begins, without an engine."""
    device, precision = distributed.device(), precision_of(plan.engine_config)
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16  # a CPU has no fp16, and the sizes are the same
    model.to(device, dtype).train()
    for technique in objective.techniques:
        technique.rehearse(device)
        technique.on_step(0)


def forward_and_backward(plan: PhasePlan, model: nn.Module, objective: Objective, ids: ExampleIds) -> None:
    """Run a micro-batch of these examples."""
    device, task = distributed.device(), plan.task
    batch = task.collate(task.examples("train"), ids, 1).to(device)
    autocast = bool(flag_at(plan.engine_config, "torch_autocast.enabled"))
    with torch.autocast(device.type, torch.bfloat16) if autocast else nullcontext():
        loss, _ = objective(Forward(batch, model(**batch.inputs), 0))
        loss.backward()


def _peak_of_a_step(plan: PhasePlan, model: nn.Module, objective: Objective, ids: ExampleIds) -> int:
    with LiveMemory() as live:
        forward_and_backward(plan, model, objective, ids)
    return live.peak


def drop_gradients(model: nn.Module) -> None:
    """Have gradients freed as they come."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(_drop_gradient)


def _drop_gradient(parameter: torch.Tensor) -> None:
    parameter.grad = None
