"""The run folder never deletes a file that no run wrote, and recipes and engine files write only inside of it."""

import copy
import json
import os
import shutil
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest
from support.launching import ROOT, run_script

from ds_trainer.cli.evaluate import read_evaluate_job
from ds_trainer.cli.train import read_train_job
from ds_trainer.files.run_folder import (
    DEFAULT_CACHE,
    RUN_LIST,
    RunFolder,
    cache_place,
    check_output_folder,
    environment_of,
    placed_engine_file,
)
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


@pytest.mark.parametrize("name", ["model", "model/config.json"])
def test_nothing_is_written_or_deleted_behind_a_link(tmp_path, name):
    """A user has replaced a folder of the run by a link, after an earlier run wrote something of that name."""
    run, other = tmp_path / "run", tmp_path / "other"
    folder = RunFolder(run)
    folder.open(overwrite=False)
    folder.claim(name)
    other.mkdir()
    (other / "config.json").write_text("precious")
    shutil.rmtree(run / "model", ignore_errors=True)
    (run / "model").symlink_to(other)
    with pytest.raises(UserError, match="leads out of the output folder by a link: remove the link"):
        folder.claim(name)
    RunFolder(run).open(overwrite=True)
    assert (other / "config.json").is_file()


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


PATHS = [("tensorboard", "output_path"), ("csv_monitor", "output_path"), ("flops_profiler", "output_file")]


def config_of(section: str, key: str, value: str) -> dict[str, Any]:
    """An engine file with one section that is enabled."""
    return {section: {"enabled": True, "output_path": "logs", key: value}}


@pytest.mark.parametrize(("section", "key"), [*PATHS, ("tensorboard", "job_name")])
def test_paths_of_an_engine_file_stay_in_the_output_folder(section, key, tmp_path):
    """A relative path is taken inside, and a note says so; one that leads out is refused, unless it is allowed."""
    config = config_of(section, key, "a/./b")
    before = copy.deepcopy(config)
    placed, notes = placed_engine_file(config, config, tmp_path, [])
    if key != "job_name":
        assert f"the engine file's {section}.{key} is {tmp_path / 'deepspeed/a/b'}" in notes
        assert placed[section][key] == str(tmp_path / "deepspeed/a/b")
    assert config == before
    for value in ("/elsewhere", "../x", "a/../../../x"):
        config = config_of(section, key, value)
        with pytest.raises(UserError) as caught:
            placed_engine_file(config, config, tmp_path / "out", [])
        assert all(word in str(caught.value) for word in (f"{section}.{key}", repr(value), "--allow_write"))
        placed_engine_file(config, config, tmp_path / "out", ["/"])


def test_paths_that_a_user_means_are_left_alone(tmp_path):
    """Those of --set, of a section that is not enabled, and nvme_path, which is there to name another disk."""
    offload = {"offload_optimizer": {"device": "nvme", "nvme_path": "/local_nvme"}}
    for config in ({"tensorboard": {"enabled": False, "output_path": "/x"}}, {"zero_optimization": offload}):
        assert placed_engine_file(config, config, tmp_path, []) == (config, [])
    as_read = config_of("tensorboard", "output_path", "other")
    for value in ("/elsewhere", "here"):
        config = config_of("tensorboard", "output_path", value)
        assert placed_engine_file(config, as_read, tmp_path, []) == (config, [])


def test_a_link_does_not_lead_out(tmp_path):
    """A link inside the output folder to another place is refused, unless that place is allowed."""
    (tmp_path / "out/deepspeed").mkdir(parents=True)
    (tmp_path / "out/deepspeed/logs").symlink_to(tmp_path / "elsewhere")
    config = config_of("tensorboard", "output_path", "logs/x")
    with pytest.raises(UserError):
        placed_engine_file(config, config, tmp_path / "out", [])
    placed_engine_file(config, config, tmp_path / "out", [str(tmp_path / "elsewhere")])


def test_what_would_go_to_the_current_folder_goes_to_the_output_folder(tmp_path, monkeypatch):
    """By the engine file where DeepSpeed has a key for it, else by a variable, which stays if it is set."""
    for section in ("tensorboard", "csv_monitor"):
        placed, notes = placed_engine_file({section: {"enabled": True}}, {}, tmp_path, [])
        assert placed[section]["output_path"] == str(tmp_path / "deepspeed")
        assert len([line for line in notes if f"{section}.output_path" in line]) == 1
    monkeypatch.setenv("COMET_OFFLINE_DIRECTORY", "mine")
    monkeypatch.delenv("WANDB_DIR", raising=False)
    config = {"wandb": {"enabled": True}, "comet": {"enabled": True}}
    assert environment_of(config, tmp_path) == {"WANDB_DIR": str(tmp_path / "deepspeed")}
    assert environment_of({"wandb": {"enabled": False}}, tmp_path) == {}


