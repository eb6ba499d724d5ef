"""Read what a checkpoint is of: the folder `checkpoint-N`, the run that it lies in, and the phase that wrote it.

The phase and its task are read from the checkpoint, since the recipe in the run's folder may be that of a later
`--resume`; models and the order of the phases are read from that recipe. This module needs neither torch nor DeepSpeed.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ds_trainer.files.checkpoint_files import Sums, read_marker
from ds_trainer.files.reading import read_json
from ds_trainer.ranks.failures import UserError
from ds_trainer.recipe.recipe import Phase, Recipe, parse_recipe, task_of
from ds_trainer.recipe.task_specs import TaskSpec

CHECKPOINT = re.compile(r"checkpoint-(\d+)")
RECIPE = "recipe.json"


@dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint whose marker is whole; `sums` are to check its other files by."""

    path: Path
    run: Path
    """The output folder of the run."""
    recipe: Recipe
    """The recipe of the run, with the phase as it was when the checkpoint was written."""
    phase: Phase
    task: TaskSpec
    """The task to build the model for: that of the phase, unless a command names another."""
    sums: Sums
    position: Mapping[str, Any]
    """Where the run was, as `engine.checkpoint.Checkpoint`."""


def is_checkpoint(name: str) -> bool:
    """Whether a path is a checkpoint of a run, and not a model folder that has such a name."""
    folder = os.path.realpath(name)
    named = CHECKPOINT.fullmatch(os.path.basename(folder)) is not None
    return named and os.path.isdir(folder) and not os.path.lexists(os.path.join(folder, "config.json"))


def checkpoints_in(folder: Path) -> list[Path]:
    """Return the checkpoints in a phase's folder, whole or not, in the order of their steps."""
    by_step = {int(name[1]): path for path in folder.glob("checkpoint-*") if (name := CHECKPOINT.fullmatch(path.name))}
    return [by_step[step] for step in sorted(by_step)]


def read_checkpoint(name: str | Path) -> SavedCheckpoint:
    """Read the marker of a checkpoint and the recipe of its run; a UserError says why one of them cannot be read."""
    path = Path(os.path.realpath(name))
    run = next((place for place in path.parents[:2] if (place / RECIPE).is_file()), None)
    if run is None:
        nowhere = f"neither {path.parent} nor the folder above has a {RECIPE}"
        raise UserError(f"{name} does not lie in the folder of a run: {nowhere}")
    try:
        sums, position = read_marker(path)
    except UserError as error:
        raise UserError(f"{name} is damaged ({error}): use another checkpoint") from error
    data, phase = read_json(run / RECIPE, "the recipe"), position["phase"]
    names = [phase.name for phase in parse_recipe(data).phases]
    if phase["name"] not in names:
        instead = f"which {run / RECIPE} does not have: take the recipe of its run"
        raise UserError(f"{name} was written by the phase {phase['name']}, {instead}")
    number = names.index(phase["name"])
    data["phases"][number] = phase
    recipe = parse_recipe(data)
    saved_phase = recipe.phases[number]
    return SavedCheckpoint(path, run, recipe, saved_phase, task_of(saved_phase, recipe), sums, position)
