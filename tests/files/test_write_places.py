"""Where a recipe or an engine file can have things written: inside the output folder, unless the user allows more."""

import copy
import json
import zipfile
from pathlib import Path
from typing import Any

import pytest
from support.launching import ROOT, run_script

from ds_trainer.cli.evaluate import read_evaluate_job
from ds_trainer.cli.train import read_train_job
from ds_trainer.files.run_folder import RUN_LIST
from ds_trainer.files.write_places import (
    DEFAULT_CACHE,
    cache_place,
    environment_of,
    placed_engine_file,
)
from ds_trainer.ranks.failures import UserError

PATHS = [("tensorboard", "output_path"), ("csv_monitor", "output_path"), ("flops_profiler", "output_file")]
PATHS += [("autotuning", key) for key in ("exps_dir", "results_dir", "metric_path", "model_info_path")]


def config_of(section: str, key: str, value: str) -> dict[str, Any]:
    """An engine file with one section that is enabled."""
    return {section: {"enabled": True, "output_path": "logs", key: value}}


@pytest.mark.parametrize(("section", "key"), [*PATHS, ("tensorboard", "job_name")])
@pytest.mark.parametrize("value", ["/elsewhere", "../x", "a/../../../x"])
def test_a_path_that_leads_out_of_the_output_folder_is_refused(section, key, value, tmp_path):
    """The error names the key, the value and both ways out; one of them is --allow_write with its folder."""
    config = config_of(section, key, value)
    with pytest.raises(UserError) as caught:
        placed_engine_file(config, config, tmp_path / "out", [])
    words = (f"{section}.{key}", repr(value), "relative path", "--allow_write")
    assert all(word in str(caught.value) for word in words)
    placed_engine_file(config, config, tmp_path / "out", ["/"])


@pytest.mark.parametrize(("section", "key"), PATHS)
def test_a_relative_path_is_taken_inside_the_output_folder(section, key, tmp_path):
    """A note says so, and the config that was given stays as it is."""
    config = config_of(section, key, "a/./b")
    before = copy.deepcopy(config)
    placed, notes = placed_engine_file(config, config, tmp_path, [])
    assert f"the engine file's {section}.{key} is {tmp_path / 'deepspeed/a/b'}" in notes
    assert placed[section][key] == str(tmp_path / "deepspeed/a/b")
    assert config == before


def test_a_path_of_set_is_taken_as_it_is(tmp_path):
    """A value of --set is neither refused nor changed."""
    for value in ("/elsewhere", "here"):
        config = config_of("tensorboard", "output_path", value)
        as_read = config_of("tensorboard", "output_path", "other")
        assert placed_engine_file(config, as_read, tmp_path, []) == (config, [])


def test_a_link_does_not_lead_out(tmp_path):
    """A link inside the output folder to another place is refused, unless that place is allowed."""
    (tmp_path / "out/deepspeed").mkdir(parents=True)
    (tmp_path / "out/deepspeed/logs").symlink_to(tmp_path / "elsewhere")
    config = config_of("tensorboard", "output_path", "logs/x")
    with pytest.raises(UserError):
        placed_engine_file(config, config, tmp_path / "out", [])
    placed_engine_file(config, config, tmp_path / "out", [str(tmp_path / "elsewhere")])


@pytest.mark.parametrize(
    "config",
    [
        {"tensorboard": {"enabled": False, "output_path": "/x"}},
        {"tensorboard": {"output_path": "/x"}},
        {"zero_optimization": {"offload_optimizer": {"device": "nvme", "nvme_path": "/local_nvme"}}},
    ],
)
def test_other_paths_are_left_alone(config, tmp_path):
    """A section that is not enabled writes nothing, and nvme_path is there to name another disk."""
    assert placed_engine_file(config, config, tmp_path, []) == (config, [])


@pytest.mark.parametrize("section", ["tensorboard", "csv_monitor"])
def test_what_would_go_to_the_current_folder_goes_to_the_output_folder(section, tmp_path):
    """DeepSpeed's own default is the current folder."""
    for values in ({}, {"output_path": ""}):
        config = {section: {"enabled": True, **values}}
        placed, notes = placed_engine_file(config, config, tmp_path, [])
        assert placed[section]["output_path"] == str(tmp_path / "deepspeed")
        assert len([line for line in notes if f"{section}.output_path" in line]) == 1


def test_monitors_without_a_key_are_told_by_the_environment(tmp_path, monkeypatch):
    """wandb and comet write to the current folder otherwise; a variable that is set stays."""
    monkeypatch.setenv("COMET_OFFLINE_DIRECTORY", "mine")
    monkeypatch.delenv("WANDB_DIR", raising=False)
    config = {"wandb": {"enabled": True}, "comet": {"enabled": True}}
    assert environment_of(config, tmp_path) == {"WANDB_DIR": str(tmp_path / "deepspeed")}
    assert environment_of({"wandb": {"enabled": False}}, tmp_path) == {}


