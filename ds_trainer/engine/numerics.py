"""Watch for optimizer steps whose gradients are not finite: DeepSpeed skips some, and others spoil the weights.

DeepSpeed 0.19.8 skips such a step in fp16, and with ZeRO in bf16 and fp32 too: weights and schedule stay as they were,
and `global_steps` goes on. It takes such a step, and the weights are lost, in fp32 and bf16 autocast without ZeRO, with
`bf16.check_grad_overflow` false (stages 1 and 2), and with `zero_optimization.compute_grad_norm` false in fp32.

Every decision is the same on every rank: DeepSpeed decides to skip by a reduced value, and a check here is one small
reduction. The loss itself is checked by `report/log.py`.
"""

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
        self._unreported: list[int] = []
        self._taken: list[tuple[int, Tensor | float | None]] = []
        self._spoilt: int | None = None
        scaler = _dynamic_scaler(engine)
        if scaler is not None:
            scaler.raise_error_at_min_scale = False  # a bare Exception inside the step; `after_step` raises instead
        self._at_floor = _is_at_floor(engine)

    def after_step(self) -> None:
        """Note the optimizer step just made; nothing leaves the device.

        A skipped step is reported at once; where the loss is scaled, at the next check, since a loss scale adapts by
        skipping steps. Raises NonFiniteLossError at the `max_skipped`th skipped step in a row, and where the loss scale
        of fp16 would have to fall below its minimum.
        """
        step = int(self._engine.global_steps)
        if self._engine.was_step_applied():
            self._in_a_row = []
            self._taken.append((step, self._engine.get_global_grad_norm()))
        else:
            self._in_a_row.append(step)
            self._unreported.append(step)
            if self._at_floor or len(self._in_a_row) >= self._max_skipped:
                raise NonFiniteLossError(self._endless_skipping())
            if not _scales(self._engine):
                self._report_skipped()
        self._at_floor = _is_at_floor(self._engine)

    def check(self) -> None:
        """Report the steps skipped since the last check; raise NonFiniteLossError for a spoilt one; collective.

        Call it before a record of the log, and before a checkpoint is saved.
        """
        if self.spoilt_step() is not None:
            raise NonFiniteLossError(self._spoilt_weights())
        if self._unreported:
            self._report_skipped()

    def spoilt_step(self) -> int | None:
        """Return the first step, counted from 1, that was taken with gradients that are not finite; collective.

        Where DeepSpeed computes no norm, the weights are checked instead, and the step is the last one taken.
        """
        taken, self._taken = self._taken, []
        if self._spoilt is None and taken:
            norms = [norm for _, norm in taken]
            if any(norm is None for norm in norms):
                taken, norms = taken[-1:], [_largest_weight(self._engine)]
            bad = _non_finite(norms, self._engine)
            self._spoilt = next((step for (step, _), share in zip(taken, bad, strict=True) if share), None)
        return self._spoilt

    def _report_skipped(self) -> None:
        skipped, self._unreported = f"{self._phase}: {self._skipped(self._unreported)}", []
        if _scales(self._engine):  # a loss scale finds its place by skipping
            distributed.info(f"{skipped}; the loss scale is now {loss_scale(self._engine):g}")
        else:
            distributed.warn(skipped)

    def _skipped(self, steps: list[int]) -> str:
        first, last = steps[0], steps[-1]
        numbers = f"{first}-{last}" if last - first == len(steps) - 1 else ", ".join(map(str, steps))
        subject = f"steps {numbers} were" if len(steps) > 1 else f"step {first} was"
        return f"optimizer {subject} skipped, the gradients are not finite in {_precision(self._engine)}"

    def _endless_skipping(self) -> str:
        """Describe the skipped steps in a row that end the run, and what to change."""
        engine = self._engine
        scale = f", at a loss scale of {loss_scale(engine):g}" if _scales(engine) else ""
        spent = f"max_skipped_steps is {self._max_skipped}"
        limit = "it is fp16.min_loss_scale and cannot fall" if self._at_floor else spent
        return (
            f"{self._phase}: {self._skipped(self._in_a_row)}{scale}; {limit}. {_cure(engine)} The weights are those of "
            f"step {self._in_a_row[0] - 1}, and the checkpoints are unchanged"
        )

    def _spoilt_weights(self) -> str:
        """Describe the step that spoilt the weights, and what to change."""
        engine, step, precision = self._engine, self._spoilt, _precision(self._engine)
        event = f"the gradients of step {step} are not finite in {precision}, and DeepSpeed took the step"
        if engine.get_global_grad_norm() is None:
            event = f"at step {step} the weights are not finite in {precision}; no gradient norm shows since when"
        skips = "With bf16.check_grad_overflow true such steps are skipped. " if engine.bfloat16_enabled() else ""
        if not engine.zero_optimization():
            skips = "With zero_optimization.stage 1 such steps are skipped. "
        return (
            f"{self._phase}: {event}: the weights are lost. {_cure(engine)} {skips}"
            f"The checkpoints are unchanged: --resume goes on from the last"
        )


