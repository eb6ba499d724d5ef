"""What a run checks of its folder before it goes on."""

import contextlib
import json
from types import SimpleNamespace

import pytest

from ds_trainer import run
from ds_trainer.cli.train import read_train_job
from ds_trainer.engine.checkpoint import TRAINING_DATA, Checkpoints, check_fits
from ds_trainer.files.checkpoint_files import write_marker
from ds_trainer.files.run_folder import RunFolder
from ds_trainer.ranks.failures import StoppedError, UserError
from ds_trainer.resuming import asked_of, checkpoint_to_go_back_to, phase_to_lengthen, write_asked


def resume(folder, names):
    recipe = SimpleNamespace(phases=[SimpleNamespace(name=name, sources={"start_from": "@model"}) for name in names])
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


def test_a_checkpoint_of_other_data_names_the_field_and_no_hash(tmp_path):
    """The identity holds a hash of the data; the checkpoint has the fields of the task beside it."""
    task = {"name": "text", "max_seq_length": 24}
    state = SimpleNamespace(identity={TRAINING_DATA: "c0ffee"}, phase={"task": task})
    with pytest.raises(UserError) as caught:
        check_fits(tmp_path, state, {TRAINING_DATA: "decaf"}, task | {"max_seq_length": 32})
    assert "the training data differ: max_seq_length: 24 before, 32 now" in str(caught.value)
    with pytest.raises(UserError, match=r"the files have other contents, .* or this version reads them otherwise"):
        check_fits(tmp_path, state, {TRAINING_DATA: "decaf"}, task)
    state.identity = {"the cut": {"keep": 0.5}}
    with pytest.raises(UserError, match=r"the cut\.keep: 0\.5 before, 0\.4 now"):
        check_fits(tmp_path, state, {"the cut": {"keep": 0.4}})


ASKED = {"max_steps": 8, "techniques": {"prune": None}, "task": {"data_dir": "a", "max_seq_length": 24}}
ASKED |= {"contents": {"the data of train": "1", "model.name_or_path": "2"}}


@pytest.mark.parametrize(
    ("phase", "change", "mistakes"),
    [
        ("last", {"task": {"data_dir": "moved", "max_seq_length": 24}}, []),
        ("last", {"contents": {"the data of train": "3", "model.name_or_path": "2"}}, ["the data of train is another"]),
        (
            "last",
            {"contents": {"the data of train": "1", "model.name_or_path": "3"}},
            ["model.name_or_path is another"],
        ),
        ("last", {"contents": {"model.name_or_path": "2"}}, []),
        (
            "last",
            {"start_from": "/other", "contents": ASKED["contents"] | {"start_from": "4"}},
            ["start_from is another"],
        ),
        ("last", {"contents": {"the data of train": "1"}}, ["model.name_or_path is another"]),
        ("last", {"techniques": {"prune": {"final_threshold": 0.5}}}, ["techniques.prune: null before, {"]),
        ("last", {"max_steps": 4}, ["max_steps: 8 before, 4 now"]),
        (
            "last",
            {"max_steps": 12},
            ["max_steps: 8 before, 12 now", "it has no checkpoint from which it could go on"],
        ),
        ("first", {"max_steps": 12}, ["max_steps: 8 before, 12 now"]),
    ],
)
def test_what_is_asked_of_a_finished_phase_and_not_done_is_an_error(tmp_path, phase, change, mistakes):
    """It names fields, and what has other contents; a folder that was only moved, or a model that was deleted, is none.

    One that is only to be trained longer is, where it is the last and has a checkpoint.
    """
    names = ["first", "last"]
    recipe = SimpleNamespace(phases=[SimpleNamespace(name=name, sources={"start_from": "@model"}) for name in names])
    job = SimpleNamespace(output=tmp_path, recipe=recipe)
    RunFolder(tmp_path).write_json("all_results.json", {name: {"train": {}} for name in names})
    for name in names:
        write_asked(RunFolder(tmp_path), SimpleNamespace(name=name), ASKED)
    now = {name: ASKED | (change if name == phase else {}) for name in names}
    if mistakes:
        with pytest.raises(UserError) as caught:
            phase_to_lengthen(job, now)
        *lines, way_out = str(caught.value).splitlines()
        assert len(lines) == len(mistakes)
        assert all(f"phase {phase} is finished, and {text}" in line for text, line in zip(mistakes, lines, strict=True))
        assert "--overwrite_output_dir" in way_out
    else:
        assert phase_to_lengthen(job, now) is None
    assert phase_to_lengthen(job, {"first": ASKED}) is None
    (tmp_path / "checkpoint-8").mkdir()
    write_marker(tmp_path / "checkpoint-8", {}, {})
    if change == {"max_steps": 12} and phase == "last":
        assert phase_to_lengthen(job, now) is recipe.phases[1]
        RunFolder(tmp_path).write_json("all_results.json", {"last": {"train": {"stopped_early_at": 8}}})
        with pytest.raises(UserError, match="last is finished, and it ended early: raise early_stopping_patience"):
            phase_to_lengthen(job, now)
        for name in names:
            write_asked(RunFolder(tmp_path), SimpleNamespace(name=name), ASKED | {"early_stopping_patience": 2})
        more = now | {"first": ASKED | {"early_stopping_patience": 2}}
        assert phase_to_lengthen(job, more) is recipe.phases[1], "without patience it trains to the end"


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
