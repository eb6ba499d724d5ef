"""The families of tasks, and how the task of a spec is built for a model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ds_trainer import lm_text, squad_file
from ds_trainer.readers import TASK_NAMES, unknown_task
from ds_trainer.recipe import TaskSpec, TextSpec
from ds_trainer.task_specs import family
from ds_trainer.tasks.lm import LmTask
from ds_trainer.tasks.pretrained import load_tokenizer
from ds_trainer.tasks.squad import SquadTask
from ds_trainer.tasks.task import Batch, Task
from ds_trainer.tasks.text import TextTask
from ds_trainer.tasks.text import training_texts as texts_of_rows

__all__ = ["TASKS", "Batch", "Task", "TextTask", "build_task", "training_texts"]

TASKS: dict[str, type[Task]] = {"text": TextTask, "squad": SquadTask, "lm": LmTask}
_TEXTS: dict[str, Callable[[Any], list[str]]] = {
    "text": texts_of_rows,
    "squad": squad_file.training_texts,
    "lm": lm_text.training_texts,
}
_CACHE_DIR = "~/.cache/ds_trainer"


def build_task(spec: TaskSpec, source: str | Path, cache_dir: str | Path | None = None) -> Task:
    """The task of a spec for the model folder (or hub name) `source`; every rank must build it.

    Raises ValueError for a name that is no task, with the nearest ones.
    """
    if isinstance(spec, TextSpec) and spec.name not in TASK_NAMES:
        raise ValueError(unknown_task(spec.name))
    return TASKS[family(spec)](spec, load_tokenizer(source), source, Path(cache_dir or _CACHE_DIR))  # type: ignore[call-arg, arg-type]


def training_texts(spec: TaskSpec) -> list[str]:
    """Every text of the training split, for training a tokenizer. Not collective: one rank can call it alone."""
    return _TEXTS[family(spec)](spec)
