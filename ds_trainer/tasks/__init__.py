"""The tasks by name, and how one is built for a model."""

from __future__ import annotations

from pathlib import Path

from ds_trainer.readers import TASK_NAMES, unknown_task
from ds_trainer.recipe import TaskSpec
from ds_trainer.tasks.task import Batch, Task
from ds_trainer.tasks.text import TextTask, training_texts
from ds_trainer.tasks.text_model import load_tokenizer

__all__ = ["TASKS", "Batch", "Task", "TextTask", "build_task", "training_texts"]

TASKS: dict[str, type[TextTask]] = dict.fromkeys(TASK_NAMES, TextTask)
_CACHE_DIR = "~/.cache/ds_trainer"


def build_task(spec: TaskSpec, source: str | Path, cache_dir: str | Path | None = None) -> TextTask:
    """The task of a spec for the model folder (or hub name) `source`; every rank must build it.

    Raises ValueError for a name that is no task, with the nearest ones.
    """
    if spec.name not in TASKS:
        raise ValueError(unknown_task(spec.name))
    return TASKS[spec.name](spec, load_tokenizer(source), source, Path(cache_dir or _CACHE_DIR))
