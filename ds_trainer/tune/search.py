"""A tuning from end to end: try candidates, write the best files, print one table.

There are two aims. For speed, a trial times steps of one phase. The candidate that differs least from the fastest so
far is tried next, and at the end the fastest are timed again in turns, since single times are noisy. For a score, a
trial is a whole run, and optuna (arXiv 1907.10902) chooses what to try: all combinations where there are few, and
otherwise what its tree-structured Parzen estimator expects to score well. Its median pruner ends runs early: a run
whose best score so far is worse than the median of the finished ones at the same step.
"""

import json
import math
import shlex
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from statistics import fmean, median
from typing import Any

from ds_trainer.engine.engine_file import MICRO
from ds_trainer.files.messages import Row, aligned
from ds_trainer.files.reading import read_object
from ds_trainer.files.redaction import redacted
from ds_trainer.files.writing import write_json
from ds_trainer.ranks import distributed
from ds_trainer.ranks.failures import NothingFitsError, TuningFailedError, UserError
from ds_trainer.recipe.jobs import TuneJob
from ds_trainer.tune import trials
from ds_trainer.tune.trials import MEASURED, RANKS, CannotWin, Machine, Settings, Trial, label

TUNED_ENGINE_FILE, TUNED_RECIPE = "tuned.json", "tuned_recipe.json"
_FINALISTS, _FINAL_ROUNDS, _FOR_FINALS = 3, 2, 0.4
"""How many are timed again beside the user's own, how often, and the part of the budget that is kept for it."""
_ALL, _DRAWS = 128, 1000
"""Up to this number, all combinations for a score are tried; of more, this many are drawn at most, refused ones too."""
_FINISHED, _WARM_UP = 3, 3
"""The runs that must have finished before one is ended early, and the part of the steps in which none is: a third."""


def tune(job: TuneJob) -> Trial:
    """Find the best settings within the budget, write the files with them, and return the best trial.

    Raises NothingFitsError where memory suffices for no candidate, TuningFailedError where none ran to its end, and
    UserError where the budget does not suffice to compare anything.
    """
    started = time.monotonic()
    search = Search(job, trials.prepare(job), started)
    best, note = best_score(search) if job.metric else fastest(search)
    write_results(job, search.trials, best, note)
    return best


class Search:
    """Tries candidates; `trials` has all that became of them, the user's own files first."""

    def __init__(self, job: TuneJob, machine: Machine, started: float) -> None:
        self.job, self.machine, self.started = job, machine, started
        self.own: Settings = {RANKS: job.num_gpus or machine.gpus or 1}
        """Those of the user's own files: on the ranks that are given, else on one a GPU, else on one."""
        self.trials: list[Trial] = []

    @property
    def measured(self) -> list[Trial]:
        """The trials with a value, the best first; an error where there is none."""
        measured = [trial for trial in self.trials if trial.outcome == MEASURED]
        if measured:
            return sorted(measured, key=lambda trial: -self.job.sign * (trial.value or 0.0))
        outcomes = {trial.outcome for trial in self.trials}
        fits_nowhere = outcomes <= {trials.NO_MEMORY, trials.KILLED, trials.REFUSED} and trials.NO_MEMORY in outcomes
        lines = dict.fromkeys(f"{trial.outcome}: {trial.reason}" for trial in self.trials)
        message = "\n".join(["no candidate ran to its end:", *lines])
        raise NothingFitsError(message) if fits_nowhere else TuningFailedError(message)

    def attempt(
        self,
        settings: Settings,
        cannot_win: CannotWin = lambda step, score: False,
        part: float = 1.0,
        again: int = 0,
    ) -> Trial | None:
        """Return what becomes of a candidate; None where a trial would probably not end within this part of the budget.

        Nothing is run for settings that are a mistake, were tried in other words, ran out of memory with a smaller
        micro-batch, or were measured by an earlier call of the same command. `again` numbers the trials after a
        candidate's first.
        """
        try:
            key = trials.key_of(self.job, self.machine, settings)
        except UserError as error:
            return self._noted(Trial(settings, trials.REFUSED, str(error)))
        known = next((trial for trial in self.trials if trial.key == key), None)
        if known and not again:
            return known
        with_less = (each for each in self.trials if each.settings.get(MICRO, math.inf) < settings.get(MICRO, 0))
        for each in with_less:
            if each.outcome == trials.NO_MEMORY and settings == each.settings | {MICRO: settings[MICRO]}:
                return self._noted(Trial(settings, trials.NO_MEMORY, f"as with {label(each.settings)}", key=key))
        folder = self.job.output / "trials" / (f"{key[:12]}-{again}" if again else key[:12])
        name, record = label(settings), folder / "trial.json"
        trial = Trial(**read_object(record)) if record.is_file() else None
        if trial and trial.outcome not in (trials.HUNG, trials.KILLED):  # another time these may end well
            name = f"known: {name}"
            for step, score in trial.details.get("curve", ()):
                cannot_win(step, score)  # the pruner compares later runs with it
        elif not self._has_time(part):
            return None
        else:
            distributed.info(f"trial {len(self.trials) + 1}: {name}")
            trial = replace(trials.run_trial(self.job, settings, folder, cannot_win), key=key)
            write_json(record, asdict(trial))
        what = f"{trial.outcome}: {trial.reason}" if trial.value is None else f"{trial.value:.4g} {self.job.unit}"
        distributed.info(f"{name}: {what}")
        return self._noted(trial)

    def _noted(self, trial: Trial) -> Trial:
        self.trials.append(trial)
        return trial

    def _has_time(self, part: float) -> bool:
        """Whether one more trial would probably end in time; UserError where nothing could be compared."""
        lasted = [trial.lasted for trial in self.trials if trial.lasted]
        mean, now = fmean(lasted) if lasted else 0.0, time.monotonic() - self.started
        if now + mean <= part * self.job.budget:
            return True
        if len(lasted) < 2:
            least = math.ceil((now + (2 - len(lasted)) * mean) / part)
            raise UserError(f"the budget is too small to compare anything: give --budget {least}s at least")
        return False


