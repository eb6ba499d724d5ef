"""How long a phase will train: forwards and backwards of its own examples on this machine, times its steps."""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from ds_trainer.engine.engine_file import MICRO, STEPS
from ds_trainer.phase import PhasePlan
from ds_trainer.phase_memory import begin, drop_gradients, forward_and_backward
from ds_trainer.ranks import distributed, machine
from ds_trainer.ranks.failures import ran_out
from ds_trainer.ranks.timing import seconds
from ds_trainer.tasks.data import ExampleIds
from ds_trainer.trial import trial_batches

_PLACES = 3
"""Batches are taken from so many places in the order of the examples' lengths."""
_SECONDS = 1.0
"""A batch has fewer examples than a micro-batch of the phase where that would take longer than this."""


def measure_time(plan: PhasePlan) -> dict[str, Any]:
    """Return the seconds of all steps of a phase, and on what they were measured, as JSON values.

    A teacher that answers in every step is in them, but not the optimizer's steps, evaluations, and what is done once.
    Where memory does not suffice, `seconds` is None, and `reason` says so. Each rank takes equally many batches.
    """
    micro, device = plan.engine_config[MICRO], distributed.device()
    measured_on = {"device": machine.device_name(), "threads": torch.get_num_threads()}
    model, _, objective = plan.prepare()
    begin(plan, model, objective)
    drop_gradients(model)

    def slowest(batches: Sequence[ExampleIds]) -> float:
        """Return the mean seconds of a batch on the slowest rank, infinite where one of them runs out of memory."""
        taken = 0.0
        try:
            for take in (partial(forward_and_backward, plan, model, objective, ids) for ids in batches):
                take()  # the first time something may be loaded, or kept for the second
                taken += seconds(take, device)
        except RuntimeError as error:
            if not ran_out(error):
                raise
            taken = math.inf
        return max(distributed.broadcast(distributed.gather(taken))) / len(batches)

    lengths, examples = plan.task.examples("train").lengths, 1
    try:
        micro_batch = slowest(trial_batches(lengths, 1, 1)[1:])
        if micro_batch < math.inf:
            examples = min(micro, max(1, int(_SECONDS / micro_batch)))
            micro_batch = slowest(trial_batches(lengths, examples, _PLACES)[1:]) * micro / examples
    finally:
        for technique in objective.techniques:
            technique.stop()
    if micro_batch == math.inf:
        return {"seconds": None, "reason": f"{examples} examples do not fit into the memory of this machine"}
    in_all = plan.length.total * plan.engine_config[STEPS] * micro_batch
    return {"seconds": in_all, "batches": _PLACES, "examples": examples, "micro_batch": micro, **measured_on}
