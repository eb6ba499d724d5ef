"""Run one trial: a training command in a process group, a folder and at a port of its own, with a time limit.

Whatever becomes of it is a result: it was measured, or it ran out of memory, hung, was killed or refused, its loss was
not finite, or it failed. A trial is measured only where its results file is whole; its exit code and what it printed
prove nothing.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from tqdm import tqdm

from ds_trainer.config.jobs import TrialRequest, TuneJob
from ds_trainer.files.writing import write_json
from ds_trainer.ranks import distributed
from ds_trainer.ranks.failures import (
    NonFiniteLossError,
    NothingFitsError,
    OutOfMemoryError,
    TuningFailedError,
    UserError,
)
from ds_trainer.tuning.space import Candidate

MEASURED, NO_MEMORY, HUNG, KILLED = "measured", "out of memory", "hung", "killed"
REFUSED, NOT_FINITE, FAILED, SKIPPED = "refused", "not finite", "failed", "skipped"
_OUTCOMES = {UserError.exit_code: REFUSED, NonFiniteLossError.exit_code: NOT_FINITE}
_OUTCOMES |= {OutOfMemoryError.exit_code: NO_MEMORY}
LOG = "output.log"
"""What the processes of a trial print, in its folder."""
NO_TIME = "the budget was used up"
_TRAIN = "ds_trainer.cli.train"
_POLL = 0.2  # seconds between two looks at a process
_GRACE = 5  # seconds that a process group has to end before it is killed


@dataclass(frozen=True)
class TrialBase:
    """What became of a candidate once. The fields of a subclass are JSON values."""

    candidate: Candidate
    outcome: str
    reason: str = ""
    lasted: float = 0.0
    """Seconds of the whole trial, its start included."""


@dataclass(frozen=True)
class Trial(TrialBase):
    """What a trial has measured of a phase's steps."""

    predicted: int = 0
    """The peak of a rank in bytes, by arithmetic."""
    peak: int = 0
    examples: int = 0
    """Of an optimizer step."""
    seconds: Sequence[float] = ()
    """Those of a step, for each of the trial's batches: the mean of the medians of early and of late rounds."""
    stopped_early: bool = False
    details: Mapping[str, Any] = field(default_factory=dict)

    @property
    def speed(self) -> float:
        """Examples per second; 0 where it was not measured."""
        return self.examples / fmean(self.seconds) if self.seconds else 0.0


def announce(tried: int, label: str, until: float) -> None:
    """Say before a trial what it tries, and how much of the budget is left."""
    left = tqdm.format_interval(max(0.0, until - time.monotonic()))
    distributed.info(f"trial {tried + 1}: {label} ({left} of the budget left)")


def run_trial(job: TuneJob, candidate: Candidate, request: TrialRequest, timeout: float) -> Trial:
    """Run a candidate as the request says; the log of its processes, `LOG`, is beside its results."""
    folder = request.results.parent
    write_json(folder / "request.json", request.model_dump(mode="json"))
    request.results.unlink(missing_ok=True)
    started = time.monotonic()
    asked = ("--trial", str(folder / "request.json"))
    code = run_training(job, candidate, folder, asked, lambda: time.monotonic() > started + timeout)
    lasted = time.monotonic() - started
    with contextlib.suppress(OSError, ValueError):
        results = json.loads(request.results.read_text(encoding="utf-8"))
        peaks = results.get("peaks", {})
        return Trial(
            candidate,
            MEASURED,
            reason="it was stopped early, since it could not win" if results.get("stopped_early") else "",
            peak=peaks.get("device") or peaks.get("resident", 0),
            examples=results.get("examples", 0),
            seconds=results.get("seconds", ()),
            lasted=lasted,
            stopped_early=bool(results.get("stopped_early")),
            details=results,
        )
    outcome = (HUNG, f"no result after {timeout:.0f} s") if code is None else outcome_of(code, folder)
    return Trial(candidate, *outcome, lasted=lasted)


def run_training(
    job: TuneJob, candidate: Candidate, folder: Path, more: Sequence[str], is_to_end: Callable[[], bool]
) -> int | None:
    """Run the training command of a candidate, with `more` arguments, in a process group that is gone afterwards.

    Returns its exit code; None where `is_to_end`, which is asked every moment, has ended it.
    """
    threads = {"OMP_NUM_THREADS": str(candidate.threads)} if candidate.threads else {}
    with (folder / LOG).open("wb") as output:
        process = subprocess.Popen(
            _command(job, candidate, folder, more),
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | threads,
            start_new_session=True,
        )
        try:
            while not is_to_end():
                with contextlib.suppress(subprocess.TimeoutExpired):
                    return process.wait(_POLL)
        finally:
            _end_group(process)
    return None


def _command(job: TuneJob, candidate: Candidate, folder: Path, more: Sequence[str]) -> list[str]:
    """Return a training command, which DeepSpeed's launcher starts unless it is of one rank on this host."""
    words = [*training_words(job, candidate), *more, "--output_dir", str(folder), "--overwrite_output_dir"]
    if candidate.ranks == 1 and not job.hostfile:
        return [sys.executable, "-m", _TRAIN, *words]
    where = ["--hostfile", str(job.hostfile)] if job.hostfile else ["--num_gpus", str(candidate.ranks)]
    launcher = str(Path(sys.executable).with_name("deepspeed"))
    return [launcher, *where, "--master_port", str(distributed.free_port()), "--module", _TRAIN, *words]


def training_words(job: TuneJob, candidate: Candidate) -> list[str]:
    """Return the user's arguments of `ds-train`, and the candidate's settings after them."""
    settings = [f"{path}={json.dumps(value)}" for path, value in candidate.settings]
    return [*job.arguments, *(word for setting in settings for word in ("--set", setting))]


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """End what is left of a trial's processes, which are all in its group, and wait until they are gone."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        until = time.monotonic() + _GRACE
        lives = _group_lives(process, sign)
        while lives and time.monotonic() < until:
            time.sleep(0.02)
            lives = _group_lives(process, 0)


def _group_lives(process: subprocess.Popen[bytes], sign: int) -> bool:
    """Send a signal to a group, or 0 for none; return whether there was a process to get it."""
    process.poll()  # or its leader would live on as a zombie
    try:
        os.killpg(process.pid, sign)
    except ProcessLookupError:
        return False
    return True


def outcome_of(code: int, folder: Path) -> tuple[str, str]:
    """Name what became of a trial without results, and say why, in the words of its processes."""
    lines = (folder / LOG).read_text(encoding="utf-8", errors="replace").splitlines()
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    memory = next((line for line in errors if "ran out of memory" in line), None)
    if memory:
        return NO_MEMORY, memory
    if code < 0 or code > 128 or any("was killed" in line or "signal 9" in line for line in errors):
        return KILLED, errors[0] if errors else f"ended by a signal (exit code {code}), as for lack of memory"
    return _OUTCOMES.get(code, FAILED), errors[0] if errors else (lines or [f"exit code {code}"])[-1]


def failure_of(trials: Sequence[TrialBase]) -> Exception:
    """Return the error of a tuning without any result."""
    reasons = dict.fromkeys(f"{trial.outcome}: {trial.reason}" for trial in trials)
    message = "no candidate ran to its end:\n" + "\n".join(reasons)
    outcomes = {trial.outcome for trial in trials}
    if outcomes == {REFUSED}:
        return UserError(message)
    lacks_memory = NO_MEMORY in outcomes and outcomes <= {NO_MEMORY, KILLED, REFUSED, SKIPPED}
    return NothingFitsError(message) if lacks_memory and NO_TIME not in message else TuningFailedError(message)
