"""Start DeepSpeed's engine with our parameter groups, read what it knows, and tear it down."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from ds_trainer.engine import universal
from ds_trainer.engine.engine_file import zero_stage
from ds_trainer.engine.optim import Group, Hyperparameters, as_torch, build_optimizer
from ds_trainer.engine.universal_form import SCALER
from ds_trainer.files.redaction import redacted
from ds_trainer.ranks import distributed

Engine = Any
"""`deepspeed.DeepSpeedEngine`; DeepSpeed has no types of its own."""

_SCALERS = ("loss_scaler", "loss_scale_config")
_WITH_SETTINGS = (*_SCALERS, "dynamic_loss_scale", "clip_grad")
"""What DeepSpeed's wrappers of optimizers take over from a checkpoint beside the groups."""


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

    _hide_secrets()
    model.train()  # from_pretrained leaves it in evaluation mode, without dropout, and DeepSpeed leaves it there
    own_optimizer = "optimizer" in config
    with distributed.building_kernels():
        engine, *_ = deepspeed.initialize(
            model=model,
            config=dict(config),
            optimizer=None if own_optimizer else build_optimizer(groups, base),
            model_parameters=as_torch(groups, base) if own_optimizer else None,
            lr_scheduler=None
            if "scheduler" in config
            else lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lr_factor),
        )
    if not engine.zero_optimization():
        _mend_without_zero(engine)
    return engine


def _hide_secrets() -> None:
    """Have DeepSpeed's log, which prints the whole engine file at a start, go without the keys in it."""
    from deepspeed.utils import logger

    for handler in logger.handlers:
        if _redact not in handler.filters:
            handler.addFilter(_redact)


def _redact(record: logging.LogRecord) -> bool:
    record.msg, record.args = redacted(record.getMessage()), None
    return True


class OptimizerSettings:
    """What the recipe and the engine file say of the optimizer, as an engine has it before it loads a checkpoint.

    A checkpoint brings what the run had that wrote it: rates, decays, betas, clipping, how the loss scale moves. Its
    place in the schedule and its loss scale are states, and stay.
    """

    def __init__(self, engine: Engine) -> None:
        optimizer, scheduler = engine.optimizer, engine.lr_scheduler
        self._groups = [_settings_of(group) for group in optimizer.param_groups]
        self._own = {name: copy.copy(value) for name, value in vars(optimizer).items() if name in _WITH_SETTINGS}
        self._schedule = {name: value for name, value in vars(scheduler).items() if name in _scheduler_params(engine)}

    def put_back(self, engine: Engine) -> str:
        """Have a resumed engine go on with these settings; gives what differs from the checkpoint's, in words."""
        optimizer = engine.optimizer
        before = [_settings_of(group) for group in optimizer.param_groups]
        for group, settings in zip(optimizer.param_groups, self._groups, strict=True):
            group.update(settings)
        self._renew_rates(engine, before)
        changes: dict[str, list[str]] = {}
        for index, (group, old) in enumerate(zip(optimizer.param_groups, before, strict=True)):
            rate = "initial_lr" if "initial_lr" in group else "lr"  # "lr" alone also moves with the schedule
            for key, value in _settings_of(group).items():
                if key in old and old[key] != value and (key == rate or key not in ("lr", "initial_lr")):
                    change = f"{'learning rate' if key == rate else key} {old[key]} -> {value}"
                    changes.setdefault(change, []).append(str(group.get("name", index)))
        everywhere = len(self._groups)
        told = [
            change if len(names) == everywhere else f"{change} ({', '.join(dict.fromkeys(names))})"
            for change, names in changes.items()
        ]
        clip = getattr(optimizer, "clip_grad", None)
        self._renew_own(optimizer)
        if clip != getattr(optimizer, "clip_grad", None):
            told.append(f"gradient_clipping {clip} -> {optimizer.clip_grad}")
        return "; ".join(told)

    def _renew_rates(self, engine: Engine, before: Sequence[Mapping[str, Any]]) -> None:
        """Set the rates that the schedule has at its place."""
        scheduler, groups = engine.lr_scheduler, engine.optimizer.param_groups
        if isinstance(scheduler, torch.optim.lr_scheduler.LambdaLR):
            scheduler.base_lrs = [group["initial_lr"] for group in groups]
            for group in groups:
                group["lr"] = group["initial_lr"] * scheduler.lr_lambdas[0](scheduler.last_epoch)
        elif hasattr(scheduler, "last_batch_iteration"):
            if scheduler.last_batch_iteration >= 0:  # else every step so far was skipped
                scheduler.step(scheduler.last_batch_iteration)  # one of DeepSpeed's, a function of its step
        else:  # torch's others go from rate to rate, and keep their settings in their state
            vars(scheduler).update(self._schedule)
            for group, old in zip(groups, before, strict=True):
                factor = old["lr"] / old["initial_lr"] if old["initial_lr"] else 1.0
                group["lr"] = group["initial_lr"] * factor
                cycled = ("betas", "momentum") if "base_momentum" in group else ()
                group.update({key: old[key] for key in cycled if key in old})

    def _renew_own(self, optimizer: Any) -> None:
        """Set what DeepSpeed's wrapper keeps beside the groups; a dynamic loss scale goes on where it was."""
        for name, value in self._own.items():
            state = vars(vars(optimizer)[name]) if name in _SCALERS else {}
            setattr(optimizer, name, value)
            if state.get("dynamic", state.get("dynamic_loss_scale")):
                universal.set_scaler(optimizer, {key: state[key] for key in SCALER if key in state})


