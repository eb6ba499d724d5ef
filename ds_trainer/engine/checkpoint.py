"""Engine checkpoints of a phase: `checkpoint-N/`, N the optimizer step. Each is whole, or does not exist.

A checkpoint is first written into a folder of another name and read back. Then its `complete.json` lists the size and
the checksum of every file, and the state of the phase; only then does the folder get its name. Thresholds and the
random state are not stored, since they are functions of the step. A checkpoint of other ranks or of another ZeRO stage
is loaded by `reshard.py`.
"""

import contextlib
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from ds_trainer.config.saved_checkpoint import checkpoints_in
from ds_trainer.engine import reshard
from ds_trainer.files import checkpoint_files
from ds_trainer.files.checkpoint_files import MARKER, read_marker, write_marker
from ds_trainer.files.messages import changes
from ds_trainer.ranks import distributed
from ds_trainer.ranks.failures import UserError

TRAINING_DATA, PARAMETER_GROUPS = "the training data", "the parameter groups"
"""The entries of a phase's identity that are hashes."""


@dataclass(frozen=True)
class CheckpointState:
    """How far a phase has come, as `complete.json` keeps it under "position" beside the list of files.

    The fields are the keys on disk, except that `order_batch_size` is "order". `Checkpoints.save` fills in the last
    two.
    """

    step: int
    examples: int
    """Seen so far, from the start of the phase."""
    batch_size: int
    order_batch_size: int
    """The batch size of the phase's first run. The order of the examples stays that of batches of this size."""
    identity: Mapping[str, Any]
    """What a resumed run must have in common with this one: the name for messages -> the value."""
    asked: bool
    """Whether the recipe requests a checkpoint of this step; false for one that only a stop has made."""
    evaluated: int
    """The step of the last finished evaluation."""
    scores: Mapping[str, float]
    """The scores of that evaluation."""
    report: Mapping[str, Any] | None
    techniques: Mapping[str, Any]
    total: int
    """The steps of the phase, which its schedules follow."""
    phase: Mapping[str, Any]
    """The phase as the recipe had it, with its task: a later `--resume` may have another recipe."""
    curve: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """The `metric_for_best_model` at every evaluation so far, by its name."""
    world_size: int = 0
    zero_stage: int = 0


class WholeCheckpoint(NamedTuple):
    """A checkpoint whose files are all as they were written."""

    path: Path
    state: CheckpointState


