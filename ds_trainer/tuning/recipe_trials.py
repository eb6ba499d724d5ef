"""Run one trial of a recipe: a whole training, scored on the held-out part of its training set.

It is followed by the log of its last phase, and ended early where its evaluations show that it cannot win, or where it
prints and logs nothing for too long. Its evaluation set is never read.
"""

import contextlib
import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ds_trainer.config.jobs import RecipeTuneJob
from ds_trainer.tuning.space import Candidate, apply_settings
from ds_trainer.tuning.trials import HUNG, LOG, MEASURED, TrialBase, outcome_of, run_training

ENDED_EARLY, NO_SCORE = "ended early", "without the score"
_RECORDS, _RESULTS, _STATUS = "log.jsonl", "all_results.json", "status.json"
_WEIGHTS = ("*/model", "checkpoint-*", "*/checkpoint-*", "starting_models")
"""Of a run's folder, without the model of its last phase."""

CannotWin = Callable[[int, float], bool]
"""Takes an evaluation, its step and the score; the answer holds for the trial that runs."""


@dataclass(frozen=True)
class RecipeTrial(TrialBase):
    """What a whole run has reached, and what its model costs."""

    run: str = ""
    """The name of its folder."""
    score: float | None = None
    curve: Sequence[Sequence[Any]] = ()
    """Step and score of every evaluation of the last phase."""
    costs: Mapping[str, float] = field(default_factory=dict)
    """Of the exported model, as the closing table of a run names them."""
    trained: float = 0.0
    """Seconds of training in all phases."""


def run_recipe_trial(job: RecipeTuneJob, candidate: Candidate, folder: Path, cannot_win: CannotWin) -> RecipeTrial:
    """Train the recipe with the candidate's settings; of the weights only the run's model is kept."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in (_RECORDS, _RESULTS, _STATUS):  # those of an earlier call
        (folder / name).unlink(missing_ok=True)
    recipe = apply_settings(job.recipe_file, candidate.settings, of_recipe=True)
    settings = [*held_out_settings(recipe), "report=true"]
    words = [word for setting in settings for word in ("--set", setting)]
    follower, started = _Follower(job, folder, cannot_win), time.monotonic()
    code = run_training(job, candidate, folder, words, follower.is_to_end)
    lasted = time.monotonic() - started
    follower.curve += follower.new_evaluations()
    for path in (path for pattern in _WEIGHTS for path in folder.glob(pattern)):
        shutil.rmtree(path, ignore_errors=True)
    reached: dict[str, Any] = {"run": folder.name, "lasted": lasted, "curve": follower.curve}
    if code is None:
        return RecipeTrial(candidate, *follower.verdict, **reached)
    with contextlib.suppress(OSError, ValueError, KeyError):  # it did not finish
        if json.loads((folder / _STATUS).read_text(encoding="utf-8"))["state"] == "finished":
            return RecipeTrial(candidate, **_results(folder, job), **reached)
    return RecipeTrial(candidate, *outcome_of(code, folder), **reached)


def held_out_settings(recipe: Mapping[str, Any]) -> list[str]:
    """Return the settings with which every phase of a recipe, as it is written, is scored on held-out examples."""
    own = [place for place, phase in enumerate(recipe["phases"]) if phase.get("task")]
    shared = ["task"] if len(own) < len(recipe["phases"]) else []
    return [f"{path}.score_held_out=true" for path in [*shared, *(f"phases.{place}.task" for place in own)]]


def _results(folder: Path, job: RecipeTuneJob) -> dict[str, Any]:
    """Return the fields of the trial of a run that has finished."""
    results = json.loads((folder / _RESULTS).read_text(encoding="utf-8"))
    last = results[job.phase]
    score = last["eval"].get(job.metric)
    if score is None:
        return {"outcome": NO_SCORE, "reason": f"the run has the scores {', '.join(last['eval'])}"}
    latency = last.get("early_exit_latency") or last.get("latency", {})
    costs = {"MiB": last["size"]["bytes"] / 2**20} if "size" in last else {}
    costs |= {f"ms ({batch.replace('_', ' ')})": times["median_ms"] for batch, times in latency.items()}
    trained = sum(result["train"]["train_seconds"] for result in results.values())
    return {"outcome": MEASURED, "score": score, "costs": costs, "trained": trained}


class _Follower:
    """Reads what a run writes while it runs."""

    def __init__(self, job: RecipeTuneJob, folder: Path, cannot_win: CannotWin) -> None:
        self.curve: list[tuple[int, float]] = []
        self.verdict = ("", "")
        """The outcome of a run that is to end, and the reason."""
        self._job, self._folder, self._cannot_win = job, folder, cannot_win
        self._read, self._sizes, self._since = 0, [0, 0], time.monotonic()

    def is_to_end(self) -> bool:
        for step, score in self.new_evaluations():
            self.curve.append((step, score))
            if self._cannot_win(step, score):
                self.verdict = (ENDED_EARLY, f"at step {step} it was behind the median of the runs before")
                return True
        files = [self._folder / name for name in (LOG, _RECORDS)]
        sizes = [path.stat().st_size if path.exists() else 0 for path in files]
        if sizes != self._sizes:
            self._sizes, self._since = sizes, time.monotonic()
        self.verdict = (HUNG, f"it printed and logged nothing for {self._job.trial_timeout:.0f} s")
        return time.monotonic() - self._since > self._job.trial_timeout

    def new_evaluations(self) -> Iterator[tuple[int, float]]:
        """Yield step and score of the last phase's evaluations that were logged since the last call."""
        with contextlib.suppress(OSError), (self._folder / _RECORDS).open("rb") as log:
            log.seek(self._read)
            for line in log:
                if not line.endswith(b"\n"):
                    return  # it is being written
                self._read += len(line)
                record = json.loads(line)
                score = record.get(f"eval/{self._job.metric}")
                if record["phase"] == self._job.phase and score is not None:
                    yield record["step"], score
