"""Start DeepSpeed's engine with our parameter groups, or to check an engine file; read its rates and norms; stop it."""

from __future__ import annotations

import copy
import logging
import traceback
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from ds_trainer.engine import reshard
from ds_trainer.engine.engine_file import MICRO, STEPS, TRACES, TRAIN, Hyperparameters
from ds_trainer.engine.keys import flag_at, value_at
from ds_trainer.engine.saved_states import dynamic_scale
from ds_trainer.files.redaction import redacted
from ds_trainer.ranks import distributed
from ds_trainer.ranks.failures import UserError
from ds_trainer.recipe.recipe import GroupRule

_LINEAR = torch.nn.functional.linear
"""ZeRO-3 replaces it for good, by a function that rounds otherwise."""
Engine = Any
"""`deepspeed.DeepSpeedEngine`; DeepSpeed has no types of its own."""

_SCALERS = ("loss_scaler", "loss_scale_config")
_WIDTH = 64  # DeepSpeed quantizes weights in groups of 8, and cuts them among the ranks
_MONITORS = {"tensorboard": "tb", "wandb": "wandb", "comet": "comet"}
"""The monitors that need a package, with DeepSpeed's short name."""
_STEPS = 5
"""Steps of a check: enough for a rate to leave the 0 from which a warm-up begins."""
_REFUSALS = (ArithmeticError, AssertionError, AttributeError, ImportError, NotImplementedError, TypeError, ValueError)
"""Neither DeepSpeed nor torch has a type of its own for the errors by which it refuses a file."""


@dataclass
class Group:
    """Parameters that share a rate and a weight decay."""

    name: str
    learning_rate: float
    weight_decay: float
    parameters: dict[str, nn.Parameter] = field(default_factory=dict)

    @property
    def size(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters.values())

    @property
    def identity(self) -> str:
        """A text that changes with the parameters of the group and their order, but not with its rate and decay."""
        names = "\n".join(self.parameters)
        return f"{self.name} ({len(self.parameters)} parameters, {zlib.crc32(names.encode()):08x})"


def parameter_groups(
    model: nn.Module, user_rules: Sequence[GroupRule], other_rules: Iterable[GroupRule], base: Hyperparameters
) -> list[Group]:
    """Freeze and group the model's parameters by the first rule that matches each name.

    The parameters that a technique adds and trains by its own rule (mask scores, exit heads, a projection) are only
    reached by those of the user's rules whose pattern contains their name: "*encoder*" is about the model. Without a
    rule, vectors (biases, norms) get no weight decay. The patterns alone decide which parameters share a group, so that
    a phase can be resumed with other rates and decays. Raises UserError for a user's rule that matches nothing, and for
    a phase in which everything is frozen. Changes `requires_grad` of the model's parameters.
    """
    named = dict(model.named_parameters())
    other_rules = list(other_rules)
    rules_of = {name: _rules_of(name, user_rules, other_rules) for name in named}
    for rule in user_rules:
        if not any(rule in rules for rules in rules_of.values()):
            words = sorted({other.params.strip("*.") for other in other_rules if not other.frozen} - {""})
            added = f"; what techniques add is reached by patterns with its name: {', '.join(words)}" if words else ""
            some = ", ".join([*named][:4])
            raise UserError(f'groups: "{rule.params}" matches no parameter of the model; some are: {some}, ...{added}')
    groups: dict[tuple[str, bool], Group] = {}
    for name, parameter in named.items():
        rule = next(iter(rules_of[name]), GroupRule(params="*"))
        parameter.requires_grad_(not rule.frozen)
        if rule.frozen:
            continue
        rate = base.lr if rule.learning_rate is None else rule.learning_rate
        exempt = rule.weight_decay is None and parameter.ndim <= 1
        decay = 0.0 if exempt else base.weight_decay if rule.weight_decay is None else rule.weight_decay
        label = rule.params if rule.params != "*" else "weights" if parameter.ndim > 1 else "vectors"
        groups.setdefault((label, exempt), Group(label, rate, decay)).parameters[name] = parameter
    if not groups:
        raise UserError("groups: every parameter is frozen: nothing would be trained")
    return list(groups.values())