def fastest(search: Search) -> tuple[Trial, str]:
    """Return the fastest trial, and in words how sure that is.

    The user's own files win where they are slower by no more than the noise: half the range of a finalist's trials, as
    a part of their median, and of these parts the middle one.
    """
    job, own, part = search.job, search.attempt(search.own), 1 - _FOR_FINALS
    assert own is not None, "the first trial has time"
    untried = [*trials.combinations(job, search.machine.gpus)]
    while untried:
        others = [trial for trial in search.trials if trial.value and trial is not own]
        pivot = max(others, key=lambda trial: trial.value or 0.0, default=own).settings
        # of those that differ at equally many paths, the first in the order of the space
        settings = min(untried, key=lambda each: sum(value != pivot.get(path) for path, value in each.items()))
        untried.remove(settings)
        if search.attempt(settings, part=part) is None:
            distributed.warn(f"the budget is used up, and {len(untried) + 1} combinations were not tried")
            break
    finalists = {trial.key: trial for trial in [*search.measured[:_FINALISTS], own] if trial.value}
    for number in range(1, _FINAL_ROUNDS + 1) if len(finalists) > 1 else ():
        for trial in finalists.values():
            search.attempt(trial.settings, again=number)
    times = {key: [trial.value or 0.0 for trial in search.measured if trial.key == key] for key in finalists}
    times = {key: speeds for key, speeds in times.items() if len(speeds) > 1} or times
    medians = {key: median(speeds) for key, speeds in times.items()}
    noise = median((max(speeds) - min(speeds)) / 2 / medians[key] for key, speeds in times.items())
    first = max(medians, key=lambda key: medians[key])
    if medians.get(own.key, 0.0) >= medians[first] * (1 - noise):
        first = own.key
    return replace(finalists[first], value=medians[first]), f"noise {noise:.1%}"


