"""What a tuning varies: candidates, each a set of settings over the user's two files, and those that cannot be."""

import copy
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

from ds_trainer.config.jobs import TuneJob
from ds_trainer.config.recipe import Recipe, parse_recipe
from ds_trainer.config.settings import assign
from ds_trainer.engine.engine_file import MICRO, STEPS, TRAIN, check_engine_file, resolve_engine_file, settled_numbers
from ds_trainer.engine.rank_memory import PhaseMemory
from ds_trainer.ranks.failures import raise_mistakes

RANKS, THREADS = "ranks", "threads"
"""The settings that have no place in either file: the launcher's ranks, and OMP_NUM_THREADS of each."""
STAGE, OFFLOAD = "zero_optimization.stage", "zero_optimization.offload_optimizer"
_BUCKET = "zero_optimization.reduce_bucket_size"
_SMALLEST_SHARE = 32
"""The default space has micro-batches down to this part of what a rank has of a global batch."""

Settings = tuple[tuple[str, Any], ...]
"""Paths of `--set`, and JSON values."""


@dataclass(frozen=True)
class Machine:
    """What a trial on one rank has found out: the memory of the phase, and where it runs."""

    memory: PhaseMemory
    hidden_size: int
    gpus: int
    bytes_free: int
    """For all ranks of a host together; on GPUs for each of them."""
    identity: Any
    """The data, the hardware and the versions: JSON."""


@dataclass(frozen=True)
class Candidate:
    """One way to run the phase. Without settings it is the user's own."""

    ranks: int
    threads: int | None = None
    settings: Settings = ()

    def __hash__(self) -> int:
        return hash(str(self.settings))  # a value may be an object

    @property
    def label(self) -> str:
        parts = [f"{self.ranks} rank{'s' * (self.ranks > 1)}"]
        parts += [f"{self.threads} threads"] if self.threads else []
        for path, value in self.settings:
            if path not in (TRAIN, STEPS):
                words = "/".join(map(str, value.values())) if isinstance(value, dict) else value
                parts.append(f"{path.rpartition('.')[2]} {words}")
        return ", ".join(parts)

    @property
    def identity(self) -> list[Any]:
        """JSON that tells it from other candidates."""
        return [self.ranks, self.threads, [list(setting) for setting in self.settings]]


def apply_settings(file: dict[str, Any], settings: Settings, *, of_recipe: bool = False) -> dict[str, Any]:
    """Return a copy of the engine file, or of the recipe, with those settings that belong to it."""
    changed = copy.deepcopy(file)
    for path, value in settings:
        if (path.partition(".")[0] in Recipe.model_fields) == of_recipe:
            assign(changed, path.split("."), value, f"the setting {path}")
    return changed


@dataclass(frozen=True)
class Resolved:
    """A candidate whose files have no mistakes, with the memory that it takes by arithmetic."""

    candidate: Candidate
    micro_batch: int
    recomputes: bool
    bytes: int
    """The peak of each rank: of its GPU where it has one."""

    @property
    def siblings(self) -> Any:
        """What it has in common with candidates that differ in the micro-batch alone."""
        others = [setting for setting in self.candidate.settings if setting[0] not in (MICRO, STEPS)]
        return self.candidate.ranks, self.candidate.threads, str(others)


def user_ranks(job: TuneJob, machine: Machine) -> int:
    """Return on how many ranks the user's own files are run: as given, else one a GPU, else one."""
    return job.num_gpus or machine.gpus or 1


def global_batch(job: TuneJob, machine: Machine) -> int:
    """Return the examples of an optimizer step under the user's own files, which no candidate changes."""
    numbers = settled_numbers(job.train.engine_config, job.tuned_phase, user_ranks(job, machine))
    return numbers.train_batch_size


def default_space(job: TuneJob, machine: Machine) -> dict[str, list[Any]]:
    """Return what is varied where the user names no space, by path."""
    batch, cores = global_batch(job, machine), len(os.sched_getaffinity(0))
    fixed = job.num_gpus or machine.gpus
    recomputing = {one.gradient_checkpointing for one in machine.memory.activations}
    space: dict[str, list[Any]] = {
        RANKS: [fixed] if fixed else [count for count in _divisors(cores) if batch % count == 0],
        f"phases.{job.phase}.gradient_checkpointing": sorted(recomputing),
        STAGE: [0, 1, 2, 3],
    }
    if machine.gpus:
        space[OFFLOAD] = [None, {"device": "cpu"}]
    space[_BUCKET] = ["auto", 50_000_000]
    space[MICRO] = [micro for micro in reversed(_divisors(batch)) if micro * _SMALLEST_SHARE >= batch]
    return space


def candidates(job: TuneJob, machine: Machine, space: Mapping[str, list[Any]]) -> Iterator[Candidate]:
    """Yield the user's own files, then the combinations of the space, in its order, the last path changing fastest.

    Those are left out that do not divide the global batch, that differ from another one only in buckets without ZeRO,
    and, unless the user names the space, those that share among ranks on one rank alone.
    """
    yield Candidate(user_ranks(job, machine))
    batch, seen = global_batch(job, machine), set()
    for values in product(*space.values()):
        chosen = dict(zip(space, values, strict=True))
        ranks = int(chosen.pop(RANKS, user_ranks(job, machine)))
        threads = chosen.pop(THREADS, None)
        stage = chosen.get(STAGE)
        if ranks == 1 and stage and not chosen.get(OFFLOAD) and not job.space:
            continue
        if batch % (ranks * chosen.get(MICRO, 1)):
            continue
        if stage == 0:
            chosen.pop(_BUCKET, None)
        if MICRO in chosen:
            chosen[STEPS] = "auto"  # other phases may have other global batches
        if job.tuned_phase.train_batch_size is None:
            chosen[TRAIN] = batch
        candidate = Candidate(ranks, threads, tuple(chosen.items()))
        if str(candidate) not in seen:
            seen.add(str(candidate))
            yield candidate


def resolve(candidate: Candidate, job: TuneJob, machine: Machine) -> Resolved:
    """Check a candidate and foretell its memory; a UserError says why it cannot be."""
    engine = apply_settings(job.train.engine_config, candidate.settings)
    recipe = apply_settings(job.train.recipe.model_dump(), candidate.settings, of_recipe=True)
    phases = checked_recipe(recipe, engine, candidate.ranks).phases
    phase = next(phase for phase in phases if phase.name == job.phase)
    config = resolve_engine_file(
        engine, phase, candidate.ranks, hidden_size=machine.hidden_size, total_steps=1, warmup_steps=0
    )
    described = machine.memory.describe(config, phase.gradient_checkpointing)
    peak = described["peak_of_the_gpu" if machine.gpus else "peak"]
    return Resolved(candidate, config[MICRO], phase.gradient_checkpointing, peak)


def checked_recipe(recipe: dict[str, Any], engine: dict[str, Any], ranks: int) -> Recipe:
    """Check a recipe, and an engine file for each of its phases; a UserError has the mistakes in either."""
    parsed = parse_recipe(recipe)
    raise_mistakes(mistake for phase in parsed.phases for mistake in check_engine_file(engine, phase, ranks))
    return parsed


def _divisors(number: int) -> list[int]:
    return [count for count in range(1, number + 1) if number % count == 0]
