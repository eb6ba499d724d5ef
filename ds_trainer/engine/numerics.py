"""Notice optimizer steps that did no good: skipped ones, and those whose gradients spoilt the weights.

DeepSpeed 0.19.8 skips a step whose gradients are not finite in fp16, and with ZeRO in bf16 and fp32 too: weights and
schedule stay where they were, `global_steps` goes on. It takes such a step in fp32 and bf16 autocast without ZeRO,
with `bf16.check_grad_overflow` false (stages 1 and 2), and with `zero_optimization.compute_grad_norm` false in fp32.

Every decision is the same on every rank: DeepSpeed reduces what it skips by, and a check here is one small reduction.
Does not look at the loss: `report.py` does.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ds_trainer.engine.engine import Engine, loss_scale
from ds_trainer.ranks import distributed
from ds_trainer.ranks.failures import NonFiniteLossError


class StepWatch:
    """Watches the steps of one engine. Make it after the engine has resumed, which may replace its loss scaler."""

    def __init__(self, engine: Engine, phase: str, max_skipped: int) -> None:
        self._engine, self._phase, self._max_skipped = engine, phase, max_skipped
        self._in_a_row: list[int] = []
        self._untold: list[int] = []
        self._taken: list[tuple[int, Tensor | float | None]] = []
        self._spoilt: int | None = None
        scaler = _dynamic_scaler(engine)
        if scaler is not None:
            scaler.raise_error_at_min_scale = False  # a bare Exception in the middle of the step; `after_step` tells
        self._at_floor = _is_at_floor(engine)

    def after_step(self) -> None:
        """Note the optimizer step just made; nothing leaves the device.

        A skipped one is told at once, but for those by which a loss scale finds its place: those wait for a check.
        Raises NonFiniteLossError at the `max_skipped`th skipped step in a row, or where the loss scale of fp16 should
        fall and must not.
        """
        step = int(self._engine.global_steps)
        if self._engine.was_step_applied():
            self._in_a_row = []
            self._taken.append((step, self._engine.get_global_grad_norm()))
        else:
            self._in_a_row.append(step)
            self._untold.append(step)
            if self._at_floor or len(self._in_a_row) >= self._max_skipped:
                raise NonFiniteLossError(self._told_skipped())
            if not _scales(self._engine):
                self._tell_skipped()
        self._at_floor = _is_at_floor(self._engine)

    def check(self) -> None:
        """Say which steps were skipped since the last check; raise NonFiniteLossError for a spoilt one; collective.

        For a flush, and before a checkpoint is saved.
        """
        if self.spoilt_step() is not None:
            raise NonFiniteLossError(self._told_spoilt())
        if self._untold:
            self._tell_skipped()

    def _tell_skipped(self) -> None:
        tell = distributed.info if _scales(self._engine) else distributed.warn
        tell(f"{self._phase}: {self._skipped(self._untold)}{self._scale_now()}")
        self._untold = []

    def spoilt_step(self) -> int | None:
        """The first step, counted from 1, that was taken with gradients that are not finite; collective.

        With a norm that DeepSpeed was told not to compute, the last step at which the weights are looked at.
        """
        taken, self._taken = self._taken, []
        if self._spoilt is None and taken:
            norms = [norm for _, norm in taken]
            if any(norm is None for norm in norms):
                taken, norms = taken[-1:], [_largest_weight(self._engine)]
            bad = _non_finite(norms, self._engine)
            self._spoilt = next((step for (step, _), share in zip(taken, bad, strict=True) if share), None)
        return self._spoilt

    def _skipped(self, steps: list[int]) -> str:
        many = len(steps) > 1
        return (
            f"optimizer step{'s' if many else ''} {_ranges(steps)} {'were' if many else 'was'} skipped, "
            f"the gradients are not finite in {_precision(self._engine)}"
        )

    def _scale_now(self) -> str:
        return f"; the loss scale is now {loss_scale(self._engine):g}" if _scales(self._engine) else ""

    def _told_skipped(self) -> str:
        """Of the steps in a row that end the run."""
        row, engine = self._in_a_row, self._engine
        scale = f", at a loss scale of {loss_scale(engine):g}" if _scales(engine) else ""
        limit, start = f"max_skipped_steps is {self._max_skipped}", ""
        if self._at_floor:
            limit = "it is fp16.min_loss_scale and cannot fall"
        elif engine.fp16_enabled() and engine.dynamic_loss_scale():
            start = "If the scale only started too high, lower fp16.initial_scale_power or raise max_skipped_steps. "
        return (
            f"{self._phase}: {self._skipped(row)}{scale}; {limit}. {_cure(engine)} {start}"
            f"The weights are those of step {row[0] - 1}, and checkpoints are as they were"
        )

    def _told_spoilt(self) -> str:
        engine, step, precision = self._engine, self._spoilt, _precision(self._engine)
        found = f"the gradients of step {step} are not finite in {precision}, and it was taken: the weights are lost"
        if engine.get_global_grad_norm() is None:
            found = f"at step {step} the weights are not finite in {precision}; no gradient norm tells since when"
        skips = ""
        if engine.bfloat16_enabled():
            skips = "With bf16.check_grad_overflow true such steps are skipped. "
        elif not engine.zero_optimization():
            skips = "With zero_optimization.stage 1 such steps are skipped. "
        return (
            f"{self._phase}: {found}. {_cure(engine)} {skips}"
            f"Checkpoints are as they were: --resume goes on from the last"
        )


def _non_finite(norms: list[Any], engine: Engine) -> list[float]:
    """By norm, the share of the ranks on which it is not finite; -1 is DeepSpeed's own word for that."""
    values = torch.stack([torch.as_tensor(norm, device=engine.device).float().reshape(()) for norm in norms])
    return distributed.mean((~values.isfinite() | (values < 0)).float()).tolist()


