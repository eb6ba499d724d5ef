"""One optimizer step of the loop; whole runs are in tests/integration."""

from types import SimpleNamespace
from typing import Any

import torch

from ds_trainer.ranks import distributed
from ds_trainer.run import loop


def test_random_numbers_are_a_function_of_run_step_and_rank(monkeypatch):
    """Each step and each rank draws others, and a step that is taken again after a resume draws what it drew."""
    monkeypatch.setattr(loop, "micro_batches", lambda *_: [])
    draws: list[float] = []
    technique = SimpleNamespace(on_step=lambda step: draws.append(float(torch.rand(()))))
    objective: Any = SimpleNamespace(techniques=[technique], task=None)

    def drawn(seed: int, step: int, rank: int) -> float:
        monkeypatch.setattr(distributed, "rank", lambda: rank)
        engine: Any = SimpleNamespace(global_steps=step)
        loop.train_step(objective, engine, indices=None, log=None, seed=seed)  # type: ignore[arg-type]
        return draws[-1]

    first = drawn(1, 5, 0)
    assert drawn(1, 5, 0) == first
    assert len({first, drawn(2, 5, 0), drawn(1, 6, 0), drawn(1, 5, 1)}) == 4
