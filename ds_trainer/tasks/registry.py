"""Build the task of a spec, check its files, and read its texts, whatever its family.

The families are listed in `FAMILIES` (`config/task_specs.py`). Importing this module loads no torch.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ds_trainer.config.task_specs import FAMILIES, TaskBase, family
from ds_trainer.files.write_places import DEFAULT_CACHE
from ds_trainer.ranks.failures import UserError

if TYPE_CHECKING:
    from ds_trainer.tasks.task import Task


def build_task(spec: TaskBase, source: str | Path, cache_dir: str | Path | None = None) -> Task:
    """Build the task of a spec for the model folder (or hub name) `source`; every rank must do so."""
    from ds_trainer.models.pretrained import load_tokenizer

    task_class: type[Task] = _loaded(FAMILIES[family(spec)].task)
    return task_class(spec, load_tokenizer(source), source, Path(cache_dir or DEFAULT_CACHE))


def check_data_files(spec: TaskBase, splits: Sequence[str] | None = None) -> list[str]:
    """Return every mistake in a task's settings, and every missing folder, file or column; loads nothing heavy.

    `splits` defaults to training and all evaluation splits. Records beyond the first are not read, and the hub is not
    asked.
    """
    module = _loaded(FAMILIES[family(spec)].data)
    return module.check_data_files(spec, splits) if module else []


def training_texts(spec: TaskBase) -> list[str]:
    """Return every text of the training split, for training a tokenizer. Not collective: one rank can call it alone."""
    module = _loaded(FAMILIES[family(spec)].data)
    if module is None:
        raise UserError(f'the task "{spec.name}" has no texts to train a tokenizer on: take a model that brings one')
    return module.training_texts(spec)


def _loaded(entry: Any) -> Any:
    """Import what an entry of the table names; anything but a name is returned as it is."""
    return pkgutil.resolve_name(entry) if isinstance(entry, str) else entry