def _rules_of(name: str, user_rules: Sequence[GroupRule], other_rules: Sequence[GroupRule]) -> list[GroupRule]:
    """Return the rules that reach a parameter, the deciding one first."""
    others = [rule for rule in other_rules if fnmatchcase(name, rule.params)]
    words = {rule.params.strip("*.") for rule in others if not rule.frozen}  # of a parameter that a technique trains
    users = [rule for rule in user_rules if fnmatchcase(name, rule.params)]
    return [rule for rule in users if all(word in rule.params for word in words)] + others


def as_torch(groups: Sequence[Group], base: Hyperparameters) -> list[dict[str, Any]]:
    """Return the groups as torch and DeepSpeed optimizers take them.

    A rate equal to the base is not written, for the optimizer to fill it, so that DeepSpeed's Muon keeps its `muon_lr`.
    """
    return [
        {"name": group.name, "params": list(group.parameters.values()), "weight_decay": group.weight_decay}
        | ({} if group.learning_rate == base.lr else {"lr": group.learning_rate})
        for group in groups
    ]


def start_engine(
    model: nn.Module,
    groups: Sequence[Group],
    config: Mapping[str, Any],
    base: Hyperparameters,
    lr_factor: Callable[[int], float],
) -> Engine:
    """Hand the model to DeepSpeed and return its engine, with what DeepSpeed leaves out without ZeRO.

    An `optimizer` block of the resolved engine file builds that optimizer over our groups; without one, torch AdamW is
    handed over. A `scheduler` block wins over `lr_factor`, the factor on every group's rate by optimizer step.
    """
    import deepspeed
    from deepspeed.runtime import compiler, torch_autocast

    compiler.compile = lambda: _compiled_when_called
    # DeepSpeed never resets it: an earlier engine's autocast, also that of a run that failed, would go on under ZeRO
    torch_autocast.TORCH_AUTOCAST_INITIALIZED = False
    _hide_secrets()
    model.train()  # from_pretrained leaves it in evaluation mode, without dropout, and DeepSpeed leaves it there
    in_file = "optimizer" in config
    engine, *_ = deepspeed.initialize(
        model=model,
        config=dict(config),
        # fused: one pass over memory, on the CPU too
        optimizer=None if in_file else torch.optim.AdamW(as_torch(groups, base), **asdict(base), fused=True),
        model_parameters=as_torch(groups, base) if in_file else None,
        lr_scheduler=None if "scheduler" in config else partial(LambdaLR, lr_lambda=lr_factor),
    )
    if not engine.zero_optimization():
        _mend_without_zero(engine)
    return engine


def _compiled_when_called(function: Callable[..., Any]) -> Callable[..., Any]:
    """Do what `torch.compile` does when the function is first called.

    Whatever the optimizer, DeepSpeed loads Muon's functions under that decorator, which takes seconds of every start.
    """
    compiled = cache(lambda: torch.compile(function))
    return lambda *args, **kwargs: compiled()(*args, **kwargs)


def _hide_secrets() -> None:
    """Remove keys and tokens from DeepSpeed's log, which prints the whole engine file at a start."""
    from deepspeed.utils import logger

    for handler in logger.handlers:
        handler.addFilter(_redact)  # which does nothing the second time


def _redact(record: logging.LogRecord) -> bool:
    record.msg, record.args = redacted(record.getMessage()), None
    return True


