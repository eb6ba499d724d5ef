"""A run that goes back to a checkpoint: for good, whole or not at all, and what comes out is the same."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace

from support.killing import STEPS, alike, finish, resumed_at, status_of

from ds_trainer.engine.checkpoint import Checkpoints, step_of
from ds_trainer.files.run_folder import RunFolder
from ds_trainer.recipe.recipe import parse_recipe
from ds_trainer.run import resuming


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
    """A named checkpoint that the recipe no longer fits, or a finished phase with another rate or pruning: exit code 2,
    each difference is named, and no file changes. More steps of the last phase are trained from its newest checkpoint,
    also where the first session that trains them is killed."""
    folder = tmp_path / "out"
    shutil.copytree(whole, folder)
    oldest, *_, newest = Checkpoints(folder).all()
    before, status = contents(folder), status_of(folder)
    other = server.run(2, folder, *words, "--resume", str(oldest), "--seed", "7")
    assert other.codes() == [2, 2], other.text[-3000:]
    assert "seed: 42 before, 7 now" in other.text
    assert contents(folder) == before
    changed = {"phases.finetune.learning_rate": 0.1, "phases.prune.techniques.prune.final_threshold": 0.5}
    sets = [word for path, value in changed.items() for word in ("--set", f"{path}={value}")]
    other = server.run(2, folder, *words, "--resume", *sets)
    assert other.codes() == [2, 2], other.text[-3000:]
    assert "phase finetune is finished, and learning_rate: 0.004 before, 0.1 now" in other.text
    assert "phase prune is finished, and techniques.prune.final_threshold: " in other.text
    assert (contents(folder), status_of(folder)["state"]) == (before, status["state"])
    longer = (*words, "--set", f"phases.prune.max_steps={STEPS + 4}")
    run = server.run(2, folder, *longer, "--resume")
    assert run.wait_until(lambda: f"\nprune: step {step_of(newest) + 2} " in run.text)
    run.kill()
    again = finish(server, folder, longer)
    assert resumed_at(again) >= step_of(newest)
    assert json.loads((folder / "all_results.json").read_text())["prune"]["train"]["steps"] == STEPS + 4


class Killed(BaseException):
    """What a test raises where a run would be killed."""


def test_going_back_is_done_whole_or_not_at_all(whole, tmp_path, monkeypatch):
    """Killed before any of its changes to the folder: nothing has happened, or the next --resume does all the rest."""
    checkpoint = Checkpoints(whole).all()[0].name
    recipe = parse_recipe(json.loads((whole / "recipe.json").read_text()))
    calls = {Path: ("replace", "rename", "unlink"), shutil: ("rmtree",)}
    real = {(owner, name): getattr(owner, name) for owner, names in calls.items() for name in names}

    def go_back(folder: Path, until: int) -> int:
        """Return the number of changes made, `until` at most."""
        shutil.copytree(whole, folder, ignore=shutil.ignore_patterns("*.pt", "tensorboard", "model"))
        job, made = SimpleNamespace(recipe=recipe, output=folder), []

        def counted(call, *args, **keywords):
            if len(made) == until:
                raise Killed
            made.append(call)
            return call(*args, **keywords)

        with monkeypatch.context() as patch, contextlib.suppress(Killed):
            for (owner, name), call in real.items():
                patch.setattr(owner, name, lambda *args, call=call, **keywords: counted(call, *args, **keywords))
            resuming.go_back(RunFolder(folder), job, folder / checkpoint)
        resuming._end_going_back(RunFolder(folder), job)
        return len(made)

    shutil.copytree(whole, tmp_path / "untouched", ignore=shutil.ignore_patterns("*.pt", "tensorboard", "model"))
    untouched = contents(tmp_path / "untouched")
    changes = go_back(tmp_path / "back", 1000)
    expected = contents(tmp_path / "back")
    assert set(json.loads(expected["all_results.json"])) == {"finetune"}
    assert "going_back.json" not in expected
    assert changes > 8
    for until in range(changes):
        assert go_back(tmp_path / str(until), until) == until
        # the note of what is to be done is the second file that is put in place
        assert contents(tmp_path / str(until)) == (untouched if until < 3 else expected)


KILLED_AT_THE_SECOND_PHASE = """
import os, signal
from ds_trainer.engine.checkpoint import Checkpoints
supersede = Checkpoints.supersede
def killed(self, after):
    if after < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    supersede(self, after)
Checkpoints.supersede = killed
"""


def test_going_back_to_an_earlier_phase_does_the_later_ones_again(server, words, whole, tmp_path):
    """They start from another model now: their old checkpoints are put aside, and not gone on from; also where the run
    is killed in the midst of that, and --resume names no checkpoint."""
    saving = ("--set", "phases.finetune.save_steps=2")
    finish(server, tmp_path / "out", [*words, *saving])
    named = ("--resume", str(tmp_path / "out/finetune/checkpoint-2"))
    killed = server.run(2, tmp_path / "out", *words, *saving, *named, sabotage={0: KILLED_AT_THE_SECOND_PHASE})
    assert killed.codes() == [-signal.SIGKILL, 4], killed.text[-3000:]
    run = server.run(2, tmp_path / "out", *words, *saving, "--resume")
    assert run.codes() == [0, 0], run.text[-3000:]
    assert "finetune: resumed from " in run.text
    assert resumed_at(run) == 0
    assert any((tmp_path / "out").glob("superseded-*"))
    assert alike(tmp_path / "out", whole)
