"""The message of a rank that runs out of memory: where, what it held, and what to change."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ds_trainer.engine.keys import offloads, zero_stage
from ds_trainer.engine.rank_memory import ModelSizes, offloaded, rank_memory
from ds_trainer.ranks import distributed, machine
from ds_trainer.ranks.joining import out_of_memory_named

TRAIN_FIELD, EVAL_FIELD = "per_device_train_batch_size", "per_device_eval_batch_size"


@contextmanager
def explaining_memory(
    where: str,
    field: str,
    batch_size: int,
    config: Mapping[str, Any] | None = None,
    situation: Callable[[], str] = str,
    more: Sequence[str] = (),
) -> Iterator[None]:
    """Turn every error of an allocator inside into an OutOfMemoryError, which ends with what to change.

    `field` names the batch size of this work. `config` is the engine file of work that an engine does, `situation`
    describes it, and `more` are further things to change, as clauses.
    """
    with out_of_memory_named(where, lambda: f"{situation()} {_advice(field, batch_size, config, more)}".strip()):
        yield


def held(sizes: ModelSizes, config: Mapping[str, Any]) -> str:
    """Describe the memory of a rank: what the arithmetic has of its model, and how much more its peak was."""
    peaks, memory = machine.peak_memory(), rank_memory(sizes, config, distributed.world_size())
    parts = {"gradients": memory.gradients} | memory.held
    peak, of = peaks["resident"], "the process"
    if torch.cuda.is_available():
        peak, of = peaks["device"], "the GPU's allocator"
        parts = {name: size for name, size in parts.items() if name not in offloaded(memory, config)}
    return (
        f"By the arithmetic of ZeRO stage {zero_stage(config)} it holds "
        f"{', '.join(f'{name} {_size(size)}' for name, size in parts.items())}; the peak of {of} since the last record "
        f"is {_size(peak)}; the difference, {_size(max(0, peak - sum(parts.values())))}, is activations, buffers and "
        f"all else."
    )


def _advice(field: str, batch_size: int, config: Mapping[str, Any] | None, more: Sequence[str]) -> str:
    """Return a sentence with the settings that are not yet exhausted."""
    clauses = []
    if batch_size > 1:
        keep = " and raise gradient_accumulation_steps as much" if field == TRAIN_FIELD else ""
        clauses.append(f"lower {field} (now {batch_size}){keep}")
    clauses += more
    if config is not None and (stage := zero_stage(config)) < 3 and distributed.world_size() > 1:
        clauses.append(f"raise zero_optimization.stage (now {stage})")
    if config is not None and torch.cuda.is_available() and not offloads(config, "optimizer"):
        clauses.append("offload to the host with zero_optimization.offload_optimizer")
    text = ", or ".join([*clauses, "lower the task's max_seq_length"])
    return f"{text[0].upper()}{text[1:]}."


def _size(number: float) -> str:
    return f"{number / 2**20:,.0f} MiB"
