"""Engine checkpoints of a phase: `checkpoint-N/`, N the optimizer step. Each is whole or is not there.

It is written aside, read back, listed in its `complete.json` with the size and checksum of every file and all that a
phase needs to go on, and only then given its name. The thresholds and the random state are functions of the step.
Where the ranks or the ZeRO stage have changed, DeepSpeed's universal form is made of it (`universal.py`).
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from ds_trainer import distributed, universal

_MARKER = "complete.json"
_NAME = re.compile(r"checkpoint-\d+")
_ASIDE = ".checkpoint-*"
_CHUNK = 1 << 22
_PAGE = 1 << 16  # what a full disk may still call free


@dataclass(frozen=True)
class Position:
    """How far a phase has come, and what it was doing: what `complete.json` keeps beside the list of files."""

    step: int
    examples: int
    """Seen so far, from the start of the phase."""
    batch_size: int
    order: int
    """The batch size that their order is cut by: the first run's."""
    training_examples: int
    precision: str
    world_size: int = 0
    zero_stage: int = 0
    evaluated: int = 0
    """The step of the last evaluation that was finished."""
    scores: Mapping[str, float] = field(default_factory=dict)
    """Of that evaluation."""
    report: Mapping[str, Any] | None = None
    techniques: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Best:
    """The metric by which a checkpoint is worth keeping."""

    metric: str
    greater: bool

    def key(self, position: Position) -> float:
        """Higher is better; -inf where it was not evaluated at its own step."""
        if position.evaluated != position.step or self.metric not in position.scores:
            return float("-inf")
        return position.scores[self.metric] * (1 if self.greater else -1)


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints in a phase's folder, of which the newest `keep` stay (all where it is None), and the best."""

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
        mistake = _mistake_of(lambda: distributed.on_main(lambda: _make_anew(aside)))
        if not mistake:
            with _remembered_errors(engine) as errors:
                names = universal.parameter_names(engine)
                engine.save_checkpoint(str(self.folder), tag=aside.name, client_state=names, save_latest=False)
            mistake = _first(errors[0] if errors else None)
        if not mistake:
            mistake = _mistake_of(lambda: self._complete(engine, position, aside, target))
        if mistake:
            distributed.on_main(lambda: shutil.rmtree(aside, ignore_errors=True))
            newest = distributed.on_main(lambda: [path.name for path in self.all()][-1:])
            distributed.warn(
                f"{target} could not be written: {mistake}. Training goes on; free some space, or lower "
                f"save_total_limit. The newest checkpoint is {newest[0] if newest else 'none yet'}"
            )
            return None
        return target

    def _complete(self, engine: Any, position: Position, aside: Path, target: Path) -> None:
        """Read back what was written, list it, and give the folder its name."""
        files = _merged(_sums_of_own_share(aside))
        written = replace(position, world_size=distributed.world_size(), zero_stage=engine.zero_optimization_stage())

        def name() -> None:
            text = json.dumps({"files": files, **asdict(written)}, indent=1)
            with (aside / _MARKER).open("w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            if target.exists():
                shutil.rmtree(target)  # damaged, or of a future that a resumed run has left
            aside.rename(target)
            _sync_folder(target.parent)

        distributed.on_main(name)

    def all(self) -> list[Path]:
        """Those that were whole when they were written, oldest first."""
        found = [path.parent for path in self.folder.glob(f"checkpoint-*/{_MARKER}")]
        return sorted((path for path in found if _NAME.fullmatch(path.name)), key=step_of)

    def drop_oldest(self) -> None:
        """Leave the newest `keep` checkpoints, and the best."""
        if distributed.is_main() and self.keep is not None:
            kept = self.best_one()
            for old in self.all()[: -self.keep]:
                if old != kept:
                    _drop(old)

    def best_one(self) -> Path | None:
        """The checkpoint of the best score, the earliest of equals; None where none has one, or none is asked for."""
        if self.best is None:
            return None
        keys = {path: self.best.key(_position_in(path)) for path in self.all()}
        found = max(keys, key=lambda path: keys[path], default=None)
        return found if found and keys[found] > float("-inf") else None

    def best_saved(self) -> tuple[Path, Position] | None:
        """`best_one` and its position, on every rank."""
        found = distributed.on_main(self.best_one)
        return (found, distributed.on_main(partial(_position_in, found))) if found else None

    def newest(self, wanted: Path | None = None) -> tuple[Path, Position] | None:
        """The newest checkpoint that is still whole, or the one wanted; on every rank. Others are told and passed over.

        Checkpoints after the one wanted are put aside, as `superseded-N`: they are of another future. A wanted one
        that is damaged is a ValueError.
        """
        candidates = [wanted.name] if wanted else distributed.on_main(lambda: [p.name for p in reversed(self.all())])
        for checkpoint in (self.folder / name for name in candidates):
            damage = _damage(checkpoint)
            if damage is None:
                distributed.on_main(partial(self._supersede, checkpoint) if wanted else lambda: None)
                return checkpoint, distributed.on_main(partial(_position_in, checkpoint))
            if wanted:
                raise ValueError(f"--resume {wanted}: the checkpoint is damaged: {damage}")
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
            f"{checkpoint} is of {position.world_size} ranks and ZeRO stage {position.zero_stage}, and this run of "
            f"{now[0]} and {now[1]}: it is converted"
        )
        converted = checkpoint.with_name(f".{checkpoint.name}.universal")
        distributed.on_main(lambda: universal.as_universal(checkpoint, converted))
        try:
            universal.load(engine, converted)
        finally:
            distributed.barrier()
            distributed.on_main(lambda: shutil.rmtree(converted, ignore_errors=True))

    def clear_asides(self) -> None:
        """Remove what a killed run had begun to write."""
        for begun in self.folder.glob(_ASIDE):
            shutil.rmtree(begun, ignore_errors=True)

    def _supersede(self, wanted: Path) -> None:
        for later in self.all():
            if step_of(later) > step_of(wanted):
                place = later.with_name(f"superseded-{step_of(later)}")
                shutil.rmtree(place, ignore_errors=True)
                later.rename(place)


