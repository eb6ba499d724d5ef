"""What a run checks of its folder before it goes on."""

import contextlib
import json
from types import SimpleNamespace

import pytest

from ds_trainer.cli.train import read_train_job
from ds_trainer.engine.checkpoint import TRAINING_DATA, Checkpoints, check_fits
from ds_trainer.files.checkpoint_files import write_marker
from ds_trainer.files.run_folder import RunFolder
from ds_trainer.ranks.failures import StoppedError, UserError
from ds_trainer.run import run
from ds_trainer.run.resuming import asked_of, checkpoint_to_go_back_to, phase_to_lengthen, write_asked


def job_of(folder, names):
    recipe = SimpleNamespace(phases=[SimpleNamespace(name=name, sources={"start_from": "@model"}) for name in names])
    return SimpleNamespace(output=folder, resume=True, checkpoint=None, recipe=recipe)


def test_a_run_goes_on_with_its_own_phases(tmp_path):
    """The last phase writes into the run's folder itself: another last phase would take its model and checkpoints."""
    same = job_of(tmp_path, ["finetune", "prune"])
    assert checkpoint_to_go_back_to(RunFolder(tmp_path), same) is None, "a run that has not begun"
    (tmp_path / "recipe.json").write_text(json.dumps({"phases": [{"name": "finetune"}, {"name": "prune"}]}))
    assert checkpoint_to_go_back_to(RunFolder(tmp_path), same) is None
    for names in (["finetune", "prune", "third"], ["new", "finetune", "prune"], ["finetune"]):
        with pytest.raises(UserError, match=r"has the phases finetune, prune, and the recipe .*another --output_dir"):
            checkpoint_to_go_back_to(RunFolder(tmp_path), job_of(tmp_path, names))


def test_a_checkpoint_of_another_version_is_not_taken_for_damaged(tmp_path):
    """It is whole: renamed to `damaged-N`, it would be progress put aside, and the phase would begin anew."""
    (tmp_path / "checkpoint-4").mkdir()
    write_marker(tmp_path / "checkpoint-4", {}, {"step": 4, "order": 16, "a field of the future": 1})
    with pytest.raises(UserError, match="has other fields than this version"):
        Checkpoints(tmp_path).newest()
    assert (tmp_path / "checkpoint-4").is_dir()


def test_a_checkpoint_of_other_data_names_the_field_and_no_hash(tmp_path):
    """The identity holds a hash of the data; the checkpoint has the fields of the task beside it."""
    task = {"name": "text", "max_seq_length": 24}
    saved = SimpleNamespace(path=tmp_path, identity={TRAINING_DATA: "c0ffee"}, phase={"task": task})
    for now, words in (
        (task | {"max_seq_length": 32}, "the training data differ: max_seq_length: 24 before, 32 now$"),
        (task, r"the files have other contents, .* or this version reads them otherwise"),
    ):
        with pytest.raises(UserError, match=f"(?m){words}"):
            check_fits(saved, {TRAINING_DATA: "decaf"}, now)
    saved.identity = {"the cut": {"keep": 0.5}}
    with pytest.raises(UserError, match=r"the cut\.keep: 0\.5 before, 0\.4 now"):
        check_fits(saved, {"the cut": {"keep": 0.4}})


CONTENTS = {"the data of train": "1", "model.name_or_path": "2"}
ASKED = {"max_steps": 8, "techniques": {"prune": None}, "task": {"data_dir": "a", "max_seq_length": 24}}
ASKED |= {"contents": CONTENTS}