def test_a_recipes_cache_lies_in_the_output_folder_or_the_users_cache(tmp_path, monkeypatch):
    """Or where flags say; a relative one is taken inside the output folder; by default it is $DS_TRAINER_CACHE."""
    monkeypatch.setenv("DS_TRAINER_CACHE", str(tmp_path / "own"))
    out = tmp_path / "out"

    def of_file(place: str, *allowed: str) -> str | None:
        return cache_place(place, place, [out, *allowed])

    assert of_file("c/d") == str(out / "c/d")
    assert of_file(f"{tmp_path}/own/x") == f"{tmp_path}/own/x"
    assert of_file(f"{DEFAULT_CACHE}/x") == str(Path(DEFAULT_CACHE).expanduser() / "x")
    assert of_file("/elsewhere/x", "/elsewhere") == "/elsewhere/x"
    assert cache_place("/elsewhere", "other", [out]) == "/elsewhere"
    assert cache_place(None, None, [out]) == str(tmp_path / "own")
    for place in ("/elsewhere", "../x", "~/x", "/"):
        with pytest.raises(ValueError, match=r"outside of the output folder: give --cache_dir or --allow_write"):
            of_file(place)


def test_a_command_names_all_places_at_once(tiny_recipe, write_json, tmp_path):
    """As the other mistakes; and takes both with the user's permission, in flags and in --set."""
    engine = json.loads((ROOT / "ds_configs/zero0.json").read_text())
    engine |= {"csv_monitor": {"enabled": True, "output_path": str(tmp_path / "elsewhere"), "job_name": "../x"}}
    recipe = write_json("recipe.json", tiny_recipe | {"cache_dir": str(tmp_path / "elsewhere")})
    command = ["--deepspeed_config", write_json("engine.json", engine), "--recipe", recipe]
    command += ["--output_dir", str(tmp_path / "out")]
    with pytest.raises(ValueError, match=r"output_path is") as caught:
        read_train_job(command)
    assert [word in str(caught.value) for word in ("csv_monitor.output_path", "job_name", "cache_dir")] == [True] * 3
    job = read_train_job([*command, "--allow_write", str(tmp_path), "--set", "csv_monitor.job_name=x"])
    assert job.recipe.cache_dir == job.engine_config["csv_monitor"]["output_path"] == str(tmp_path / "elsewhere")
    mine = ["--cache_dir", str(tmp_path / "c"), "--set", "csv_monitor.output_path=t", "--set", "csv_monitor.job_name=x"]
    job = read_train_job([*command, *mine])
    assert (job.recipe.cache_dir, job.engine_config["csv_monitor"]["output_path"]) == (str(tmp_path / "c"), "t")


def test_an_evaluation_takes_a_cache_beside_the_recipe_and_refuses_others(write_json, tmp_path, tiny_recipe):
    """The resolved recipe of a run names the cache in the run's folder; beside any other recipe nothing is written."""
    flags = ["name", "--recipe", write_json("other.json", tiny_recipe | {"cache_dir": "/elsewhere"})]
    with pytest.raises(ValueError, match="cache_dir"):
        read_evaluate_job(flags)
    assert read_evaluate_job([*flags, "--cache_dir", "c"]).cache_dir == "c"
    run = tmp_path / "run"
    run.mkdir()
    (run / "recipe.json").write_text(json.dumps(tiny_recipe | {"cache_dir": str(run / "cache")}))
    with pytest.raises(ValueError, match="cache_dir"):
        read_evaluate_job(["name", "--recipe", str(run / "recipe.json")])
    (run / RUN_LIST).write_text("[]")
    assert read_evaluate_job(["name", "--recipe", str(run / "recipe.json")]).cache_dir == str(run / "cache")


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
    assert f"the engine file's csv_monitor.output_path is {own / 'csv'}" in done.stderr
    assert list((own / "DeepSpeedJobName").glob("events.out.tfevents.*"))
    assert list((own / "csv/j").glob("*.csv"))
    assert (own / "flops/profile.txt").stat().st_size
    assert [key for key, (_, printed) in PRINTED.items() if printed not in done.stdout] == []
    assert done.stdout.count("Comm. Op ") == 1
    states = list((tmp_path / "out").glob("checkpoint-*/**/*model_states.pt"))
    assert states
    assert not any(zipfile.is_zipfile(path) for path in states)
