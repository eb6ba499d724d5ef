"""What a run's models score and cost: read from the files of its output folder, side by side in a table, and in words.

The first phase that was timed is what the others are compared with. Latencies are those of `deploy.measuring`: measured
in turns, on the texts of one task, which the scores are of as well.
"""

import contextlib
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from ds_trainer.files.messages import aligned
from ds_trainer.files.reading import read_file, read_object
from ds_trainer.files.run_folder import LOG, RESULTS, phase_folder
from ds_trainer.ranks.failures import UserError
from ds_trainer.recipe.exit_specs import EXITS_FILE
from ds_trainer.recipe.saved_checkpoint import RECIPE
from ds_trainer.recipe.task_specs import greater_is_better

LogRecords: TypeAlias = Sequence[Mapping[str, Any]]
"""The log of one phase: one record for each step, in order. A value that was not finite is None."""

_OF_ONE_EXIT = re.compile(r"(^|/)(exit_\d+/|early_exit/(leave_at_\d+|seconds|full_seconds|expected_saving)$)")
"""Matches scores that no table shows: those of single exit heads, and those that repeat another score."""
_OF_ONE_CLASS = re.compile(r"(^|/)f1/")
_MEMORY = re.compile(r"(?:eval/)?memory/(\w+)/rank(\d+)")
_PERCENTS = ("exact_match",)
"""Scores that are given in percent; others of 1 or less are shares, of which a hundredth is a point."""
_WAYS = (("latency", "", ""), ("early_exit_latency", "early_exit/", "early exit, "))
"""The ways in which a model is timed: the key of its times, the prefix of its scores, and words for its cells."""


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
        """Return the folder of a phase's model and evaluation."""
        planned = [spec["name"] for spec in self.recipe.get("phases", [])] or self.phases
        return phase_folder(self.folder, planned, phase)

    def spec(self, phase: str) -> Mapping[str, Any]:
        """Return the section of a phase in the recipe; an empty one if the recipe does not have this phase."""
        return next((spec for spec in self.recipe.get("phases", []) if spec["name"] == phase), {})

    def exits(self, phase: str) -> dict[str, Any]:
        """Return the results of a phase's exits, with curves if its evaluation wrote them; empty without exits."""
        file = self.folder_of(phase) / "eval" / EXITS_FILE
        return read_object(file) if file.is_file() else self.results.get(phase, {}).get("exits") or {}


def read_run(folder: Path) -> RunFiles:
    """Read the small files of an output folder. Raises UserError if it holds no run, or a file is broken."""
    recipe, results, log = (folder / name for name in (RECIPE, RESULTS, LOG))
    if not (results.is_file() or log.is_file()):
        why = f"holds no run: it has neither {LOG} nor {RESULTS}" if folder.is_dir() else "is no folder"
        raise UserError(f"{folder} {why}: name the output folder of a run")
    of_recipe, of_results = (read_object(file) if file.is_file() else {} for file in (recipe, results))
    return RunFiles(folder, of_recipe, of_results, _read_log(log) if log.is_file() else {})


def _read_log(file: Path) -> dict[str, LogRecords]:
    """Read the records of each phase, one for each step. If a resumed run logged a step again, its later values win."""
    phases: dict[str, dict[int, dict[str, Any]]] = {}
    for line in read_file(file).decode("utf-8", errors="replace").splitlines():
        with contextlib.suppress(ValueError, LookupError, TypeError):  # the last line of a killed run may be cut short
            record = json.loads(line)
            phases.setdefault(record["phase"], {}).setdefault(int(record["step"]), {}).update(record)
    return {phase: [steps[step] for step in sorted(steps)] for phase, steps in phases.items()}


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
    for name, held in ((name, held) for record in records for name, held in record.items()):
        if match := _MEMORY.fullmatch(name):
            peaks[match[1]] = max(peaks.get(match[1], (0.0, "")), (held, match[2]))
    return peaks


def is_detail(score: str) -> bool:
    """Whether a score is of one exit head or one class, of which there may be too many for a table."""
    return bool(_OF_ONE_EXIT.search(score) or _OF_ONE_CLASS.search(score))


def main_metric(results: Mapping[str, Any]) -> str | None:
    """Return the name of the score that the last phase's task gives first."""
    return next(iter(list(results.values())[-1].get("eval", {})), None) if results else None


def cells_of(result: Mapping[str, Any]) -> dict[str, str]:
    """Return what a phase's model scores, what it costs, and its training, by the titles of a table.

    Size and latency are only known of a run with a report.
    """
    cells = {name: number(value) for name, value in result.get("eval", {}).items() if not _OF_ONE_EXIT.search(name)}
    if counted := encoder_weights(result):
        cells["encoder weights"] = f"{counted[0]:,} ({100 * counted[0] / max(counted[1], 1):.1f}%)"
    if "size" in result:
        cells["MiB"] = f"{result['size']['bytes'] / 2**20:,.1f}"
    for key, _, words in _WAYS:
        for batch, times in (result.get(key) or {}).items():
            cells[f"{words}ms ({batch.replace('_', ' ')})"] = f"{times['median_ms']:.2f}"
    if train := result.get("train"):
        cells |= {"seconds": f"{train['train_seconds']:,.0f}", "examples/s": f"{train['examples_per_s']:.0f}"}
    return cells


