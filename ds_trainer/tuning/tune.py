"""A tuning from end to end: measure what the phase needs, try candidates, time the finalists again, write the results.

Arithmetic comes first: the memory model says which candidates cannot fit. What is left is measured, in the order of
the space, or in that of optuna's sampler where the space is large. A candidate is skipped, with a reason, where what
was measured before shows that it cannot win.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean, median
from typing import Any

from ds_trainer.config.jobs import TrialRequest, TuneJob
from ds_trainer.engine.engine_file import MICRO, STEPS, TRAIN
from ds_trainer.engine.rank_memory import Activations, ModelSizes, PhaseMemory
from ds_trainer.files.reading import free_memory
from ds_trainer.ranks import distributed
from ds_trainer.ranks.failures import UserError
from ds_trainer.tuning.order import order_of
from ds_trainer.tuning.record import TrialRecord
from ds_trainer.tuning.results import Tuned, write_results
from ds_trainer.tuning.space import Candidate, Machine, Resolved, candidates, default_space, resolve
from ds_trainer.tuning.trials import (
    KILLED,
    MEASURED,
    NO_MEMORY,
    NO_TIME,
    REFUSED,
    SKIPPED,
    Trial,
    announce,
    failure_of,
    run_trial,
)

MARGIN = 0.15
"""How far the peak by arithmetic may be off: a candidate is skipped only where it would not fit even so."""
_CLEARLY = 0.9
"""A speed below this part of another one is clearly slower."""
_FINALISTS, _FINAL_ROUNDS = 3, 2
_TOO_LARGE = "a smaller micro-batch did not fit"
_LACKS_MEMORY = (NO_MEMORY, KILLED)
"""Linux kills a process where the memory of a host is used up."""


def tune(job: TuneJob) -> Tuned:
    """Find the fastest settings for a phase within the budget, write the results, and return them.

    Raises NothingFitsError where memory suffices for no candidate, and TuningFailedError where none ran to its end.
    """
    until = time.monotonic() + job.budget
    examine_hosts(job)
    machine = measure_machine(job)
    everything = list(candidates(job, machine, job.space or default_space(job, machine)))
    search = _Search(job, machine, everything[0], until)
    search.try_all(everything)
    search.final()
    tuned = search.conclude()
    write_results(job, tuned)
    return tuned


def measure_machine(job: TuneJob) -> Machine:
    """Measure on one rank what all candidates have in common; UserError in the trial's words where that fails."""
    results = dict(measured_on_one_rank(job, "memory"))
    memory, gpus = results.pop("memory"), results.pop("gpus")
    activations = tuple(Activations(**one) for one in memory.pop("activations"))
    sizes = ModelSizes(**memory.pop("sizes"))
    free = results.pop("bytes_of_a_gpu") or free_memory()
    phase_memory = PhaseMemory(sizes, activations=activations, **memory)
    return Machine(phase_memory, results.pop("hidden_size"), gpus, free, results)


def measured_on_one_rank(job: TuneJob, what: str) -> Mapping[str, Any]:
    """Return what a trial without steps has found out, the "memory" or the "facts"; UserError where it fails."""
    request = _request(job, "machine").model_copy(update={"measure": what})
    alone = job.model_copy(update={"hostfile": None})
    # batch sizes for several ranks may not suit one, and do not matter here
    distributed.info(f"phase {job.phase} is measured on one rank, before the trials")
    sizes_left_open = (*((key, "auto") for key in (TRAIN, MICRO, STEPS)), ("phases.*.train_batch_size", None))
    trial = run_trial(alone, Candidate(1, settings=sizes_left_open), request, job.trial_timeout)
    if trial.outcome != MEASURED:
        raise UserError(f"phase {job.phase} cannot be measured on one rank ({trial.outcome}): {trial.reason}")
    return trial.details


def _request(job: TuneJob, name: str) -> TrialRequest:
    trials = job.output / "trials"
    results, models = trials / name / "results.json", trials / "models"
    return TrialRequest(phase=job.phase, results=results, models=models, seconds=job.trial_seconds)


def examine_hosts(job: TuneJob) -> None:
    """Have the doctor examine the hosts of a tuning on several; UserError where they are not ready."""
    if not job.hostfile:
        return
    flags = ["--hostfile", str(job.hostfile), "--output_dir", str(job.output)]
    if subprocess.run([sys.executable, "-m", "ds_trainer.cli.doctor", *flags], check=False).returncode:
        raise UserError(f"the hosts of {job.hostfile} are not ready for a run: mend what the doctor found first")


