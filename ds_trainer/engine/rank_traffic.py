"""What the collectives of an optimizer step carry for a rank, in bytes: arithmetic over the engine file.

The formulas are those of DeepSpeed 0.19.8, and equal its own communication log (`tests/engine/test_rank_traffic.py`):

    stage 0  one all_reduce of all gradients a step
    stage 1  the same, and an all_gather of the new weights
    stage 2  an all_reduce of all gradients in every micro-batch (no reduce_scatter), and the all_gather
    stage 3  a reduce_scatter of all gradients in every micro-batch, and all_gathers of the weights: before each use of
             parameters above the persistence threshold, and once a step for those below it, which stay gathered

Left out are a step's few scalars (overflow, norm), what `zero_quantized_*` and `zero_hpz_partition_size` spare, and
that with `torch_autocast` beside ZeRO the linear layers travel in 16 bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ds_trainer.engine.engine_file import MICRO, STEPS, TRAIN
from ds_trainer.engine.keys import flag_at, precision_of, value_at, zero_stage
from ds_trainer.engine.rank_memory import FP32, ModelSizes, PhaseMemory, kept_gathered, zero_number


def rank_traffic(sizes: ModelSizes, config: Mapping[str, Any], world: int, gathered: int = 0) -> dict[str, int]:
    """Return the bytes that a rank hands to the collectives of one optimizer step, by operation.

    They are counted as in DeepSpeed's log: the whole tensor of an all_reduce or a reduce_scatter, and of an all_gather
    the rank's own part. `gathered` are the bytes that techniques gather whole from the parts of all ranks.
    """
    if world == 1:
        return {}
    stage, steps, width = zero_stage(config), config[STEPS], 4 if precision_of(config) == "fp32" else 2
    gradients = sizes.trained * _communicated_width(config, width)
    carried = {"all_reduce": gradients * (steps if stage == 2 else 1)}
    if stage in (1, 2):
        gathered += sizes.trained * width
    if stage == 3:
        scatters = flag_at(config, "zero_optimization.reduce_scatter") is not False
        carried = {"reduce_scatter" if scatters else "all_reduce": gradients * steps}
        gathered += _gathered_values(sizes, config) * width
    return carried | ({"all_gather": gathered // world} if gathered else {})


def on_the_wire(carried: Mapping[str, int], world: int) -> int:
    """Return the bytes that a rank sends, and receives, where every collective is a ring of all ranks."""
    passes = {"all_reduce": 2 * (world - 1) / world, "reduce_scatter": (world - 1) / world, "all_gather": world - 1}
    return round(sum(passes[name] * size for name, size in carried.items()))


def describe_traffic(memory: PhaseMemory, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the ranks of a phase exchange in an optimizer step, of a resolved engine file.

    A partitioned teacher is gathered in every micro-batch. A choice of masks over all layers is left out.
    """
    world = config[TRAIN] // (config[MICRO] * config[STEPS])
    carried = rank_traffic(memory.sizes, config, world, memory.shared_teacher * config[STEPS])
    return {"ranks": world, **carried, "sent_in_rings": on_the_wire(carried, world)}


def _gathered_values(sizes: ModelSizes, config: Mapping[str, Any]) -> int:
    """Return how many values of weights ZeRO-3 gathers in a step: small parameters once, others in each micro-batch.

    Those that do not stay gathered from the forward to the backward are gathered twice in a micro-batch.
    """
    persistent = sum(size for size in sizes.each if size <= zero_number(config, "param_persistence_threshold"))
    others = sum(sizes.each) - persistent
    return persistent + config[STEPS] * (others + max(0, others - kept_gathered(config)))


def _communicated_width(config: Mapping[str, Any], width: int) -> int:
    """Return the bytes of a gradient on its way, by `communication_data_type`, else as wide as the weights."""
    asked = value_at(config, "communication_data_type")
    return width if asked is None else FP32 if asked == "fp32" else 2
