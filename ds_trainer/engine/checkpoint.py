"""Engine checkpoints of a phase: `checkpoint-N/`, N the optimizer step. Each is whole or is not there.

It is written aside, read back, listed in its `complete.json` with the size and checksum of every file and all that a
phase needs to go on, and only then given its name. The thresholds and the random state are functions of the step.
Where the ranks or the ZeRO stage have changed, DeepSpeed's universal form is made of it (`universal.py`).
"""

from __future__ import annotations

import contextlib
import math
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from ds_trainer.config.saved_checkpoint import checkpoints_in
from ds_trainer.engine import universal
from ds_trainer.files.checkpoint_files import (
    MARKER,
    checked_sums,
    damage_of,
    read_marker,
    sync_folder,
    watched,
    write_marker,
)
from ds_trainer.ranks import distributed
from ds_trainer.ranks.failures import UserError

_ASIDE = ".checkpoint-*"


@dataclass(frozen=True)
class Position:
    """How far a phase has come, and what it was doing: what `complete.json` keeps beside the list of files."""

    step: int
    examples: int
    """Seen so far, from the start of the phase."""
    batch_size: int
    order: int
    """The batch size that their order is cut by: the first run's."""
    identity: Mapping[str, Any]
    """What a run that goes on must have in common, by the name it is told by."""
    world_size: int = 0
    zero_stage: int = 0
    asked: bool = True
    """Whether the recipe asks for a checkpoint of this step; one that only a stop has made is a passing one."""
    evaluated: int = 0
    """The step of the last evaluation that was finished."""
    scores: Mapping[str, float] = field(default_factory=dict)
    """Of that evaluation."""
    report: Mapping[str, Any] | None = None
    techniques: Mapping[str, Any] = field(default_factory=dict)
    total: int = 0
    """The steps of the phase, which its schedules follow."""
    phase: Mapping[str, Any] = field(default_factory=dict)
    """The phase as the recipe had it: a run that is resumed with another recipe leaves older checkpoints behind."""


