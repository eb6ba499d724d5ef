"""Runs that are killed again and again, and gone on with; and what tests read of a run that was interrupted."""

from __future__ import annotations

import contextlib
import json
import os
import random
import time
from pathlib import Path

import torch
from safetensors.torch import load_file
from support.forked_ranks import ForkedRun, ForkServer

from ds_trainer.engine.checkpoint import Checkpoints, step_of

PHASE = "prune"
EVERY, STEPS = 4, 28
"""After how many steps the runs of `conftest.py` save, and how many they make."""
ENDLESS = ("--set", f"phases.{PHASE}.max_steps=5000")


def arguments(recipe: Path, every: int, steps: int) -> list[str]:
    """A run that saves every few steps, and says at each where it is; its gradients are reduced all at once."""
    return [
        *("--recipe", str(recipe), "--set", "tensorboard=false"),
        *("--set", "zero_optimization.reduce_bucket_size=1000000"),
        *("--set", f"phases.{PHASE}.max_steps={steps}", "--set", f"phases.{PHASE}.save_steps={every}"),
    ]


def kill_often(server: ForkServer, output: Path, words: list[str], kills: int, rng: random.Random) -> list[bool]:
    """Start or resume the run on 2 ranks, kill it, and so on; the first time and then every second one while it saves.

    Ends with as many kills, or earlier with a run that was finished first. Returns which of them came during a save.
    """
    saving: list[bool] = []
    while len(saving) < kills:
        before = newest(output)
        run = server.run(2, output, *words, "--resume")
        more, end = len(_whole(output)) + rng.randint(0, 3), time.monotonic() + rng.uniform(0.1, 3)
        if len(saving) % 2 == 0:
            going_on = run.wait_until(lambda wanted=more: _saving(output) and len(_whole(output)) >= wanted)
            time.sleep(rng.uniform(0, 0.03))
        else:
            going_on = run.wait_until(lambda limit=end: time.monotonic() > limit)
        if not going_on:
            _check_finished(run)
            break
        run.kill()
        _check_resumed(run, before)
        saving.append(_saving(output))
    return saving


def newest(output: Path) -> int:
    """The step of the newest whole checkpoint; 0 where there is none."""
    return max(map(step_of, _whole(output)), default=0)


def finish(server: ForkServer, output: Path, words: list[str]) -> ForkedRun:
    before = newest(output)
    run = server.run(2, output, *words, "--resume")
    _check_finished(run)
    _check_resumed(run, before)
    return run


def _check_resumed(run: ForkedRun, step: int) -> None:
    """A run that came to training went on from the newest checkpoint: nothing that was saved is lost."""
    if f"\n{PHASE}: step " in run.text:
        assert resumed_at(run) == step, run.text[-4000:]


def resumed_at(run: ForkedRun) -> int:
    """The step at which a run says that it goes on; 0 where it starts."""
    lines = [line for line in run.text.splitlines() if line.startswith(f"{PHASE}: resumed from ")]
    return int(lines[0].rpartition(" ")[2]) if lines else 0


def records_of(file: Path) -> list[dict]:
    """The records of a log that may just be written."""
    found = []
    for line in file.read_text().splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            found.append(json.loads(line))
    return found


def without_rates(record: dict) -> dict:
    """A record without what depends on the clock or on the machine."""
    return {
        name: value for name, value in record.items() if not name.endswith("_per_s") and "memory" not in name.split("/")
    }


def status_of(output: Path) -> dict:
    return json.loads((output / "status.json").read_text())


def alike(first: Path, second: Path) -> bool:
    """Whether two runs have the same records and, bit by bit, the same model."""
    records = [[without_rates(record) for record in records_of(out / "log.jsonl")] for out in (first, second)]
    weights = [load_file(out / "model" / "model.safetensors") for out in (first, second)]
    return records[0] == records[1] and all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def trained(output: Path) -> int:
    """The last step of the phase that is logged."""
    log = output / "log.jsonl"
    return max((r["step"] for r in records_of(log) if r["phase"] == PHASE), default=0) if log.is_file() else 0


def _whole(output: Path) -> list[Path]:
    return Checkpoints(output).all()


def _saving(output: Path) -> bool:
    return output.is_dir() and any(name.endswith(".saving") for name in os.listdir(output))


def _check_finished(run: ForkedRun) -> None:
    codes = run.codes()
    assert codes == [0, 0], f"{codes}:\n{run.text[-4000:]}"
    assert status_of(run.output)["state"] == "finished"


def states(checkpoint: Path) -> Path:
    """One of the files that a checkpoint cannot do without."""
    return next(checkpoint.glob("*optim_states.pt"))


def write(folder: Path, recipe: dict) -> Path:
    file = folder / "recipe.json"
    file.write_text(json.dumps(recipe))
    return file
