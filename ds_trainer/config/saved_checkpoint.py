"""A checkpoint as a command finds it: the folder `checkpoint-N`, the run that it lies in, and the phase that wrote it.

What the checkpoint says of its phase counts, since the recipe in the run's folder may be that of a later `--resume`;
models, task and the order of the phases are the recipe's. Needs neither torch nor DeepSpeed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ds_trainer.config.recipe import Phase, Recipe, TaskSpec, parse_recipe, task_of
from ds_trainer.files.checkpoint_files import Sums, read_marker
from ds_trainer.files.json_file import read_json
from ds_trainer.ranks.failures import UserError

_NAME = re.compile(r"checkpoint-(\d+)")
_RECIPE = "recipe.json"


@dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint whose marker is whole; whether its other files are, `sums` tells."""

    path: Path
    run: Path
    """The output folder of the run."""
    recipe: Recipe
    """The run's, with the phase in it as it was when the checkpoint was written."""
    phase: Phase
    task: TaskSpec
    """To build the model for: the phase's own, unless a command names another."""
    sums: Sums
    position: Mapping[str, Any]
    """As `checkpoint.CheckpointState`."""

    @property
    def recipe_file(self) -> Path:
        return self.run / _RECIPE


def is_checkpoint(name: str) -> bool:
    """Whether a path is that of a checkpoint of a run, and not of a model folder that has such a name."""
    folder = Path(name)
    named = _NAME.fullmatch(os.path.basename(os.path.realpath(folder))) is not None
    return named and os.path.isdir(folder) and not os.path.lexists(folder / "config.json")


def checkpoints_in(folder: Path) -> list[Path]:
    """The checkpoints in a phase's folder, whole or not, in the order of their steps."""
    found = {int(name[1]): path for path in folder.glob("checkpoint-*") if (name := _NAME.fullmatch(path.name))}
    return [found[step] for step in sorted(found)]


def read_checkpoint(name: str | Path) -> SavedCheckpoint:
    """Read the marker of a checkpoint and the recipe of its run. ValueError says why the two are not to be had."""
    path = Path(os.path.realpath(name))
    run = next((place for place in path.parents[:2] if (place / _RECIPE).is_file()), None)
    if run is None:
        raise UserError(
            f"{name} does not lie in the folder of a run: neither {path.parent} nor the folder above has the "
            f"{_RECIPE} that tells which model and which task the checkpoint is of; move it back there"
        )
    try:
        sums, position = read_marker(path)
    except ValueError as error:
        raise UserError(f"{name} is damaged ({error}): use another checkpoint") from error
    data = read_json(run / _RECIPE, "the recipe")
    names = [phase.name for phase in parse_recipe(data).phases]
    writer = names[-1] if path.parent == run else path.parent.name
    if writer not in names:
        raise UserError(
            f"{name} lies in the folder of a phase {writer}, and {run / _RECIPE} has no such phase: it has "
            f"{', '.join(names)}"
        )
    phase = position.get("phase") or {}
    if not phase:
        raise UserError(
            f"{name} was written by an older version of this library, which did not note the phase: go on from it "
            f"with launch/train.py --resume {name}, whose next checkpoint does"
        )
    if phase["name"] != writer:
        raise UserError(
            f"{name} was written by the phase {phase['name']}, and lies where {run / _RECIPE} has the phase {writer} "
            f"write: the recipe or the folder is another one than that of the run"
        )
    data["phases"][names.index(writer)] = phase
    recipe = parse_recipe(data)
    own = recipe.phases[names.index(writer)]
    return SavedCheckpoint(path, run, recipe, own, task_of(own, recipe), sums, position)