def _largest_weight(engine: Engine) -> Tensor:
    """The largest of all weights that this rank holds, in absolute value; NaN where one is."""
    held = [getattr(p, "ds_tensor", p).detach() for p in engine.module.parameters() if p.requires_grad]
    return torch.stack([part.abs().max().float() for part in held if part.numel()]).max()


def _dynamic_scaler(engine: Engine) -> Any:
    """DeepSpeed's own loss scaler with ZeRO; None where the scale is fixed, or not its own."""
    scaler = getattr(engine.optimizer, "loss_scaler", None)
    return scaler if scaler is not None and scaler.dynamic else None


def _is_at_floor(engine: Engine) -> bool:
    """Whether fp16's loss scale could not be lowered at an overflow: it is the smallest, and no hysteresis is left."""
    scaler, config = _dynamic_scaler(engine), getattr(engine.optimizer, "loss_scale_config", None)
    if scaler is not None:
        lowers_now = 1 in (scaler.delayed_shift, scaler.cur_hysteresis)
        return bool(lowers_now and scaler.cur_scale <= scaler.min_scale)
    # without ZeRO DeepSpeed has no hysteresis
    return bool(config and config.dynamic_loss_scale and config.cur_scale <= config.min_loss_scale)


def _scales(engine: Engine) -> bool:
    """Whether the loss is scaled at all."""
    return bool(engine.fp16_enabled()) or _autocasts_in_fp16(engine)


def _autocasts_in_fp16(engine: Engine) -> bool:
    return bool(engine.torch_autocast_enabled()) and engine.torch_autocast_dtype() == torch.float16


def _precision(engine: Engine) -> str:
    if engine.torch_autocast_enabled():
        return f"torch_autocast ({'fp16' if _autocasts_in_fp16(engine) else 'bf16'})"
    return "fp16" if engine.fp16_enabled() else "bf16" if engine.bfloat16_enabled() else "fp32"


def _cure(engine: Engine) -> str:
    """What to change, in whole sentences."""
    calmer = "Lower learning_rate or lengthen warmup_steps"
    if _autocasts_in_fp16(engine):
        return f'{calmer}, or write torch_autocast.dtype "bfloat16", or fp16 or bf16 in its place.'
    if not engine.fp16_enabled():
        return f"{calmer}, and look at the data of that step, and at losses without a gradient there, as of sqrt at 0."
    if not engine.dynamic_loss_scale():
        return f"fp16.loss_scale is fixed at {engine.loss_scale():g}: write 0, for one that adapts, or use bf16."
    above_1 = engine.dynamic_loss_scale_args()["min_scale"] > 1
    return f"{calmer}, or use bf16{', or lower fp16.min_loss_scale' if above_1 else ''}."


def _ranges(steps: list[int]) -> str:
    """Rising numbers as they are said: "1-17, 20"."""
    spans: list[list[int]] = []
    for step in steps:
        if spans and spans[-1][1] == step - 1:
            spans[-1][1] = step
        else:
            spans.append([step, step])
    return ", ".join(f"{first}-{last}" if last > first else str(first) for first, last in spans)
