"""Run one trial: a training command in a process group, a folder and at a port of its own, with a time limit.

Whatever becomes of it is a result: it was measured, or it ran out of memory, hung, was killed or refused, its loss was
not finite, or it failed. A trial is measured only where its results are whole; its exit code and what it printed prove
nothing. Every trial is written down at once in `trials.jsonl`, so that the same command goes on where it was ended.
"""

import contextlib
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib import import_module
from multiprocessing.process import BaseProcess
from pathlib import Path
from statistics import fmean
from typing import Any, NoReturn

from ds_trainer.files.reading import content_hash, folder_hash, read_value
from ds_trainer.files.writing import write_json
from ds_trainer.ranks import distributed
from ds_trainer.ranks.failures import NonFiniteLossError, OutOfMemoryError, UserError
from ds_trainer.recipe.jobs import TrialRequest, TuneJob
from ds_trainer.tasks.data import hash_of
from ds_trainer.tune.space import RANKS, THREADS, Settings, files_with, label

MEASURED, NO_MEMORY, HUNG, KILLED, REFUSED = "measured", "out of memory", "hung", "killed", "refused"
NOT_FINITE, FAILED, ENDED_EARLY, NO_SCORE = "not finite", "failed", "ended early", "no score"
_BY_EXIT_CODE = {
    UserError.exit_code: REFUSED,
    NonFiniteLossError.exit_code: NOT_FINITE,
    OutOfMemoryError.exit_code: NO_MEMORY,
}
LOG, RECORD = "output.log", "trials.jsonl"
"""What the processes of a trial print, in its folder; and all trials, in the folder of the tuning."""
_TRAIN = "ds_trainer.cli.train"
_FORKS = multiprocessing.get_context("forkserver")
_PRELOADED = [_TRAIN, "ds_trainer.run.trial", "deepspeed.module_inject.auto_ep_layer"]
_PRELOADED += ["transformers.models.bert.modeling_bert"]
"""What trials load of this library, of DeepSpeed, and of transformers for a model of any kind: 6 of 8 CPU seconds."""
_GPUS = ("nvidia[0-9]*", "kfd", "accel*")
"""Devices in /dev. A GPU cannot be used by a process that is forked from one that has asked its driver anything."""
_POLL, _GRACE = 0.1, 5.0
"""Seconds between two looks at a process; and those that a process group has to end before it is killed."""
_WEIGHTS = ("*/model", "checkpoint-*", "*/checkpoint-*", "starting_models")
"""Of a run's folder, without the model of its last phase."""

Process = BaseProcess | subprocess.Popen[bytes]
CannotWin = Callable[[int, float], bool]
"""Takes step and score of an evaluation of the trial that runs."""


@dataclass(frozen=True)
class Trial:
    """What became of a candidate once; all fields are JSON values."""

    settings: Settings
    outcome: str
    reason: str = ""
    value: float | None = None
    """Examples per second, or the score."""
    lasted: float = 0.0
    """Seconds of the whole trial, its start included; 0 for one that was not started."""
    details: Mapping[str, Any] = field(default_factory=dict)
    key: str = ""
    """That of its plan (`space.py`); empty for settings that were refused."""


class TrialRecord:
    """The trials of this configuration, code, data, models and hardware. Those of others stay in the file, unused."""

    def __init__(self, job: TuneJob, identity: Any) -> None:
        """Read the file. `identity` is JSON: the data, the hardware and the versions."""
        recipe = job.train.recipe.model_dump(exclude={"output_dir", "cache_dir"})
        tuned = [job.train.engine_config, recipe, *contents_of(recipe), job.arguments, job.phase, job.metric]
        self._context = hash_of([*tuned, folder_hash(Path(__file__).parents[1]), identity])
        self._path = job.output / RECORD
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._kept: dict[str, list[Trial]] = defaultdict(list)
        for line in self._path.read_text(encoding="utf-8").splitlines() if self._path.is_file() else ():
            with contextlib.suppress(ValueError, KeyError, TypeError):  # the last line of a call that was killed
                entry = json.loads(line)
                key, _ = entry.pop("identity"), entry.pop("label")
                if entry["outcome"] not in (HUNG, KILLED):  # another time they may end well
                    self._kept[key].append(Trial(**entry))

    def knows(self, settings: Settings) -> bool:
        """Whether `take` would return a trial."""
        return bool(self._kept[self._key(settings)])

    def take(self, settings: Settings) -> Trial | None:
        """Return the next trial of a candidate that an earlier call has made; None where there is none left."""
        kept = self._kept[self._key(settings)]
        return kept.pop(0) if kept else None

    def add(self, trial: Trial) -> None:
        """Write a trial down."""
        entry = {"identity": self._key(trial.settings), "label": label(trial.settings), **asdict(trial)}
        with self._path.open("a", encoding="utf-8") as file:
            # the line break comes first: the last line of a call that was killed may be torn
            file.write("\n" * bool(file.tell()) + json.dumps(entry))

    def _key(self, settings: Settings) -> str:
        return hash_of([self._context, settings, *contents_of(settings)])


