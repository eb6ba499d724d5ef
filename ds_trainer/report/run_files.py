"""The small files of a run's output folder, as its report reads them."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from ds_trainer.config.exit_specs import EXITS_FILE
from ds_trainer.files.messages import kind_of, listed
from ds_trainer.files.reading import read_file, read_value
from ds_trainer.ranks import distributed
from ds_trainer.ranks.failures import UserError

Records: TypeAlias = Sequence[Mapping[str, Any]]
"""What one phase has logged: one record a step, in order; a value that was not finite is None."""

OF_ONE_EXIT = re.compile(r"(^|/)(exit_\d+/|early_exit/(leave_at_\d+|seconds|full_seconds|expected_saving)$)")
"""Scores that a table of phases leaves out: those of single exit heads, and those that repeat another score."""

_MEMORY = re.compile(r"(?:eval/)?memory/(\w+)/rank(\d+)")


def encoder_weights(result: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return how many encoder weights a phase has kept, and how many there were before; None if none were counted."""
    weights = result.get("weights", {})
    if "encoder" not in weights:
        return None
    whole = weights["before"]["encoder"] if "before" in weights else weights["encoder"]["total"]
    return weights["encoder"]["kept"], whole


def peak_memory(records: Records) -> dict[str, tuple[float, str]]:
    """Return the most bytes that any rank has held, and the number of that rank, by kind of memory."""
    peaks: dict[str, tuple[float, str]] = {}
    for record in records:
        for name, held in record.items():
            if match := _MEMORY.fullmatch(name):
                peaks[match[1]] = max(peaks.get(match[1], (0.0, "")), (held, match[2]))
    return peaks


@dataclass(frozen=True)
class RunFiles:
    """The files of an output folder; results and records are by phase."""

    folder: Path
    recipe: Mapping[str, Any]
    results: Mapping[str, Any]
    records: Mapping[str, Records]

    @property
    def phases(self) -> list[str]:
        """The phases that have logged or finished, in their order."""
        return list(dict.fromkeys([*self.results, *self.records]))

    def folder_of(self, phase: str) -> Path:
        """Return where a phase writes its model and its evaluation: the last one into the output folder itself."""
        planned = [spec["name"] for spec in self.recipe.get("phases", [])] or self.phases
        return self.folder if phase == planned[-1] else self.folder / phase

    def spec(self, phase: str) -> Mapping[str, Any]:
        """Return the phase as it stands in the recipe; empty where the recipe does not have it."""
        return next((spec for spec in self.recipe.get("phases", []) if spec["name"] == phase), {})

    def exits(self, phase: str) -> dict[str, Any]:
        """Return the results of a phase's exits, with the curves where its evaluation wrote them.

        Empty without exits.
        """
        file = self.folder_of(phase) / "eval" / EXITS_FILE
        return read_object(file) if file.is_file() else self.results.get(phase, {}).get("exits") or {}

    def calibrated_again(self, phase: str) -> bool:
        """Whether the exits of a phase's model differ from those that were evaluated."""
        file, evaluated = self.folder_of(phase) / "model" / EXITS_FILE, self.exits(phase)
        if not evaluated or not file.is_file():
            return False
        now = read_object(file)
        return any(now.get(name) != evaluated.get(name) for name in ("policy", "calibration"))


def read_run(folder: Path) -> RunFiles:
    """Read the small files of an output folder. Raises UserError where it holds no run, or a file is broken."""
    recipe, results, log = (folder / name for name in ("recipe.json", "all_results.json", "log.jsonl"))
    if not (results.is_file() or log.is_file()):
        why = "holds no run: it has neither log.jsonl nor all_results.json" if folder.is_dir() else "is no folder"
        raise UserError(f"{folder} {why}: name the output folder of a run")
    return RunFiles(
        folder,
        read_object(recipe) if recipe.is_file() else {},
        read_object(results) if results.is_file() else {},
        _read_log(log) if log.is_file() else {},
    )


def read_object(file: Path) -> dict[str, Any]:
    """Read the JSON object in a file that a run has written; NaN is a number there. Raises UserError."""
    value = read_value(file)
    if not isinstance(value, dict):
        raise UserError(f"{file} holds {kind_of(value)}: it must be an object, {{...}}")
    return value


def _read_log(file: Path) -> dict[str, Records]:
    """Read each phase's records, one a step: where a resumed run has logged a step again, the last record counts."""
    lines = read_file(file).decode("utf-8", errors="replace").splitlines()
    records = {number: _record(line) for number, line in enumerate(lines, start=1)}
    if broken := [number for number, record in records.items() if not record]:
        distributed.warn(f"{file}: left out line {listed(broken)}, which is no record of a step")
    phases: dict[str, dict[int, dict[str, Any]]] = {}
    for record in filter(None, records.values()):
        phases.setdefault(record["phase"], {}).setdefault(record["step"], {}).update(record)
    return {phase: [steps[step] for step in sorted(steps)] for phase, steps in phases.items()}


def _record(line: str) -> dict[str, Any]:
    """Return a line of the log as a record; empty where it is none, as the last line of a run that was killed."""
    try:
        record = json.loads(line)
    except ValueError:
        return {}
    return record if isinstance(record, dict) and {"phase", "step"} <= record.keys() else {}
