"""A run that makes a trained model smaller in every way, for the tasks whose folders sentence-transformers opens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

PHASES = ("pairs", "pruned", "half", "student", "small")


def smaller_phases(first: dict[str, Any], taught: dict[str, Any], untrained: dict[str, Any]) -> list[dict[str, Any]]:
    """Train a model and prune it; cut it, and take a layer of it, each taught; cut the tokens of the half.

    `first`, `taught` and `untrained` are fields of the phases of these kinds.
    """
    cut = {"keep": 0.5, "calibration_examples": 32, "reconstruct": {"tokens": 512, "steps": 4}}
    prune = {"final_threshold": 0.5, "granularity": "hybrid", "initial_warmup": 0, "final_warmup": 0.3}
    return [
        first | {"name": "pairs", "gradient_accumulation_steps": 2},
        first | {"name": "pruned", "max_steps": 4, "techniques": {"prune": prune}, "shrink": True},
        taught | {"name": "half", "start_from": "@pairs", "max_steps": 2, "cut": cut},
        taught | {"name": "student", "start_from": "@pairs", "max_steps": 2, "student": {"layers": [1]}},
        untrained
        | {"name": "small", "start_from": "@half", "num_train_epochs": 0, "cut": {"vocabulary": {"keep": 60}}},
    ]


def model_of(recipe: Path, phase: str) -> Path:
    """Return the folder of a phase's model, of the run beside its recipe."""
    return recipe.parent / "out" / ("" if phase == PHASES[-1] else phase) / "model"