@dataclass(frozen=True)
class Best:
    """The metric by which a checkpoint is worth keeping."""

    metric: str
    greater: bool

    def key(self, position: Position) -> float:
        """Higher is better; -inf where there is no number of its own step."""
        score = position.scores.get(self.metric, math.nan) if position.evaluated == position.step else math.nan
        return (score if self.greater else -score) if math.isfinite(score) else -math.inf


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints in a phase's folder, of which the newest `keep` stay (all where it is None), and the best.

    Those that only a stop has made do not count: they stay until the next is written, or the phase has ended, so that
    a run that was stopped leaves what one leaves that was not.
    """

    folder: Path
    keep: int | None = None
    best: Best | None = None

    def save(self, engine: Any, position: Position) -> Path | None:
        """Write `checkpoint-N`; every rank takes part. None, and a warning, where it cannot be written.

        Of the older ones the oldest beyond `keep` are dropped first: until the next save there is one more, for what
        the new one is worth shows in the next forward.
        """
        self.drop_oldest()
        target = self.folder / f"checkpoint-{position.step}"
        aside = self.folder / f".{target.name}.saving"
        mistake = _mistake_of(lambda: self._write(engine, position, aside, target))
        if mistake is None:
            self.drop_unasked(but=target)
            return target
        distributed.on_main(lambda: shutil.rmtree(aside, ignore_errors=True))
        newest = distributed.on_main(lambda: [path.name for path in self.all()][-1:])
        distributed.warn(
            f"{target} could not be written: {mistake}. Training goes on; free some space, or lower save_total_limit. "
            f"The newest checkpoint is {newest[0] if newest else 'none yet'}"
        )
        return None

    def _write(self, engine: Any, position: Position, aside: Path, target: Path) -> None:
        """Write aside, read back, list, and give the folder its name. OSError, on every rank, where that fails."""
        distributed.on_main(partial(_make_anew, aside))
        with watched(engine) as writes:
            names = universal.parameter_names(engine)
            engine.save_checkpoint(str(self.folder), tag=aside.name, client_state=names, save_latest=False)
        mistakes = [error for errors in distributed.broadcast(distributed.gather(writes.errors)) for error in errors]
        if mistakes:
            raise OSError(mistakes[0])
        sums = checked_sums(aside, writes)
        ranks = replace(position, world_size=distributed.world_size(), zero_stage=engine.zero_optimization_stage())

        def name() -> None:
            write_marker(aside, sums, asdict(ranks))
            if target.exists():
                shutil.rmtree(target)  # of a future that a resumed run has left
            aside.rename(target)
            sync_folder(target.parent)

        distributed.on_main(name)

    def all(self) -> list[Path]:
        """Those that were whole when they were written, oldest first."""
        return [path for path in checkpoints_in(self.folder) if (path / MARKER).exists()]

    def write_scores(self, step: int, scores: Mapping[str, float]) -> None:
        """Add the scores of its own step to `checkpoint-N`; every rank takes part."""
        checkpoint = self.folder / f"checkpoint-{step}"

        def add() -> None:
            position, sums, damage = _read(checkpoint)
            assert position is not None, damage
            write_marker(checkpoint, sums, asdict(replace(position, evaluated=step, scores=scores)))

        mistake = _mistake_of(lambda: distributed.on_main(add))
        if mistake:
            distributed.warn(f"the scores of {checkpoint} could not be written: {mistake}. It cannot be the best one")

    def drop_oldest(self) -> None:
        """Leave the newest `keep` checkpoints, and the best."""
        if distributed.is_main() and self.keep is not None:
            kept = self.best_one()
            for old in self._asked()[: -self.keep]:
                if old != kept:
                    _drop(old)

    def drop_unasked(self, but: Path | None = None) -> None:
        """Drop what only a stop has made: it has served."""
        if distributed.is_main():
            for passing in set(self.all()) - {*self._asked(), but}:
                _drop(passing)

    def _asked(self) -> list[Path]:
        """Those that the recipe asks for, oldest first."""
        return [path for path in self.all() if (position := _position_in(path)) is None or position.asked]

    def best_one(self) -> Path | None:
        """The checkpoint of the best score, the earliest of equals; None where none has one, or none is asked for."""
        if self.best is None:
            return None
        keys = {path: self.best.key(position) for path in self._asked() if (position := _position_in(path))}
        found = max(keys, key=lambda path: keys[path], default=None)
        return found if found and keys[found] > -math.inf else None

    def best_saved(self) -> tuple[Path, Position] | None:
        """The checkpoint of the best score that is still whole, on every rank."""
        while found := distributed.on_main(self.best_one):
            position = self._whole(found)
            if position:
                return found, position
        return None

    def newest(self) -> tuple[Path, Position] | None:
        """The newest checkpoint that is still whole, on every rank; damaged ones are put aside as `damaged-N`."""
        while found := distributed.on_main(lambda: self.all()[-1:]):
            position = self._whole(found[0])
            if position:
                return found[0], position
        return None

    def named(self, checkpoint: Path) -> tuple[Path, Position]:
        """The checkpoint that the user has named, on every rank. Raises ValueError where it is damaged."""
        position, damage = _position_or_damage(checkpoint)
        if position is None:
            raise UserError(
                f"--resume {checkpoint}: the checkpoint is damaged ({damage}), and the run is left as it was: name "
                f"another, or none for the newest"
            )
        return self.folder / checkpoint.name, position

    def _whole(self, checkpoint: Path) -> Position | None:
        """The position of a checkpoint with all its files as they were written; else it is told and put aside."""
        position, damage = _position_or_damage(checkpoint)
        if position is not None:
            return position
        distributed.on_main(partial(_put_aside, checkpoint, "damaged"))
        distributed.warn(f"{checkpoint} is damaged ({damage}): the one before it is used")
        return None

    def load(self, engine: Any, checkpoint: Path, position: Position) -> None:
        """Have the engine go on from a checkpoint, whatever ranks and ZeRO stage wrote it; every rank takes part."""
        now = (distributed.world_size(), engine.zero_optimization_stage())
        if (position.world_size, position.zero_stage) == now:
            path, _ = engine.load_checkpoint(str(checkpoint.parent), tag=checkpoint.name)
            assert path is not None, f"{checkpoint} is whole, and DeepSpeed finds nothing in it"
            return
        distributed.info(
            f"{checkpoint} has world size {position.world_size} and ZeRO stage {position.zero_stage}, and this run "
            f"{now[0]} and {now[1]}: it is converted"
        )
        converted = checkpoint.with_name(f".{checkpoint.name}.universal")
        distributed.on_main(lambda: universal.as_universal(checkpoint, converted))
        universal.load(engine, converted)
        distributed.barrier()  # what an error leaves, `clear_asides` takes: another rank may be in the midst of it
        distributed.on_main(lambda: shutil.rmtree(converted, ignore_errors=True))

    def clear_asides(self) -> None:
        """Remove what a killed run had begun to write."""
        for begun in self.folder.glob(_ASIDE):
            shutil.rmtree(begun, ignore_errors=True)

    def supersede(self, after: int) -> None:
        """Put the checkpoints after a step aside, as `superseded-N`: they are of another future."""
        for later in self.all():
            if step_of(later) > after:
                _put_aside(later, "superseded")


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.rpartition("-")[2])


def precision_of(config: Mapping[str, Any]) -> str:
    """What an engine file has the weights in: a checkpoint of one cannot be read as another."""
    sections = {"fp16": "fp16", "bf16": "bf16", "bfloat16": "bf16"}
    return next((kind for name, kind in sections.items() if config.get(name, {}).get("enabled")), "fp32")


def check_fits(checkpoint: Path, position: Position, identity: Mapping[str, Any]) -> None:
    """Raise ValueError where the phase that is to go on from the checkpoint is another one than wrote it."""
    mistakes = [
        f"{checkpoint} was written with {name} {position.identity.get(name)}, and this run has {now}"
        for name, now in identity.items()
        if position.identity.get(name, now) != now
    ]
    if mistakes:
        raise UserError("\n".join([*mistakes, "resume with the same, or start again with --overwrite_output_dir"]))


def _read(checkpoint: Path) -> tuple[Position | None, dict[str, tuple[int, int]], str | None]:
    """The position and the files of a checkpoint, or what is wrong with its marker."""
    try:
        sums, position = read_marker(checkpoint)
        return Position(**position), sums, None
    except ValueError as error:
        return None, {}, str(error)
    except TypeError:
        return None, {}, f"{MARKER} is of another version of this library"


def _position_in(checkpoint: Path) -> Position | None:
    return _read(checkpoint)[0]


def _position_or_damage(checkpoint: Path) -> tuple[Position | None, str | None]:
    """The position of a checkpoint with all its files as they were written, or else what is wrong; collective."""
    position, sums, damage = distributed.on_main(partial(_read, checkpoint))
    damage = damage or damage_of(checkpoint, sums)
    return (None if damage else position), damage


def _mistake_of(call: Callable[[], object]) -> str | None:
    """What a call that every rank makes raises on all of them for the disk's sake, if it does."""
    try:
        call()
    except OSError as error:
        return error.strerror or str(error)
    return None


def _make_anew(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def _put_aside(checkpoint: Path, why: str) -> None:
    """Rename `checkpoint-N` to `WHY-N`."""
    place = checkpoint.with_name(f"{why}-{step_of(checkpoint)}")
    shutil.rmtree(place, ignore_errors=True)
    checkpoint.rename(place)


def _drop(checkpoint: Path) -> None:
    """Delete a checkpoint; killed half-way, it is no longer one. What cannot be deleted costs space, not the run."""
    gone = checkpoint.with_name(f".{checkpoint.name}.dropped")
    shutil.rmtree(gone, ignore_errors=True)
    with contextlib.suppress(OSError):
        checkpoint.rename(gone)
    shutil.rmtree(gone, ignore_errors=True)
