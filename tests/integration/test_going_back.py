"""A run that goes back to a checkpoint does so for good, and what comes out is the same."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path

from support.killing import STEPS, alike, finish, resumed_at

from ds_trainer.engine.checkpoint import Checkpoints, step_of


def test_a_checkpoint_that_is_named_is_gone_back_to(server, words, whole, tmp_path):
    """--resume CHECKPOINT of a finished run puts its later checkpoints and results aside for good: stopped, it goes on
    with plain --resume from where it was stopped, and the result is the same."""
    folder = tmp_path / "out"
    shutil.copytree(whole, folder)
    oldest, *later = Checkpoints(folder).all()
    run = server.run(2, folder, *words, "--resume", str(oldest), "--set", "phases.prune.save_steps=0")
    assert run.wait_until(lambda: f"\nprune: step {step_of(oldest) + 2} " in run.text)
    assert set(json.loads((folder / "all_results.json").read_text())) == {"finetune"}
    os.kill(run.pids[1], signal.SIGTERM)
    assert run.codes() == [5, 5], run.text[-3000:]
    assert resumed_at(run) == step_of(oldest)
    stopped_at = Checkpoints(folder).all()[-1]
    assert step_of(oldest) < step_of(stopped_at)
    assert resumed_at(finish(server, folder, words)) == step_of(stopped_at)
    assert {path.name for path in folder.glob("superseded-*")} == {f"superseded-{step_of(path)}" for path in later}
    assert alike(folder, whole)


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a run, but for those of its last command, and the list of what it may write."""
    passing = ("status.json", ".ds_trainer.lock", ".ds_trainer.json")
    files = [path for path in folder.rglob("*") if path.is_file() and path.name not in passing]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files if path.suffix != ".tmp"}


def test_a_run_does_what_is_asked_or_says_why_not_and_stays_as_it_was(server, words, whole, tmp_path):
    """A named checkpoint of another seed, techniques or groups: exit code 2, each difference is named, no file changes.

    More steps of the last phase are trained from its newest checkpoint, also where the first session that trains them
    is killed.
    """
    folder = tmp_path / "out"
    shutil.copytree(whole, folder)
    oldest, *_, newest = Checkpoints(folder).all()
    finished = (folder / "finished.json").read_bytes()
    (folder / "finished.json").unlink()  # which would refuse another seed for the first phase already
    before = contents(folder)
    other = ("phases.prune.techniques.distill=null", 'phases.prune.groups=[{"params": "*LayerNorm*"}]')
    sets = [word for setting in other for word in ("--set", setting)]
    run = server.run(2, folder, *words, "--resume", str(oldest), "--seed", "7", *sets)
    assert run.codes() == [2, 2], run.text[-3000:]
    assert "seed: 42 before, 7 now" in run.text
    assert 'the techniques: ["distill", "prune"] before, ["prune"] now' in run.text
    assert "the parameter groups differ" in run.text
    assert contents(folder) == before
    (folder / "finished.json").write_bytes(finished)
    longer = (*words, "--set", f"phases.prune.max_steps={STEPS + 4}")
    run = server.run(2, folder, *longer, "--resume")
    assert run.wait_until(lambda: f"\nprune: step {step_of(newest) + 2} " in run.text)
    run.kill()
    again = finish(server, folder, longer)
    assert resumed_at(again) >= step_of(newest)
    assert json.loads((folder / "all_results.json").read_text())["prune"]["train"]["steps"] == STEPS + 4
