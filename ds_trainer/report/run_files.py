"""The small files of a run's output folder, as its report reads them."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from ds_trainer.files.messages import listed
from ds_trainer.files.reading import read_file, read_object
from ds_trainer.ranks import distributed
from ds_trainer.ranks.failures import UserError
from ds_trainer.recipe.exit_specs import EXITS_FILE

LogRecords: TypeAlias = Sequence[Mapping[str, Any]]
"""The log of one phase: one record for each step, in order. A value that was not finite is None."""

OF_ONE_EXIT = re.compile(r"(^|/)(exit_\d+/|early_exit/(leave_at_\d+|seconds|full_seconds|expected_saving)$)")
"""Matches scores that a table of phases leaves out: those of single exit heads, and those that repeat another score."""
_OF_ONE_CLASS = re.compile(r"(^|/)f1/")

_MEMORY = re.compile(r"(?:eval/)?memory/(\w+)/rank(\d+)")


def encoder_weights(result: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return how many encoder weights a phase has kept, and how many there were before; None if none were counted."""
    weights = result.get("weights", {})
    if "encoder" not in weights:
        return None
    whole = weights["before"]["encoder"] if "before" in weights else weights["encoder"]["total"]
    return weights["encoder"]["kept"], whole


def peak_memory(records: LogRecords) -> dict[str, tuple[float, str]]:
    """Return, by kind of memory, the most bytes that any rank has held, and the number of that rank."""
    peaks: dict[str, tuple[float, str]] = {}
    for record in records:
        for name, held in record.items():
            if match := _MEMORY.fullmatch(name):
                peaks[match[1]] = max(peaks.get(match[1], (0.0, "")), (held, match[2]))
    return peaks


@dataclass(frozen=True)
class RunFiles:
    """The contents of an output folder's files; results and records are by phase."""

    folder: Path
    recipe: Mapping[str, Any]
    results: Mapping[str, Any]
    records: Mapping[str, LogRecords]

    @property
    def phases(self) -> list[str]:
        """The phases that have logged or finished, in their order."""
        return list(dict.fromkeys([*self.results, *self.records]))

    def folder_of(self, phase: str) -> Path:
        """Return the folder of a phase's model and evaluation; for the last phase it is the output folder itself."""
        planned = [spec["name"] for spec in self.recipe.get("phases", [])] or self.phases
        return self.folder if phase == planned[-1] else self.folder / phase

    def spec(self, phase: str) -> Mapping[str, Any]:
        """Return the section of a phase in the recipe; an empty one if the recipe does not have this phase."""
        return next((spec for spec in self.recipe.get("phases", []) if spec["name"] == phase), {})

    def exits(self, phase: str) -> dict[str, Any]:
        """Return the results of a phase's exits, with curves if its evaluation wrote them; empty without exits."""
        file = self.folder_of(phase) / "eval" / EXITS_FILE
        return read_object(file) if file.is_file() else self.results.get(phase, {}).get("exits") or {}


def read_run(folder: Path) -> RunFiles:
    """Read the small files of an output folder. Raises UserError if it holds no run, or a file is broken."""
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


def _read_log(file: Path) -> dict[str, LogRecords]:
    """Read the records of each phase, one for each step. If a resumed run logged a step again, its later values win."""
    lines = read_file(file).decode("utf-8", errors="replace").splitlines()
    records = {number: _record(line) for number, line in enumerate(lines, start=1)}
    if broken := [number for number, record in records.items() if not record]:
        distributed.warn(f"{file}: left out line {listed(broken)}, which is no record of a step")
    phases: dict[str, dict[int, dict[str, Any]]] = {}
    for record in filter(None, records.values()):
        phases.setdefault(record["phase"], {}).setdefault(record["step"], {}).update(record)
    return {phase: [steps[step] for step in sorted(steps)] for phase, steps in phases.items()}


def _record(line: str) -> dict[str, Any]:
    """Parse a line of the log; return an empty record for a broken line, such as the last one of a killed run."""
    try:
        record = json.loads(line)
    except ValueError:
        return {}
    if not isinstance(record, dict):
        return {}
    phase, step = record.get("phase"), record.get("step")
    return record if isinstance(phase, str) and isinstance(step, int) and not isinstance(step, bool) else {}


def is_detail(score: str) -> bool:
    """Whether a score is of one exit head or one class, of which there may be too many for a table."""
    return bool(OF_ONE_EXIT.search(score) or _OF_ONE_CLASS.search(score))
