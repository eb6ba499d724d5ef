"""What a recipe's or an engine file's text can have written, and where: only inside the output folder."""

from __future__ import annotations

import copy
import json
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.launching import ROOT, run_python

from ds_trainer.cli.evaluate import read_evaluate_job
from ds_trainer.cli.train import read_train_job
from ds_trainer.engine.keys import key_table
from ds_trainer.files.write_places import (
    DEFAULT_CACHE,
    cache_place,
    engine_place_mistakes,
    environment_of,
    output_place_mistakes,
    placed_engine_file,
    result_place_mistakes,
)


def config_of(path: str, value: Any) -> dict[str, Any]:
    """An engine file that says one thing, in sections that are switched on."""
    config: dict[str, Any] = {}
    inner = config
    *sections, last = path.split(".")
    for section in sections:
        inner[section] = {"enabled": True, "device": "nvme"}
        inner = inner[section]
    inner[last] = value
    return config


WRITTEN = [
    "tensorboard.output_path",
    "csv_monitor.output_path",
    "flops_profiler.output_file",
    "autotuning.exps_dir",
    "autotuning.results_dir",
    "autotuning.metric_path",
    "autotuning.model_info_path",
    "zero_optimization.offload_optimizer.nvme_path",
    "zero_optimization.offload_param.nvme_path",
    "data_efficiency.data_sampling.curriculum_learning.data_cluster_path",
]
OUTSIDE = ["/elsewhere", "../x", "a/../../../x", "..", "/", "/etc/passwd"]


@pytest.mark.parametrize("path", WRITTEN)
@pytest.mark.parametrize("value", OUTSIDE)
def test_a_place_outside_is_refused_by_its_key(path, value, tmp_path):
    """Named are the key, what was found, and the two cures; --allow_write of its folder is one of them."""
    config = config_of(path, value)
    (mistake,) = engine_place_mistakes(config, config, tmp_path / "out", [])
    assert all(word in mistake for word in (path, repr(value), "relative path", "--allow_write"))
    assert engine_place_mistakes(config, config, tmp_path / "out", ["/"]) == []


@pytest.mark.parametrize("path", WRITTEN)
def test_a_relative_place_is_moved_into_the_output_folder(path, tmp_path):
    """And told; the config that was given stays as it is."""
    config = config_of(path, "a/./b")
    before = copy.deepcopy(config)
    assert engine_place_mistakes(config, config, tmp_path, []) == []
    placed, told = placed_engine_file(config, config, tmp_path)
    assert f"the engine file's {path} is {tmp_path / 'deepspeed/a/b'}" in told
    value: Any = placed
    for key in path.split("."):
        value = value[key]
    assert value == str(tmp_path / "deepspeed/a/b")
    assert config == before


def test_what_the_user_sets_is_the_users_word(tmp_path):
    """A value of --set is neither refused nor moved; the same one in the file is."""
    for value in ("/elsewhere", "here"):
        config = config_of("tensorboard.output_path", value)
        as_read = config_of("tensorboard.output_path", "other")
        assert engine_place_mistakes(config, as_read, tmp_path, []) == []
        assert placed_engine_file(config, as_read, tmp_path)[0] == config


def test_a_link_does_not_lead_out(tmp_path):
    """Of a folder inside the output folder that is a link to another place, and of an allowed one's."""
    (tmp_path / "out/deepspeed").mkdir(parents=True)
    (tmp_path / "out/deepspeed/logs").symlink_to(tmp_path / "elsewhere")
    config = config_of("tensorboard.output_path", "logs/x")
    assert engine_place_mistakes(config, config, tmp_path / "out", [])
    assert not engine_place_mistakes(config, config, tmp_path / "out", [str(tmp_path / "elsewhere")])


def test_what_writes_nothing_is_left_alone(tmp_path):
    """A section that is not enabled, offload to memory, indices that are only read, "auto"."""
    for config in (
        {"tensorboard": {"enabled": False, "output_path": "/x"}},
        {"tensorboard": {"output_path": "/x"}},
        {"zero_optimization": {"offload_optimizer": {"device": "cpu", "nvme_path": "/x"}}},
        config_of("data_efficiency.data_sampling.curriculum_learning.index_to_sample_path", "/x"),
    ):
        assert engine_place_mistakes(config, config, tmp_path, []) == []
        assert placed_engine_file(config, config, tmp_path) == (config, [])


@pytest.mark.parametrize(
    ("path", "default"),
    [
        ("tensorboard.output_path", "."),
        ("csv_monitor.output_path", "."),
    ],
)
def test_what_would_go_to_the_current_folder_goes_to_the_output_folder(path, default, tmp_path):
    """Where nothing is said of it: DeepSpeed's own default is the current folder."""
    section, key = path.split(".")
    for said in ({}, {key: ""}):
        placed, told = placed_engine_file({section: {"enabled": True, **said}}, {}, tmp_path)
        assert Path(placed[section][key]) == tmp_path / "deepspeed" / default
        assert len([line for line in told if path in line]) == 1


@pytest.mark.parametrize("name", ["../x", "/x", "a/b", ".", "..", ""])
def test_a_job_name_is_a_name(name, tmp_path):
    """DeepSpeed appends it to the path."""
    config = {"tensorboard": {"enabled": True, "job_name": name}}
    found = engine_place_mistakes(config, config, tmp_path, [])
    assert bool(found) == bool(name), "an empty one adds nothing"
    assert all("tensorboard.job_name" in mistake and "a name, not a path" in mistake for mistake in found)
    named = {"tensorboard": {"enabled": True, "job_name": "x"}}
    assert placed_engine_file(named, named, tmp_path)[0]["tensorboard"]["job_name"] == "x"


