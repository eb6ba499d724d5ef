"""The techniques by their key in the recipe."""

from ds_trainer.recipe.technique_specs import Techniques
from ds_trainer.tasks.task import Task
from ds_trainer.techniques.distill.distill import Distill
from ds_trainer.techniques.exits.exits import Exits
from ds_trainer.techniques.prune.prune import KeepZeros, Prune
from ds_trainer.techniques.technique import PhaseLength, Technique

TECHNIQUES: dict[str, type[Technique]] = {
    "exits": Exits,
    "prune": Prune,
    "keep_zeros": KeepZeros,
    "distill": Distill,
}
"""The order is that in which techniques are attached, and in which each hook is called for them. None depends on it."""


def build_techniques(specs: Techniques, length: PhaseLength, task: Task) -> list[Technique]:
    """Build one object for each technique that the phase has, in the order of the table."""
    chosen = [name for name in TECHNIQUES if getattr(specs, name, None) is not None]
    return [TECHNIQUES[name](getattr(specs, name), length, task) for name in chosen]
