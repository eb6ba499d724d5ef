"""What a tuning tries, and what becomes of it: settings over the user's two files, and an ordinary run for each.

For a score a trial is the run of the whole recipe, scored on held-out training examples. For speed it is a run of one
phase, which is ended after its first steps. The models that the phase starts from and is taught by are made once
before, by a run of the earlier phases without any training.

Whatever becomes of a trial is a result: it was measured, or it ran out of memory, hung, was killed or refused, its loss
was not finite, or it failed. What it has logged decides; its exit code and what it printed only say why.
"""

import contextlib
import copy
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import product, takewhile
from pathlib import Path
from statistics import harmonic_mean
from typing import Any

from ds_trainer.engine.engine_file import (
    MICRO,
    STEPS,
    TRACES,
    TRAIN,
    check_engine_file,
    resolve_engine_file,
    settled_numbers,
)
from ds_trainer.files.messages import shown
from ds_trainer.files.reading import content_hash, folder_hash, read_value
from ds_trainer.files.redaction import redacted
from ds_trainer.files.run_folder import LOG, RESULTS, STATUS
from ds_trainer.files.writing import write_json
from ds_trainer.ranks import distributed
from ds_trainer.ranks.failures import NonFiniteLossError, OutOfMemoryError, UserError, raise_mistakes
from ds_trainer.recipe.jobs import TuneJob
from ds_trainer.recipe.recipe import Phase, Recipe, parse_recipe
from ds_trainer.recipe.settings import assign
from ds_trainer.tasks.data import hash_of
from ds_trainer.tasks.registry import fingerprint_of

RANKS = "ranks"
"""The setting that has no place in either file: the launcher's ranks."""
MEASURED, NO_MEMORY, HUNG, KILLED, REFUSED = "measured", "out of memory", "hung", "killed", "refused"
NOT_FINITE, FAILED, ENDED_EARLY, NO_SCORE = "not finite", "failed", "ended early", "no score"
_BY_EXIT_CODE = {
    UserError.exit_code: REFUSED,
    NonFiniteLossError.exit_code: NOT_FINITE,
    OutOfMemoryError.exit_code: NO_MEMORY,
}
_STAGE, _OFFLOAD = "zero_optimization.stage", "zero_optimization.offload_optimizer"
_BUCKET, _SPEED = "zero_optimization.reduce_bucket_size", "train/examples_per_s"
_SMALLEST_SHARE = 32
"""The default space has micro-batches down to this part of what a rank has of a global batch."""
_RECORDS = 4
"""A trial for speed logs this often; the first record, of steps that allocate memory and build kernels, is left out."""
_POLL, _GRACE = 0.2, 5.0
"""Seconds between two looks at a run; and those that its processes have to end before they are killed."""
_WEIGHTS = ("*/model", "checkpoint-*", "*/checkpoint-*", "starting_models")
"""Of a run's folder, without the model of its last phase."""

Settings = dict[str, Any]
"""JSON values by the paths of `--set`, and by `RANKS`."""
CannotWin = Callable[[int, float], bool]
"""Takes step and score of an evaluation of the trial that runs."""


@dataclass(frozen=True)
class Machine:
    """Where a tuning runs, and on what."""

    gpus: int
    identity: Any
    """The data, the hardware and the versions, as a JSON value."""


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
    """That of its plan; empty for settings that were refused."""


# Settings


