"""What a run checks of its folder before it goes on."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from ds_trainer.engine.checkpoint import TRAINING_DATA, check_fits
from ds_trainer.files.checkpoint_files import write_marker
from ds_trainer.files.run_folder import RunFolder
from ds_trainer.ranks.failures import UserError
from ds_trainer.recipe.recipe import parse_recipe
from ds_trainer.run.resuming import (
    checkpoint_to_go_back_to,
    go_back,
    phase_to_lengthen,
    write_finished,
    write_results,
)


def job_of(folder, names, seed=0, **last):
    """A command that resumes a run of these phases; `last` has fields of the last one."""
    phases = [{"name": name, "max_steps": 8} for name in names]
    recipe = parse_recipe({"seed": seed, "phases": [*phases[:-1], phases[-1] | last]})
    return SimpleNamespace(output=folder, resume=True, checkpoint=None, recipe=recipe, engine_config={})


def test_a_run_goes_on_with_its_own_phases(tmp_path):
    """The last phase writes into the run's folder itself: another last phase would take its model and checkpoints."""
    same = job_of(tmp_path, ["finetune", "prune"])
    assert checkpoint_to_go_back_to(RunFolder(tmp_path), same) is None, "a run that has not begun"
    (tmp_path / "recipe.json").write_text(json.dumps({"phases": [{"name": "finetune"}, {"name": "prune"}]}))
    assert checkpoint_to_go_back_to(RunFolder(tmp_path), same) is None
    with pytest.raises(UserError, match=r"has the phases finetune, prune, and the recipe .*another --output_dir"):
        checkpoint_to_go_back_to(RunFolder(tmp_path), job_of(tmp_path, ["finetune", "prune", "third"]))


def test_a_checkpoint_of_other_data_names_the_field_and_no_hash(tmp_path):
    """The identity holds a hash of the data; the checkpoint has the fields of the task beside it."""
    task = {"name": "text", "max_seq_length": 24}
    saved = SimpleNamespace(path=tmp_path, identity={TRAINING_DATA: "c0ffee"}, phase={"task": task})
    for now, words in (
        (
            task | {"max_seq_length": 32},
            "the training data differ; in the recipe differ: task.max_seq_length: 24 before, 32",
        ),
        (task, r"in the recipe differ: none; the files have other contents, .* or this version reads them otherwise"),
    ):
        with pytest.raises(UserError, match=words) as error:
            check_fits(saved, {TRAINING_DATA: "decaf"}, {"task": now, "a new field": 1})
        assert "c0ffee" not in str(error.value)
    saved.identity = {"the cut": {"keep": 0.5}}
    with pytest.raises(UserError, match=r"the cut\.keep: 0\.5 before, 0\.4 now"):
        check_fits(saved, {"the cut": {"keep": 0.4}})


def test_what_is_asked_of_a_finished_phase_and_not_done_is_an_error(tmp_path):
    """It names the fields. The last phase may be trained longer, where it has a checkpoint, and was not ended by its
    patience; a folder of data that was moved is no difference, and nor are fields of how a phase runs or records."""
    folder, results = RunFolder(tmp_path), {name: {"train": {}, "eval": {}} for name in ("first", "last")}
    task = {"name": "sst2", "data_dir": "a"}

    def lengthened(before, **now):
        first, then = (job_of(tmp_path, ["first", "last"], **fields) for fields in (before, now))
        for phase in first.recipe.phases:
            write_finished(folder, first, phase, results)
        phase = phase_to_lengthen(then, then.recipe.phases)
        return phase and phase.name

    assert lengthened({"task": task}, task=task | {"data_dir": "moved"}, logging_steps=3, save_steps=2) is None
    for now, *mistakes in (
        ({"task": task | {"max_seq_length": 24}}, "task.max_seq_length: null before, 24 now"),
        ({"start_from": "/x"}, "start_from: "),
        ({"learning_rate": 0.1}, "learning_rate: null before, 0.1 now"),
        ({"max_steps": 4}, "max_steps: 8 before, 4 now"),
        ({"max_steps": 12}, "max_steps: 8 before, 12 now", "it has no checkpoint from which it could go on"),
    ):
        with pytest.raises(UserError, match="--overwrite_output_dir") as caught:
            lengthened({"task": task}, **{"task": task} | now)
        lines = str(caught.value).splitlines()[:-1]
        assert len(lines) == len(mistakes)
        assert all(f"phase last is finished, and {text}" in line for text, line in zip(mistakes, lines, strict=True))
    with pytest.raises(UserError, match=r"phase first is finished, and seed: 0 before, 1 now\nphase last is"):
        lengthened({}, seed=1, max_steps=12)
    (tmp_path / "checkpoint-8").mkdir()
    write_marker(tmp_path / "checkpoint-8", {}, {})
    assert lengthened({}, max_steps=12) == "last"
    assert phase_to_lengthen(job_of(tmp_path, ["first", "last"], seed=1), []) is None
    results["last"]["train"]["stopped_early_at"] = 8
    with pytest.raises(UserError, match="last is finished, and it ended early: raise early_stopping_patience"):
        lengthened({}, max_steps=12)
    scored = {"metric_for_best_model": "accuracy", "eval_steps": 2, "save_steps": 2}
    assert lengthened(scored | {"early_stopping_patience": 2}, **scored, max_steps=12) == "last"


def test_a_run_that_is_killed_as_it_goes_back_has_checkpoints_up_to_some_point(tmp_path, monkeypatch):
    """No phase keeps a checkpoint that began from a model of before, and the same command does the rest."""
    job, rename = job_of(tmp_path, ["first", "second", "last"]), Path.rename
    places = [Path("first/checkpoint-2"), Path("first/checkpoint-4"), Path("second/checkpoint-2"), Path("checkpoint-2")]
    for place in places:
        (tmp_path / place).mkdir(parents=True)
        write_marker(tmp_path / place, {}, {})
    done = {name: {"train": {}, "eval": {}} for name in ("first", "second")}
    write_results(RunFolder(tmp_path), done)

    def killed(path, target):
        rename(path, target)
        raise KeyboardInterrupt

    for left in (3, 2):
        monkeypatch.setattr(Path, "rename", killed)
        with pytest.raises(KeyboardInterrupt):
            go_back(RunFolder(tmp_path), job, tmp_path / places[0])
        monkeypatch.undo()
        assert [place for place in places if (tmp_path / place).exists()] == places[:left]
        assert json.loads((tmp_path / "all_results.json").read_text()) == done
    go_back(RunFolder(tmp_path), job, tmp_path / places[0])
    assert [place for place in places if (tmp_path / place).exists()] == places[:1]
    assert json.loads((tmp_path / "all_results.json").read_text()) == {}