def test_what_is_asked_of_a_finished_phase_and_not_done_is_an_error(tmp_path):
    """It names fields, and what has other contents; a folder that was only moved, or a model that was deleted, is none.

    The last phase may be trained longer, where it has a checkpoint, and was not ended by its patience.
    """
    job, folder = job_of(tmp_path, ["first", "last"]), RunFolder(tmp_path)

    def lengthened(change, phase="last", before=ASKED):
        for name in ("first", "last"):
            write_asked(folder, SimpleNamespace(name=name), before)
        return phase_to_lengthen(job, {name: before | (change if name == phase else {}) for name in ("first", "last")})

    folder.write_json("all_results.json", {name: {"train": {}} for name in ("first", "last")})
    assert lengthened({"task": {"data_dir": "moved", "max_seq_length": 24}}) is None
    assert lengthened({"contents": {"model.name_or_path": "2"}}) is None, "data are not hashed without their model"
    assert phase_to_lengthen(job, {"first": ASKED}) is None
    for change, phase, *mistakes in (
        ({"contents": CONTENTS | {"the data of train": "3"}}, "last", "the data of train is another"),
        ({"contents": CONTENTS | {"model.name_or_path": "3"}}, "last", "model.name_or_path is another"),
        ({"start_from": "/x", "contents": CONTENTS | {"start_from": "4"}}, "last", "start_from is another"),
        ({"contents": {"the data of train": "1"}}, "last", "model.name_or_path is another"),
        ({"techniques": {"prune": {"final_threshold": 0.5}}}, "last", "techniques.prune: null before, {"),
        ({"max_steps": 4}, "last", "max_steps: 8 before, 4 now"),
        ({"max_steps": 12}, "last", "max_steps: 8 before, 12 now", "it has no checkpoint from which it could go on"),
        ({"max_steps": 12}, "first", "max_steps: 8 before, 12 now"),
    ):
        with pytest.raises(UserError, match="--overwrite_output_dir") as caught:
            lengthened(change, phase)
        lines = str(caught.value).splitlines()[:-1]
        assert len(lines) == len(mistakes)
        assert all(f"phase {phase} is finished, and {text}" in line for text, line in zip(mistakes, lines, strict=True))
    (tmp_path / "checkpoint-8").mkdir()
    write_marker(tmp_path / "checkpoint-8", {}, {})
    assert lengthened({"max_steps": 12}) is job.recipe.phases[1]
    folder.write_json("all_results.json", {"last": {"train": {"stopped_early_at": 8}}})
    with pytest.raises(UserError, match="last is finished, and it ended early: raise early_stopping_patience"):
        lengthened({"max_steps": 12})
    no_patience = {"max_steps": 12, "early_stopping_patience": None}
    assert lengthened(no_patience, before=ASKED | {"early_stopping_patience": 2}) is job.recipe.phases[1]


def test_what_is_kept_is_what_the_files_say(tiny_recipe, write_json, tmp_path):
    """No field that has its default, which a later version may add; and the warm-up that the engine file itself has."""
    words = ["--recipe", write_json("recipe.json", tiny_recipe), "--output_dir", str(tmp_path / "out")]
    job = read_train_job(["--deepspeed_config", "ds_configs/zero0.json", *words])
    phase = job.recipe.phases[0]

    def of(steps: object) -> dict:
        scheduler = {"type": "WarmupLR", "params": {"warmup_num_steps": steps}}
        resolved = {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 9 if steps == "auto" else steps}}}
        return asked_of(job.model_copy(update={"engine_config": {"scheduler": scheduler}}), phase, resolved)

    values = of(2)
    fields = type(phase).model_fields.keys() & values.keys()
    assert fields - {"task"} <= tiny_recipe["phases"][0].keys()
    assert values["task"].keys() <= tiny_recipe["task"].keys()
    assert values["model"].keys() <= tiny_recipe["model"].keys()
    write_asked(RunFolder(job.output), phase, values)
    assert phase_to_lengthen(job, {phase.name: values}) is None
    with pytest.raises(UserError, match=r"scheduler\.params\.warmup_num_steps: 2 before, 500 now"):
        phase_to_lengthen(job, {phase.name: of(500)})
    write_asked(RunFolder(job.output), phase, of("auto"))
    assert phase_to_lengthen(job, {phase.name: of("auto")}) is None


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
    monkeypatch.setattr(run, "rehearse_phases", lambda job: [])
    monkeypatch.setattr(run, "StopRequests", Interrupted)
    with pytest.raises(StoppedError):
        run.run(job)
    assert json.loads((output / "results.json").read_text()) == {"old": "run"}