@dataclass(frozen=True)
class Best:
    """The metric by which a checkpoint is worth keeping."""

    metric: str
    greater: bool

    def key(self, state: CheckpointState) -> float:
        """Return a number that is higher for a better checkpoint; -inf where its step was not given a finite score."""
        return self._rank(state.scores.get(self.metric, math.nan) if state.evaluated == state.step else math.nan)

    def waited(self, curve: Mapping[str, Sequence[float]]) -> int:
        """Return how many evaluations have passed since the best one, given the scores of all by their metric."""
        ranks = [self._rank(score) for score in curve.get(self.metric, ())]
        return len(ranks) - 1 - ranks.index(max(ranks)) if ranks else 0

    def _rank(self, score: float) -> float:
        return (score if self.greater else -score) if math.isfinite(score) else -math.inf


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints in a phase's folder: the newest `keep` of them (None: all) and the best are kept.

    A checkpoint that was saved only because of a stop is a passing one: it does not count towards `keep`, and is
    deleted once the next one is written or the phase has ended. So a run that was stopped and resumed keeps the same
    checkpoints as any other.
    """

    folder: Path
    keep: int | None = None
    best: Best | None = None

    def save(self, engine: Any, state: CheckpointState) -> Path | None:
        """Write `checkpoint-N`; collective. None, and a warning, where it cannot be written.

        The oldest beyond `keep` are dropped before the new one is written, not after: its score is only known later.
        So one more than `keep` exists until the next save.
        """
        self.drop_oldest()
        target = self.folder / f"checkpoint-{state.step}"
        aside = self.folder / f".{target.name}.saving"
        error = _disk_error_of(lambda: self._write(engine, state, aside, target))
        if error is None:
            self.drop_passing(but=target)
            return target
        distributed.on_main(lambda: shutil.rmtree(aside, ignore_errors=True))
        newest = distributed.on_main(lambda: [path.name for path in self.all()][-1:])
        distributed.warn(
            f"{target} could not be written: {error}. Training goes on; free some space, or lower save_total_limit. "
            f"The newest checkpoint is {newest[0] if newest else 'none yet'}"
        )
        return None

    def _write(self, engine: Any, state: CheckpointState, aside: Path, target: Path) -> None:
        """Write the checkpoint aside, read it back, list it, and rename it. Raises OSError on every rank or on none.

        All ranks write into the folder. So rank 0 renames it only after the collective of `checked_sums`, which every
        rank reaches once it has written.
        """

        def begin() -> None:
            shutil.rmtree(aside, ignore_errors=True)
            aside.mkdir(parents=True)

        distributed.on_main(begin)
        with checkpoint_files.watched(engine) as writes:
            names = reshard.parameter_names(engine)
            engine.save_checkpoint(str(self.folder), tag=aside.name, client_state=names, save_latest=False)
        errors = [error for errors in distributed.broadcast(distributed.gather(writes.errors)) for error in errors]
        if errors:
            raise OSError(errors[0])
        sums = checkpoint_files.checked_sums(aside, writes)
        state = replace(state, world_size=distributed.world_size(), zero_stage=engine.zero_optimization_stage())

        def rename() -> None:
            on_disk = asdict(state)
            on_disk["order"] = on_disk.pop("order_batch_size")
            write_marker(aside, sums, on_disk)
            if target.exists():
                shutil.rmtree(target)  # of an earlier session, before the run went back to an older checkpoint
            aside.rename(target)
            checkpoint_files.sync_folder(target.parent)

        distributed.on_main(rename)

    def all(self) -> list[Path]:
        """Return the checkpoints that were whole when they were written, oldest first."""
        return [path for path in checkpoints_in(self.folder) if (path / MARKER).exists()]

    def write_scores(self, step: int, scores: Mapping[str, float], curve: Mapping[str, Sequence[float]]) -> None:
        """Add the scores of step N, and of all evaluations, to `checkpoint-N`; collective."""
        checkpoint = self.folder / f"checkpoint-{step}"

        def add() -> None:
            sums, saved = read_marker(checkpoint)
            write_marker(checkpoint, sums, {**saved, "evaluated": step, "scores": scores, "curve": curve})

        error = _disk_error_of(lambda: distributed.on_main(add))
        if error:
            distributed.warn(f"the scores of {checkpoint} could not be written: {error}. It cannot be the best one")

    def drop_oldest(self) -> None:
        """Delete all but the newest `keep` checkpoints and the best."""
        if distributed.is_main() and self.keep is not None:
            best = self.best_one()
            for old in [*self._requested()][: -self.keep]:
                if old != best:
                    _drop(old)

    def drop_passing(self, but: Path | None = None) -> None:
        """Delete the passing checkpoints, once the run has gone on from them, or has ended."""
        if distributed.is_main():
            for passing in set(self.all()) - {*self._requested(), but}:
                _drop(passing)

    def _requested(self) -> dict[Path, CheckpointState | None]:
        """Return the checkpoints that the recipe requests, oldest first; None for a damaged marker."""
        read = {path: _read(path)[0] for path in self.all()}
        return {path: state for path, state in read.items() if state is None or state.asked}

    def best_one(self) -> Path | None:
        """Return the checkpoint of the best score, the earliest of equals; None where none has a score."""
        if self.best is None:
            return None
        keys = {path: self.best.key(state) for path, state in self._requested().items() if state}
        best = max(keys, key=lambda path: keys[path], default=None)
        return best if best and keys[best] > -math.inf else None

    def best_saved(self) -> WholeCheckpoint | None:
        """Return the checkpoint of the best score that is still whole; collective."""
        return self._first_whole(self.best_one)

    def newest(self) -> WholeCheckpoint | None:
        """Return the newest checkpoint that is still whole; collective."""
        return self._first_whole(lambda: next(reversed(self.all()), None))

    def _first_whole(self, choose: Callable[[], Path | None]) -> WholeCheckpoint | None:
        """Verify the checkpoint that rank 0 chooses; rename a damaged one to `damaged-N` and choose again."""
        while checkpoint := distributed.on_main(choose):
            state, damage = _verified(checkpoint)
            if state:
                return WholeCheckpoint(checkpoint, state)
            distributed.on_main(partial(_put_aside, checkpoint, "damaged"))
            distributed.warn(f"{checkpoint} is damaged ({damage}): the one before it is used")
        return None

    def named(self, checkpoint: Path) -> WholeCheckpoint:
        """Return the checkpoint that the user has named; collective. Raises UserError where it is damaged."""
        state, damage = _verified(checkpoint)
        if state is None:
            raise UserError(
                f"--resume {checkpoint}: the checkpoint is damaged ({damage}), and the run is left as it was: name "
                f"another, or none for the newest"
            )
        return WholeCheckpoint(self.folder / checkpoint.name, state)

    def load(self, engine: Any, checkpoint: Path, state: CheckpointState) -> None:
        """Make the engine go on from a checkpoint, whatever ranks and ZeRO stage wrote it; collective."""
        now = (distributed.world_size(), engine.zero_optimization_stage())
        if (state.world_size, state.zero_stage) == now:
            path, _ = engine.load_checkpoint(str(checkpoint.parent), tag=checkpoint.name)
            assert path is not None, f"{checkpoint} is whole, but DeepSpeed finds nothing in it"
            return
        distributed.info(
            f"{checkpoint} has world size {state.world_size} and ZeRO stage {state.zero_stage}, and this run "
            f"has {now[0]} and {now[1]}: it is converted"
        )
        reshard.load(engine, checkpoint)

    def clear_asides(self) -> None:
        """Remove the folders that a killed run was writing or deleting."""
        for begun in self.folder.glob(".checkpoint-*"):
            shutil.rmtree(begun, ignore_errors=True)

    def supersede(self, after: int) -> None:
        """Rename the checkpoints after a step to `superseded-N`: a run that went back makes others."""
        for later in self.all():
            if step_of(later) > after:
                _put_aside(later, "superseded")


def step_of(checkpoint: Path) -> int:
    """Return the N of `checkpoint-N`."""
    return int(checkpoint.name.rpartition("-")[2])


def check_fits(
    checkpoint: Path, state: CheckpointState, identity: Mapping[str, Any], task: Mapping[str, Any] | None = None
) -> None:
    """Raise UserError where the phase that is to go on from the checkpoint differs from the one that wrote it.

    `task` has the fields of its task, by which the message explains a difference of the data.
    """
    saved = state.identity
    different = {name: now for name, now in identity.items() if saved.get(name, now) != now}
    mistakes = [f"{checkpoint}: {_difference(name, saved[name], now, state, task)}" for name, now in different.items()]
    if mistakes:
        raise UserError("\n".join([*mistakes, "resume with the same, or start again with --overwrite_output_dir"]))


def _difference(name: str, before: Any, now: Any, state: CheckpointState, task: Mapping[str, Any] | None) -> str:
    """Say in which fields an entry of a phase's identity, which may be a hash, is another than in the checkpoint."""
    saved_task = state.phase.get("task")
    if name == TRAINING_DATA:
        fields = "; ".join(text for _, text in changes(saved_task, task or {})) if saved_task else ""
        others = (
            "the files have other contents, or the model has another tokenizer, "
            "or this version reads them otherwise (docs/tasks.md)"
        )
        return f"{name} differ: {fields or others}"
    if name == PARAMETER_GROUPS:  # each is a text with a hash of its parameters
        labels = dict.fromkeys(text.partition(" (")[0] for text in [*before, *now] if (text in before) != (text in now))
        return f"{name} differ in {', '.join(labels)}: the phase's groups or techniques, or its model, are others"
    return "; ".join(text for _, text in changes({name: before}, {name: now}))


