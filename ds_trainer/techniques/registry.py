"""The techniques by their key in the recipe."""

from ds_trainer.config.recipe import Techniques
from ds_trainer.tasks.task import Task
from ds_trainer.techniques.distill.distill import Distill
from ds_trainer.techniques.exits.exits import Exits
from ds_trainer.techniques.prune.keep_zeros import KeepZeros
from ds_trainer.techniques.prune.prune import Prune
from ds_trainer.techniques.technique import Clock, Technique

TECHNIQUES: dict[str, type[Technique]] = {"exits": Exits, "prune": Prune, "keep_zeros": KeepZeros, "distill": Distill}
"""In the order in which they are attached, and give their views.

Exits come first: a new exit head is made like the model's own head, which is run for that before anything is masked;
and the views of exits use the states of the model's latest forward, while the view of prune runs the model once more.
"""


def build_techniques(specs: Techniques, clock: Clock, task: Task) -> list[Technique]:
    """Build one object for each technique that the phase has, in the order of the table."""
    chosen = [name for name in TECHNIQUES if getattr(specs, name, None) is not None]
    return [TECHNIQUES[name](getattr(specs, name), clock, task) for name in chosen]
