"""The techniques on offer, by their key in the recipe."""

from __future__ import annotations

from ds_trainer.config.recipe import Techniques
from ds_trainer.tasks.task import Forward, Predict, Task
from ds_trainer.techniques.distill.distill import Distill
from ds_trainer.techniques.exits.exits import Exits
from ds_trainer.techniques.prune.keep_zeros import KeepZeros
from ds_trainer.techniques.prune.prune import Prune
from ds_trainer.techniques.technique import Clock, Technique

TECHNIQUES = {"exits": Exits, "prune": Prune, "keep_zeros": KeepZeros, "distill": Distill}
"""In the order in which they are attached, and give their views.

Exits come first: a head is made like the model's own, which is run for it; and the heads' views are of the states that
the model's latest forward has left, whereas the view of prune runs the model once more.
"""

__all__ = ["TECHNIQUES", "Clock", "Forward", "Predict", "Technique", "build_techniques"]


def build_techniques(specs: Techniques, clock: Clock, task: Task) -> list[Technique]:
    """One object for each technique the phase asks for, in the order of the table."""
    asked = {name: getattr(specs, name) for name in TECHNIQUES}
    return [TECHNIQUES[name](spec, clock, task) for name, spec in asked.items() if spec is not None]