def _non_finite(norms: list[Any], engine: Engine) -> list[float]:
    """Return for each norm the share of the ranks on which it is not finite, or -1, DeepSpeed's mark of an overflow."""
    values = torch.stack([torch.as_tensor(norm, device=engine.device).float().reshape(()) for norm in norms])
    return distributed.mean((~values.isfinite() | (values < 0)).float()).tolist()


def _largest_weight(engine: Engine) -> Tensor:
    """Return the largest absolute value of the weights on this rank; NaN where one is NaN."""
    parts = [getattr(p, "ds_tensor", p).detach() for p in engine.module.parameters() if p.requires_grad]
    return torch.stack([part.abs().max().float() for part in parts if part.numel()]).max()


def _dynamic_scaler(engine: Engine) -> Any:
    """Return DeepSpeed's loss scaler with ZeRO; None where the scale is fixed, or belongs to torch."""
    scaler = getattr(engine.optimizer, "loss_scaler", None)
    return scaler if scaler is not None and scaler.dynamic else None


def _is_at_floor(engine: Engine) -> bool:
    """Whether fp16's loss scale could not fall at an overflow: it is at its minimum, and no hysteresis remains."""
    scaler, config = _dynamic_scaler(engine), getattr(engine.optimizer, "loss_scale_config", None)
    if scaler is not None:
        lowers_now = 1 in (scaler.delayed_shift, scaler.cur_hysteresis)
        return bool(lowers_now and scaler.cur_scale <= scaler.min_scale)
    # without ZeRO DeepSpeed has no hysteresis
    return bool(config and config.dynamic_loss_scale and config.cur_scale <= config.min_loss_scale)


def _scales(engine: Engine) -> bool:
    """Whether the loss is scaled at all."""
    return bool(engine.fp16_enabled()) or _precision(engine) == "torch_autocast (fp16)"


def _precision(engine: Engine) -> str:
    if engine.torch_autocast_enabled():
        return f"torch_autocast ({'fp16' if engine.torch_autocast_dtype() == torch.float16 else 'bf16'})"
    return "fp16" if engine.fp16_enabled() else "bf16" if engine.bfloat16_enabled() else "fp32"


def _cure(engine: Engine) -> str:
    """Say what to change, in whole sentences."""
    calmer = "Lower learning_rate or lengthen warmup_steps"
    if not _scales(engine):
        return f"{calmer}, and look at the data of that step, and at losses without a gradient there, as of sqrt at 0."
    if not engine.fp16_enabled():
        return f'{calmer}, or write torch_autocast.dtype "bfloat16", or fp16 or bf16 in its place.'
    if not engine.dynamic_loss_scale():
        return f"fp16.loss_scale is fixed at {engine.loss_scale():g}: write 0, for one that adapts, or use bf16."
    return (
        f"{calmer}, or use bf16. If the scale only started too high, lower fp16.initial_scale_power or raise "
        f"max_skipped_steps; if it cannot fall, lower fp16.min_loss_scale where that is above 1."
    )
