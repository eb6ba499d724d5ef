"""Engine checkpoints of a phase: `checkpoint-N/`, N the optimizer step. Each is whole, or does not exist.

A checkpoint is first written into a folder of another name and read back. Then its `complete.json` lists the size and
the checksum of every file, and the state of the phase; only then does the folder get its name. Thresholds and the
random state are not stored, since they are functions of the step. A checkpoint of other ranks or of another ZeRO stage
is loaded by `reshard.py`.

| file | what is in it |
|---|---|
| `files/checkpoint_files.py` | the bytes: checksums, and the list that makes a folder a checkpoint |
| `recipe/saved_checkpoint.py` | which folders are checkpoints, and their recipe, without loading torch |
| `engine/checkpoint.py` | saving, finding the newest or best one, going back |
| `engine/saved_states.py` | the states that DeepSpeed has written |
| `engine/reshard.py` | loading them on other ranks or stages |
"""

import contextlib
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from ds_trainer.engine import reshard
from ds_trainer.files import checkpoint_files
from ds_trainer.files.checkpoint_files import MARKER, read_marker, write_marker
from ds_trainer.files.messages import changes
from ds_trainer.ranks import distributed
from ds_trainer.ranks.failures import UserError
from ds_trainer.recipe.saved_checkpoint import checkpoints_in

HASHED = TRAINING_DATA, PARAMETER_GROUPS = "the training data", "the parameter groups"
"""The entries of a phase's identity that are hashes, or have some in them."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that is whole, and how far its phase has come.

    All fields but `path` are the keys under "position" in `complete.json`, beside the list of files.
    """

    path: Path
    step: int
    examples: int
    """The number of examples seen since the start of the phase."""
    batch_size: int
    order: int
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
    world_size: int
    zero_stage: int
    curve: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """The `metric_for_best_model` at every evaluation so far, by its name."""


@dataclass(frozen=True)
class Best:
    """The metric by which a checkpoint is worth keeping."""

    metric: str
    greater: bool

    def key(self, checkpoint: Checkpoint) -> float:
        """Return a number that is higher for a better checkpoint; -inf where its step was not given a finite score."""
        scored = checkpoint.evaluated == checkpoint.step
        return self._rank(checkpoint.scores.get(self.metric, math.nan) if scored else math.nan)

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

    def save(self, engine: Any, step: int, position: Mapping[str, Any]) -> bool:
        """Write `checkpoint-N`, N the step; collective. False, and a warning, where it cannot be written.

        `position` has the fields of `Checkpoint` that the phase knows. The oldest beyond `keep` are dropped before the
        new one is written, not after: its score is only known later. So one more than `keep` exists until the next
        save.
        """
        self.drop_oldest()
        target = self.folder / f"checkpoint-{step}"
        aside = self.folder / f".{target.name}.saving"
        engine_is = {"world_size": distributed.world_size(), "zero_stage": engine.zero_optimization_stage()}
        try:
            _write(engine, {"step": step, **position, **engine_is}, aside, target)
        except OSError as error:  # a full disk, say, which must not end the run: every rank or none comes here
            distributed.on_main(lambda: shutil.rmtree(aside, ignore_errors=True))
            way_out = "Training goes on; free some space, or lower save_total_limit"
            distributed.warn(f"{target} could not be written: {error.strerror or error}. {way_out}")
            return False
        self.drop_passing(but=target)  # not before: until the new one is whole, a passing one may be the only one
        return True

    def all(self) -> list[Path]:
        """Return the checkpoints that were whole when they were written, oldest first."""
        return [path for path in checkpoints_in(self.folder) if (path / MARKER).exists()]

    def write_scores(self, step: int, scores: Mapping[str, float], curve: Mapping[str, Sequence[float]]) -> None:
        """Add the scores of step N, and of all evaluations, to `checkpoint-N`; collective."""
        checkpoint = self.folder / f"checkpoint-{step}"

        def add() -> None:
            sums, saved = read_marker(checkpoint)
            write_marker(checkpoint, sums, {**saved, "evaluated": step, "scores": scores, "curve": curve})

        with distributed.as_warning(f"the scores of {checkpoint} are not written, and it cannot be the best one"):
            distributed.on_main(add)

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

    def _requested(self) -> dict[Path, Checkpoint | None]:
        """Return the checkpoints that the recipe requests, oldest first; None for a damaged marker."""
        read = {path: _read(path)[0] for path in self.all()}
        return {path: one for path, one in read.items() if one is None or one.asked}

    def best_one(self) -> Path | None:
        """Return the checkpoint of the best score, the earliest of equals; None where none has a score."""
        if self.best is None:
            return None
        keys = {path: self.best.key(one) for path, one in self._requested().items() if one}
        best = max(keys, key=lambda path: keys[path], default=None)
        return best if best and keys[best] > -math.inf else None

    def best_saved(self) -> Checkpoint | None:
        """Return the checkpoint of the best score that is still whole; collective."""
        return self._first_whole(self.best_one)

    def newest(self) -> Checkpoint | None:
        """Return the newest checkpoint that is still whole; collective."""
        return self._first_whole(lambda: next(reversed(self.all()), None))

    def _first_whole(self, choose: Callable[[], Path | None]) -> Checkpoint | None:
        """Verify the checkpoint that rank 0 chooses; rename a damaged one to `damaged-N` and choose again."""
        while path := distributed.on_main(choose):  # rank 0 alone looks, or hosts with stale caches would disagree
            checkpoint, damage = _verified(path)
            if checkpoint:
                return checkpoint
            distributed.on_main(partial(_put_aside, path, "damaged"))
            distributed.warn(f"{path} is damaged ({damage}): the one before it is used")
        return None

    def named(self, path: Path) -> Checkpoint:
        """Return the checkpoint that the user has named; collective. Raises UserError where it is damaged."""
        checkpoint, damage = _verified(self.folder / path.name)
        if checkpoint is None:
            raise UserError(
                f"--resume {path}: the checkpoint is damaged ({damage}), and the run is left as it was: name another, "
                f"or none for the newest"
            )
        return checkpoint

    def clear_asides(self) -> None:
        """Remove the folders that a killed run was writing or deleting."""
        for begun in self.folder.glob(".checkpoint-*"):
            shutil.rmtree(begun, ignore_errors=True)

    def supersede(self, after: int) -> None:
        """Rename the checkpoints after a step to `superseded-N`, the last first: a run that went back makes others."""
        for later in reversed(self.all()):
            if step_of(later) > after:
                _put_aside(later, "superseded")