def files_with(job: TuneJob, settings: Settings) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the recipe and the engine file as the user wrote them, with the settings."""
    recipe, engine = copy.deepcopy((job.recipe_file, job.engine_file))
    for path, value in settings.items():
        if path != RANKS:
            file = recipe if path.partition(".")[0] in Recipe.model_fields else engine
            assign(file, path.split("."), value, f"the setting {path}")
    return recipe, engine


def checked(job: TuneJob, settings: Settings) -> tuple[Recipe, dict[str, Any]]:
    """Return the recipe and the engine file with the settings; a UserError has the mistakes in either."""
    recipe_file, engine = files_with(job, settings)
    recipe, ranks = parse_recipe(recipe_file), settings.get(RANKS, job.num_gpus or 1)
    raise_mistakes(mistake for phase in recipe.phases for mistake in check_engine_file(engine, phase, ranks))
    return recipe, engine


def key_of(job: TuneJob, machine: Machine, settings: Settings) -> str:
    """Return a hash of what settings amount to, here and now; a UserError says why they cannot be."""
    recipe, engine = checked(job, settings)
    phase = next(phase for phase in recipe.phases if phase.name == job.phase)
    run: list[Any] = [resolve_engine_file(engine, phase, settings[RANKS]), recipe.model_dump(exclude={"output_dir"})]
    run += [settings[RANKS], job.metric, job.trial_steps, job.train_flags, machine.identity]
    return hash_of([*run, *contents_of([job.recipe_file, settings])])


def combinations(job: TuneJob, gpus: int) -> Iterator[Settings]:
    """Yield the settings to try for speed: every combination of the space, in its order, the last path fastest.

    None of them changes the global batch of the user's own files. Left out are buckets where there is no ZeRO and, in
    the default space, stages that share among ranks where there is one rank.
    """
    ranks = job.num_gpus or gpus or 1
    batch = settled_numbers(job.train.engine_config, job.tuned_phase, ranks).train_batch_size
    micros = [micro for micro in range(batch, 0, -1) if batch % micro == 0 and micro * _SMALLEST_SHARE >= batch]
    space: dict[str, Any] = job.space or {
        f"phases.{job.phase}.gradient_checkpointing": [False, True],
        _STAGE: [0, 1, 2, 3],
        **({_OFFLOAD: [None, {"device": "cpu"}]} if gpus else {}),
        _BUCKET: ["auto", 50_000_000],
        MICRO: micros,
    }
    bucket = space.get(_BUCKET, [None])[0]
    for values in product(*space.values()):
        settings = {RANKS: ranks, **dict(zip(space, values, strict=True))}
        shares = settings.get(_STAGE) and not settings.get(_OFFLOAD)
        if batch % (settings[RANKS] * settings.get(MICRO, 1)) or (shares and settings[RANKS] == 1 and not job.space):
            continue
        if settings.get(_STAGE) == 0 and settings.pop(_BUCKET, bucket) != bucket:
            continue
        if MICRO in settings:
            settings[STEPS] = "auto"  # other phases may have other global batches
        if not job.tuned_phase.train_batch_size:
            settings[TRAIN] = batch
        yield settings


def label(settings: Settings) -> str:
    """Name a candidate in a few words."""
    parts = [f"{path} {shown(value)}" for path, value in settings.items() if path not in (TRAIN, STEPS)]
    return ", ".join(parts if len(parts) > 1 else [*parts, "the user's own files"])


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


# Runs


def prepare(job: TuneJob) -> Machine:
    """See where the tuning runs; for speed, also make the models that the tuned phase starts from and is taught by.

    Raises UserError in the words of the run that makes them, where it fails.
    """
    import torch

    from ds_trainer.ranks import machine

    if not job.metric:
        distributed.info(f"making the models that phase {job.phase} starts from, without training them")
        phases = [_untrained(phase) for phase in _until(job.train.recipe, job.phase)]
        recipe = job.train.recipe.model_copy(update={"phases": phases, "report": False})
        folder = job.output / "trials" / "start"
        command = _command(job, {RANKS: 1}, _with_tasks(recipe, max_eval_samples=8), {}, folder)
        with (folder / "output.log").open("wb") as log:
            code = subprocess.run(command, stdout=log, stderr=log, check=False).returncode
        if code:
            outcome, reason = outcome_of(code, folder / "output.log")
            raise UserError(f"the models that phase {job.phase} starts from cannot be made ({outcome}): {reason}")
    data = [fingerprint_of(phase.task or job.train.recipe.task) for phase in job.train.recipe.phases]
    here = [socket.gethostname(), machine.device_name(), len(os.sched_getaffinity(0)), machine.versions()]
    return Machine(torch.cuda.device_count(), [data, here])


def run_trial(job: TuneJob, settings: Settings, folder: Path, cannot_win: CannotWin) -> Trial:
    """Run a candidate in this folder until it has been measured or ends; of its weights only the run's model is kept.

    The run is ended where it prints and logs nothing for too long, and where `cannot_win` says so of an evaluation of
    the last phase. Nothing is left of its processes at the end, however this function is left.
    """
    recipe, engine = checked(job, settings)
    recipe = _scored(recipe) if job.metric else _timed(job, recipe)
    for name in (LOG, STATUS, RESULTS):  # those of an earlier call
        (folder / name).unlink(missing_ok=True)
    command = _command(job, settings, recipe, engine, folder)
    started, log, seen, trial = time.monotonic(), folder / "output.log", 0, None
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, start_new_session=True)
    try:
        while trial is None and process.poll() is None:
            time.sleep(_POLL)
            records = records_of(folder, job)
            if job.metric and any(cannot_win(step, score) for step, score in _curve(records, job)[seen:]):
                trial = Trial(settings, ENDED_EARLY, f"at step {records[-1]['step']} it was behind the median so far")
            last = max(path.stat().st_mtime for path in (log, folder / LOG) if path.exists())
            if time.time() - last > job.trial_timeout:
                trial = Trial(settings, HUNG, f"it printed and logged nothing for {job.trial_timeout:.0f} s")
            elif not job.metric and len(records) >= _RECORDS:
                break
            seen = len(records)
    finally:
        _end(process)
    for path in (path for pattern in _WEIGHTS for path in folder.glob(pattern)):
        shutil.rmtree(path, ignore_errors=True)
    trial = trial or Trial(settings, *outcome_of(process.returncode, log))
    result = _score(job, folder, trial) if job.metric else _speed(job, folder, trial)
    return replace(result, lasted=time.monotonic() - started)


def records_of(folder: Path, job: TuneJob) -> list[dict[str, Any]]:
    """Return the records of the tuned phase's speed, or of its score, that a run has logged so far."""
    path, name = folder / LOG, f"eval/{job.metric}" if job.metric else _SPEED
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    # the last line may be half written
    whole = [json.loads(line) for line in lines if line.endswith(b"\n") and name.encode() in line]
    return [record for record in whole if record["phase"] == job.phase and name in record]


