"""Engine checkpoints of a phase: `checkpoint-N/`, and the step from which to go on.

The data position, the thresholds and the random state are functions of the optimizer step, so the step is all that
is kept beside what the engine saves. A checkpoint counts only once its `complete.json` is there, written last.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

from ds_trainer import distributed

_MARKER = "complete.json"
_NAME = re.compile(r"checkpoint-\d+")


def save(engine: Any, folder: Path, keep: int | None) -> Path:
    """Write `folder/checkpoint-N`, N the optimizer step. Every rank takes part.

    Of the older ones the oldest beyond `keep` are dropped first: until the next save there is one more, for what the
    new one is worth shows in the next forward.
    """
    drop_oldest(folder, keep)
    step = engine.global_steps
    target = folder / f"checkpoint-{step}"
    engine.save_checkpoint(str(folder), tag=target.name, client_state={"step": step}, save_latest=False)
    distributed.barrier()
    if distributed.is_main():
        marker = {"step": step, "world_size": distributed.world_size()}
        aside = target / f".{_MARKER}"
        aside.write_text(json.dumps(marker), encoding="utf-8")
        aside.replace(target / _MARKER)
    return target


def drop_oldest(folder: Path, keep: int | None) -> None:
    """Leave the newest `keep` checkpoints; all where it is None."""
    if distributed.is_main() and keep is not None:
        for old in complete_checkpoints(folder)[:-keep]:
            shutil.rmtree(old)


def complete_checkpoints(folder: Path) -> list[Path]:
    """The whole checkpoints of a phase, oldest first."""
    found = [path.parent for path in folder.glob(f"checkpoint-*/{_MARKER}") if _NAME.fullmatch(path.parent.name)]
    return sorted(found, key=lambda path: int(path.name.removeprefix("checkpoint-")))


def resume(engine: Any, folder: Path) -> int:
    """Load the newest whole checkpoint, if there is one, and give the optimizer step to go on from."""
    found = distributed.broadcast([path.name for path in complete_checkpoints(folder)])
    if not found:
        return 0
    marker = json.loads((folder / found[-1] / _MARKER).read_text(encoding="utf-8"))
    if marker["world_size"] != distributed.world_size():
        raise ValueError(
            f"{folder / found[-1]} was written by {marker['world_size']} ranks and this run has "
            f"{distributed.world_size()}: resume with {marker['world_size']}"
        )
    path, state = engine.load_checkpoint(str(folder), tag=found[-1])
    if path is None:
        raise ValueError(f"{folder / found[-1]} cannot be loaded: remove it to resume from an older checkpoint")
    distributed.info(f"resumed from {path}")
    return int(state["step"])
