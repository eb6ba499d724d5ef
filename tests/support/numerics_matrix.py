"""A tiny net whose backward gives infinity at chosen steps, on the last rank only, under the engine and a StepWatch.

`deepspeed --num_gpus N tests/support/numerics_matrix.py OUT` runs every case of CASES and writes what every rank saw.
"""

import json
import logging
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from torch import nn

from ds_trainer.engine import engine
from ds_trainer.engine.engine_file import Hyperparameters
from ds_trainer.engine.numerics import StepWatch
from ds_trainer.ranks import distributed
from ds_trainer.ranks.failures import NonFiniteLossError

RANKS, MICRO, ACCUMULATION = 2, 4, 2
BASE = Hyperparameters(0.05)
DECAY = 0.5
"""Of the rate by step, so that it tells how often the schedule has moved."""
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 4}},
    "bf16": {"bf16": {"enabled": True}},
    "autocast": {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
    "autocast-fp16": {"torch_autocast": {"enabled": True, "dtype": "float16"}},
}


@dataclass(frozen=True)
class Case:
    """A net trained for some steps, and the engine file's words beside those of the precision."""

    precision: str
    stage: int
    infinite: tuple[int, ...] = (2,)
    """The steps, counted from 0, with infinite gradients."""
    steps: int = 4
    max_skipped: int = 50
    factor: float = 1.0
    words: dict[str, Any] = field(default_factory=dict)


_UNCLIPPED = {"gradient_clipping": 0.0}
_WARMUP = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.1, "warmup_num_steps": 10, "warmup_type": "linear"}}
SKIPPING = {
    way: Case(way[:-2], int(way[-1]))
    for way in ("fp16-0", "fp16-2", "fp16-3", "bf16-0", "bf16-3", "fp32-1", "autocast-1", "autocast-fp16-0")
} | {
    "autocast-fp16-0, unclipped": Case("autocast-fp16", 0, words=_UNCLIPPED),
    "fp16-0, unclipped": Case("fp16", 0, words=_UNCLIPPED),
    "bf16-1, fp32 sums": Case("bf16", 1, words={"data_types": {"grad_accum_dtype": "fp32"}}),
    "fp16-0, scheduler block": Case("fp16", 0, words={"scheduler": _WARMUP}),
}
_UNCHECKED = {"bf16": {"enabled": True, "check_grad_overflow": False}}
SPOILT = {
    "fp32-0": Case("fp32", 0),
    "fp32-0, unclipped": Case("fp32", 0, words=_UNCLIPPED),
    "autocast-0": Case("autocast", 0),
    "bf16-1, unchecked": Case("bf16", 1, words=_UNCHECKED),
    "bf16-2, unchecked": Case("bf16", 2, words=_UNCHECKED),
}
_FROM_2 = tuple(range(2, 40))
_SMALL = {"fp16": {"enabled": True, "initial_scale_power": 3}}
STOPPED = {
    "fixed scale": Case("fp16", 0, _FROM_2, 14, 4, words={"fp16": {"enabled": True, "loss_scale": 128}}),
    # the scale starts at 8, and stays at its smallest, where DeepSpeed itself would raise
    "smallest scale": Case("fp16", 2, _FROM_2, 14, 7, words=_SMALL),
    "smallest scale, no ZeRO": Case("fp16", 0, _FROM_2, 14, 7, words=_SMALL),
    "fp32": Case("fp32", 3, _FROM_2, 14, 4),
    # 65536 is too much for this loss, and DeepSpeed never lowers it
    "autocast-fp16": Case("autocast-fp16", 1, (), 14, 4, factor=100.0),
}
SOUND = {
    "with a gap": Case("fp16", 2, (2, 3, 5, 6), 9, 3, words={"fp16": {"enabled": True, "initial_scale_power": 10}}),
    "high start": Case("fp16", 1, (), 20, words={"fp16": {"enabled": True, "initial_scale_power": 28}}),
}
CASES = SKIPPING | SPOILT | STOPPED | SOUND


class Infinite(torch.autograd.Function):
    """The same values; infinite gradients while it is on."""

    on = False

    @staticmethod
    def forward(_, values):
        return values.clone()

    @staticmethod
    def backward(_, gradient):
        return gradient * float("inf") if Infinite.on else gradient


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x):
        return (self.second(Infinite.apply(torch.tanh(self.first(x)))).float() - 1).pow(2).mean()


def run(case: Case) -> dict[str, Any]:
    """Train, checking after every second step and after the last; what this rank saw."""
    config = {
        "train_batch_size": MICRO * distributed.world_size() * ACCUMULATION,
        "train_micro_batch_size_per_gpu": MICRO,
        "gradient_accumulation_steps": ACCUMULATION,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": case.stage, "stage3_param_persistence_threshold": 0},
    }
    config |= PRECISIONS[case.precision] | case.words
    torch.manual_seed(0)
    net = Net()
    groups = engine.parameter_groups(net, [], [], BASE)
    under = engine.start_engine(net, groups, config, BASE, lambda step: DECAY**step)
    watch = StepWatch(under, "tiny", case.max_skipped)
    seen: dict[str, Any] = {"rates": [], "norms": [], "error": None}
    try:
        for step in range(case.steps):
            Infinite.on = step in case.infinite and distributed.rank() == distributed.world_size() - 1
            for micro in range(ACCUMULATION):
                generator = torch.Generator().manual_seed(100 * step + 10 * micro + distributed.rank())
                rows = torch.randn(MICRO, 8, generator=generator).to(under.device, next(net.parameters()).dtype)
                under.backward(under(rows) * case.factor)
                under.step()
            readings = engine.readings(under)
            seen["rates"].append(next(iter(readings.values())))
            seen["norms"].append(readings.get("train/grad_norm"))
            watch.after_step()
            if step % 2 or step == case.steps - 1:
                watch.check()
    except NonFiniteLossError as error:
        seen["error"] = str(error)
    seen |= {"global_steps": under.global_steps, "skipped_steps": under.skipped_steps}
    held = [getattr(p, "ds_tensor", p).detach().float() for p in under.module.parameters()]
    seen["finite"] = all(bool(part.isfinite().all()) for part in held)
    engine.stop_engine(under)
    return seen


def main(out: str) -> None:
    get_accelerator().is_fp16_supported = lambda: True  # DeepSpeed refuses it on a CPU, where torch computes it
    distributed.start()
    distributed.start_logging()
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    results = {}
    for name, case in CASES.items():
        distributed.info(f"case {name}")
        results[name] = distributed.gather(run(case))
    if distributed.is_main():
        Path(out).write_text(json.dumps(results))
    distributed.stop()
    distributed.leave(0)  # as a run does: threads of gloo can abort Python's own end


if __name__ == "__main__":
    main(sys.argv[-1])