def test_every_key_that_deepspeed_names_like_a_place_is_held_to_it(tmp_path):
    """Of the table of all its keys: none that takes text and is named like a path or a folder is passed over."""

    def paths(keys: dict[str, Any], above: str) -> Iterator[str]:
        for key, entry in keys.items():
            if entry.get("types") is None or "str" in entry["types"]:
                yield above + key
            yield from paths(entry.get("keys", {}), f"{above}{key}.")

    named = re.compile(r"path|dir(_|$|s)|file$|folder|job_name")
    found = [path for path in paths(key_table()["keys"], "") if named.search(path.split(".")[-1])]
    assert set(found) >= set(WRITTEN[:-1]), "the pattern finds the known ones"
    for path in found:
        config = config_of(path, "/elsewhere/x")
        assert engine_place_mistakes(config, config, tmp_path, []), path


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


def test_a_recipes_output_folder_is_its_own(tmp_path):
    """Absent, empty, or of a run; what flags say is the user's word."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run/.ds_trainer.json").write_text("[]")
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis/chapter.tex").write_text("x")
    for name in ("absent", "empty", "run"):
        assert output_place_mistakes(tmp_path / name, True) == []
    assert "holds something else" in output_place_mistakes(tmp_path / "thesis", True)[0]
    assert output_place_mistakes(tmp_path / "thesis", False) == []


def test_results_are_not_worked_for_where_they_cannot_be_written(tmp_path, monkeypatch):
    """Told before: a folder without permission, also of one that is to be made in it, and a file without."""
    assert result_place_mistakes(tmp_path / "scores.json", tmp_path / "a/b") == []
    (tmp_path / "old.json").write_text("")
    closed = {tmp_path, tmp_path / "old.json"}  # not by permissions: the superuser needs none
    monkeypatch.setattr("ds_trainer.files.write_places.os.access", lambda path, _: Path(path) not in closed)
    for name in ("scores.json", "old.json"):
        (mistake,) = result_place_mistakes(tmp_path / name, None)
        assert "--output_file" in mistake
        assert "cannot be written" in mistake
    (mistake,) = result_place_mistakes(None, tmp_path / "a/b")
    assert f"--predictions_dir: {tmp_path} cannot be written to" in mistake


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


def test_an_evaluation_takes_a_runs_own_cache_and_refuses_others(command, tmp_path, tiny_recipe):
    """The resolved recipe of a run names the cache that lies in its folder."""
    with pytest.raises(ValueError, match="cache_dir"):
        read_evaluate_job(["name", *command[2:]])
    assert read_evaluate_job(["name", *command[2:], "--cache_dir", "c"]).cache_dir == "c"
    run = tmp_path / "run"
    run.mkdir()
    (run / ".ds_trainer.json").write_text("[]")
    (run / "recipe.json").write_text(json.dumps(tiny_recipe | {"cache_dir": str(run / "cache")}))
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
    for name, value in (("recipe", tiny_recipe | {"phases": [phase], "report": False}), ("engine", engine)):
        (folder / f"{name}.json").write_text(json.dumps(value))
    (folder / "here").mkdir()
    command = [str(ROOT / "launch/train.py"), "--deepspeed_config", str(folder / "engine.json")]
    command += ["--recipe", str(folder / "recipe.json"), "--output_dir", str(folder / "out")]
    code = f"import os, runpy, sys; os.chdir({str(folder / 'here')!r}); sys.argv = {command!r}; "
    done = run_python("-c", code + "runpy.run_path(sys.argv[0], run_name='__main__')")
    assert done.returncode == 0, done.stderr[-3000:]
    return done, folder


def test_a_run_writes_deepspeeds_own_files_into_its_output_folder(talkative):
    """With relative paths and none: the folder that the command was started in stays empty."""
    done, folder = talkative
    assert list((folder / "here").iterdir()) == []
    own = folder / "out/deepspeed"
    assert f"the engine file's csv_monitor.output_path is {own / 'csv'}" in done.stderr
    assert list((own / "DeepSpeedJobName").glob("events.out.tfevents.*"))
    assert list((own / "csv/j").glob("*.csv"))
    assert (own / "flops/profile.txt").stat().st_size


@pytest.mark.parametrize("key", PRINTED)
def test_what_an_engine_file_asks_deepspeed_to_print_is_printed(talkative, key):
    """Each of these keys has its words in the output; what is warned of is the one key that has no effect."""
    done, folder = talkative
    assert PRINTED[key][1] in done.stdout
    (warning,) = [line for line in done.stderr.splitlines() if "without effect" in line]
    assert warning == f"without effect in {folder / 'engine.json'}: aio (needs an offload with device nvme)"


def test_the_communication_summary_comes_at_the_end(talkative):
    """DeepSpeed prints it only when asked: once for this phase, after the last step."""
    assert talkative[0].stdout.count("Comm. Op ") == 1


def test_checkpoints_are_written_as_the_engine_file_says(talkative):
    """Without torch's zip format, and counted as whole all the same."""
    states = list((talkative[1] / "out").glob("checkpoint-*/**/*model_states.pt"))
    assert states
    assert not any(zipfile.is_zipfile(path) for path in states)
