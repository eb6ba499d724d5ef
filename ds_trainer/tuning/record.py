"""`trials.jsonl`: what became of every trial, so that a second call of a tuning goes on where the first ended."""

import json
import os
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, Generic, TypeVar

from ds_trainer.config.jobs import TuneJob
from ds_trainer.files.reading import content_hash, folder_hash
from ds_trainer.hosts.probe import source_hash
from ds_trainer.hosts.remote import PROJECT
from ds_trainer.tasks.data import hash_of
from ds_trainer.tuning.space import Candidate
from ds_trainer.tuning.trials import HUNG, KILLED, TrialBase

FILE = "trials.jsonl"
T = TypeVar("T", bound=TrialBase)


class TrialRecord(Generic[T]):
    """The trials of this configuration, code, data, models and hardware. Those of others stay in the file, unused."""

    def __init__(self, job: TuneJob, measured: Any, kind: type[T]) -> None:
        """Read what is there. `measured` is JSON: what is tuned, and the data, the hardware and the versions."""
        train = job.train
        recipe = train.recipe.model_dump(exclude={"output_dir", "cache_dir"})
        self._kind = kind
        files = [train.engine_config, recipe, *contents_of(recipe)]
        self._context = hash_of([*files, source_hash(str(PROJECT)), job.arguments, measured])
        self._path = job.output / FILE
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._kept: dict[str, list[dict[str, Any]]] = defaultdict(list)
        if self._path.is_file():
            for line in self._path.read_text(encoding="utf-8").splitlines():
                self._keep(line)

    def _keep(self, line: str) -> None:
        try:
            entry = json.loads(line)
            if entry["outcome"] not in (HUNG, KILLED):  # another time they may end well
                self._kept[entry.pop("key")].append(entry)
        except (ValueError, KeyError, TypeError, AttributeError):
            return  # the last line of a call that was killed

    def knows(self, candidate: Candidate) -> bool:
        """Whether `take` would give a trial."""
        return bool(self._kept.get(self._key(candidate)))

    def take(self, candidate: Candidate) -> T | None:
        """Return the next trial of a candidate that an earlier call has made; None where there is none left."""
        entries = self._kept.get(self._key(candidate))
        if not entries:
            return None
        entry = entries.pop(0)
        return self._kind(candidate, **{name: value for name, value in entry.items() if name != "label"})

    def add(self, trial: T) -> None:
        """Write a trial down."""
        entry = asdict(trial)
        named = {"key": self._key(trial.candidate), "label": trial.candidate.label}
        del entry["candidate"]
        with self._path.open("a", encoding="utf-8") as file:
            # the line break comes first: the last line of a call that was killed may be torn
            file.write("\n" * bool(file.tell()) + json.dumps(named | entry))

    def _key(self, candidate: Candidate) -> str:
        return hash_of([self._context, candidate.identity, *contents_of(candidate.settings)])


def contents_of(value: Any) -> Iterator[str]:
    """Yield a hash of every file and every model folder whose path stands anywhere in a JSON value."""
    if isinstance(value, dict | list | tuple):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from contents_of(inner)
    elif isinstance(value, str):
        if os.path.isfile(os.path.join(value, "config.json")):
            yield folder_hash(Path(value))
        elif os.path.isfile(value):
            yield content_hash(Path(value)).hex()
