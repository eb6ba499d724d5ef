"""What a tuning leaves: `tuned.json`, the table of all trials with their reasons, and a figure."""

from __future__ import annotations

import contextlib
import shlex
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ds_trainer.config.jobs import TuneJob
from ds_trainer.config.recipe import Recipe
from ds_trainer.files.redaction import redacted
from ds_trainer.files.tables import Row, markdown
from ds_trainer.files.writing import write_json, write_whole
from ds_trainer.ranks import distributed
from ds_trainer.ranks.failures import UserError
from ds_trainer.tuning.space import STAGE, Candidate, apply_settings
from ds_trainer.tuning.trials import MEASURED, Trial, training_words

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TUNED, TABLE = "tuned.json", "tuned.md"
_MIB = 2**20


@dataclass(frozen=True)
class Tuned:
    """The results of a tuning: the winner, the user's own files, and all that was tried."""

    winner: Candidate
    own: Candidate
    speeds: dict[Candidate, float]
    """Examples per second of the finalists, the median of their trials."""
    noise: float
    """Half the range of a finalist's trials, as a part of their median; the middle one of the finalists."""
    trials: list[Trial]


def write_results(job: TuneJob, tuned: Tuned) -> None:
    """Write the winner's engine file, the table and the figure, and print how to train with them."""
    engine_file = apply_settings(job.engine_file, tuned.winner.settings)
    write_json(job.output / TUNED, redacted(engine_file))
    command = training_command(job, tuned.winner)
    summary = _summary(tuned)
    lines = [f"# The fastest settings for phase {job.phase}", summary, f"```\n{command}\n```", _memory_line(tuned)]
    lines += [markdown(list(table(tuned.trials)))]
    write_page(job.output / TABLE, lines, "speed against memory", partial(draw, tuned))
    distributed.info(f"\n{summary}\n{_memory_line(tuned)}\ntable: {job.output / TABLE}\ntrain with:\n  {command}")


def write_page(path: Path, lines: Sequence[str], name: str, draw: Callable[[], Figure]) -> None:
    """Write paragraphs of Markdown, and below them the figure of this name, where Matplotlib is installed."""
    with contextlib.suppress(UserError):  # Matplotlib is an extra
        from ds_trainer.report import drawing

        drawing.save(draw(), path.with_suffix(".png"))
        lines = [*lines, f"![{name}]({path.stem}.png)"]
    write_whole(path, "\n\n".join(lines) + "\n")


def training_command(job: TuneJob, winner: Candidate, flag: str = "--deepspeed_config", file: str = TUNED) -> str:
    """Return the command that trains with a file of the tuning in place of the user's own, which `flag` names.

    Its `--set` flags are those of the other file, the user's and the winner's; this file has its own inside.
    """
    words = training_words(job, winner)
    pairs = [words[place : place + 2] for place, word in enumerate(words) if word == "--set"]
    of_recipe = {pair[1]: pair[1].partition("=")[0].split(".")[0] in Recipe.model_fields for pair in pairs}
    kept = [word for place, word in enumerate(words) if "--set" not in words[max(0, place - 1) : place + 1]]
    kept[kept.index(flag) + 1] = str(job.output / file)
    hosts = ["--hostfile", str(job.hostfile)] if job.hostfile else ["--num_gpus", str(winner.ranks)]
    threads = [f"OMP_NUM_THREADS={winner.threads}"] if winner.threads else []
    settings = [word for pair in pairs if of_recipe[pair[1]] != (flag == "--recipe") for word in pair]
    command = ["deepspeed", *hosts, "--module", "ds_trainer.cli.train", *kept, *settings, "--output_dir", "OUT"]
    return str(redacted(" ".join([*threads, shlex.join(command)])))


def table(trials: Sequence[Trial]) -> Iterator[Row]:
    """Yield a row for each trial that was started, the fastest first, and one for each reason why others were not."""
    started = [trial for trial in trials if trial.lasted]
    for trial in sorted(started, key=lambda trial: -trial.speed):
        yield {
            "settings": trial.candidate.label,
            "examples/s": f"{trial.speed:.1f}" if trial.seconds else "",
            "peak of a rank": f"{trial.peak / _MIB:,.0f} MiB" if trial.peak else "",
            "by arithmetic": f"{trial.predicted / _MIB:,.0f} MiB",
            "outcome": f"{trial.outcome}: {trial.reason}" if trial.reason else trial.outcome,
        }
    reasons = Counter(f"{trial.outcome}: {trial.reason}" for trial in trials if not trial.lasted)
    for reason, count in reasons.most_common():
        yield {"settings": f"{count} more", "outcome": reason}


def draw(tuned: Tuned) -> Figure:
    """Draw the speed of every measured trial over its peak memory; the user's own files and the winner stand out."""
    from ds_trainer.report import drawing

    figure, axes = drawing.one_panel(900, 420, "speed against memory")
    measured = [trial for trial in tuned.trials if trial.outcome == MEASURED]
    kinds = [_kind(trial.candidate, tuned.own) for trial in measured]
    names = sorted(set(kinds))
    for colour, name in zip(drawing.colours(names), names, strict=True):
        points = [trial for trial, kind in zip(measured, kinds, strict=True) if kind == name]
        across, up = [trial.peak / _MIB for trial in points], [trial.speed for trial in points]
        axes.plot(across, up, "o", color=colour, markersize=8, label=name)
    best = [trial for trial in measured if trial.candidate == tuned.winner]
    across, up = [trial.peak / _MIB for trial in best], [trial.speed for trial in best]
    axes.plot(across, up, "o", markersize=15, markerfacecolor="none", color="black", label="the winner")
    drawing.dress(axes, "peak memory of a rank (MiB)", "examples per second")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.legend(**drawing.LEGEND)
    return figure


def _kind(candidate: Candidate, own: Candidate) -> str:
    """Name the group of points in the figure that a candidate belongs to."""
    stage = dict(candidate.settings).get(STAGE)
    return "the user's own files" if candidate == own else "others" if stage is None else f"ZeRO {stage}"


def _summary(tuned: Tuned) -> str:
    if len(tuned.speeds) < 2:
        return f"{tuned.winner.label}: {tuned.speeds[tuned.winner]:.1f} examples/s; no other candidate was measured."
    speed, own = tuned.speeds[tuned.winner], tuned.speeds.get(tuned.own)
    if tuned.winner == tuned.own:
        return f"The user's own files are the fastest, within {tuned.noise:.1%}: {speed:.1f} examples/s."
    base = f", {speed / own:.2f} times the user's own ({own:.1f})" if own else "; the user's own were not measured"
    return f"{tuned.winner.label}: {speed:.1f} examples/s{base}; noise {tuned.noise:.1%}."


def _memory_line(tuned: Tuned) -> str:
    ratios = [trial.predicted / trial.peak for trial in tuned.trials if trial.peak and trial.predicted]
    if not ratios:
        return ""
    return f"Memory by arithmetic over memory measured: {min(ratios):.2f} to {max(ratios):.2f} in {len(ratios)} trials."