def _position_in(checkpoint: Path) -> Position:
    """What the checkpoint says of itself. Raises ValueError where it is of another version of this library."""
    marker = json.loads((checkpoint / _MARKER).read_text(encoding="utf-8"))
    del marker["files"]
    try:
        return Position(**marker)
    except TypeError:
        raise ValueError(f"{checkpoint} was written by another version of this library: start again") from None


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.rpartition("-")[2])


def precision_of(config: Mapping[str, Any]) -> str:
    """What an engine file has the weights in: a checkpoint of one cannot be read as another."""
    return next((kind for kind in ("fp16", "bf16") if config.get(kind, {}).get("enabled")), "fp32")


def check_fits(checkpoint: Path, position: Position, config: Mapping[str, Any], training_examples: int) -> None:
    """Raise ValueError where a phase with this engine file and these data cannot go on from the checkpoint."""
    precision = precision_of(config)
    if position.precision != precision:
        raise ValueError(
            f"{checkpoint} was trained in {position.precision}, and the engine file says {precision}: resume with that"
        )
    if position.training_examples != training_examples:
        raise ValueError(
            f"{checkpoint} was written in training on {position.training_examples} examples, and the task has "
            f"{training_examples} now: resume with the same data, or start again with --overwrite_output_dir"
        )


def _damage(checkpoint: Path) -> str | None:
    """What is wrong with a checkpoint's files, if anything; the ranks share the reading, and all learn it."""
    try:
        listed = distributed.on_main(lambda: json.loads((checkpoint / _MARKER).read_text(encoding="utf-8"))["files"])
    except (ValueError, RuntimeError) as error:
        return f"{_MARKER} cannot be read: {error}"
    wanted = {name: tuple(sums) for name, sums in listed.items()}
    shares = distributed.broadcast(distributed.gather(_own_damage(checkpoint, wanted)))
    return next((damage for damage in shares if damage), None)


def _own_damage(checkpoint: Path, wanted: Mapping[str, tuple[int, int]]) -> str | None:
    for name in sorted(wanted)[distributed.rank() :: distributed.world_size()]:
        try:
            found = _size_and_sum(checkpoint / name)
        except OSError as error:
            return f"{name}: {error.strerror}"
        if found[0] != wanted[name][0]:
            return f"{name} has {found[0]:,} bytes, and was written with {wanted[name][0]:,}"
        if found != wanted[name]:
            return f"{name} is not what was written: its checksum differs"
    return None


def _sums_of_own_share(folder: Path) -> dict[str, tuple[int, int]] | str:
    """Size and checksum of every world-th file, each put on disk; or what was wrong with one."""
    try:
        names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
        own = names[distributed.rank() :: distributed.world_size()]
        return {name: _size_and_sum(folder / name, sync=True) for name in own}
    except OSError as error:
        return str(error)


def _merged(own: dict[str, tuple[int, int]] | str) -> dict[str, tuple[int, int]]:
    """All ranks' shares; OSError on every rank where one of them failed."""
    merged: dict[str, tuple[int, int]] = {}
    for share in distributed.broadcast(distributed.gather(own)):
        if isinstance(share, str):
            raise OSError(share)
        merged |= share
    return merged


def _size_and_sum(path: Path, sync: bool = False) -> tuple[int, int]:
    total = 0
    with path.open("rb") as file:
        if sync:
            os.fsync(file.fileno())
        while chunk := file.read(_CHUNK):
            total = zlib.crc32(chunk, total)
        return file.tell(), total


@contextlib.contextmanager
def _remembered_errors(engine: Any) -> Iterator[list[str]]:
    """Have DeepSpeed's writer keep an error for later: raised in the midst, it leaves the other ranks at a barrier."""
    writer, errors = engine.checkpoint_engine, []
    write = writer.save

    def save(state_dict: Any, path: str) -> None:
        try:
            write(state_dict, path)
        except (OSError, RuntimeError) as error:
            errors.append(_why(error, Path(path).parent))

    writer.save = save
    try:
        yield errors
    finally:
        writer.save = write


def _why(error: Exception, place: Path) -> str:
    """What the system says; torch's zip writer only finds that its file is shorter than it should be."""
    if shutil.disk_usage(place).free < _PAGE:
        return os.strerror(errno.ENOSPC)
    return str(getattr(error, "strerror", None) or str(error).splitlines()[0])


def _first(own: str | None) -> str | None:
    """The first rank's mistake, on every rank."""
    return next((mistake for mistake in distributed.broadcast(distributed.gather(own)) if mistake), None)


def _mistake_of(call: Any) -> str | None:
    """What a call that every rank makes raises on all of them for the disk's sake, if it does."""
    try:
        call()
    except (OSError, RuntimeError) as error:
        return str(error)
    return None


def _make_anew(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def _drop(checkpoint: Path) -> None:
    """Delete a checkpoint; killed half-way, it is no longer one."""
    gone = checkpoint.with_name(f".{checkpoint.name}.dropped")
    shutil.rmtree(gone, ignore_errors=True)
    checkpoint.rename(gone)
    shutil.rmtree(gone)


def _sync_folder(folder: Path) -> None:
    place = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(place)
    finally:
        os.close(place)
