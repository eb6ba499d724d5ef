"""The families of tasks, and how the task of a spec is built for a model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ds_trainer.config.recipe import TaskSpec, TextSpec
from ds_trainer.config.task_specs import family
from ds_trainer.files.write_places import DEFAULT_CACHE
from ds_trainer.models.pretrained import load_tokenizer
from ds_trainer.ranks.failures import UserError
from ds_trainer.tasks.lm import lm_text
from ds_trainer.tasks.lm.lm_task import LmTask
from ds_trainer.tasks.squad import squad_file
from ds_trainer.tasks.squad.squad_task import SquadTask
from ds_trainer.tasks.task import Batch, Task
from ds_trainer.tasks.text.readers import TASK_NAMES, unknown_task
from ds_trainer.tasks.text.text_task import TextTask
from ds_trainer.tasks.text.text_task import training_texts as texts_of_rows

__all__ = ["TASKS", "Batch", "Task", "TextTask", "build_task", "training_texts"]

TASKS: dict[str, type[Task]] = {"text": TextTask, "squad": SquadTask, "lm": LmTask}
_TEXTS: dict[str, Callable[[Any], list[str]]] = {
    "text": texts_of_rows,
    "squad": squad_file.training_texts,
    "lm": lm_text.training_texts,
}


def build_task(spec: TaskSpec, source: str | Path, cache_dir: str | Path | None = None) -> Task:
    """The task of a spec for the model folder (or hub name) `source`; every rank must build it.

    Raises ValueError for a name that is no task, with the nearest ones.
    """
    if isinstance(spec, TextSpec) and spec.name not in TASK_NAMES:
        raise UserError(unknown_task(spec.name))
    return TASKS[family(spec)](spec, load_tokenizer(source), source, Path(cache_dir or DEFAULT_CACHE))  # type: ignore[call-arg, arg-type]


def training_texts(spec: TaskSpec) -> list[str]:
    """Every text of the training split, for training a tokenizer. Not collective: one rank can call it alone."""
    return _TEXTS[family(spec)](spec)
