"""The scores of all checkpoints of a phase: a table, `checkpoints.json`, and a figure of scores and density."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ds_trainer.config.jobs import EvaluateJob
from ds_trainer.files.run_folder import RunFolder, kept_from_runs
from ds_trainer.files.tables import aligned
from ds_trainer.files.writing import write_json
from ds_trainer.ranks import distributed
from ds_trainer.report import drawing
from ds_trainer.report.run_files import encoder_weights, is_detail

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SCORES, _FIGURE = "checkpoints.json", "checkpoints.png"


@dataclass(frozen=True)
class CheckpointScores:
    """The scores of one checkpoint by name, and the weights that its model has kept."""

    step: int
    scores: Mapping[str, float]
    weights: Mapping[str, Any]
    """As `models.count_weights` gives them."""

    @property
    def density(self) -> float:
        """Encoder weights that are present and not 0, as a share of those before any was cut out."""
        kept, whole = encoder_weights({"weights": self.weights}) or (1, 1)
        return kept / whole


def scores_table(rows: Sequence[CheckpointScores]) -> str:
    """Return a table with a row for each checkpoint. Scores of single exit heads and classes are only in the file."""
    return aligned(
        [
            {"step": f"{row.step:,}"}
            | {name: f"{value:.4f}" for name, value in row.scores.items() if not is_detail(name)}
            | {"encoder weights": f"{100 * row.density:.1f}%"}
            for row in rows
        ]
    )


def write_scores(rows: Sequence[CheckpointScores], job: EvaluateJob) -> None:
    """Write the file and the figure to the folder of the phase, or to the places that the command's flags name."""
    newest = job.checkpoints[-1]
    scores = [{"step": row.step, "scores": row.scores, "density": row.density} for row in rows]
    value = {"phase": newest.phase.name, "checkpoints": scores}
    if job.output_file:
        job.output_file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    if job.predictions_dir:
        write_json(job.predictions_dir / _SCORES, value)
        _draw(newest.phase.name, rows, job.predictions_dir / _FIGURE)
        return
    relative = newest.path.parent.relative_to(newest.run)
    with kept_from_runs(newest.run):
        folder = RunFolder(newest.run)
        folder.write_json(str(relative / _SCORES), value)
        _draw(newest.phase.name, rows, folder.claim(str(relative / _FIGURE)))


def scores_over_steps(phase: str, rows: Sequence[CheckpointScores]) -> Figure:
    """Draw a panel for each metric, with a line for each split and for early exit, and below them the density."""
    metrics = [name for name in rows[0].scores if "/" not in name]
    figure = drawing.new_figure(800, 200 + 180 * len(metrics), f"{phase}: checkpoints")
    panels = drawing.add_panels(figure, len(metrics) + 1, 1, sharex=True)
    steps = [row.step for row in rows]
    for axes, metric in zip(panels, metrics, strict=False):
        lines = [name for name in rows[0].scores if name.rpartition("/")[2] == metric and not is_detail(name)]
        for name, colour, marker in zip(lines, drawing.colours(lines), drawing.markers(lines), strict=True):
            values = [row.scores[name] for row in rows]
            axes.plot(steps, values, label=drawing.label(name), color=colour, marker=marker, markersize=5)
        drawing.dress(axes, "", drawing.score_name(metric))
        if len(lines) > 1:
            axes.legend(frameon=False, fontsize=9)
    panels[-1].plot(steps, [100 * row.density for row in rows], color="black", marker="o", markersize=5)
    panels[-1].set_ylim(0, 105)
    drawing.dress(panels[-1], "optimizer step", "kept (%)")
    return figure


def _draw(phase: str, rows: Sequence[CheckpointScores], target: Path) -> None:
    try:
        drawing.save(scores_over_steps(phase, rows), target)
        distributed.info(f"written: {target.with_name(_SCORES)}, {target}")
    except ValueError as error:
        distributed.warn(f"{target.name} is not drawn: {error}")