def outcome_of(code: int, log: Path) -> tuple[str, str]:
    """Name what became of a trial without results, and say why, in the words of its processes."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    if memory := next((line for line in errors if "ran out of memory" in line), None):
        return NO_MEMORY, memory
    if code < 0 or code > 128 or any("was killed" in line or "signal 9" in line for line in errors):
        return KILLED, errors[0] if errors else f"ended by a signal (exit code {code}), as for lack of memory"
    return _BY_EXIT_CODE.get(code, FAILED), errors[0] if errors else (lines or [f"exit code {code}"])[-1]


def _speed(job: TuneJob, folder: Path, trial: Trial) -> Trial:
    """Return a trial with its examples/s, where its run has logged them, and with the most memory of a rank."""
    records = records_of(folder, job)[:_RECORDS]  # it may have logged more until it was ended
    if len(records) < _RECORDS and not (len(records) > 1 and _is_finished(folder)):
        return trial
    peaks = {name: value for name, value in records[-1].items() if name.startswith("memory/")}
    of_gpus = [value for name, value in peaks.items() if name.startswith("memory/device/")]
    costs = {"MiB of a rank": max(of_gpus or peaks.values(), default=0) / 2**20}
    value = harmonic_mean([record[_SPEED] for record in records[1:]])
    return replace(trial, outcome=MEASURED, reason="", value=value, details={"costs": costs})


def _score(job: TuneJob, folder: Path, trial: Trial) -> Trial:
    """Return a trial with the scores of its last phase, by step and at the end, and with what its model costs."""
    details: dict[str, Any] = {"curve": _curve(records_of(folder, job), job)}
    if trial.outcome not in (HUNG, ENDED_EARLY) and _is_finished(folder):
        last = read_value(folder / RESULTS)[job.phase]
        latency = last.get("early_exit_latency") or last.get("latency", {})
        details["costs"] = {"MiB": last["size"]["bytes"] / 2**20} if "size" in last else {}
        details["costs"] |= {f"ms ({batch.replace('_', ' ')})": ms["median_ms"] for batch, ms in latency.items()}
        details["examples"] = last.get("measured_on", {}).get("examples", 0)
        value = last["eval"].get(job.metric)
        reason = f"the run has the scores {', '.join(last['eval'])}" if value is None else ""
        trial = replace(trial, outcome=NO_SCORE if value is None else MEASURED, reason=reason, value=value)
    return replace(trial, details=details)


def _is_finished(folder: Path) -> bool:
    """Whether a run is done: the launcher's exit code does not prove it."""
    status = folder / STATUS
    return status.is_file() and read_value(status)["state"] == "finished"