class _Search:
    """Tries candidates until the budget ends, and knows what the trials so far say about the others."""

    def __init__(self, job: TuneJob, machine: Machine, own: Candidate, until: float) -> None:
        self.job, self.machine, self.own, self.until = job, machine, own, until
        self.record = TrialRecord(job, [job.phase, machine.identity], Trial)
        self.trials: list[Trial] = []
        self._resolved: dict[Candidate, Resolved] = {}

    def try_all(self, everything: Sequence[Candidate]) -> None:
        """Try the user's own files, then the others while the budget lasts for the finals as well."""
        self._try(self.own)
        others = everything[1:]
        order = order_of(others, self.job.train.recipe.seed)
        while not self._budget_is_used_up() and (candidate := order.ask()):
            order.tell(self._try(candidate).speed)
        for candidate in order.left:
            self._note(Trial(candidate, SKIPPED, NO_TIME))

    def final(self) -> None:
        """Time the fastest candidates and the user's own again, in turns."""
        ranked = sorted(self._measured(), key=lambda trial: -trial.speed)
        finalists = dict.fromkeys(trial.candidate for trial in ranked[:_FINALISTS] if not trial.stopped_early)
        if any(trial.candidate == self.own for trial in ranked):
            finalists[self.own] = None
        for _ in range(_FINAL_ROUNDS if len(finalists) > 1 else 0):
            for candidate in finalists:
                self._measure(candidate, self._resolved[candidate], to_beat=None)

    def conclude(self) -> Tuned:
        """Choose the winner: the fastest by the median of its trials, or the user's own where noise is larger."""
        measured = self._measured()
        if not measured:
            raise failure_of(self.trials)
        speeds: dict[Candidate, list[float]] = {}
        for trial in measured:
            speeds.setdefault(trial.candidate, []).append(trial.speed)
        finalists = {one: values for one, values in speeds.items() if len(values) > 1} or speeds
        medians = {candidate: median(values) for candidate, values in finalists.items()}
        halves = [(max(values) - min(values)) / 2 / medians[one] for one, values in finalists.items()]
        noise = median(halves)
        winner = max(medians, key=lambda candidate: medians[candidate])
        if medians.get(self.own, 0.0) >= medians[winner] * (1 - noise):
            winner = self.own
        return Tuned(winner, self.own, medians, noise, self.trials)

    def _measured(self) -> list[Trial]:
        return [trial for trial in self.trials if trial.outcome == MEASURED]

    def _try(self, candidate: Candidate) -> Trial:
        """Measure a candidate unless something speaks against it."""
        try:
            resolved = resolve(candidate, self.job, self.machine)
        except UserError as error:
            return self._note(Trial(candidate, REFUSED, str(error)))
        self._resolved[candidate] = resolved
        doubt = self._doubt(resolved)
        if doubt:
            return self._note(Trial(candidate, *doubt, predicted=resolved.bytes))
        best = max(self._measured(), key=lambda trial: trial.speed, default=None)
        return self._measure(candidate, resolved, sum(best.seconds) if best else None)

    def _doubt(self, resolved: Resolved) -> tuple[str, str] | None:
        """Return why a candidate need not be measured; None where nothing is known against it."""
        free = self._free_for(resolved)
        if resolved.bytes > free * (1 + MARGIN):
            needs = f"needs {_gib(resolved.bytes)} a rank by arithmetic, and {_gib(free)} are free"
            return (NO_MEMORY, needs)
        siblings = [
            (self._resolved[trial.candidate], trial)
            for trial in self.trials
            if trial.candidate in self._resolved and self._resolved[trial.candidate].siblings == resolved.siblings
        ]
        if any(t.outcome in _LACKS_MEMORY and r.micro_batch <= resolved.micro_batch for r, t in siblings):
            return SKIPPED, _TOO_LARGE
        speeds = {r.micro_batch: t.speed for r, t in siblings if t.outcome == MEASURED}
        larger = sorted(micro for micro in speeds if micro > resolved.micro_batch)
        if len(larger) > 1 and speeds[larger[0]] < _CLEARLY * speeds[larger[1]]:
            return SKIPPED, f"micro-batches get slower as they get smaller: {larger[1]} to {larger[0]}"
        if resolved.recomputes and self._fits_without(resolved):
            return SKIPPED, "it fits without gradient_checkpointing, which only costs time then"
        return None

    def _free_for(self, resolved: Resolved) -> int:
        """Return the bytes that a rank may take: those of its GPU, or its part of its host's."""
        ranks_of_a_host = -(-resolved.candidate.ranks // self.job.hosts)
        return self.machine.bytes_free // (1 if self.machine.gpus else ranks_of_a_host)

    def _fits_without(self, resolved: Resolved) -> bool:
        """Whether the same candidate without gradient checkpointing was measured, or was skipped for its speed."""
        path = f"phases.{self.job.phase}.gradient_checkpointing"
        settings = tuple((name, False if name == path else value) for name, value in resolved.candidate.settings)
        plain = replace(resolved.candidate, settings=settings)
        trials = [trial for trial in self.trials if trial.candidate == plain]
        return any(t.outcome == MEASURED or (t.outcome == SKIPPED and t.reason != _TOO_LARGE) for t in trials)

    def _budget_is_used_up(self) -> bool:
        """Whether no more time is left than the finals take."""
        lasted = [trial.lasted for trial in self.trials if trial.lasted]
        finals = fmean(lasted) * (1 + _FINAL_ROUNDS * (_FINALISTS + 1)) if lasted else 0.0
        return time.monotonic() + finals > self.until

    def _measure(self, candidate: Candidate, resolved: Resolved, to_beat: float | None) -> Trial:
        kept = self.record.take(candidate)
        if kept:
            return self._note(kept, is_new=False)
        announce(len(self.trials), candidate.label, self.until)
        request = _request(self.job, f"{len(self.trials):03d}").model_copy(update={"seconds_to_beat": to_beat})
        trial = run_trial(self.job, candidate, request, self.job.trial_timeout)
        return self._note(replace(trial, predicted=resolved.bytes))

    def _note(self, trial: Trial, is_new: bool = True) -> Trial:
        self.trials.append(trial)
        if trial.lasted and is_new:
            self.record.add(trial)
        what = f"{trial.speed:.1f} examples/s" if trial.outcome == MEASURED else trial.outcome
        why = f" ({trial.reason})" if trial.reason else ""
        if trial.lasted:
            distributed.info(f"{'' if is_new else 'known: '}{trial.candidate.label}: {what}{why}")
        return trial


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