def best_score(search: Search) -> tuple[Trial, str]:
    """Return the trial with the best score, and in words whether its lead may be chance; of equal ones, the first."""
    import optuna

    job, own = search.job, search.attempt(search.own)
    assert own is not None, "the first trial has time"
    if own.outcome == trials.NO_SCORE:
        raise UserError(f"--metric is eval/{job.metric}: {own.reason}")
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    curve = dict(own.details.get("curve", ()))
    pruner = optuna.pruners.MedianPruner(_FINISHED, max(curve, default=0) // _WARM_UP, n_min_trials=_FINISHED)
    lists = {path: _texts(values) for path, values in (job.space or {}).items() if isinstance(values, list)}
    is_small = len(lists) == len(job.space or {}) and math.prod(map(len, lists.values())) <= _ALL
    seed = job.train.recipe.seed
    sampler = optuna.samplers.GridSampler(lists, seed) if is_small else optuna.samplers.TPESampler(seed=seed)
    direction = "maximize" if job.greater_is_better else "minimize"
    study = optuna.create_study(direction=direction, sampler=sampler, pruner=pruner)
    if own.value is not None:
        study.add_trial(optuna.trial.create_trial(value=own.value, intermediate_values=curve))

    def objective(drawing: Any) -> float:
        settings = dict(search.own)
        for path, values in (job.space or {}).items():
            if isinstance(values, list):
                settings[path] = json.loads(drawing.suggest_categorical(path, _texts(values)))
            else:
                suggest = drawing.suggest_int if values.whole else drawing.suggest_float
                settings[path] = suggest(path, values.low, values.high, log=values.log)

        def cannot_win(step: int, score: float) -> bool:
            drawing.report(score, step)
            return bool(drawing.should_prune())

        trial = search.attempt(settings, cannot_win)
        if trial is None:
            distributed.warn("the budget is used up")
            study.stop()
        if trial is None or trial.outcome == trials.ENDED_EARLY:
            raise optuna.TrialPruned
        return math.nan if trial.value is None else trial.value  # optuna counts a NaN as a failure

    study.optimize(objective, n_trials=_DRAWS)
    best = search.measured[0]
    count, share = max(1, best.details.get("examples", 0)), best.value or 0.0
    error = math.sqrt(max(0.0, share * (1 - share)) / count)
    note = f"one standard error of {count:,} held-out examples is {error:.4f}"
    return best, note if str(job.metric).endswith("accuracy") else ""


def _texts(values: list[Any]) -> list[str]:
    """Return the values as texts, which are what optuna takes."""
    return list(dict.fromkeys(json.dumps(value) for value in values))


def write_results(job: TuneJob, tried: Sequence[Trial], best: Trial, note: str) -> None:
    """Write both files with the best settings; print the table of all trials and how to train with the files."""
    for name, file in zip((TUNED_RECIPE, TUNED_ENGINE_FILE), trials.files_with(job, best.settings), strict=True):
        write_json(job.output / name, redacted(file))
    (job.output / "trials.jsonl").write_text("".join(f"{json.dumps(asdict(trial))}\n" for trial in tried))
    for trial in tried:  # the models of the others would fill the disk
        if trial.key != best.key and job.metric:
            shutil.rmtree(job.output / "trials" / trial.key[:12] / "model", ignore_errors=True)
    files = ["--deepspeed_config", str(job.output / TUNED_ENGINE_FILE), "--recipe", str(job.output / TUNED_RECIPE)]
    hosts = ["--hostfile", str(job.hostfile)] if job.hostfile else ["--num_gpus", str(best.settings[RANKS])]
    command = ["deepspeed", *hosts, "--module", "ds_trainer.cli.train", *files, *job.train_flags, "--output_dir", "OUT"]
    own = next((f"{trial.value:.4g}" for trial in tried[:1] if trial.value is not None), "none")
    summary = f"best: {label(best.settings)}: {best.value:.4g} {job.unit}, the user's own files {own}; {note}"
    table, shell = aligned(list(rows(job, tried))), redacted(shlex.join(command))
    distributed.info(f"\n{table}\n\n{summary}\ntrain with:\n  {shell}")


def rows(job: TuneJob, tried: Sequence[Trial]) -> Iterator[Row]:
    """Yield a row for each trial, the best first."""
    for trial in sorted(tried, key=lambda trial: math.inf if trial.value is None else -job.sign * trial.value):
        yield {
            job.unit: "" if trial.value is None else f"{trial.value:.4g}",
            "settings": label(trial.settings),
            **{cost: f"{value:,.4g}" for cost, value in trial.details.get("costs", {}).items()},
            "seconds": f"{trial.lasted:,.0f}",
            "outcome": f"{trial.outcome}: {trial.reason}" if trial.reason else trial.outcome,
        }
