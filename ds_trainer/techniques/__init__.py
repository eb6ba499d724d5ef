"""The techniques on offer, by their key in the recipe."""

from __future__ import annotations

from ds_trainer.recipe import Techniques
from ds_trainer.techniques.prune import Prune
from ds_trainer.techniques.technique import Clock, Forward, Predict, Technique

TECHNIQUES = {"prune": Prune}

__all__ = ["TECHNIQUES", "Clock", "Forward", "Predict", "Technique", "build_techniques"]


def build_techniques(specs: Techniques, clock: Clock) -> list[Technique]:
    """One object for each technique the phase asks for, in the order of the table."""
    asked = {name: getattr(specs, name) for name in TECHNIQUES}
    return [TECHNIQUES[name](spec, clock) for name, spec in asked.items() if spec is not None]