def test_a_recipes_cache_lies_in_the_output_folder_or_the_users_cache(tmp_path, monkeypatch):
    """Or where flags say; a relative one is taken inside the output folder; by default it is $DS_TRAINER_CACHE."""
    monkeypatch.setenv("DS_TRAINER_CACHE", str(tmp_path / "own"))
    out = tmp_path / "out"

    def of_file(said: str, *allowed: str) -> str | None:
        return cache_place(said, said, [out, *allowed])

    assert of_file("c/d") == str(out / "c/d")
    assert of_file(f"{tmp_path}/own/x") == f"{tmp_path}/own/x"
    assert of_file(f"{DEFAULT_CACHE}/x") == str(Path(DEFAULT_CACHE).expanduser() / "x")
    assert of_file("/elsewhere/x", "/elsewhere") == "/elsewhere/x"
    assert cache_place("/elsewhere", "other", [out]) == "/elsewhere"
    assert cache_place(None, None, [out]) == str(tmp_path / "own")
    for said in ("/elsewhere", "../x", "~/x", "/"):
        with pytest.raises(ValueError, match=r"outside of the output folder: give --cache_dir or --allow_write"):
            of_file(said)


@pytest.fixture
def command(tiny_recipe, write_json, tmp_path) -> list[str]:
    """A recipe and an engine file that both write where they should not."""
    engine = json.loads((ROOT / "ds_configs/zero0.json").read_text())
    engine |= {"csv_monitor": {"enabled": True, "output_path": str(tmp_path / "elsewhere"), "job_name": "../x"}}
    recipe = write_json("recipe.json", tiny_recipe | {"cache_dir": str(tmp_path / "elsewhere")})
    return ["--deepspeed_config", write_json("engine.json", engine), "--recipe", recipe]


def test_a_command_tells_all_of_them_at_once(command, tmp_path):
    """As the other mistakes; and takes both with the user's permission, in flags and in --set."""
    out = ["--output_dir", str(tmp_path / "out")]
    with pytest.raises(ValueError, match=r"output_path is") as caught:
        read_train_job([*command, *out])
    assert [word in str(caught.value) for word in ("csv_monitor.output_path", "job_name", "cache_dir")] == [True] * 3
    job = read_train_job([*command, *out, "--allow_write", str(tmp_path), "--set", "csv_monitor.job_name=x"])
    assert job.recipe.cache_dir == job.engine_config["csv_monitor"]["output_path"] == str(tmp_path / "elsewhere")
    mine = ["--cache_dir", str(tmp_path / "c"), "--set", "csv_monitor.output_path=t", "--set", "csv_monitor.job_name=x"]
    job = read_train_job([*command, *out, *mine])
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


@pytest.fixture(scope="module")
def talkative(tiny_recipe, tmp_path_factory):
    """The real command, started in an empty folder, with an engine file that makes DeepSpeed print and write a lot."""
    folder = tmp_path_factory.mktemp("talkative")
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
        (folder / f"{name}.json").write_text(json.dumps(value))
    (folder / "here").mkdir()
    command = [str(ROOT / "launch/train.py"), "--deepspeed_config", str(folder / "engine.json")]
    command += ["--recipe", str(folder / "recipe.json"), "--output_dir", str(folder / "out")]
    code = f"import os, runpy, sys; os.chdir({str(folder / 'here')!r}); sys.argv = {command!r}; "
    (folder / "driver.py").write_text(code + "runpy.run_path(sys.argv[0], run_name='__main__')")
    done = run_script(str(folder / "driver.py"))
    assert done.returncode == 0, done.stderr[-3000:]
    return done, folder


def test_a_run_writes_deepspeeds_own_files_into_its_output_folder(talkative):
    """With relative paths and none: the folder that the command was started in stays empty.

    The summary of communication, which DeepSpeed prints only when asked, comes once, after the last step. Checkpoints
    without torch's zip format, as the engine file wants them, are counted as whole all the same.
    """
    done, folder = talkative
    assert list((folder / "here").iterdir()) == []
    own = folder / "out/deepspeed"
    assert f"the engine file's csv_monitor.output_path is {own / 'csv'}" in done.stderr
    assert list((own / "DeepSpeedJobName").glob("events.out.tfevents.*"))
    assert list((own / "csv/j").glob("*.csv"))
    assert (own / "flops/profile.txt").stat().st_size
    assert done.stdout.count("Comm. Op ") == 1
    states = list((folder / "out").glob("checkpoint-*/**/*model_states.pt"))
    assert states
    assert not any(zipfile.is_zipfile(path) for path in states)


@pytest.mark.parametrize("key", PRINTED)
def test_what_an_engine_file_asks_deepspeed_to_print_is_printed(talkative, key):
    """Each of these keys has its words in the output."""
    assert PRINTED[key][1] in talkative[0].stdout
