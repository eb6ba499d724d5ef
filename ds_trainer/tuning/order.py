"""The order in which candidates are tried: that of the space, or, where there are many, that of optuna's sampler."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ds_trainer.ranks import distributed
from ds_trainer.tuning.space import RANKS, THREADS, Candidate

INSTALL = "pip install optuna"
_LARGE = 128
"""More candidates than this are sampled."""


def order_of(candidates: Sequence[Candidate], seed: int) -> InOrder:
    """Return the order for so many candidates: that of the space, with a warning, where optuna is not installed."""
    if len(candidates) > _LARGE:
        try:
            return Sampled(candidates, seed)
        except ImportError as error:
            distributed.warn(f"{len(candidates)} candidates are tried in their order, for want of optuna ({error})")
            distributed.warn(f"to have it choose: {INSTALL}")
    return InOrder(candidates)


class InOrder:
    """Gives candidates one after the other."""

    def __init__(self, candidates: Sequence[Candidate]) -> None:
        self.left = list(candidates)
        """Those that were not asked for yet."""

    def ask(self) -> Candidate | None:
        """Return the next candidate; None where all were tried."""
        return self.left.pop(0) if self.left else None

    def tell(self, speed: float) -> None:
        """Take note of the examples per second of the candidate that was asked for last; 0 where it has none."""


class Sampled(InOrder):
    """Gives the candidates first that optuna's tree-structured Parzen estimator expects to be fast.

    It draws every setting by itself. A combination that is no candidate, or was tried, counts as slow.
    """

    def __init__(self, candidates: Sequence[Candidate], seed: int) -> None:
        import optuna

        super().__init__(candidates)
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self._study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=seed))
        self._by_values = {_values(candidate): candidate for candidate in candidates}
        self._choices = {
            path: sorted({dict(values).get(path, "") for values in self._by_values})
            for path in sorted({path for values in self._by_values for path, _ in values})
        }
        self._draws = 10 * len(candidates)  # for one candidate
        self._trial: Any = None

    def ask(self) -> Candidate | None:
        for _ in range(self._draws):
            self._trial = self._study.ask()
            drawn = {path: self._trial.suggest_categorical(path, texts) for path, texts in self._choices.items()}
            values = tuple(sorted((path, text) for path, text in drawn.items() if text))
            candidate = self._by_values.pop(values, None)
            if candidate:
                self.left.remove(candidate)
                return candidate
            self._study.tell(self._trial, 0.0)
        self._draws, self._trial = 0, None  # what is left has hardly a chance to be drawn
        return super().ask()

    def tell(self, speed: float) -> None:
        if self._trial:
            self._study.tell(self._trial, speed)


def _values(candidate: Candidate) -> tuple[tuple[str, str], ...]:
    """Return a candidate's settings as texts, sorted by path: optuna's choices are plain values."""
    named = {RANKS: candidate.ranks, THREADS: candidate.threads, **dict(candidate.settings)}
    return tuple(sorted((path, str(value)) for path, value in named.items()))
