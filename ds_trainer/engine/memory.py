"""What a rank holds of a model in training, in bytes: arithmetic over the engine file, for any number of ranks.

The formulas are those of DeepSpeed 0.19.8, read off a record of every tensor that it allocates; `benchmarks/
memory_model.py` compares them with the peak of real runs. ZeRO keeps master weights in fp32 also where the model is in
fp32. A step has two peaks. One is in the backward, where activations, gradients and the buffers of their reduction
meet; under ZeRO-3 the weights that are gathered come to it. The other is in the optimizer's step, which copies a rank's
gradients into one tensor, in fp32, and takes their norm in fp64.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ds_trainer.engine.engine_file import MICRO, STEPS, TRAIN
from ds_trainer.engine.keys import flag_at, offloads, precision_of, value_at, zero_stage

if TYPE_CHECKING:  # the arithmetic is done where torch is not loaded
    from torch import nn

    from ds_trainer.engine.engine import Group

FP32, FP64 = 4, 8
_STATES = {"sgd": 0, "lion": 1, "cpulion": 1, "fusedlion": 1, "adagrad": 1, "muon": 1}
"""The values that an optimizer keeps for each weight, where they are not the two of Adam; SGD has one with momentum."""
_MOST_REDUCED_AT_ONCE = 500_000_000
"""Values: without ZeRO, gradients are reduced in copies of this size at most (`gradient_allreduce`)."""
_DEFAULTS = {"reduce_bucket_size": 5e8, "prefetch_bucket_size": 5e7, "max_reuse_distance": 1e9}
"""DeepSpeed's, in values."""


@dataclass(frozen=True)
class ModelSizes:
    """How many values a model has, as the engine takes it."""

    trained: int
    frozen: int
    largest: int
    """Those of the largest trained parameter."""

    @classmethod
    def of(cls, model: nn.Module, groups: Iterable[Group]) -> ModelSizes:
        """Count the values of a model whose parameters are not yet partitioned."""
        trained = [parameter.numel() for group in groups for parameter in group.parameters.values()]
        everything = sum(parameter.numel() for parameter in model.parameters())
        return cls(sum(trained), everything - sum(trained), max(trained, default=0))


