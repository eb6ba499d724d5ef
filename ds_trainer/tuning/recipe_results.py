"""What the tuning of a recipe leaves: `tuned_recipe.json`, the table of its trials, the front of score against cost.

A trial is on the front of a cost, such as its model's size, where no other trial scores at least as well at that cost
or less and is better in one of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from ds_trainer.config.jobs import RecipeTuneJob
from ds_trainer.files.messages import shown
from ds_trainer.files.redaction import redacted
from ds_trainer.files.tables import Row, markdown
from ds_trainer.files.writing import write_json
from ds_trainer.ranks import distributed
from ds_trainer.report import drawing
from ds_trainer.tuning.recipe_trials import RecipeTrial
from ds_trainer.tuning.results import training_command, write_page
from ds_trainer.tuning.space import Settings, apply_settings
from ds_trainer.tuning.trials import MEASURED

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TUNED, TABLE = "tuned_recipe.json", "tuned_recipe.md"
OWN = "the user's own recipe"


@dataclass(frozen=True)
class TunedRecipe:
    """The results of a tuning: the winner, and all that was tried, the user's own recipe first."""

    winner: RecipeTrial
    trials: Sequence[RecipeTrial]
    held_out: int
    """The examples that scores are of."""
    sign: int
    """-1 where lower scores are better, else 1."""


def write_results(job: RecipeTuneJob, tuned: TunedRecipe) -> None:
    """Write the winner's recipe, the table and the figure, and print how to train with it."""
    settings = tuned.winner.candidate.settings
    write_json(job.output / TUNED, redacted(apply_settings(job.recipe_file, settings, of_recipe=True)))
    command = training_command(job, tuned.winner.candidate, "--recipe", TUNED)
    summary = summary_of(tuned, job.metric)
    lines = [f"# The settings with the best {job.metric}", summary, f"```\n{command}\n```"]
    lines += [markdown(list(table(tuned, job.metric)))]
    write_page(job.output / TABLE, lines, "score against cost", partial(draw, tuned, job.metric))
    distributed.info(f"\n{summary}\ntable: {job.output / TABLE}\ntrain with:\n  {command}")


def settings_in_words(settings: Settings) -> str:
    """Name what a candidate sets."""
    return ", ".join(f"{path.removeprefix('phases.')} {_value(value)}" for path, value in settings) or OWN


def summary_of(tuned: TunedRecipe, metric: str) -> str:
    """Say who won by how much, and whether that may be chance: an accuracy's standard error is that of a share."""
    score, own, count = tuned.winner.score or 0.0, tuned.trials[0], tuned.held_out
    first = f"{settings_in_words(tuned.winner.candidate.settings)}: {metric} {score:.4f} on {count:,} held-out examples"
    if own is tuned.winner or own.score is None:
        return f"{first}; {'no other scored better' if own is tuned.winner else f'{OWN} has no score'}."
    first += f", {OWN} {own.score:.4f}."
    if metric.rpartition("/")[2] != "accuracy":
        return first
    error = math.sqrt(max(0.0, score * (1 - score)) / max(1, count))
    where = "within" if abs(score - own.score) <= error else "beyond"
    return f"{first} The difference is {where} one standard error of so many examples, {error:.4f}."


def table(tuned: TunedRecipe, metric: str) -> Iterator[Row]:
    """Yield a row for each trial, the best score first and those without one last."""
    fronts = fronts_of(tuned.trials, tuned.sign)
    for trial in sorted(tuned.trials, key=lambda trial: math.inf if trial.score is None else -tuned.sign * trial.score):
        costs = {cost: f"{trial.costs[cost]:,.2f}" if cost in trial.costs else "" for cost in fronts}
        yield {
            metric: "" if trial.score is None else f"{trial.score:.4f}",
            "settings": settings_in_words(trial.candidate.settings),
            **costs,
            "on the front of": ", ".join(cost for cost, front in fronts.items() if trial in front),
            "trained": f"{trial.trained:,.0f} s" if trial.trained else "",
            "outcome": f"{trial.outcome}: {trial.reason}" if trial.reason else trial.outcome,
            "folder": f"trials/{trial.run}" if trial.run else "",
        }


def fronts_of(trials: Sequence[RecipeTrial], sign: int) -> dict[str, list[RecipeTrial]]:
    """Return the trials that are on the front of each cost; `sign` is -1 where lower scores are better."""
    measured = [trial for trial in trials if trial.outcome == MEASURED]
    fronts = {}
    for cost in dict.fromkeys(cost for trial in measured for cost in trial.costs):
        known = [trial for trial in measured if cost in trial.costs]
        points = [(sign * (trial.score or 0.0), trial.costs[cost]) for trial in known]
        fronts[cost] = [trial for trial, unbeaten in zip(known, are_unbeaten(points), strict=True) if unbeaten]
    return fronts


def are_unbeaten(points: Sequence[tuple[float, float]]) -> list[bool]:
    """Return for each pair of a score and a cost whether no other one is as good in both and better in one."""
    return [
        not any(other >= score and price <= cost and (other, price) != (score, cost) for other, price in points)
        for score, cost in points
    ]


def draw(tuned: TunedRecipe, metric: str) -> Figure:
    """Draw the score of every trial over each cost of its model, with the front, the user's own, and the winner."""
    fronts = fronts_of(tuned.trials, tuned.sign)
    figure = drawing.new_figure(380 * max(1, len(fronts)) + 160, 400, "score against cost")
    panels = drawing.add_panels(figure, columns=max(1, len(fronts)), sharey=True)
    for axes, (cost, front) in zip(panels, fronts.items(), strict=False):
        known = [trial for trial in tuned.trials if trial.score is not None and cost in trial.costs]
        on_front = sorted(front, key=lambda trial: trial.costs[cost])
        groups: dict[str, tuple[Sequence[RecipeTrial], dict[str, Any]]] = {
            "all": (known, {"linestyle": "", "marker": "o", "color": drawing.COLOURS[6]}),
            "the front": (on_front, {"marker": "o", "color": drawing.COLOURS[0]}),
            OWN: ([trial for trial in known if trial is tuned.trials[0]], {"marker": "s", "color": drawing.COLOURS[1]}),
            "the winner": (
                [tuned.winner],
                {"linestyle": "", "marker": "o", "markersize": 14, "mfc": "none", "mec": "black"},
            ),
        }
        for name, (trials, style) in groups.items():
            points = [(trial.costs[cost], trial.score) for trial in trials if cost in trial.costs]
            axes.plot(*zip(*points, strict=True) if points else ((), ()), label=name, **style)
        drawing.dress(axes, cost, drawing.score_name(metric, tuned.sign > 0))
    panels[-1].legend(**drawing.LEGEND)
    return figure


def _value(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else shown(value)
