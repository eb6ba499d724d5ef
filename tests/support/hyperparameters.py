"""A tiny net that is trained, saved, and gone on with under other hyperparameters, with every kind of optimizer.

Part of `resume_matrix.py`, which has the process group.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from support.launching import chosen
from torch import nn

from ds_trainer.engine import engine
from ds_trainer.engine.optim import Hyperparameters, parameter_groups
from ds_trainer.ranks import distributed
from ds_trainer.recipe.recipe import GroupRule

OLD, NEW = Hyperparameters(0.01, 0.1), Hyperparameters(0.02, 0.0, (0.8, 0.98), 1e-6)
SAVED_AT, STEPS = 3, 5


@dataclass(frozen=True)
class Case:
    """What the engine file says, and what it says in the run that goes on from a checkpoint, beside the recipe."""

    stage: int = 0
    words: dict[str, Any] = field(default_factory=dict)
    new_words: dict[str, Any] = field(default_factory=dict)


def _block(kind: str, **params: Any) -> dict[str, Any]:
    return {"optimizer": {"type": kind, "params": params}, "zero_allow_untested_optimizer": True}


def _schedule(kind: str, **params: Any) -> dict[str, Any]:
    return {"scheduler": {"type": kind, "params": params}}


_FP16, _BF16 = {"fp16": {"enabled": True, "initial_scale_power": 8}}, {"bf16": {"enabled": True}}
_WINDOW = {"fp16": {"enabled": True, "initial_scale_power": 4, "loss_scale_window": 7}}
_ADAM = {"lr": 0.02, "weight_decay": 0.0, "betas": [0.8, 0.98], "eps": 1e-6}
_WARMUP = {"total_num_steps": 9, "warmup_num_steps": 4, "warmup_type": "linear"}
_CYCLE = {"cycle_min_lr": 1e-3, "cycle_first_step_size": 4}
CASES = {
    **{f"torch AdamW, stage {stage}": Case(stage) for stage in range(4)},
    **{f"fp16, stage {stage}": Case(stage, _FP16, _WINDOW) for stage in (0, 1, 3)},
    **{f"bf16, stage {stage}": Case(stage, _BF16, _BF16) for stage in (0, 2)},
    **{
        f"AdamW of DeepSpeed, stage {stage}": Case(stage, _block("AdamW", lr=0.01), _block("AdamW", **_ADAM))
        for stage in (0, 2, 3)
    },
    "SGD": Case(1, _block("SGD", lr=0.01, momentum=0.5), _block("SGD", lr=0.02, momentum=0.9, nesterov=True)),
    "WarmupDecayLR": Case(
        2,
        _schedule("WarmupDecayLR", warmup_max_lr=0.01, **_WARMUP),
        _schedule("WarmupDecayLR", warmup_max_lr=0.02, **_WARMUP),
    ),
    "OneCycle": Case(
        0, _schedule("OneCycle", cycle_max_lr=0.01, **_CYCLE), _schedule("OneCycle", cycle_max_lr=0.02, **_CYCLE)
    ),
}
_MORE = {f"torch AdamW, stage {stage}" for stage in (1, 2)} | {"bf16, stage 0"}
_MORE |= {f"AdamW of DeepSpeed, stage {stage}" for stage in (0, 2)}
CASES = {name: CASES[name] for name in chosen(CASES, lambda name: name not in _MORE)}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(6, 5), nn.Linear(5, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.head(torch.tanh(self.body(x))).float() - 1).pow(2).mean()


def started(case: Case, words: dict[str, Any], base: Hyperparameters) -> engine.Engine:
    net = Net()
    # a group of a weight and a vector where neither decays, and two where one does
    groups = parameter_groups(net, [GroupRule(params="head.*")], [], base)
    zero = {"stage": case.stage, "stage3_param_persistence_threshold": 0}
    config = {"train_micro_batch_size_per_gpu": 4, "gradient_clipping": 1.0, "zero_optimization": zero} | words
    config["gradient_clipping"] = 1.0 if base is OLD else 0.5
    return engine.start_engine(net, groups, config, base, lambda step: 0.9**step)


def train(running: engine.Engine, until: int) -> list[torch.Tensor]:
    """What this rank holds of the weights after the steps."""
    while running.global_steps < until:
        generator = torch.Generator().manual_seed(10 * running.global_steps + distributed.rank())
        rows = torch.randn(4, 6, generator=generator).to(next(running.module.parameters()).dtype)
        running.backward(running(rows))
        running.step()
    return [getattr(p, "ds_tensor", p).detach().clone() for p in running.module.parameters()]


def settings(running: engine.Engine) -> list[dict[str, Any]]:
    """Every group's hyperparameters but the rate; JSON values."""
    kept = [{k: v for k, v in g.items() if k not in ("params", "step", "lr")} for g in running.optimizer.param_groups]
    return [{k: list(v) if isinstance(v, tuple) else v for k, v in group.items()} for group in kept]


def gone_on(folder: Path, case: Case, words: dict[str, Any], base: Hyperparameters) -> dict[str, Any]:
    """Go on from the checkpoint with the settings of `words` and `base`."""
    running = started(case, words, base)
    fresh, in_files = settings(running), engine.OptimizerSettings(running)
    running.load_checkpoint(str(folder), tag="saved")
    loaded = settings(running)
    before = engine.OptimizerSettings(running)
    in_files.restore(running)
    told = engine.OptimizerSettings(running).changes_since(before)
    found = {"fresh": fresh, "loaded": loaded, "now": settings(running), "told": told}
    found["rates"] = [group["lr"] for group in running.optimizer.param_groups]
    found["clip"] = getattr(running.optimizer, "clip_grad", None)
    scaler = getattr(running.optimizer, "loss_scale_config", None) or getattr(running.optimizer, "loss_scaler", None)
    found["scaler"] = [getattr(scaler, name, None) for name in ("scale_window", "cur_scale", "cur_iter")]
    found["weights"] = train(running, STEPS)
    found["last_rate"] = running.optimizer.param_groups[0]["lr"]
    engine.stop_engine(running)
    return found


def run(case: Case, folder: Path) -> dict[str, Any]:
    running = started(case, case.words, OLD)
    train(running, SAVED_AT)
    running.save_checkpoint(str(folder), tag="saved", save_latest=False)
    whole = train(running, STEPS)
    engine.stop_engine(running)
    same, other = gone_on(folder, case, case.words, OLD), gone_on(folder, case, case.new_words, NEW)
    weights = same.pop("weights"), other.pop("weights")
    bits = [all(torch.equal(*pair) for pair in zip(whole, found, strict=True)) for found in weights]
    return {"same": same | {"bits": bits[0]}, "other": other | {"bits": bits[1]}}


def run_all(folder: Path) -> dict[str, Any]:
    """By case, what rank 0 found."""
    get_accelerator().is_fp16_supported = lambda: True  # DeepSpeed refuses it on a CPU, where torch computes it
    return {name: run(case, folder / name.replace(" ", "-")) for name, case in CASES.items()}