def _read(checkpoint: Path) -> tuple[CheckpointState | None, dict[str, tuple[int, int]], str | None]:
    """Return state and files of a checkpoint, or the error in its marker."""
    try:
        sums, state = read_marker(checkpoint)
        return CheckpointState(order_batch_size=state.pop("order"), **state), sums, None
    except (KeyError, TypeError) as error:  # it is whole: to rename it as damaged would put its progress aside
        raise UserError(
            f"{checkpoint / MARKER} has other fields than this version of the library writes: go on with the version "
            f"that wrote it, or start again with --overwrite_output_dir"
        ) from error
    except ValueError as error:
        return None, {}, str(error)


def _verified(checkpoint: Path) -> tuple[CheckpointState | None, str | None]:
    """Return the state of a checkpoint whose files are all as they were written, or else the damage; collective."""
    state, sums, damage = distributed.on_main(partial(_read, checkpoint))
    damage = damage or checkpoint_files.damage_of(checkpoint, sums)
    return (None if damage else state), damage


def _disk_error_of(call: Callable[[], object]) -> str | None:
    """Return the text of the OSError that a call raises on every rank, if it does."""
    try:
        call()
    except OSError as error:
        return error.strerror or str(error)
    return None


def _put_aside(checkpoint: Path, reason: str) -> None:
    """Rename `checkpoint-N` to `REASON-N`."""
    place = checkpoint.with_name(f"{reason}-{step_of(checkpoint)}")
    shutil.rmtree(place, ignore_errors=True)
    checkpoint.rename(place)


def _drop(checkpoint: Path) -> None:
    """Rename a checkpoint and delete it: a kill in between must not leave half of one under the name of a whole one."""
    dropped = checkpoint.with_name(f".{checkpoint.name}.dropped")
    shutil.rmtree(dropped, ignore_errors=True)
    with contextlib.suppress(OSError):  # a checkpoint that cannot be deleted costs space, and must not end the run
        checkpoint.rename(dropped)
    shutil.rmtree(dropped, ignore_errors=True)
