"""The small files of a run's output folder, as its report reads them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from ds_trainer.config.exit_specs import EXITS_FILE
from ds_trainer.files.messages import kind_of, listed
from ds_trainer.files.reading import read_file, read_value
from ds_trainer.ranks import distributed
from ds_trainer.ranks.failures import UserError

Records: TypeAlias = Sequence[Mapping[str, Any]]
"""What one phase has logged: a record for each step, in order; a value that was not finite is None."""

OF_ONE_EXIT = re.compile(r"(^|/)(exit_\d+/|early_exit/(leave_at_\d+|seconds|full_seconds|expected_saving)$)")
"""Scores that a table of phases leaves out: of single exit heads, and what says the same in another way."""

_MEMORY = re.compile(r"(?:eval/)?memory/(\w+)/rank(\d+)")


def encoder_weights(found: Mapping[str, Any]) -> tuple[int, int] | None:
    """How many a phase has kept, and of how many before any was zeroed or cut out; None where it counted none."""
    weights = found.get("weights", {})
    if "encoder" not in weights:
        return None
    whole = weights["before"]["encoder"] if "before" in weights else weights["encoder"]["total"]
    return weights["encoder"]["kept"], whole


def peak_memory(records: Records) -> dict[str, tuple[float, str]]:
    """The most bytes that any rank has held while a phase was trained and evaluated, and its number, by kind."""
    peaks: dict[str, tuple[float, str]] = {}
    for record in records:
        for name, held in record.items():
            found = _MEMORY.fullmatch(name)
            if found and isinstance(held, int | float):
                peaks[found[1]] = max(peaks.get(found[1], (0.0, "")), (held, found[2]))
    return peaks


@dataclass(frozen=True)
class Run:
    """The files of an output folder. `records`: of each phase what it has logged, one record a step, in order."""

    folder: Path
    recipe: Mapping[str, Any]
    results: Mapping[str, Any]
    records: Mapping[str, Records]

    @property
    def phases(self) -> list[str]:
        """Those that have logged or finished, in their order."""
        return list(dict.fromkeys([*self.results, *self.records]))

    def place(self, phase: str) -> Path:
        """Where a phase writes its model and its evaluation: the last one into the output folder itself."""
        asked = [spec["name"] for spec in self.recipe.get("phases", [])] or self.phases
        return self.folder if phase == asked[-1] else self.folder / phase

    def spec(self, phase: str) -> Mapping[str, Any]:
        """The phase as the recipe has it; empty where it does not."""
        return next((spec for spec in self.recipe.get("phases", []) if spec["name"] == phase), {})

    def exits(self, phase: str) -> dict[str, Any]:
        """What is known of a phase's exits: with the curves where its evaluation wrote them; empty without exits."""
        file = self.place(phase) / "eval" / EXITS_FILE
        return read_object(file) if file.is_file() else self.results.get(phase, {}).get("exits") or {}

    def calibrated_again(self, phase: str) -> bool:
        """Whether the exits of a phase's model are no longer those that were evaluated."""
        file, evaluated = self.place(phase) / "model" / EXITS_FILE, self.exits(phase)
        if not evaluated or not file.is_file():
            return False
        now = read_object(file)
        return any(now.get(name) != evaluated.get(name) for name in ("policy", "calibration"))


def read_run(folder: Path, failures: list[str] | None = None) -> Run:
    """Read the small files of an output folder. Raises ValueError where it holds no run, or a file is broken.

    With `failures`, a recipe, results or a log that is broken is told there instead, and taken for empty.
    """
    if not any((folder / name).is_file() for name in ("log.jsonl", "all_results.json")):
        why = "holds no run: it has neither log.jsonl nor all_results.json" if folder.is_dir() else "is no folder"
        raise UserError(f"{folder} {why}: name the output folder of a run")
    found: list[Any] = []
    for name, read in (("recipe.json", _recipe), ("all_results.json", _results), ("log.jsonl", _log)):
        found.append(_read(folder / name, read, failures))
    return Run(folder, *found)


def read_object(file: Path) -> dict[str, Any]:
    """The object in a file that a run has written; NaN is a number there. Raises ValueError."""
    value = read_value(file)
    if not isinstance(value, dict):
        raise UserError(f"{file} holds {kind_of(value)}: it must be an object, {{...}}")
    return value


def _read(file: Path, read: Callable[[Path], Mapping[str, Any]], failures: list[str] | None) -> Mapping[str, Any]:
    try:
        return read(file) if file.is_file() else {}
    except ValueError as error:
        if failures is None:
            raise
        failures.append(str(error))
        return {}


def _recipe(file: Path) -> dict[str, Any]:
    value = read_object(file)
    phases = value.get("phases", [])
    named = isinstance(phases, list) and all(isinstance(p, dict) and isinstance(p.get("name"), str) for p in phases)
    if not named:
        raise UserError(f'{file} is no recipe: "phases" must be a list of objects with a "name"')
    return value


def _results(file: Path) -> dict[str, Any]:
    value = read_object(file)
    broken = [phase for phase, found in value.items() if not isinstance(found, dict)]
    if broken:
        raise UserError(f"{file} holds no results of {listed(broken)}: what is there must be an object, {{...}}")
    return value


def _log(file: Path) -> dict[str, Records]:
    """Each phase's records, one a step: where a resumed run has logged a step again, the last holds."""
    lines = read_file(file).decode("utf-8", errors="replace").splitlines()
    found = {number: _record(line) for number, line in enumerate(lines, start=1)}
    broken = [number for number, record in found.items() if not record]
    if broken:
        distributed.warn(f"{file}: left out what is no record, on line {listed(broken)}")
    phases: dict[str, dict[int, dict[str, Any]]] = {}
    for record in filter(None, found.values()):
        phases.setdefault(record["phase"], {}).setdefault(record["step"], {}).update(record)
    return {phase: [records[step] for step in sorted(records)] for phase, records in phases.items()}


def _record(line: str) -> dict[str, Any]:
    """A line of the log; empty where it is none, as the last of a run that was killed may be."""
    try:
        record = json.loads(line)
    except (RecursionError, ValueError):
        return {}
    whole = isinstance(record, dict) and isinstance(record.get("phase"), str) and isinstance(record.get("step"), int)
    return record if whole else {}