class OptimizerSettings:
    """The hyperparameters that an engine has at this moment: rates, decays, betas, clipping, rules of the loss scale.

    Loading a checkpoint overwrites them with those of the run that wrote it. A snapshot taken before lets the engine go
    on with the settings of the files. The place in the schedule and the loss scale itself are states, and stay as the
    checkpoint has them.
    """

    def __init__(self, engine: Engine) -> None:
        optimizer = engine.optimizer
        self._groups = [_settings_of(group) for group in optimizer.param_groups]
        # what DeepSpeed's wrappers of optimizers load from a checkpoint beside the groups
        names = {*_SCALERS, "dynamic_loss_scale", "clip_grad"} & vars(optimizer).keys()
        self._wrapper = {name: copy.copy(vars(optimizer)[name]) for name in names}

    def restore(self, engine: Engine) -> None:
        """Give these settings to an engine that has loaded a checkpoint."""
        optimizer, scheduler = engine.optimizer, engine.lr_scheduler
        for group, settings in zip(optimizer.param_groups, self._groups, strict=True):
            group.update(settings)
        if isinstance(scheduler, LambdaLR):
            scheduler.base_lrs = [group["initial_lr"] for group in optimizer.param_groups]
            for group in optimizer.param_groups:
                group["lr"] = group["initial_lr"] * scheduler.lr_lambdas[0](scheduler.last_epoch)
        elif scheduler.last_batch_iteration >= 0:  # else every step so far was skipped
            scheduler.step(scheduler.last_batch_iteration)  # the rates of DeepSpeed's are functions of the step
        for name, value in self._wrapper.items():
            state = dynamic_scale(vars(vars(optimizer)[name])) if name in _SCALERS else None
            setattr(optimizer, name, value)
            reshard.set_scaler(optimizer, state)  # the scale itself goes on where the checkpoint had it


