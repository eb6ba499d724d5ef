"""Takes steps of a small BERT under every ZeRO stage and writes what its collectives carry; started by a test.

`deepspeed --num_gpus N tests/support/traffic_worker.py OUT` writes, for each case, the bytes of the fourth step by
operation: by arithmetic, by DeepSpeed's communication log, and as torch's dispatcher saw them. It also writes which
functions made the host wait for a value of the device in that step.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections import Counter
from dataclasses import asdict, dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from support import zero_matrix
from support.host_waits import host_waits, place
from support.zero_matrix import BASE, ToyTask
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForSequenceClassification

from ds_trainer.config.recipe import parse_recipe
from ds_trainer.engine import engine
from ds_trainer.engine.numerics import StepWatch
from ds_trainer.engine.optim import parameter_groups
from ds_trainer.engine.rank_memory import ModelSizes
from ds_trainer.engine.rank_traffic import rank_traffic
from ds_trainer.models.recomputing import set_recomputing
from ds_trainer.objective import Objective
from ds_trainer.ranks import distributed, shared_memory
from ds_trainer.ranks.stopping import StopRequests
from ds_trainer.tasks.task import Forward
from ds_trainer.techniques.registry import build_techniques
from ds_trainer.techniques.technique import PhaseLength

STEPS = 4
NAMES = {"all_gather_into_tensor": "all_gather", "reduce_scatter_tensor": "reduce_scatter"}
"""DeepSpeed's names of operations, where the arithmetic has shorter ones."""
OPERATIONS = {
    "allreduce_": "all_reduce",
    "_allgather_base_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "broadcast_": "broadcast",
    "allgather_": "all_gather of a list",
    "gather_": "gather",
    "reduce_": "reduce",
}
"""torch's names of operations."""
_SCORES = {"initial_warmup": 0, "final_warmup": 0, "final_threshold": 0.5, "mask_init": "uniform"}
_TEACHER = {"alpha_ce": 0.5, "alpha_distil": 0.5}
TECHNIQUES: dict[str, dict[str, Any]] = {
    "plain": {},
    "prune": {"prune": _SCORES},
    "prune heads": {"prune": _SCORES | {"granularity": "hybrid"}},
    "prune global": {"prune": _SCORES | {"global_topk": True}},
    "distill": {"distill": _TEACHER},
    "distill partitioned": {"distill": _TEACHER | {"teacher_zero_stage": 3}},
    "exits": {"exits": {"training": "joint"}},
}


@dataclass(frozen=True)
class Case:
    technique: str
    stage: int
    precision: str = "fp32"
    accumulation: int = 1
    zero: dict[str, Any] = field(default_factory=dict)
    checkpointing: bool = False
    exact: bool = True
    """Whether the arithmetic is meant to hold."""

    def __str__(self) -> str:
        more = [f"{key}={value}" for key, value in self.zero.items()] + ["checkpointing"] * self.checkpointing
        return "-".join([self.technique, f"zero{self.stage}", self.precision, f"x{self.accumulation}", *more])


_RELEASED = {"stage3_prefetch_bucket_size": 0, "stage3_max_reuse_distance": 0}
"""Under ZeRO-3 no weight stays gathered from the forward to the backward."""
CASES = [Case("plain", stage, "fp32", accumulation) for stage in range(4) for accumulation in (1, 4)]
CASES += [Case("plain", stage, "bf16", 4) for stage in range(4)]
CASES += [Case(technique, stage) for technique in [*TECHNIQUES][1:] for stage in (2, 3)]
CASES += [
    Case("distill partitioned", 2, accumulation=4),
    Case("plain", 3, accumulation=4, zero={"stage3_param_persistence_threshold": 5000}),
    Case("plain", 3, zero=_RELEASED),
    Case("plain", 3, zero=_RELEASED | {"stage3_max_reuse_distance": 200_000}),
    Case("plain", 3, checkpointing=True),
    Case("plain", 3, zero=_RELEASED, checkpointing=True, exact=False),  # layers are gathered a third time
    Case("plain", 3, zero={"reduce_scatter": False}),
]


class Collectives(TorchDispatchMode):
    """Counts the bytes of every collective of torch, as DeepSpeed's log does."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            name = func._schema.name.split("::")[1]
            at = 1 if name.endswith(("gather_base_", "scatter_base_")) else 0
            sizes = [t.nbytes for t in tree_leaves(args[at]) if isinstance(t, torch.Tensor)]
            self.bytes[OPERATIONS.get(name, name)] += sum(sizes)
        return func(*args, **(kwargs or {}))


class Copies(TorchFunctionMode):
    """Counts the calls that copy a tensor to the host: they do nothing on a CPU, and so are not dispatched."""

    def __init__(self) -> None:
        self.waits = Counter[str]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.Tensor.cpu, torch.Tensor.tolist, torch.Tensor.numpy):
            self.waits[place()] += 1
        return func(*args, **(kwargs or {}))


@cache
def teacher_folder() -> str:
    """A BERT whose matrices are larger than DeepSpeed's threshold for parameters that stay gathered."""

    def save() -> str:
        folder = tempfile.mkdtemp()
        wide = zero_matrix.bert(hidden_size=320, intermediate_size=640, num_hidden_layers=2, vocab_size=500)
        AutoModelForSequenceClassification.from_config(wide).save_pretrained(folder)
        ToyTask.tokenizer.save_pretrained(folder)
        return folder

    return distributed.on_main(save)


