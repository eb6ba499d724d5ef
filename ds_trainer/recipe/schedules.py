"""Values that follow the optimizer step: thresholds, penalties, learning-rate multipliers.

They are pure functions of the step, so that a resumed run needs no schedule state. This module imports neither torch
nor DeepSpeed: the recipe is checked with it before either is loaded.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

# an int is optimizer steps; a float in [0, 1] is a fraction of the phase
Duration = int | float
Shape = Literal["linear", "cubic", "cosine"]
LrSchedule = Literal["linear", "cosine", "constant", "constant_with_warmup"]

_REMAINING: dict[str, Callable[[float], float]] = {
    "linear": lambda progress: 1 - progress,
    "cubic": lambda progress: (1 - progress) ** 3,
    "cosine": lambda progress: (1 + math.cos(math.pi * progress)) / 2,
}


def steps_of(duration: Duration, total: int) -> int:
    """Resolve a duration to optimizer steps, in a phase of `total` steps."""
    return duration if isinstance(duration, int) else round(duration * total)


def interval(every: Duration | None, total: int) -> int:
    """Return the steps between two flushes, evaluations or checkpoints, at least 1; 0 means never, as 0 and None do."""
    return max(1, steps_of(every, total)) if every else 0


@dataclass(frozen=True)
class Schedule:
    """Hold `initial` through step `start`, ramp to `final` at step `end`, hold it.

    The cubic shape is the sparsity schedule of arXiv 1710.01878, as movement pruning (arXiv 2005.07683) uses it.
    """

    initial: float
    final: float
    start: int
    end: int
    shape: Shape = "cubic"

    def __call__(self, step: int) -> float:
        if step >= self.end:
            return self.final
        if step <= self.start:
            return self.initial
        progress = (step - self.start) / (self.end - self.start)
        return self.final + (self.initial - self.final) * _REMAINING[self.shape](progress)


def lr_multiplier(kind: LrSchedule, warmup: Duration, total: int) -> Callable[[int], float]:
    """Return step -> factor on learning rates: a linear warm-up over `warmup`, then the named decay to 0."""
    rise = steps_of(warmup, total)

    def multiplier(step: int) -> float:
        if step < rise:
            return step / rise
        if kind in ("constant", "constant_with_warmup"):
            return 1.0
        return _REMAINING[kind](min(1.0, (step - rise) / max(1, total - rise)))

    return multiplier