def number(value: Any) -> str:
    """Write a score for a table."""
    if not isinstance(value, int | float):
        return "–"
    return f"{value:,.1f}" if abs(value) >= 1000 else f"{value:.4f}"


def side_by_side(
    results: Mapping[str, Any], more: Mapping[str, Mapping[str, str]] | None = None
) -> dict[str, dict[str, str]]:
    """Return the cells of each phase, and `more` of them; all phases have the same titles, those of scores first."""
    cells = {phase: cells_of(result) | dict((more or {}).get(phase, {})) for phase, result in results.items()}
    every = dict.fromkeys(title for of_phase in cells.values() for title in of_phase)
    scores = {name for result in results.values() for name in result.get("eval", {})}
    titles = sorted(every, key=lambda title: title not in scores)
    return {phase: {title: own.get(title, "–") for title in titles} for phase, own in cells.items()}


def results_table(results: Mapping[str, Any]) -> str:
    """Show a line for each phase, without the scores of single classes, above the verdict."""
    rows = [
        {"phase": phase} | {title: cell for title, cell in cells.items() if not is_detail(title)}
        for phase, cells in side_by_side(results).items()
    ]
    return "\n\n".join([aligned(rows), *filter(None, ["\n".join(verdict(results))])])


def verdict(results: Mapping[str, Any]) -> list[str]:
    """Say in a sentence for each timed model how fast it is and how well it scores beside the first one.

    A model is named by its phase, and once more where it leaves early.
    """
    metric, sentences = main_metric(results), list[str]()
    timed: dict[str, tuple[float | None, dict[str, float]]] = {}  # scores, and milliseconds by "batch 1", "batch 32"
    for phase, result in results.items():
        for key, prefix, words in _WAYS:
            ms = {batch.replace("_", " "): times["median_ms"] for batch, times in (result.get(key) or {}).items()}
            score = result.get("eval", {}).get(f"{prefix}{metric}")
            if ms:
                finite = score is not None and math.isfinite(score)
                timed[f"{phase}, leaving early" if words else phase] = score if finite else None, ms
    base, (base_score, base_ms) = next(iter(timed.items()), ("", (None, {})))
    for name, (score, ms) in list(timed.items())[1:]:
        batches = [batch for batch in ms if batch in base_ms]
        parts = [f"{base_ms[batch] / ms[batch]:.1f} times at {batch}" for batch in batches]
        parts[:1] = [part.replace(" at ", f" as fast as {base} at ", 1) for part in parts[:1]]
        if metric and score is not None and base_score is not None:
            parts.append(_difference(metric, base_score, score))
        sentences.append(f"{name}: {', '.join(parts)}.")
    return sentences


def _difference(metric: str, before: float, after: float) -> str:
    """Say how a score differs: in points, or as both values where less is better, which has no points."""
    if number(before) == number(after):
        return f"equal {metric}"
    if greater_is_better(metric) is False:
        order = "worse" if after > before else "better"
        return f"{metric} {number(after)} instead of {number(before)}, which is {order}"
    shares = metric not in _PERCENTS and max(abs(before), abs(after)) <= 1
    points = f"{abs(after - before) * (100 if shares else 1):.1f}"
    return f"{points} points {'less' if after < before else 'more'} {metric}" if points != "0.0" else f"equal {metric}"


def dry_run_table(phases: Sequence[Mapping[str, Any]]) -> str:
    """Show the phases of `rehearsal.rehearse_phases`, a line each, and say what the minutes are measured on."""
    return "\n".join([aligned([_rehearsed(phase) for phase in phases]), "", *_notes(phases)])


def _rehearsed(phase: Mapping[str, Any]) -> dict[str, str]:
    trained = sum(group["parameters"] for group in phase["parameter_groups"])
    row = {
        "phase": phase["phase"],
        "steps": f"{phase['steps']['total']:,}",
        "examples a step": f"{phase['engine_file']['train_batch_size']:,}",
        "parameters": f"{trained + phase['frozen_parameters']:,}",
        "of them trained": f"{trained:,}" if "time" in phase else "0",
    }
    names = {"peak": "MiB", "peak_of_the_gpu": "MiB of the GPU", "peak_of_the_host": "MiB of the host"}
    held = phase.get("memory_per_rank", {})
    row |= {column: f"{held[peak] / 2**20:,.0f}" for peak, column in names.items() if peak in held}
    minutes = phase.get("time", {}).get("seconds", 0) / 60
    return row | {"minutes": f"{minutes:,.1f}" if minutes >= 0.1 else "<0.1"}


def _notes(phases: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    ranks = next((phase["memory_per_rank"]["ranks"] for phase in phases if "memory_per_rank" in phase), 1)
    yield f"MiB: the peak of each of {ranks} ranks." if ranks > 1 else "MiB: the peak of the process."
    for name, time in ((phase["phase"], phase["time"]) for phase in phases if "time" in phase):
        taken = f"{time['batches']} micro-batches, {time['examples']} of the {time['micro_batch']} examples of each"
        yield f"{name} is measured by forwards and backwards of {taken}, on {time['device']}."
    yield "On top come the optimizer's steps, evaluations, saves, and what comes before the first step, such as a cut."
    yield "--dry_run json prints all of it: both files as resolved, parameter groups, memory by part."