def _curve(records: list[dict[str, Any]], job: TuneJob) -> list[tuple[int, float]]:
    return [(record["step"], record[f"eval/{job.metric}"]) for record in records]


def _until(recipe: Recipe, name: str) -> list[Phase]:
    """Return the phases up to this one, which is the last."""
    before = list(takewhile(lambda phase: phase.name != name, recipe.phases))
    return recipe.phases[: len(before) + 1]


def _untrained(phase: Phase) -> Phase:
    """Return a phase that only makes the model that this one starts from."""
    kept = {name: getattr(phase, name) for name in ("name", "start_from", "student", "cut", "task")}
    return Phase.model_validate({**kept, "num_train_epochs": 0})


def _timed(job: TuneJob, recipe: Recipe) -> Recipe:
    """Return a recipe of the tuned phase alone, which begins with the models of the run "start", and logs its speed."""
    phase = _until(recipe, job.phase)[-1]
    start = job.output / "trials" / "start"

    def made(model: str) -> str:
        if not model.startswith("@"):
            return model
        if earlier := recipe.earlier(phase, model):
            return str(start / earlier.name / "model")
        return recipe.model.name_or_path or str(start / "starting_models" / "initial_model")

    models = {place: made(model) for place, model in phase.techniques.models.items()}
    update = {"techniques": phase.techniques.with_models(models), "start_from": str(start / "model")}
    update |= dict.fromkeys(("student", "cut", "eval_steps", "save_steps", "metric_for_best_model"))
    update |= {"load_best_model_at_end": False, "early_stopping_patience": None}
    update |= {"logging_steps": max(1, job.trial_steps // _RECORDS)}
    return recipe.model_copy(update={"phases": [phase.model_copy(update=update)], "report": False})


def _scored(recipe: Recipe) -> Recipe:
    """Return the recipe with all phases scored on held-out examples, and with a report, which measures the model."""
    return _with_tasks(recipe, score_held_out=True).model_copy(update={"report": True})


def _with_tasks(recipe: Recipe, **fields: Any) -> Recipe:
    """Return the recipe with these fields in the tasks of all its phases."""
    of_phases = [phase.task and phase.task.model_copy(update=fields) for phase in recipe.phases]
    phases = [phase.model_copy(update={"task": task}) for phase, task in zip(recipe.phases, of_phases, strict=True)]
    return recipe.model_copy(update={"phases": phases, "task": recipe.task.model_copy(update=fields)})


def _command(job: TuneJob, settings: Settings, recipe: Recipe, engine: Mapping[str, Any], folder: Path) -> list[str]:
    """Write the two files of a run into its folder, and return the command that runs them there."""
    files = {"recipe": folder / "recipe_of_trial.json", "deepspeed_config": folder / "engine_of_trial.json"}
    cache = job.train.recipe.cache_dir
    plain = recipe.model_copy(update={"output_dir": None, "cache_dir": None, "tensorboard": False})
    folder.mkdir(parents=True, exist_ok=True)
    write_json(files["recipe"], redacted(plain.model_dump(exclude_none=True)))
    write_json(files["deepspeed_config"], redacted({key: engine[key] for key in engine if key not in TRACES}))
    words = [word for name, path in files.items() for word in (f"--{name}", str(path))]
    words += [*job.train_flags, *(["--cache_dir", cache] if cache else [])]
    words += ["--output_dir", str(folder), "--overwrite_output_dir"]
    if settings[RANKS] == 1 and not job.hostfile:
        return [sys.executable, "-m", "ds_trainer.cli.train", *words]
    where = ["--hostfile", str(job.hostfile)] if job.hostfile else ["--num_gpus", str(settings[RANKS])]
    launcher = [str(Path(sys.executable).with_name("deepspeed")), *where]
    return [*launcher, "--master_port", str(distributed.free_port()), "--module", "ds_trainer.cli.train", *words]


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End what is left of the processes of a run, and wait for some seconds at most until they are gone."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        until = time.monotonic() + _GRACE
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, sign)
            while time.monotonic() < until:
                time.sleep(0.02)
                process.poll()  # it would stay as a zombie
                os.killpg(process.pid, 0)
    process.wait()