def contents_of(value: Any) -> Iterator[str]:
    """Yield a hash of every file and every model folder whose path stands anywhere in a JSON value."""
    if isinstance(value, dict | list | tuple):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from contents_of(inner)
    elif isinstance(value, str):
        if os.path.isfile(os.path.join(value, "config.json")):
            yield folder_hash(Path(value))
        elif os.path.isfile(value):
            yield content_hash(Path(value)).hex()


def run_speed_trial(job: TuneJob, settings: Settings, request: TrialRequest) -> Trial:
    """Time steps of a phase as the request says; the trial's folder is that of the results."""
    folder, until = request.results.parent, time.monotonic() + job.trial_timeout
    write_json(folder / "request.json", request.model_dump(mode="json"))
    request.results.unlink(missing_ok=True)
    hung = Trial(settings, HUNG, f"no result after {job.trial_timeout:.0f} s")
    words = ["--trial", str(folder / "request.json")]
    trial = _run(job, settings, folder, words, lambda: hung if time.monotonic() > until else None)
    with contextlib.suppress(UserError):  # there are no results
        results = read_value(request.results)
        speed = results["examples"] / fmean(results["seconds"]) if "seconds" in results else None
        return replace(trial, outcome=MEASURED, reason="", value=speed, details=results)
    return trial


def run_score_trial(job: TuneJob, settings: Settings, name: str, cannot_win: CannotWin) -> Trial:
    """Train the whole recipe, scored on held-out training examples; of the weights only the run's model is kept.

    The run is ended where it prints and logs nothing for too long, and where `cannot_win` says so of an evaluation of
    the last phase.
    """
    folder = job.output / "trials" / name
    records, status, summary = (folder / file for file in ("log.jsonl", "status.json", "all_results.json"))
    for path in (records, status, summary):  # those of an earlier call
        path.unlink(missing_ok=True)
    curve: list[tuple[int, float]] = []

    def verdict() -> Trial | None:
        for step, score in evaluations_in(records, job)[len(curve) :]:
            curve.append((step, score))
            if cannot_win(step, score):
                return Trial(settings, ENDED_EARLY, f"at step {step} it was behind the median of the runs before")
        last = max(path.stat().st_mtime for path in (records, folder / LOG) if path.exists())
        silent = Trial(settings, HUNG, f"it printed and logged nothing for {job.trial_timeout:.0f} s")
        return silent if time.time() - last > job.trial_timeout else None

    recipe, _ = files_with(job, settings)
    tasks = [f"phases.{place}.task" for place, phase in enumerate(recipe["phases"]) if phase.get("task")]
    tasks += ["task"] if len(tasks) < len(recipe["phases"]) else []
    fields = [*(f"{task}.score_held_out=true" for task in tasks), "report=true"]
    trial = _run(job, settings, folder, [word for text in fields for word in ("--set", text)], verdict)
    for path in (path for pattern in _WEIGHTS for path in folder.glob(pattern)):
        shutil.rmtree(path, ignore_errors=True)
    details: dict[str, Any] = {"curve": evaluations_in(records, job)}
    with contextlib.suppress(UserError, KeyError):  # it did not finish
        if trial.outcome not in (HUNG, ENDED_EARLY) and read_value(status)["state"] == "finished":
            last = read_value(summary)[job.phase]
            latency = last.get("early_exit_latency") or last.get("latency", {})
            details["costs"] = {"MiB": last["size"]["bytes"] / 2**20} if "size" in last else {}
            details["costs"] |= {f"ms ({batch.replace('_', ' ')})": ms["median_ms"] for batch, ms in latency.items()}
            score = last["eval"].get(job.metric)
            reason = f"the run has the scores {', '.join(last['eval'])}" if score is None else ""
            outcome = NO_SCORE if score is None else MEASURED
            trial = replace(trial, outcome=outcome, reason=reason, value=score)
    return replace(trial, details=details)


def evaluations_in(records: Path, job: TuneJob) -> list[tuple[int, float]]:
    """Return step and score of each evaluation of the last phase that a run has logged so far."""
    lines = records.read_bytes().splitlines(keepends=True) if records.exists() else []
    whole = [json.loads(line) for line in lines if line.endswith(b"\n")]  # the last one may be half written
    name = f"eval/{job.metric}"
    return [(record["step"], record[name]) for record in whole if record["phase"] == job.phase and name in record]