@dataclass(frozen=True)
class RankMemory:
    """The bytes of one rank. `held` stays from step to step, and has what may be offloaded to the host."""

    held: dict[str, int]
    gradients: int
    """At the end of a backward."""
    buffers: int
    """Beside gradients and activations in the backward."""
    in_step: int
    """Beside `held` in the optimizer's step, gradients included."""
    copies_in_step: int
    """How much of `in_step` is large new buffers."""
    largest_gradient: int
    mixed: bool
    """Whether the model is in 16 bits."""
    gradients_stay: bool
    """Whether the gradients of an earlier micro-batch are there during a whole backward."""

    def peak(self, activations: int) -> int:
        """Return the most that the rank's tensors take, beside the bytes of a micro-batch's activations."""
        return sum(self.held.values()) + max(self._in_backward(activations), self.in_step)

    def resident_peak(self, activations: int) -> int:
        """Return the most that a process on a CPU keeps of the system's memory for these tensors, by experience.

        The C library's heap hardly finds room for the large buffers of the optimizer's step in what the backward has
        freed: in fp32 in about half of what activations took, in 16 bits nowhere. It also keeps a hole of the size of
        the largest gradient.
        """
        backward = self._in_backward(activations)
        nothing_reused = backward + self.copies_in_step
        all_reused = max(backward, self.gradients + self.buffers + self.copies_in_step)
        step = max(nothing_reused if self.mixed else (nothing_reused + all_reused) // 2, self.in_step)
        return sum(self.held.values()) + step + self.largest_gradient

    def _in_backward(self, activations: int) -> int:
        gradients = self.gradients + self.buffers
        return activations + gradients if self.gradients_stay else max(activations, gradients)


def rank_memory(sizes: ModelSizes, config: Mapping[str, Any], world: int) -> RankMemory:
    """Return what each of `world` ranks holds under a resolved engine file, without activations."""
    stage, width = zero_stage(config), 4 if precision_of(config) == "fp32" else 2
    share = -(-sizes.trained // (world if stage else 1))
    everything = sizes.trained + sizes.frozen
    mixed = width < FP32
    kind = str(value_at(config, "optimizer.type") or "AdamW").lower()
    states = _STATES.get(kind, 2)
    if kind == "sgd" and value_at(config, "optimizer.params.momentum"):
        states = 1
    held = {
        "parameters": everything * width // (world if stage == 3 else 1),
        "master_weights": share * FP32 if mixed or stage else 0,
        "optimizer": share * FP32 * states,
    }
    flat = share * (width + (FP32 if mixed else 0))  # the rank's gradients in one tensor, and again in fp32
    if stage == 0:
        gradients, buffers = sizes.trained * width, min(sizes.trained, _MOST_REDUCED_AT_ONCE) * width
        in_step, copies = gradients + (FP32 * sizes.trained if mixed else 0), 0  # in fp32 parameter by parameter
    else:
        gradients = share * width + (sizes.trained * width if stage == 1 else 0)
        # a bucket of gradients, or a gradient that is larger, which has a bucket of its own
        bucket = min(_zero_number(config, "reduce_bucket_size"), sizes.trained)
        buckets = 2 if flag_at(config, "zero_optimization.overlap_comm") else 1
        copies_of_largest = 2 if stage == 3 else 1  # stage 3 splits a gradient among the ranks in a copy
        buffers = 0 if stage == 1 else width * max(buckets * bucket, copies_of_largest * sizes.largest)
        in_step = copies = share * width + max(flat, FP64 * min(sizes.largest, share))
    if stage == 3:  # one buffer for the rank's gradients lasts from step to step
        held["gradients"], gradients = gradients, 0
        in_step = copies = flat
        if world > 1:  # while gradients are reduced, or where the backward begins
            prefetched = _zero_number(config, "prefetch_bucket_size")
            # Values stay gathered from the forward to the backward if they come up again soon. From a weight's forward
            # to its backward each later weight is used twice, so half of the reuse distance counts.
            kept = max(_zero_number(config, "max_reuse_distance") // 2, prefetched)
            in_use = buffers + width * min(everything, sizes.largest + prefetched)
            buffers = max(in_use, width * min(everything, kept))
    stays = stage == 3 or config[STEPS] > 1
    if stage == 2 and stays:  # a rank's share of a micro-batch is whole before it is added to the others
        buffers += share * width
    return RankMemory(held, gradients, buffers, in_step, copies, sizes.largest * width, mixed, stays)


@dataclass(frozen=True)
class PhaseMemory:
    """What the ranks of a phase hold, as far as it does not depend on the engine file. Sizes are in bytes."""

    sizes: ModelSizes
    fixed: int
    """Activations of a micro-batch of the longest examples, whatever their number."""
    per_example: int
    """Those of each of its examples."""
    teacher: int
    """What techniques keep on each rank beside the model."""
    shared_teacher: int
    """What they keep on all ranks together."""
    process: int
    """Python with its libraries, in the host's memory."""
    on_gpu: bool

    def describe(self, config: Mapping[str, Any]) -> dict[str, int]:
        """Return what each rank of a resolved engine file holds, by part, and its peak."""
        micro = config[MICRO]
        world = config[TRAIN] // (micro * config[STEPS])
        memory, teacher = rank_memory(self.sizes, config, world), self.teacher + self.shared_teacher // world
        activations = self.fixed + micro * self.per_example
        parts = {"ranks": world, "gradients": memory.gradients, **memory.held, "buffers": memory.buffers}
        parts |= {"activations": activations, "teacher": teacher, "process": self.process}
        if not self.on_gpu:
            return parts | {"peak": memory.resident_peak(activations) + teacher + self.process}
        on_host = sum(offloaded(memory, config).values())
        on_gpu = memory.peak(activations) + teacher - on_host
        return parts | {"peak_of_the_gpu": on_gpu, "peak_of_the_host": on_host + self.process}


def offloaded(memory: RankMemory, config: Mapping[str, Any]) -> dict[str, int]:
    """Return the parts of `held` that a GPU's rank keeps on its host."""
    names = ["optimizer", "master_weights"] * offloads(config, "optimizer") + ["parameters"] * offloads(config, "param")
    return {name: memory.held[name] for name in names}


def _zero_number(config: Mapping[str, Any], key: str) -> int:
    """Return a number of `zero_optimization`, also where the file calls it `stage3_...`, or DeepSpeed's default."""
    values = [value_at(config, f"zero_optimization.{name}") for name in (key, f"stage3_{key}")]
    return int(next((value for value in values if value is not None), _DEFAULTS[key]))
