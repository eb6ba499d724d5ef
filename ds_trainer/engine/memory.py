"""The message of a rank that runs out of memory: what it held, and what to change."""

from collections.abc import Mapping
from typing import Any

import torch

from ds_trainer.engine.engine_file import MICRO, STEPS
from ds_trainer.engine.keys import offloads, zero_stage
from ds_trainer.engine.rank_memory import ModelSizes, offloaded, rank_memory
from ds_trainer.ranks import distributed, machine


def held(sizes: ModelSizes, config: Mapping[str, Any]) -> str:
    """Describe the memory of a rank: what the arithmetic has of its model, and how much more its peak was.

    On a GPU the parts that are offloaded are left out: they are in the host's memory.
    """
    on_gpu = torch.cuda.is_available()
    memory = rank_memory(sizes, config, distributed.world_size())
    elsewhere = offloaded(memory, config) if on_gpu else {}
    parts = {name: size for name, size in memory.held.items() if name not in elsewhere}
    parts["gradients"] = parts.get("gradients", memory.gradients)
    by_arithmetic = ", ".join(f"{name} {_size(size)}" for name, size in parts.items())
    peaks = machine.peak_memory()
    peak, of = (peaks["device"], "the GPU's allocator") if on_gpu else (peaks["resident"], "the process")
    return (
        f"By the arithmetic of ZeRO stage {zero_stage(config)} it holds {by_arithmetic}; the peak of {of} since "
        f"the last record is {_size(peak)}, of which {_size(max(0, peak - sum(parts.values())))} are activations, "
        f"buffers and all else."
    )


def training_cure(config: Mapping[str, Any], recomputes: bool) -> str:
    """Say what to change where a training step does not fit: the settings that this phase has not yet exhausted.

    `recomputes` says whether the phase has gradient checkpointing.
    """
    micro, steps = config[MICRO], config[STEPS]
    smaller = f"lower per_device_train_batch_size ({MICRO}, now {micro}) and raise {STEPS} (now {steps}) as much"
    cures = [*([smaller] if micro > 1 else []), *([] if recomputes else ["set gradient_checkpointing in the phase"])]
    return _cure([*cures, *_sharing_cures(config), "lower the task's max_seq_length"])


def evaluation_cure(field: str, batch_size: int, config: Mapping[str, Any] | None = None) -> str:
    """Say what to change where an evaluation does not fit; `field` is the name of its batch size."""
    cures = [f"lower {field} (now {batch_size})"] if batch_size > 1 else []
    return _cure([*cures, *(_sharing_cures(config) if config else []), "lower the task's max_seq_length"])


def _sharing_cures(config: Mapping[str, Any]) -> list[str]:
    """List the settings that take parameters, gradients and the optimizer's states off a rank."""
    stage, cures = zero_stage(config), []
    if stage < 3 and distributed.world_size() > 1:
        cures.append(f"raise zero_optimization.stage (now {stage})")
    if torch.cuda.is_available() and not offloads(config, "optimizer"):
        cures.append("offload to the host with zero_optimization.offload_optimizer")
    return cures


def _cure(cures: list[str]) -> str:
    text = ", or ".join(cures)
    return f"{text[0].upper()}{text[1:]}."


def _size(number: float) -> str:
    return f"{number / 2**30:,.2f} GiB" if number >= 2**30 else f"{number / 2**20:,.2f} MiB"
