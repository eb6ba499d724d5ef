"""The tuning of a recipe from end to end: whole runs, scored on held-out training examples, and the best of them.

Optuna (arXiv 1907.10902) chooses what to try: all combinations in their order where there are few, and otherwise what
its tree-structured Parzen estimator expects to score well. Its median pruner ends runs early: a run whose best score so
far is worse than the median of the finished ones at the same step. Unlike successive halving and Hyperband it needs no
budget a run, compares only steps that others have reached, and is of use from the fourth run on.
"""

from __future__ import annotations

import json
import math
import shutil
import time
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

from ds_trainer.config.jobs import RecipeTuneJob, ValueRange
from ds_trainer.ranks import distributed
from ds_trainer.ranks.failures import UserError
from ds_trainer.tasks.data import hash_of
from ds_trainer.tuning.order import INSTALL
from ds_trainer.tuning.recipe_results import TunedRecipe, fronts_of, settings_in_words, write_results
from ds_trainer.tuning.recipe_trials import ENDED_EARLY, NO_SCORE, RecipeTrial, run_recipe_trial
from ds_trainer.tuning.record import TrialRecord
from ds_trainer.tuning.space import Candidate, Settings, apply_settings, checked_recipe
from ds_trainer.tuning.trials import MEASURED, NO_TIME, REFUSED, SKIPPED, announce, failure_of
from ds_trainer.tuning.tune import examine_hosts, measured_on_one_rank

_ALL = 128
"""As many combinations are all tried; of more, some are drawn."""
_DRAWS = 1000
"""At most, those included that turn out to be known or refused."""
_FINISHED = 3
"""The runs that must have finished before one is ended early."""
_WARM_UP = 3
"""No run is ended in this part of the steps of the last phase, a third."""


def tune_recipe(job: RecipeTuneJob) -> TunedRecipe:
    """Find the settings of a recipe that score best within the budget, write the results, and return them.

    Raises NothingFitsError where memory suffices for no run, and TuningFailedError where none ran to its end.
    """
    until = time.monotonic() + job.budget
    study = Study(job)
    examine_hosts(job)
    search = _Search(job, study, dict(measured_on_one_rank(job, "facts")), until)
    search.try_all()
    tuned = search.conclude()
    write_results(job, tuned)
    return tuned


class Study:
    """Optuna's study: it says what to try next, is told what became of it, and knows which runs cannot win.

    Its first trial is the user's own recipe, for which nothing is drawn.
    """

    def __init__(self, job: RecipeTuneJob) -> None:
        try:
            import optuna
        except ImportError as error:
            raise UserError(f"a recipe is tuned with optuna ({error}): {INSTALL}") from error
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self._optuna, self._space = optuna, job.recipe_space
        direction = "maximize" if job.greater_is_better else "minimize"
        sampler = optuna.samplers.TPESampler(seed=job.train.recipe.seed)
        self._study = optuna.create_study(direction=direction, sampler=sampler, pruner=optuna.pruners.NopPruner())
        self._trial = self._study.ask()
        self._draws = _DRAWS
        lists = {path: _choices(values) for path, values in self._space.items() if isinstance(values, list)}
        count = math.prod(map(len, lists.values()))
        if len(lists) == len(self._space) and count <= _ALL:
            self._draws = count
            for values in product(*lists.values()):
                self._study.enqueue_trial(dict(zip(lists, values, strict=True)))

    def ask(self) -> Settings | None:
        """Return the next settings to try; None where all were tried."""
        if not self._draws:
            return None
        self._draws -= 1
        self._trial = self._study.ask()
        return tuple((path, self._drawn(path, values)) for path, values in self._space.items())

    def _drawn(self, path: str, values: list[Any] | ValueRange) -> Any:
        if isinstance(values, list):
            return json.loads(self._trial.suggest_categorical(path, _choices(values)))
        suggest = self._trial.suggest_int if values.whole else self._trial.suggest_float
        return suggest(path, values.low, values.high, log=values.log)

    def cannot_win(self, step: int, score: float) -> bool:
        """Take note of an evaluation of what was asked for last; return whether its run need not go on."""
        self._trial.report(score, step)
        return bool(self._trial.should_prune())

    def tell(self, trial: RecipeTrial) -> None:
        """Take note of what became of what was asked for last."""
        states, pruners = self._optuna.trial.TrialState, self._optuna.pruners
        if trial.outcome != MEASURED:
            self._study.tell(self._trial, state=states.PRUNED if trial.outcome == ENDED_EARLY else states.FAIL)
            return
        self._study.tell(self._trial, trial.score)
        if isinstance(self._study.pruner, pruners.NopPruner):
            warm_up = max((step for step, _ in trial.curve), default=0) // _WARM_UP
            self._study.pruner = pruners.MedianPruner(_FINISHED, warm_up, n_min_trials=_FINISHED)


