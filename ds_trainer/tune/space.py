"""What a tuning tries: candidates, each a set of settings over the user's two files, and whether they can work."""

import copy
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

from ds_trainer.engine.engine_file import MICRO, STEPS, TRAIN, check_engine_file, resolve_engine_file, settled_numbers
from ds_trainer.engine.memory import PhaseMemory
from ds_trainer.ranks.failures import raise_mistakes
from ds_trainer.recipe.jobs import TuneJob
from ds_trainer.recipe.recipe import Recipe, parse_recipe
from ds_trainer.recipe.settings import assign
from ds_trainer.tasks.data import hash_of

RANKS, THREADS = "ranks", "threads"
"""The settings that have no place in either file: the launcher's ranks, and OMP_NUM_THREADS of each."""
_STAGE, _OFFLOAD = "zero_optimization.stage", "zero_optimization.offload_optimizer"
_BUCKET = "zero_optimization.reduce_bucket_size"
_SMALLEST_SHARE = 32
"""The default space has micro-batches down to this part of what a rank has of a global batch."""
_MARGIN = 0.15
"""How far memory by arithmetic may be off."""

Settings = dict[str, Any]
"""JSON values by the paths of `--set`, and by `RANKS` and `THREADS`."""


@dataclass(frozen=True)
class Machine:
    """What the first trial measures on one rank: the memory of the phase, and where it runs."""

    memory: PhaseMemory
    hidden_size: int
    gpus: int
    bytes_free: int
    """For all ranks of a host together; on GPUs for each of them."""
    held_out: int
    """How many training examples are held out."""
    identity: Mapping[str, Any]
    """The data, the hardware and the versions."""


def files_with(job: TuneJob, settings: Settings) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the recipe and the engine file as the user wrote them, with the settings."""
    recipe, engine = copy.deepcopy((job.recipe_file, job.engine_file))
    for path, value in settings.items():
        if path not in (RANKS, THREADS):
            file = recipe if path.partition(".")[0] in Recipe.model_fields else engine
            assign(file, path.split("."), value, f"the setting {path}")
    return recipe, engine


def checked(job: TuneJob, settings: Settings) -> tuple[Recipe, dict[str, Any]]:
    """Return the recipe and the engine file with the settings; a UserError has the mistakes in either."""
    recipe_file, engine = files_with(job, settings)
    recipe, ranks = parse_recipe(recipe_file), settings.get(RANKS, job.num_gpus or 1)
    raise_mistakes(mistake for phase in recipe.phases for mistake in check_engine_file(engine, phase, ranks))
    return recipe, engine


def plan(job: TuneJob, machine: Machine, settings: Settings) -> tuple[str, str]:
    """Check settings; a UserError says why they cannot be.

    Returns a hash of what they amount to, and why a rank has not enough memory by arithmetic, empty where it has.
    """
    (recipe, engine), ranks = checked(job, settings), settings[RANKS]
    phase = next(phase for phase in recipe.phases if phase.name == job.phase)
    config = resolve_engine_file(engine, phase, ranks, hidden_size=machine.hidden_size, total_steps=1, warmup_steps=0)
    memory = machine.memory.describe(config, phase.gradient_checkpointing)
    needed = memory["peak_of_the_gpu" if machine.gpus else "peak"]
    free = machine.bytes_free // (1 if machine.gpus else -(-ranks // job.hosts))
    lack = f"by arithmetic a rank needs {needed / 2**30:.2f} GiB, and {free / 2**30:.2f} are free"
    outside = {RANKS: ranks, THREADS: settings.get(THREADS)}
    return hash_of([config, recipe.model_dump(), outside]), lack if needed > free * (1 + _MARGIN) else ""


def default_space(job: TuneJob, machine: Machine) -> dict[str, list[Any]]:
    """Return what is varied for speed where the user names no space, by path."""
    batch, cores = global_batch(job, machine), len(os.sched_getaffinity(0))
    fixed = job.num_gpus or machine.gpus
    return {
        RANKS: [fixed] if fixed else [count for count in _divisors(cores) if batch % count == 0],
        f"phases.{job.phase}.gradient_checkpointing": sorted(
            {one.gradient_checkpointing for one in machine.memory.activations}
        ),
        _STAGE: [0, 1, 2, 3],
        **({_OFFLOAD: [None, {"device": "cpu"}]} if machine.gpus else {}),
        _BUCKET: ["auto", 50_000_000],
        MICRO: [micro for micro in reversed(_divisors(batch)) if micro * _SMALLEST_SHARE >= batch],
    }


def own_settings(job: TuneJob, machine: Machine) -> Settings:
    """Return the settings of the user's own files: on the ranks that are given, else on one a GPU, else on one."""
    return {RANKS: job.num_gpus or machine.gpus or 1}


def global_batch(job: TuneJob, machine: Machine) -> int:
    """Return the examples of an optimizer step under the user's own files, which no candidate for speed changes."""
    ranks = own_settings(job, machine)[RANKS]
    return settled_numbers(job.train.engine_config, job.tuned_phase, ranks).train_batch_size


def combinations(job: TuneJob, machine: Machine) -> Iterator[Settings]:
    """Yield the settings to try for speed: every combination of the space, in its order, the last path fastest.

    Settings that do not divide the global batch are left out, as are other buckets where there is no ZeRO and, in the
    default space, stages that share among ranks where there is one rank.
    """
    batch = global_batch(job, machine)
    space: dict[str, Any] = job.space or default_space(job, machine)
    bucket = space.get(_BUCKET, [None])[0]
    for values in product(*space.values()):
        settings = own_settings(job, machine) | dict(zip(space, values, strict=True))
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
    parts = [f"{settings[RANKS]} rank{'s' * (settings[RANKS] > 1)}"]
    for path, value in settings.items():
        if path not in (RANKS, TRAIN, STEPS):
            words = "/".join(map(str, value.values())) if isinstance(value, dict) else value
            text = f"{words:.4g}" if isinstance(words, float) else str(words)
            parts.append(f"{path.removeprefix('phases.').removeprefix('zero_optimization.')} {text}")
    return ", ".join(parts if len(settings) > 1 else [*parts, "the user's own files"])


def _divisors(number: int) -> list[int]:
    return [count for count in range(1, number + 1) if number % count == 0]