def _settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """What is set in an optimizer's group: not its parameters, nor the steps that some of DeepSpeed's count there."""
    kept = {key: value for key, value in group.items() if key not in ("params", "step")}
    return {key: tuple(value) if isinstance(value, list) else value for key, value in kept.items()}


def _scheduler_params(engine: Engine) -> Mapping[str, Any]:
    return (engine.scheduler_params() if engine.scheduler_name() else None) or {}


def _mend_without_zero(engine: Engine) -> None:
    """Have DeepSpeed do without ZeRO what it does with it: scale the loss, keep the norm, see what was skipped."""
    if engine.fp16_enabled():
        engine.backward = partial(_scaled_backward, engine, engine.backward)
    elif not engine.bfloat16_enabled():
        if engine.gradient_clipping() > 0:
            engine.clip_fp32_gradients = partial(_clip_and_keep_norm, engine)
        else:
            engine.optimizer.register_step_pre_hook(partial(_keep_norm, engine))
        if engine.torch_autocast_z0_gradscaler is not None:
            scaler = engine.torch_autocast_z0_gradscaler
            scaler.step = partial(_step_and_tell_overflow, scaler, scaler.step)


def _scaled_backward(engine: Engine, backward: Callable[[torch.Tensor], Any], loss: torch.Tensor) -> None:
    """Backward of the loss times the loss scale, for fp16 without ZeRO.

    DeepSpeed 0.19.8 takes the scale off those gradients, but never puts it on (DeepSpeed#8393). The hook sets what
    flows into the loss, whatever DeepSpeed makes of it, so that a release that does scale would not scale twice.
    """
    loss = loss.float() + 0.0  # a tensor of our own for the hook; half precision does not reach the scale
    factor = engine.optimizer.loss_scale_config.cur_scale / engine.gradient_accumulation_steps()
    loss.register_hook(lambda gradient: torch.full_like(gradient, factor))
    backward(loss)


def _clip_and_keep_norm(engine: Engine) -> None:
    """What the engine does without ZeRO in fp32, except that it forgets the norm; which stays on the device."""
    from deepspeed.runtime.utils import clip_grad_norm_

    engine._global_grad_norm = clip_grad_norm_(
        parameters=engine.module.parameters(), max_norm=engine.gradient_clipping(), mpu=engine.mpu
    )


def _keep_norm(engine: Engine, optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Without clipping, without ZeRO and in fp32 nothing else would look at the gradients."""
    gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    scale = getattr(optimizer, "grad_scale", None)  # a fused optimizer takes torch's loss scale off itself
    engine._global_grad_norm = torch.nn.utils.get_total_norm(gradients) / (1.0 if scale is None else scale)


def _step_and_tell_overflow(scaler: Any, step: Callable[..., Any], optimizer: Any) -> None:
    """A step of torch's scaler; DeepSpeed would count those that it skips as taken, and move the schedule on."""
    step(optimizer)  # which waits for the device itself, to know whether to skip
    optimizer.overflow = any(found.item() for found in scaler._found_inf_per_device(optimizer).values())


def loss_scale(engine: Engine) -> float:
    """What the loss is multiplied by, at the next step; 1.0 in bf16 and fp32. Waits for the device under autocast."""
    scalers = (engine.torch_autocast_z0_gradscaler, getattr(engine.optimizer, "torch_autocast_gradscaler", None))
    scaler = next((scaler for scaler in scalers if scaler is not None), None)
    return float(scaler.get_scale() if scaler else engine._get_optimizer_loss_scale() or 1.0)


def readings(engine: Engine) -> dict[str, float]:
    """Every group's rate, gradient norm, loss scale, skipped steps: host values; may wait for the device."""
    from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer

    found = {
        f"train/lr/{group.get('name', index)}": group["lr"] for index, group in enumerate(engine.optimizer.param_groups)
    }
    norm, scale = engine.get_global_grad_norm(), loss_scale(engine)
    if norm is not None:
        with_scale = isinstance(engine.optimizer, FP16_UnfusedOptimizer)  # the only one that leaves it in the norm
        found["train/grad_norm"] = float(norm) / scale if with_scale else float(norm)
    found["train/loss_scale"] = scale
    found["train/skipped_steps"] = engine.skipped_steps
    return found


def stop_engine(engine: Engine) -> None:
    """Release hooks and buffers, so that the next phase may start an engine of its own; collective.

    The `comms_logger` of the engine file prints its summary only where a program asks for it.
    """
    if engine.config.get("comms_logger", {}).get("enabled"):
        import deepspeed

        deepspeed.comm.log_summary()
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
