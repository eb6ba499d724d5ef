"""What a run checks of its folder before it goes on."""

import contextlib
import json
from types import SimpleNamespace

import pytest

from ds_trainer import run
from ds_trainer.cli.train import read_train_job
from ds_trainer.engine.checkpoint import Checkpoints
from ds_trainer.files.checkpoint_files import write_marker
from ds_trainer.files.run_folder import RunFolder
from ds_trainer.ranks.failures import StoppedError, UserError
from ds_trainer.run_state import checkpoint_to_go_back_to


def resume(folder, names):
    recipe = SimpleNamespace(phases=[SimpleNamespace(name=name) for name in names])
    job = SimpleNamespace(output=folder, resume=True, checkpoint=None, recipe=recipe)
    return checkpoint_to_go_back_to(RunFolder(folder), job)


@pytest.mark.parametrize("names", [["finetune", "prune", "third"], ["new", "finetune", "prune"], ["finetune"]])
def test_a_run_goes_on_with_its_own_phases(tmp_path, names):
    """The last phase writes into the run's folder itself: another last phase would take its model and checkpoints."""
    assert resume(tmp_path, names) is None, "a run that has not begun"
    (tmp_path / "recipe.json").write_text(json.dumps({"phases": [{"name": "finetune"}, {"name": "prune"}]}))
    assert resume(tmp_path, ["finetune", "prune"]) is None
    with pytest.raises(UserError, match=r"has the phases finetune, prune, and the recipe has .*another --output_dir"):
        resume(tmp_path, names)


def test_a_checkpoint_of_another_version_is_not_taken_for_damaged(tmp_path):
    """It is whole: renamed to `damaged-N`, it would be progress put aside, and the phase would begin anew."""
    checkpoint = tmp_path / "checkpoint-4"
    checkpoint.mkdir()
    write_marker(checkpoint, {}, {"step": 4, "order": 16, "a field of the future": 1})
    with pytest.raises(UserError, match="has other fields than this version"):
        Checkpoints(tmp_path).newest()
    assert checkpoint.is_dir()


class Interrupted(contextlib.nullcontext):
    """The requests of a user who has pressed Ctrl-C."""

    def __enter__(self):
        return self

    def check(self):
        raise StoppedError("Ctrl-C")


def test_an_interrupt_during_the_rehearsal_deletes_nothing(tiny_recipe, write_json, tmp_path, monkeypatch):
    """Whoever interrupts a run there may have seen a mistake, and still has the run that was to be overwritten."""
    output = tmp_path / "out"
    RunFolder(output).write_json("results.json", {"old": "run"})
    words = ["--recipe", write_json("recipe.json", tiny_recipe), "--output_dir", str(output), "--overwrite_output_dir"]
    job = read_train_job(["--deepspeed_config", "ds_configs/zero0.json", *words])
    monkeypatch.setattr(run, "rehearse_phases", lambda job: None)
    monkeypatch.setattr(run, "StopRequests", Interrupted)
    with pytest.raises(StoppedError):
        run.run(job)
    assert json.loads((output / "results.json").read_text()) == {"old": "run"}