def _choices(values: list[Any]) -> list[str]:
    """Return the values as texts, which are what optuna takes."""
    return list(dict.fromkeys(json.dumps(value) for value in values))


class _Search:
    """Tries what the study asks for until the budget ends."""

    def __init__(self, job: RecipeTuneJob, study: Study, facts: dict[str, Any], until: float) -> None:
        self.job, self.study, self.until = job, study, until
        self.ranks = job.num_gpus or facts["gpus"] or 1
        self.held_out = facts["held_out"]
        self.record = TrialRecord(job, [job.metric, self.ranks, facts], RecipeTrial)
        self.trials: list[RecipeTrial] = []
        self._runs = job.output / "trials"
        self._sign = 1 if job.greater_is_better else -1
        self._by_files: dict[str, RecipeTrial] = {}

    def try_all(self) -> None:
        """Try the user's own recipe, and then others while there is time for one more."""
        own = self._try(())
        if own.outcome == NO_SCORE:
            raise UserError(f"--metric is eval/{self.job.metric}: {own.reason}")
        while (settings := self.study.ask()) is not None:
            lasted = [trial.lasted for trial in self.trials if trial.lasted]
            candidate = Candidate(self.ranks, settings=settings)
            too_late = time.monotonic() + (fmean(lasted) if lasted else 0) > self.until
            if too_late and not self.record.knows(candidate):
                self.trials.append(RecipeTrial(candidate, SKIPPED, NO_TIME))
                return
            self._try(settings)

    def conclude(self) -> TunedRecipe:
        """Choose the winner; the error of a search that has none."""
        winner = self._best()
        if not winner:
            raise failure_of(self.trials)
        return TunedRecipe(winner, self.trials, self.held_out, self._sign)

    def _best(self) -> RecipeTrial | None:
        """Return the trial with the best score, and of equal ones the first."""
        measured = [trial for trial in self.trials if trial.outcome == MEASURED]
        return max(measured, key=lambda trial: self._sign * (trial.score or 0.0), default=None)

    def _try(self, settings: Settings) -> RecipeTrial:
        """Run a candidate, unless its files are wrong, or those of one that was tried, and tell the study."""
        candidate = Candidate(self.ranks, settings=settings)
        recipe = apply_settings(self.job.recipe_file, settings, of_recipe=True)
        engine = apply_settings(self.job.train.engine_config, settings)
        try:
            files = hash_of([checked_recipe(recipe, engine, self.ranks).model_dump(), engine])
        except UserError as error:
            self.trials.append(RecipeTrial(candidate, REFUSED, str(error)))
            self.study.tell(self.trials[-1])
            return self.trials[-1]
        if files not in self._by_files:
            self._by_files[files] = self._run(candidate, self._runs / files[:12])
            self.trials.append(self._by_files[files])
            self._keep_models_of_the_front()
        self.study.tell(self._by_files[files])
        return self._by_files[files]

    def _run(self, candidate: Candidate, folder: Path) -> RecipeTrial:
        trial = self.record.take(candidate)
        known = "known: " if trial else ""
        if trial:
            for step, score in trial.curve:
                self.study.cannot_win(step, score)
        else:
            announce(len(self.trials), settings_in_words(candidate.settings), self.until)
            trial = run_recipe_trial(self.job, candidate, folder, self.study.cannot_win)
            self.record.add(trial)
        what = f"{self.job.metric} {trial.score:.4f}" if trial.score is not None else f"{trial.outcome}: {trial.reason}"
        distributed.info(f"{known}{settings_in_words(candidate.settings)}: {what}")
        return trial

    def _keep_models_of_the_front(self) -> None:
        """Delete the models of the other runs, which would fill the disk, but never that of the best one."""
        kept = {trial.run for front in fronts_of(self.trials, self._sign).values() for trial in front}
        kept |= {best.run} if (best := self._best()) else set()
        for trial in self.trials:
            if trial.run and trial.run not in kept:
                shutil.rmtree(self._runs / trial.run / "model", ignore_errors=True)