def gathered_by_technique(case: Case, techniques: Any) -> int:
    """The bytes that the techniques gather from all ranks in a step, by arithmetic."""
    for technique in techniques:
        if case.technique == "distill partitioned":
            sizes = [getattr(p, "ds_numel", p.numel()) for p in technique._teacher._model.parameters()]
            return 4 * case.accumulation * sum(size for size in sizes if size > 100_000)
        if case.technique == "prune global" and case.stage == 3:  # once to bracket the threshold, once to split
            return 2 * 4 * sum(layer.weight_size for layer in technique.layers.values())
    return 0


def measured(case: Case) -> dict[str, Any]:
    from deepspeed.comm.comm import comms_logger

    asked = {name: dict(spec) for name, spec in TECHNIQUES[case.technique].items()}
    if "distill" in asked:
        asked["distill"]["teacher"] = teacher_folder()
    loss = {"loss": {"task": 1.0, "exits.heads": 1.0}} if "exits" in asked else {}
    phase = parse_recipe({"phases": [{"max_steps": STEPS, "techniques": asked} | loss]}).phases[0]
    techniques = build_techniques(phase.techniques, PhaseLength(STEPS, 0, seed=5), ToyTask())
    shape = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 3, "vocab_size": 500}
    model: Any = AutoModelForSequenceClassification.from_config(zero_matrix.bert(**shape))
    set_recomputing(model, case.checkpointing)
    for technique in techniques:
        model = technique.attach(model)
    rules = [rule for technique in techniques for rule in technique.parameter_rules(model)]
    groups = parameter_groups(model, [], rules, BASE)
    sizes, world = ModelSizes.of(model, groups), distributed.world_size()
    config = {
        "train_batch_size": 4 * world * case.accumulation,
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": case.accumulation,
        "zero_optimization": {"stage": case.stage, "stage3_param_persistence_threshold": 0} | case.zero,
        "bf16": {"enabled": case.precision == "bf16"},
        "comms_logger": {"enabled": True, "prof_all": True},
    }
    ds_engine = engine.start_engine(model, groups, config, BASE, lambda step: 1.0)
    objective, watch = Objective(ToyTask(), techniques, phase.loss), StepWatch(ds_engine, phase.name, 10)
    for technique in techniques:
        technique.start(ds_engine.device)
    stop = StopRequests()

    def take(step: int) -> None:
        take_step(case, techniques, objective, ds_engine, step)
        watch.after_step()
        stop.check()

    for step in range(STEPS - 1):
        take(step)
    comms_logger.comms_dict.clear()
    with Collectives() as seen, Copies() as copies:
        waits = host_waits(partial(take, STEPS - 1), ds_engine.device) + copies.waits
    log = {NAMES.get(op, op): sum(size * n[0] for size, n in of.items()) for op, of in comms_logger.comms_dict.items()}
    calls = {NAMES.get(op, op): sum(n[0] for n in of.values()) for op, of in comms_logger.comms_dict.items()}
    foretold = rank_traffic(sizes, config, world, gathered_by_technique(case, techniques))
    for technique in techniques:
        technique.stop()
    engine.stop_engine(ds_engine)
    return {"foretold": foretold, "log": log, "calls": calls, "dispatched": seen.bytes, "waits": waits}


def take_step(case: Case, techniques: Any, objective: Objective, ds_engine: Any, step: int) -> None:
    """The steps of `loop.train_step`, on made-up batches."""
    for technique in techniques:
        technique.on_step(step)
    for micro in range(case.accumulation):
        batch = zero_matrix.batch_of(step, micro, distributed.rank())
        loss, _ = objective(Forward(batch, ds_engine(**batch.inputs), step))
        ds_engine.backward(loss)
        ds_engine.step()


def main(cases: list[Case], out: str) -> None:
    shared_memory.share_memory = lambda: None  # torch's dispatcher counts its own collectives
    distributed.start()
    results = {str(case): asdict(case) | measured(case) for case in cases}
    if distributed.is_main():
        Path(out).write_text(json.dumps(results))
    distributed.stop()


if __name__ == "__main__":
    main(CASES[:1] if "--quick" in sys.argv else CASES, sys.argv[-1])
    distributed.leave(0)
