"""What all checkpoints of a phase score: a table, `checkpoints.json`, and a figure of score and density over steps."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ds_trainer.config.jobs import EvaluateJob
from ds_trainer.files.run_folder import RunFolder, kept_from_runs
from ds_trainer.ranks import distributed
from ds_trainer.report.figure import Figure, check_installed
from ds_trainer.report.log import aligned, save_json
from ds_trainer.report.plots import COLOURS, LOWER_IS_BETTER, MARKERS, dress, label, title
from ds_trainer.report.run_files import OF_ONE_EXIT, encoder_weights

_SCORES, _FIGURE = "checkpoints.json", "checkpoints.png"


@dataclass(frozen=True)
class CheckpointScores:
    """What one checkpoint scores, by the names of an evaluation, and the weights that its model has kept."""

    step: int
    scores: Mapping[str, float]
    weights: Mapping[str, Any]
    """As `models.count_weights`."""

    @property
    def density(self) -> float:
        """Share of the encoder's weights that are there and not 0, of those before any was cut out."""
        kept, whole = encoder_weights({"weights": self.weights}) or (1, 1)
        return kept / whole


def scores_table(rows: Sequence[CheckpointScores]) -> str:
    """The checkpoints side by side; the scores of single exit heads are left to the file."""
    return aligned(
        [
            {"step": f"{row.step:,}"}
            | {name: f"{value:.4f}" for name, value in row.scores.items() if not OF_ONE_EXIT.search(name)}
            | {"encoder weights": f"{100 * row.density:.1f}%"}
            for row in rows
        ]
    )


def write_scores(rows: Sequence[CheckpointScores], job: EvaluateJob) -> None:
    """Write file and figure to the phase's folder, as a part of the run, or where the flags say."""
    phase = job.checkpoints[-1].phase.name
    found = [{"step": row.step, "scores": row.scores, "density": row.density} for row in rows]
    files = {_SCORES: {"phase": phase, "checkpoints": found}}
    if job.output_file:
        job.output_file.write_text(json.dumps(files[_SCORES], indent=2) + "\n", encoding="utf-8")
    if job.predictions_dir:
        save_json(files, job.predictions_dir)
        _draw(phase, rows, job.predictions_dir / _FIGURE)
        return
    run, place = job.checkpoints[-1].run, job.checkpoints[-1].path.parent
    with kept_from_runs(run):
        folder, relative = RunFolder(run), place.relative_to(run)
        folder.write_json(str(relative / _SCORES), files[_SCORES])
        _draw(phase, rows, folder.claim(str(relative / _FIGURE)))


def scores_over_steps(phase: str, rows: Sequence[CheckpointScores]) -> Figure:
    """The task's metrics, a panel each with a line for every split and for early exit; below them the density."""
    metrics = [name for name in rows[0].scores if "/" not in name]
    figure = Figure(800, 200 + 180 * len(metrics))
    panels = figure.panels(len(metrics) + 1, 1, sharex=True)
    steps = [row.step for row in rows]
    for axes, metric in zip(panels, metrics, strict=False):
        lines = [name for name in rows[0].scores if name.rpartition("/")[2] == metric and not OF_ONE_EXIT.search(name)]
        for place, name in enumerate(lines):
            style: dict[str, Any] = {"color": COLOURS[place % len(COLOURS)], "marker": MARKERS[place % len(MARKERS)]}
            axes.plot(steps, [row.scores[name] for row in rows], label=label(name), markersize=5, **style)
        dress(axes, "", f"{metric} (less is better)" if metric in LOWER_IS_BETTER else metric)
        if len(lines) > 1:
            axes.legend(frameon=False, fontsize=9)
    panels[-1].plot(steps, [100 * row.density for row in rows], color="black", marker="o", markersize=5)
    panels[-1].set_ylim(0, 105)
    dress(panels[-1], "optimizer step", "kept (%)")
    title(figure, f"{phase}: checkpoints")
    return figure


def _draw(phase: str, rows: Sequence[CheckpointScores], target: Path) -> None:
    try:
        check_installed()
    except ValueError as error:
        distributed.warn(f"there is no {target.name}: {error}")
        return
    scores_over_steps(phase, rows).save(target)
    distributed.info(f"written: {target.with_name(_SCORES)}, {target}")