def step_of(checkpoint: Path) -> int:
    """Return the N of `checkpoint-N`."""
    return int(checkpoint.name.rpartition("-")[2])


def load(engine: Any, checkpoint: Checkpoint) -> None:
    """Make the engine go on from a checkpoint, whatever ranks and ZeRO stage wrote it; collective."""
    path, world_size, stage = checkpoint.path, distributed.world_size(), engine.zero_optimization_stage()
    if (checkpoint.world_size, checkpoint.zero_stage) == (world_size, stage):
        loaded, _ = engine.load_checkpoint(str(path.parent), tag=path.name)
        assert loaded is not None, f"{path} is whole, but DeepSpeed finds nothing in it"
        return
    distributed.info(
        f"{path} has world size {checkpoint.world_size} and ZeRO stage {checkpoint.zero_stage}, and this run has "
        f"{world_size} and {stage}: it is converted"
    )
    reshard.load(engine, path)


def recipe_changes(checkpoint: Checkpoint, phase: Mapping[str, Any]) -> str:
    """Say which fields a phase of the recipe has otherwise than in the checkpoint; "" where they are the same.

    A field that only one version of the library knows is no difference.
    """
    both = phase.keys() & checkpoint.phase.keys()
    before, now = ({name: fields[name] for name in phase if name in both} for fields in (checkpoint.phase, phase))
    return "; ".join(text for _, text in changes(before, now))


def check_fits(checkpoint: Checkpoint, identity: Mapping[str, Any], phase: Mapping[str, Any] | None = None) -> None:
    """Raise UserError where the phase that is to go on from the checkpoint differs from the one that wrote it.

    `phase` has the fields of the recipe, by which the message explains a difference of hashes.
    """
    different = [name for name, now in identity.items() if checkpoint.identity.get(name, now) != now]
    if not different:
        return
    plain = [name for name in different if name not in HASHED]
    before, now = ({name: values[name] for name in plain} for values in (checkpoint.identity, identity))
    lines = [text for _, text in changes(before, now)]
    if hashed := [name for name in different if name in HASHED]:
        fields = recipe_changes(checkpoint, phase or {}) or (
            "none; the files have other contents, the model has another tokenizer or other parameters, or this "
            "version reads them otherwise (docs/tasks.md)"
        )
        lines.append(f"{' and '.join(hashed)} differ; in the recipe differ: {fields}")
    way_out = "resume with the same, or start again with --overwrite_output_dir"
    raise UserError("\n".join([*(f"{checkpoint.path}: {line}" for line in lines), way_out]))


def _write(engine: Any, position: Mapping[str, Any], aside: Path, target: Path) -> None:
    """Write the checkpoint aside, read it back, list it, and rename it. Raises OSError on every rank or on none.

    All ranks write into the folder. So rank 0 renames it only after the collective of `checked_sums`, which every rank
    reaches once it has written.
    """

    def begin() -> None:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)

    def finish() -> None:
        write_marker(aside, sums, position)
        if target.exists():
            shutil.rmtree(target)  # of an earlier session, before the run went back to an older checkpoint
        aside.rename(target)
        checkpoint_files.sync_folder(target.parent)  # or a power cut could undo the rename

    distributed.on_main(begin)
    with checkpoint_files.watched(engine) as writes:
        names = reshard.parameter_names(engine)
        engine.save_checkpoint(str(aside.parent), tag=aside.name, client_state=names, save_latest=False)
    sums = checkpoint_files.checked_sums(aside, writes)
    distributed.on_main(finish)


def _read(path: Path) -> tuple[Checkpoint | None, checkpoint_files.Sums, str | None]:
    """Return a checkpoint and its files, or the error in its marker."""
    try:
        sums, position = read_marker(path)
    except ValueError as error:
        return None, {}, str(error)
    return Checkpoint(path, **position), sums, None


def _verified(path: Path) -> tuple[Checkpoint | None, str | None]:
    """Return a checkpoint whose files are all as they were written, or else the damage; collective."""
    checkpoint, sums, damage = distributed.on_main(partial(_read, path))
    damage = damage or checkpoint_files.damage_of(path, sums)
    return (None if damage else checkpoint), damage


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
