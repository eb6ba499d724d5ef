"""Start DeepSpeed's engine with our parameter groups, read what it knows, and tear it down."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from ds_trainer import distributed
from ds_trainer.engine_file import zero_stage
from ds_trainer.optim import Group, Hyperparameters, as_torch, build_optimizer

Engine = Any
"""`deepspeed.DeepSpeedEngine`; DeepSpeed has no types of its own."""


def start_engine(
    model: nn.Module,
    groups: Sequence[Group],
    config: Mapping[str, Any],
    base: Hyperparameters,
    lr_factor: Callable[[int], float],
) -> Engine:
    """Hand the model to DeepSpeed.

    An `optimizer` block of the resolved engine file builds that optimizer over our groups; without one, torch AdamW is
    handed over. A `scheduler` block wins over `lr_factor`, the factor on every group's rate by optimizer step.
    """
    import deepspeed

    model.train()  # from_pretrained leaves it in evaluation mode, without dropout, and DeepSpeed leaves it there
    own_optimizer = "optimizer" in config
    engine, *_ = deepspeed.initialize(
        model=model,
        config=dict(config),
        optimizer=None if own_optimizer else build_optimizer(groups, base),
        model_parameters=as_torch(groups, base) if own_optimizer else None,
        lr_scheduler=None
        if "scheduler" in config
        else lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lr_factor),
    )
    engine.clip_fp32_gradients = partial(_clip_and_keep_norm, engine)
    return engine


def set_rates(engine: Engine, groups: Sequence[Group]) -> None:
    """Have a resumed engine go on with the recipe's rates: a checkpoint brings those of the run that wrote it."""
    scheduler = engine.lr_scheduler
    if not isinstance(scheduler, torch.optim.lr_scheduler.LambdaLR):
        return
    scheduler.base_lrs = [group.learning_rate for group in groups]
    factor = scheduler.lr_lambdas[0](scheduler.last_epoch)
    for own, rate in zip(scheduler.optimizer.param_groups, scheduler.base_lrs, strict=True):
        own["initial_lr"], own["lr"] = rate, rate * factor


def _clip_and_keep_norm(engine: Engine) -> None:
    """What the engine does without ZeRO in fp32, except that it forgets the norm."""
    from deepspeed.runtime.utils import clip_grad_norm_

    norm = clip_grad_norm_(parameters=engine.module.parameters(), max_norm=engine.gradient_clipping(), mpu=engine.mpu)
    engine._global_grad_norm = float(norm)


def readings(engine: Engine) -> dict[str, float]:
    """Every group's rate, gradient norm, loss scale, skipped steps: host values, at no synchronisation of ours."""
    found = {
        f"train/lr/{group.get('name', index)}": group["lr"] for index, group in enumerate(engine.optimizer.param_groups)
    }
    norm = engine.get_global_grad_norm()
    if norm is not None:
        found["train/grad_norm"] = float(norm)
    found["train/loss_scale"] = float(engine._get_optimizer_loss_scale() or 1.0)
    found["train/skipped_steps"] = engine.skipped_steps
    return found


def stop_engine(engine: Engine) -> None:
    """Release hooks and buffers, so that the next phase may start an engine of its own."""
    engine.destroy()
    distributed.give_back_freed_memory()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def bytes_per_rank(trained: int, frozen: int, config: Mapping[str, Any], world: int) -> dict[str, int]:
    """What a rank holds of parameters, gradients and Adam's states, by ZeRO stage; activations and buffers are extra.

    In mixed precision the 2-byte parameters have a 4-byte master copy, which goes with the optimizer's states.
    """
    stage = zero_stage(dict(config))
    mixed = any(config.get(kind, {}).get("enabled") for kind in ("bf16", "bfloat16", "fp16"))
    width = 2 if mixed else 4
    shares = [world if stage >= from_stage else 1 for from_stage in (3, 2, 1)]
    sizes = {
        "parameters": (trained + frozen) * width // shares[0],
        "gradients": trained * width // shares[1],
        "optimizer": trained * (12 if mixed else 8) // shares[2],
    }
    return sizes | {"total": sum(sizes.values())}
