"""Build the task of a spec, check its files, and read its texts, whatever its family.

`FAMILIES` in `recipe/task_specs.py` lists the families. Importing this module does not load torch.
"""

from __future__ import annotations

import os
import pkgutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ds_trainer.files.messages import listed
from ds_trainer.ranks.failures import UserError
from ds_trainer.recipe.task_specs import FAMILIES, TaskBase, family

if TYPE_CHECKING:
    from ds_trainer.tasks.task import Task


def build_task(spec: TaskBase, source: str | Path, cache_dir: str | Path | None = None) -> Task:
    """Build the task of a spec for the model folder (or hub name) `source`; collective."""
    from ds_trainer.models.pretrained import load_tokenizer

    task_class: type[Task] = _loaded(FAMILIES[family(spec)].task)
    cache = cache_dir or os.environ.get("DS_TRAINER_CACHE") or "~/.cache/ds_trainer"
    return task_class(spec, load_tokenizer(source), source, Path(cache))


def check_data_files(spec: TaskBase, splits: Sequence[str] | None = None) -> list[str]:
    """Return every mistake in a task's settings, and every missing folder, file or column, without loading torch.

    `splits` defaults to training and those that are scored. Of each file at most the first record is read. Data sets of
    the hub are not checked.
    """
    data = _data_of(spec)
    mistakes = list[str](getattr(data, "setting_mistakes", type(spec).source_mistakes)(spec))
    if mistakes:
        return mistakes
    read = ("train" if split == "held_out" else split for split in splits or ("train", *spec.scored_splits))
    for split in dict.fromkeys(read):
        try:
            data.records(spec, split).check()
        except UserError as error:  # noqa: PERF203 - there are three splits at most
            mistakes.append(str(error))
    return list(dict.fromkeys(mistakes))


def check_metric(spec: TaskBase, metric: str) -> list[str]:
    """Return the mistake if the task is known to have no score of this name; one with a prefix is not judged."""
    names = getattr(_data_of(spec), "score_names", None)
    if names is None or "/" in metric or metric in names(spec):
        return []
    return [f'the metric is "{metric}"; the scores of {spec.name} are {listed(dict.fromkeys(names(spec)))}: write one']


def fingerprint_of(spec: TaskBase) -> str:
    """Return a hash of where a task's training examples come from. One rank can call it alone."""
    return str(_data_of(spec).records(spec, "train").fingerprint())


def training_texts(spec: TaskBase) -> list[str]:
    """Return every text of the training split, for training a tokenizer. One rank can call it alone."""
    return list(_data_of(spec).training_texts(spec))


def _data_of(spec: TaskBase) -> Any:
    """Return what reads the data: the module of a family, or the class of a plain task."""
    entry = FAMILIES[family(spec)]
    return _loaded(entry.data) if entry.data else entry.task.data or entry.task


def _loaded(entry: Any) -> Any:
    """Import the object that an entry of the table names; return any other entry as it is."""
    return pkgutil.resolve_name(entry) if isinstance(entry, str) else entry
