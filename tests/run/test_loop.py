"""One optimizer step of the loop; whole runs are in tests/integration."""

from types import SimpleNamespace
from typing import Any

import torch

from ds_trainer.ranks import distributed
from ds_trainer.run import loop


def test_random_numbers_are_a_function_of_run_step_and_rank(monkeypatch):
    """Each step and each rank draws others, and a step that is taken again after a resume draws what it drew.

    The masks of language models differ from step to step as well; they are those of an example, whatever its rank.
    """
    numbers, masks = list[float](), list[int]()
    technique = SimpleNamespace(on_step=lambda step: numbers.append(float(torch.rand(()))))
    objective: Any = SimpleNamespace(techniques=[technique], task=SimpleNamespace(compares_examples=False))
    monkeypatch.setattr(loop, "micro_batches", lambda task, indices, engine, draw: masks.append(draw) or [])

    def drawn(seed: int, step: int, rank: int) -> tuple[float, int]:
        monkeypatch.setattr(distributed, "rank", lambda: rank)
        engine: Any = SimpleNamespace(global_steps=step)
        loop.train_step(objective, engine, indices=None, log=None, seed=seed)  # type: ignore[arg-type]
        return numbers[-1], masks[-1]

    first = drawn(1, 5, 0)
    assert drawn(1, 5, 0) == first
    of_run, of_step, of_rank = drawn(2, 5, 0), drawn(1, 6, 0), drawn(1, 5, 1)
    assert len({first[0], of_run[0], of_step[0], of_rank[0]}) == 4
    assert len({0, first[1], of_run[1], of_step[1]}) == 4
    assert of_rank[1] == first[1]
