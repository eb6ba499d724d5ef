"""The run folder never deletes a file that no run wrote, and what DeepSpeed writes lies in it."""

import copy
import json
import os
import subprocess
import zipfile

import pytest
from support.launching import ROOT, run_script

from ds_trainer.files.run_folder import RunFolder, check_output_folder, placed_engine_file


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


@pytest.mark.parametrize("name", ["model", "model/config.json", "../other/config.json"])
def test_nothing_is_deleted_outside_of_the_folder(tmp_path, name):
    """A user has replaced a folder of the run by a link, or somebody has written another path into the list."""
    run, other = tmp_path / "run", tmp_path / "other"
    for folder in (run, other):
        folder.mkdir()
    (other / "config.json").write_text("precious")
    (run / "model").symlink_to(other)
    (run / ".ds_trainer.json").write_text(json.dumps([name]))
    RunFolder(run).open(overwrite=True)
    assert (other / "config.json").is_file()


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


def test_relative_paths_of_an_engine_file_are_taken_inside(tmp_path):
    """Also where a monitor has none; absolute ones, sections that are off and nvme_path stay as they are."""
    offload = {"offload_optimizer": {"device": "nvme", "nvme_path": "local_nvme"}}
    config = {
        "tensorboard": {"enabled": True},
        "csv_monitor": {"enabled": True, "output_path": "a/./b", "job_name": "j"},
        "flops_profiler": {"enabled": False, "output_file": "x"},
        "zero_optimization": offload,
    }
    before, own = copy.deepcopy(config), tmp_path / "deepspeed"
    assert placed_engine_file(config, tmp_path) == before | {
        "tensorboard": {"enabled": True, "output_path": str(own)},
        "csv_monitor": {"enabled": True, "output_path": str(own / "a/b"), "job_name": "j"},
    }
    assert config == before
    for path, placed in (("/elsewhere/x", "/elsewhere/x"), ("x", str(own / "x"))):
        block = {"enabled": True, "output_file": path}
        assert placed_engine_file({"flops_profiler": block}, tmp_path)["flops_profiler"]["output_file"] == placed


PRINTED = {
    "steps_per_print": (2, "step=2, skipped=0"),
    "timers": ({"throughput": {"synchronized": False}}, "RunningAvgSamplesPerSec"),
    "wall_clock_breakdown": (True, "time (ms) | fwd: "),
    "memory_breakdown": (True, "Engine before forward\nMA "),
    "comms_logger": ({"enabled": True, "verbose": True}, "comm op: all_reduce | time (ms): "),
    "dump_state": (True, "DeepSpeedEngine:"),
    "vocabulary_size": (50003, "vocabulary size 50003 is not aligned"),
}
"""Keys that have DeepSpeed print something at `log_level` info, and what."""


def test_a_run_writes_deepspeeds_own_files_into_its_output_folder(tiny_recipe, tmp_path):
    """The real command, with relative paths and none: the folder that it was started in stays empty.

    DeepSpeed prints what the engine file asks for, the summary of communication once. Checkpoints without torch's zip
    format, as the engine file wants them, are counted as whole all the same.
    """
    engine = json.loads((ROOT / "ds_configs/zero0.json").read_text())
    engine |= {
        "tensorboard": {"enabled": True},
        "csv_monitor": {"enabled": True, "output_path": "csv", "job_name": "j"},
        "checkpoint": {"tag_validation": "Fail", "checkpoint_serialization": False},
        "log_level": "info",
        "amp": {"enabled": False, "opt_level": "O1"},  # DeepSpeed would raise for it
        "aio": {"queue_depth": 32},
    }
    engine |= {"flops_profiler": {"enabled": True, "profile_step": 2, "output_file": "flops/profile.txt"}}
    engine |= {key: value for key, (value, _) in PRINTED.items()}
    phase = tiny_recipe["phases"][0] | {"max_steps": 4, "eval_steps": None, "save_steps": 2}
    for name, value in (("recipe", tiny_recipe | {"phases": [phase]}), ("engine", engine)):
        (tmp_path / f"{name}.json").write_text(json.dumps(value))
    (tmp_path / "here").mkdir()
    command = [str(ROOT / "launch/train.py"), "--deepspeed_config", str(tmp_path / "engine.json")]
    command += ["--recipe", str(tmp_path / "recipe.json"), "--output_dir", str(tmp_path / "out")]
    code = f"import os, runpy, sys; os.chdir({str(tmp_path / 'here')!r}); sys.argv = {command!r}; "
    (tmp_path / "driver.py").write_text(code + "runpy.run_path(sys.argv[0], run_name='__main__')")
    done = run_script(str(tmp_path / "driver.py"))
    assert done.returncode == 0, done.stderr[-3000:]
    assert list((tmp_path / "here").iterdir()) == []
    own = tmp_path / "out/deepspeed"
    assert list((own / "DeepSpeedJobName").glob("events.out.tfevents.*"))
    assert list((own / "csv/j").glob("*.csv"))
    assert (own / "flops/profile.txt").stat().st_size
    assert [key for key, (_, printed) in PRINTED.items() if printed not in done.stdout] == []
    assert done.stdout.count("Comm. Op ") == 1
    states = list((tmp_path / "out").glob("checkpoint-*/**/*model_states.pt"))
    assert states
    assert not any(zipfile.is_zipfile(path) for path in states)
