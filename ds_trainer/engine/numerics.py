"""Watch for optimizer steps whose gradients are not finite: DeepSpeed skips some, and others spoil the weights.

DeepSpeed 0.19.8 skips such a step in fp16, and with ZeRO in bf16 and fp32 too: weights and schedule stay as they were,
and `global_steps` goes on. It takes such a step, and the weights are lost, in three cases: fp32 without ZeRO, bf16
autocast without ZeRO, and stages 1 and 2 with `bf16.check_grad_overflow` false. `engine_file.py` refuses
`zero_optimization.compute_grad_norm` false, without which no norm would show such a step.

Every decision is the same on every rank: DeepSpeed decides to skip by a reduced value, and a check here is one small
reduction. The loss itself is checked by `report/log.py`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ds_trainer.engine.engine import Engine, loss_scale
from ds_trainer.ranks import distributed
from ds_trainer.ranks.failures import NonFiniteLossError

_CURE = (
    "Lower learning_rate or lengthen warmup_steps, and look at the data of that step, and at losses without a gradient "
    "there, as of sqrt at 0. In fp16: use bf16. If the loss scale only started too high, raise max_skipped_steps; if "
    "fp16.loss_scale fixes it, set that to 0"
)


class StepWatch:
    """Watches the steps of one engine. Make it after the engine has resumed, which may replace its loss scaler."""

    def __init__(self, engine: Engine, phase: str, max_skipped: int) -> None:
        self._engine, self._phase, self._max_skipped = engine, phase, max_skipped
        self._in_a_row: list[int] = []
        self._unreported: list[int] = []
        self._taken: list[tuple[int, Tensor | float]] = []
        self._spoilt: int | None = None
        if scaler := getattr(engine.optimizer, "loss_scaler", None):
            # at the smallest loss scale DeepSpeed raises a bare Exception inside of the step; here it goes on to skip
            scaler.raise_error_at_min_scale = False

    def after_step(self) -> None:
        """Note the optimizer step just made; nothing leaves the device.

        A skipped step is reported at once; where the loss is scaled, at the next check, since a loss scale adapts by
        skipping steps. Raises NonFiniteLossError at the `max_skipped`th skipped step in a row.
        """
        step = int(self._engine.global_steps)
        if self._engine.was_step_applied():
            self._in_a_row = []
            if (norm := self._engine.get_global_grad_norm()) is not None:
                self._taken.append((step, norm))
        else:
            self._in_a_row.append(step)
            self._unreported.append(step)
            if len(self._in_a_row) >= self._max_skipped:
                raise NonFiniteLossError(
                    f"{self._phase}: {_skipped(self._in_a_row)}; max_skipped_steps is {self._max_skipped}, and the "
                    f"loss scale is {loss_scale(self._engine):g}. {_CURE}. The weights are those of step "
                    f"{self._in_a_row[0] - 1}, and the checkpoints are unchanged"
                )
            if not _scales(self._engine):
                self._report_skipped()

    def check(self) -> None:
        """Report the steps skipped since the last check; raise NonFiniteLossError for a spoilt one; collective.

        Call it before a record of the log, and before a checkpoint is saved.
        """
        if self.spoilt_step() is not None:
            raise NonFiniteLossError(
                f"{self._phase}: the gradients of step {self._spoilt} are not finite, and DeepSpeed took the step: the "
                f"weights are lost. {_CURE}. With zero_optimization.stage 1 and bf16.check_grad_overflow true such "
                f"steps are skipped. The checkpoints are unchanged: --resume goes on from the last"
            )
        if self._unreported:
            self._report_skipped()

    def spoilt_step(self) -> int | None:
        """Return the first step, counted from 1, that was taken with gradients that are not finite; collective."""
        taken, self._taken = self._taken, []
        if self._spoilt is None and taken:
            device = self._engine.device
            norms = torch.stack([torch.as_tensor(norm, device=device).float().reshape(()) for _, norm in taken])
            # -1 is DeepSpeed's mark of an overflow; without ZeRO a norm is of this rank's parameters, so all are asked
            bad = distributed.total((~norms.isfinite() | (norms < 0)).float()).tolist()
            self._spoilt = next((step for (step, _), ranks in zip(taken, bad, strict=True) if ranks), None)
        return self._spoilt

    def _report_skipped(self) -> None:
        skipped, self._unreported = f"{self._phase}: {_skipped(self._unreported)}", []
        if _scales(self._engine):  # a loss scale finds its place by skipping
            distributed.info(f"{skipped}; the loss scale is now {loss_scale(self._engine):g}")
        else:
            distributed.warn(skipped)


def _skipped(steps: Sequence[int]) -> str:
    numbers = f"step {steps[0]} was" if len(steps) == 1 else f"{len(steps)} steps from {steps[0]} to {steps[-1]} were"
    return f"{numbers} skipped, since their gradients are not finite"


def _scales(engine: Engine) -> bool:
    """Whether the loss is scaled at all."""
    by_autocast = engine.torch_autocast_enabled() and engine.torch_autocast_dtype() == torch.float16
    return bool(engine.fp16_enabled() or by_autocast)
