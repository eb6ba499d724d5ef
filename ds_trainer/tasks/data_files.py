"""What is wrong with a task's files, by its family. Loads nothing heavy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ds_trainer.config.recipe import TaskSpec
from ds_trainer.config.task_specs import family
from ds_trainer.tasks.lm import lm_text
from ds_trainer.tasks.squad import squad_file
from ds_trainer.tasks.text import readers

_CHECKS: dict[str, Callable[[Any, Sequence[str] | None], list[str]]] = {
    "text": readers.check_data_files,
    "squad": squad_file.check_data_files,
    "lm": lm_text.check_data_files,
}


def check_data_files(spec: TaskSpec, splits: Sequence[str] | None = None) -> list[str]:
    """Every mistake in a task's settings, and every missing folder or file.

    `splits` defaults to training and all evaluation splits. A hub data set is not looked at.
    """
    return _CHECKS[family(spec)](spec, splits)
