"""The run folder never deletes a file that no run wrote."""

import json
import os
import shutil
import subprocess

import pytest

from ds_trainer.files.run_folder import RunFolder, check_output_folder
from ds_trainer.ranks.failures import UserError


def test_checking_says_what_is_in_the_way_and_makes_nothing(tmp_path):
    """A missing folder is fine, and still missing afterwards; a resume needs an earlier run in the folder."""
    assert check_output_folder(tmp_path / "a" / "b", overwrite=False) == []
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "mine.txt").write_text("precious")
    assert "--overwrite_output_dir" in check_output_folder(tmp_path, overwrite=False)[0]
    assert check_output_folder(tmp_path, overwrite=True) == []
    assert "holds no run" in check_output_folder(tmp_path, overwrite=False, resume=True)[0]
    assert "is a file" in check_output_folder(tmp_path / "mine.txt" / "out", overwrite=False)[0]


def test_overwriting_deletes_only_what_a_run_wrote(tmp_path):
    """The user's files stay, also in the same folders; the files of the run go, patterns included."""
    folder = RunFolder(tmp_path)
    folder.open(overwrite=False)
    folder.write_json("all_results.json", {"a": 1})
    folder.claim("checkpoint-[0-9]*")
    for name in ("model/model.safetensors", "checkpoint-8/complete.json", "first/model/config.json"):
        folder.claim(name.rpartition("/")[0] if "checkpoint" not in name else "checkpoint-[0-9]*")
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("ours")
    mine = ["mine.txt", "model/handler.py", "first/notes.txt", "checkpoint-best/complete.json"]
    for name in mine:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("precious")
    again = RunFolder(tmp_path)
    again.open(overwrite=True)
    remaining = [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()]
    assert sorted(remaining) == sorted([".ds_trainer.json", *mine])


def test_overwriting_deletes_nothing_behind_a_link(tmp_path):
    """A user has replaced a folder of the run by a link."""
    run, other = tmp_path / "run", tmp_path / "other"
    folder = RunFolder(run)
    folder.open(overwrite=False)
    folder.claim("model")
    other.mkdir()
    (other / "config.json").write_text("precious")
    (run / "model").symlink_to(other)
    RunFolder(run).open(overwrite=True)
    assert (other / "config.json").is_file()


@pytest.mark.parametrize("name", ["model", "model/config.json"])
def test_nothing_is_written_behind_a_link(tmp_path, name):
    """Not even where an earlier run wrote something of that name: the link came later."""
    run, other = tmp_path / "run", tmp_path / "other"
    folder = RunFolder(run)
    folder.open(overwrite=False)
    folder.claim(name)
    other.mkdir()
    shutil.rmtree(run / "model", ignore_errors=True)
    (run / "model").symlink_to(other)
    with pytest.raises(UserError, match="leads out of the output folder by a link: remove the link"):
        folder.claim(name)


@pytest.mark.parametrize("name", ["../mine.txt", "model/../../mine.txt", "/mine.txt", "**/mine.txt", ".", 1])
def test_a_list_that_names_files_outside_is_refused(tmp_path, name):
    """Nothing is deleted: somebody else may have written the list."""
    (tmp_path / "mine.txt").write_text("precious")
    (tmp_path / "run").mkdir()
    (tmp_path / "run/.ds_trainer.json").write_text(json.dumps(["model", name]))
    with pytest.raises(UserError, match="is not the list of files that a run wrote"):
        RunFolder(tmp_path / "run").open(overwrite=True)
    assert (tmp_path / "mine.txt").exists()


def test_unfinished_files_of_a_killed_run_are_removed(tmp_path):
    """Files and folders; those of an export or a report that still runs stay, and so do the user's hidden files."""
    process = subprocess.Popen(["true"])
    process.wait()
    for folder in (f".model.{process.pid}.tmp", ".export.ab_d3fgh.tmp"):
        (tmp_path / folder).mkdir()
    stays = {".export.ab_d3fgh.tmp", f".report.md.{os.getpid()}.tmp", ".mine.tmp"}
    for name in (f".status.json.{process.pid}.tmp", *stays - {".export.ab_d3fgh.tmp"}):
        (tmp_path / name).write_text("")
    (tmp_path / "finetune" / f".model.{process.pid}.tmp").mkdir(parents=True)  # of an earlier phase
    RunFolder(tmp_path).open(overwrite=False)
    assert {path.name for path in tmp_path.iterdir()} == stays | {".ds_trainer.json", "finetune"}
    assert list((tmp_path / "finetune").iterdir()) == []


def test_a_foreign_file_in_the_way_is_refused(tmp_path):
    """A model folder that no run wrote is not written into, even with overwrite."""
    (tmp_path / "model").mkdir()
    folder = RunFolder(tmp_path)
    folder.open(overwrite=True)
    with pytest.raises(ValueError, match="was not written by this program"):
        folder.claim("model")
    assert (tmp_path / "model").is_dir()


def test_two_objects_of_a_folder_know_each_other_s_claims(tmp_path):
    """A report made during a run is neither lost nor in the way of the run's report, and can be overwritten."""
    folder = RunFolder(tmp_path)
    folder.open(overwrite=False)
    RunFolder(tmp_path).claim("report.md").write_text("")
    folder.write_json("all_results.json", {})
    RunFolder(tmp_path).claim("report.md")
    assert json.loads((tmp_path / ".ds_trainer.json").read_text()) == ["all_results.json", "report.md"]
    RunFolder(tmp_path).open(overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == [".ds_trainer.json"]