def _settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a group's settings, without its parameters and the step count that some of DeepSpeed's optimizers keep."""
    settings = {key: value for key, value in group.items() if key not in ("params", "step")}
    return {key: tuple(value) if isinstance(value, list) else value for key, value in settings.items()}


def _mend_without_zero(engine: Engine) -> None:
    """Add to an engine without ZeRO what DeepSpeed only does with ZeRO.

    That is: scale the loss of fp16, keep the gradient norm of fp32, and notice the steps that autocast's scaler skips.
    """
    if engine.fp16_enabled():
        engine.backward = partial(_scaled_backward, engine, engine.backward)
    elif not engine.bfloat16_enabled():
        if engine.gradient_clipping() > 0:
            engine.clip_fp32_gradients = partial(_clip_and_keep_norm, engine)
        else:  # without clipping nothing else would look at the gradients
            engine.optimizer.register_step_pre_hook(partial(_keep_norm, engine))
        if engine.torch_autocast_z0_gradscaler is not None:
            scaler = engine.torch_autocast_z0_gradscaler
            scaler.step = partial(_step_and_note_overflow, scaler, scaler.step)


def _scaled_backward(engine: Engine, backward: Callable[[torch.Tensor], Any], loss: torch.Tensor) -> None:
    """Run backward of the loss times the loss scale, for fp16 without ZeRO.

    DeepSpeed 0.19.8 divides those gradients by the scale, but never multiplies the loss by it (DeepSpeed#8393). The
    hook overwrites the gradient that flows into the loss instead of multiplying it, so that with a release of DeepSpeed
    that does scale, the loss is not scaled twice.
    """
    loss = loss.float() + 0.0  # a new tensor for the hook; half precision does not reach as high as the scale
    factor = engine.optimizer.loss_scale_config.cur_scale / engine.gradient_accumulation_steps()
    loss.register_hook(lambda gradient: torch.full_like(gradient, factor))
    backward(loss)


def _clip_and_keep_norm(engine: Engine) -> None:
    """Clip as the engine does in fp32, and keep the norm, which DeepSpeed drops; it stays on the device."""
    from deepspeed.runtime.utils import clip_grad_norm_

    engine._global_grad_norm = clip_grad_norm_(
        parameters=engine.module.parameters(), max_norm=engine.gradient_clipping(), mpu=engine.mpu
    )


def _keep_norm(engine: Engine, optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Compute the gradient norm just before a step without clipping; it stays on the device."""
    gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    scale = getattr(optimizer, "grad_scale", None)  # a fused optimizer divides by torch's loss scale itself
    engine._global_grad_norm = torch.nn.utils.get_total_norm(gradients) / (1.0 if scale is None else scale)


def _step_and_note_overflow(scaler: Any, step: Callable[..., Any], optimizer: Any) -> None:
    """Step by torch's scaler; DeepSpeed would count its skipped steps as taken, and move the schedule on."""
    step(optimizer)  # which waits for the device itself, to know whether to skip
    optimizer.overflow = any(overflow.item() for overflow in scaler._found_inf_per_device(optimizer).values())


def loss_scale(engine: Engine) -> float:
    """Return the factor on the loss at the next step; 1.0 in bf16 and fp32. Waits for the device under autocast."""
    scalers = (engine.torch_autocast_z0_gradscaler, getattr(engine.optimizer, "torch_autocast_gradscaler", None))
    scaler = next((scaler for scaler in scalers if scaler is not None), None)
    return float(scaler.get_scale() if scaler else engine._get_optimizer_loss_scale() or 1.0)


def readings(engine: Engine) -> dict[str, float]:
    """Return every group's rate, gradient norm, loss scale and skipped steps, on the host; may wait for the device."""
    from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer

    values = {
        f"train/lr/{group.get('name', index)}": group["lr"] for index, group in enumerate(engine.optimizer.param_groups)
    }
    norm, scale = engine.get_global_grad_norm(), loss_scale(engine)
    if norm is not None:
        scaled = isinstance(engine.optimizer, FP16_UnfusedOptimizer)  # the only one whose norm includes the loss scale
        values["train/grad_norm"] = float(norm) / scale if scaled else float(norm)
    return values | {"train/loss_scale": scale, "train/skipped_steps": engine.skipped_steps}


def stop_engine(engine: Engine) -> None:
    """Release hooks and buffers, so that the next phase may start its engine; collective.

    A program has to ask for the summary of the engine file's `comms_logger`: it is printed here.
    """
    import deepspeed

    if engine.config.get("comms_logger", {}).get("enabled"):
        deepspeed.comm.log_summary()
    engine.destroy()
    torch.nn.functional.linear = _LINEAR
    distributed.give_back_freed_memory()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def check_with_deepspeed(config: Mapping[str, Any], base: Hyperparameters, rates: Sequence[float]) -> None:
    """Start and stop an engine by a resolved file before a run writes anything; collective.

    DeepSpeed makes its checks all over the start of an engine, so one is started over a small stand-in for the model,
    with a parameter group for each of the `rates`. Only the start of training shows what depends on the model itself
    (modules that the file names, memory), or on a disk or a server (NVMe, the log in to a monitor).

    Raises UserError with DeepSpeed's words where it refuses, and for a scheduler that would silently undo the groups'
    rates by setting one on all of them.
    """
    layers = nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH) for _ in rates))
    groups = [
        Group(str(index), rate, base.weight_decay, dict(layer.named_parameters()))
        for index, (rate, layer) in enumerate(zip(rates, layers, strict=True))
    ]
    plain = copy.deepcopy({key: value for key, value in config.items() if key not in TRACES})
    plain[TRAIN] = config[MICRO] * config[STEPS] * distributed.world_size()  # a dry run may be for other ranks
    for part in ("offload_optimizer", "offload_param"):
        if value_at(plain, f"zero_optimization.{part}.device") == "nvme":
            plain["zero_optimization"][part]["device"] = "cpu"  # this must not write to a disk
    level_before = logging.root.manager.disable
    logging.disable(max(level_before, logging.WARNING))  # the start of training prints the same warnings
    try:
        from deepspeed.monitor import utils

        for block, name in _MONITORS.items():
            if flag_at(config, f"{block}.enabled"):
                getattr(utils, f"check_{name}_availability")()
        engine = start_engine(layers, groups, plain, base, lambda step: 1.0)
        for _ in range(_STEPS if "scheduler" in config else 0):
            engine.lr_scheduler.step()
        rates_then = {group["lr"] for group in engine.optimizer.param_groups}
        stop_engine(engine)
        if len(rates_then) < len(set(rates)):
            raise UserError(
                f"scheduler.type {config['scheduler']['type']} sets one rate on parameter groups with different ones "
                f"({', '.join(map(str, rates))}): remove the scheduler block and use the recipe's lr_scheduler_type, "
                f"or write one rate for each group, e.g. [{', '.join(map(str, rates))}]"
            )
    except _REFUSALS as error:
        raised_in = traceback.extract_tb(error.__traceback__)[-1].filename
        if Path(raised_in).is_relative_to(Path(__file__).parents[1]):
            raise  # a bug of ours, which needs its traceback
        reason = str(error) or repr(error)
        raise UserError(f"DeepSpeed refuses the engine file (--deepspeed_config): {reason}") from error
    finally:
        logging.disable(level_before)