def _run(
    job: TuneJob, settings: Settings, folder: Path, more: Sequence[str], verdict: Callable[[], Trial | None]
) -> Trial:
    """Run a training command until it ends or a verdict ends it, with what it prints in `LOG`.

    Returns the verdict, or what the exit code and the last words say. Nothing is left of its processes at the end,
    however this function is left.
    """
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / LOG
    log.write_bytes(b"")
    pairs = [f"{path}={json.dumps(value)}" for path, value in settings.items() if path not in (RANKS, THREADS)]
    words = [*job.arguments, *(word for pair in pairs for word in ("--set", pair)), *more]
    words += ["--output_dir", str(folder), "--overwrite_output_dir"]
    started, said, code = time.monotonic(), None, None
    processes = _started(job, settings, words, log)
    try:
        while code is None and not (said := verdict()):
            time.sleep(_POLL)
            codes = [process.exitcode if isinstance(process, BaseProcess) else process.poll() for process in processes]
            code = next(filter(None, codes), None if None in codes else 0)
    finally:
        for sign in (signal.SIGTERM, signal.SIGKILL):
            _end(processes, sign)
    trial = said or Trial(settings, *outcome_of(code or 0, log))
    return replace(trial, lasted=time.monotonic() - started)


def _started(job: TuneJob, settings: Settings, words: list[str], log: Path) -> Sequence[Process]:
    """Start a training command, each of the processes as a group of its own.

    On a CPU the ranks are forked from a process that has loaded the libraries, which takes as long as a short trial;
    otherwise DeepSpeed's launcher starts them.
    """
    ranks, port, threads = settings[RANKS], distributed.free_port(), settings.get(THREADS)
    place = {"OMP_NUM_THREADS": str(threads)} if threads else {}
    if job.hostfile or any(path for name in _GPUS for path in Path("/dev").glob(name)):
        where = ["--hostfile", str(job.hostfile)] if job.hostfile else ["--num_gpus", str(ranks)]
        launcher = [str(Path(sys.executable).with_name("deepspeed")), *where, "--master_port", str(port)]
        command, out = [*launcher, "--module", _TRAIN, *words], log.open("wb")
        return [subprocess.Popen(command, stdout=out, stderr=out, env=os.environ | place, start_new_session=True)]
    if ranks > 1:
        numbers = {"WORLD_SIZE": ranks, "LOCAL_SIZE": ranks, "MASTER_PORT": port, "CROSS_RANK": 0, "CROSS_SIZE": 1}
        place |= {"MASTER_ADDR": "127.0.0.1", **{name: str(number) for name, number in numbers.items()}}
    _FORKS.set_forkserver_preload(_PRELOADED)
    forks = [_FORKS.Process(target=_train, args=(rank, place, words, log)) for rank in range(ranks)]
    for fork in forks:
        fork.start()
    return forks


def _train(rank: int, place: dict[str, str], words: list[str], log: Path) -> NoReturn:
    """Be a rank of a training command, in a process that was forked."""
    os.setsid()
    file = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.argv = ["ds-train", *words]
    os.environ.update(place)
    if "WORLD_SIZE" in place:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    if "OMP_NUM_THREADS" in os.environ:  # libgomp has read the variable before it was set for this trial
        import_module("torch").set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    command = import_module("ds_trainer.cli.command")
    distributed.leave(command.run_command(import_module(_TRAIN).train_command, words))


def _end(processes: Sequence[Process], sign: int) -> None:
    """Send a signal to what is left of a trial's processes, and wait for some seconds until they are gone."""
    until = time.monotonic() + _GRACE
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid or 0, sign)
            while time.monotonic() < until:
                time.sleep(0.02)
                process.exitcode if isinstance(process, BaseProcess) else process.poll()  # it would stay as a zombie
                os.killpg(process.pid or 0, 0)


def outcome_of(code: int, log: Path) -> tuple[str, str]:
    """Name what became of a trial without results, and say why, in the words of its processes."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    if memory := next((line for line in errors if "ran out of memory" in line), None):
        return NO_MEMORY, memory
    if code < 0 or code > 128 or any("was killed" in line or "signal 9" in line for line in errors):
        return KILLED, errors[0] if errors else f"ended by a signal (exit code {code}), as for lack of memory"
    return _BY_EXIT_CODE.get(code, FAILED), errors[0] if errors else (lines or [f"exit code {code}"])[-1]
