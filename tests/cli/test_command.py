"""Bad input through the real command: one clear error, exit code 2, at once, and nothing written; a user's plugins."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.launching import ROOT, run_deepspeed, run_python, run_script

import ds_trainer
from ds_trainer.cli.command import Mistakes, read_task, run_command
from ds_trainer.cli.evaluate import evaluate_parser, read_calibrate_job, read_evaluate_job
from ds_trainer.cli.main import module_of
from ds_trainer.cli.plugins import load_plugin, register
from ds_trainer.cli.train import read_train_job
from ds_trainer.ranks.distributed import share_threads
from ds_trainer.ranks.failures import UserError
from ds_trainer.recipe.settings import assign, parse_setting
from ds_trainer.tasks.task import Task

BY_F1 = {"name": "finetune", "max_steps": 2, "eval_steps": 1, "save_steps": 1, "metric_for_best_model": "f1"}
COMMANDS = sorted(path.stem for path in (ROOT / "launch").glob("*.py"))


@pytest.fixture
def command(tiny_recipe, write_json, tmp_path, monkeypatch):
    """A good training command in the root, to be spoilt: flag -> value."""
    monkeypatch.chdir(ROOT)
    return {
        "--deepspeed_config": "ds_configs/zero2.json",
        "--recipe": write_json("recipe.json", tiny_recipe),
        "--output_dir": str(tmp_path / "out"),
    }


def arguments_of(command: dict, *more: str) -> list[str]:
    return [part for pair in command.items() for part in pair] + list(more)


def mistakes_of(command: dict, *more: str) -> str:
    with pytest.raises(ValueError) as caught:
        read_train_job(arguments_of(command, *more))
    return str(caught.value)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        ({"--recipe": "/nowhere.json"}, ["the recipe /nowhere.json does not exist"]),
        ({"--model_name_or_path": "/nowhere/model"}, ["/nowhere/model does not exist"]),
        ({"--task_name": "sst3"}, ["sst3", "sst2"]),
        ({"--output_dir": "README.md/x"}, ["README.md is a file"]),
        ({"--output_dir": "ds_configs"}, ["not empty", "--overwrite_output_dir"]),
        ({"--seed": "x"}, ["--seed", "invalid int", "usage:"]),
        ({"--world": "4"}, ["--world is for --dry_run"]),
        ({"--set": "phases.nope.max_steps=3"}, ['no "nope"', "finetune", "prune"]),
        ({"--set": "phases.prune.max_step=3"}, ["phases.1.max_step", '"max_steps"']),
        ({"--set": "max_steps=3"}, ["did you mean phases.*.max_steps?"]),
        ({"--set": "zero_optimization.stag=3"}, ["zero_optimization.stag ", "stage?"]),
        ({"--set": f"phases.finetune={json.dumps(BY_F1)}"}, ['is "f1"; the scores of text are', "write one"]),
        ({"--set": "train_batch_size=7"}, ["train_batch_size", "7", "16"]),
    ],
)
def test_mistakes_of_a_command(command, spoil, words):
    """The message says what was found, what is allowed, what to change."""
    message = mistakes_of(command | spoil)
    assert [word for word in words if word not in message] == []


def test_shipped_files_are_found_by_name(command, monkeypatch, tmp_path):
    """From any folder, unless a file there has the name; a wrong name lists the nearest."""
    (tmp_path / "zero1").write_text('{"gradient_clipping": 0.25}')
    (tmp_path / "zero3").mkdir()
    monkeypatch.chdir(tmp_path)
    clipping = {"zero1": 0.25, "zero2": "auto", "zero3": "auto"}
    jobs = {name: read_train_job(arguments_of(command | {"--deepspeed_config": name})) for name in clipping}
    assert {name: job.engine_config["gradient_clipping"] for name, job in jobs.items()} == clipping
    assert jobs["zero3"].engine_config["zero_optimization"]["stage"] == 3
    assert "clm_decoder_cut" in mistakes_of(command | {"--recipe": "clm_decoder"})
    assert "nor a name in ds_configs: autocast, bf16, " in mistakes_of(command | {"--deepspeed_config": "mine"})
    scored = read_evaluate_job([str(ROOT / "tests/fixtures/version_0_1/run/model"), "--recipe", "quickstart"])
    assert scored.task.name == "docstrings"


def test_mistakes_of_both_files_and_the_flags_come_together(command, tiny_recipe, write_json):
    """One message tells those of the recipe, the engine file, the data, the output; an evaluation does the same."""
    recipe = tiny_recipe | {"task": tiny_recipe["task"] | {"train_file": "gone.csv"}}
    engine = {"train_batch_size": 7, "zero_optimisation": {}}
    spoilt = {"--recipe": write_json("r.json", recipe), "--deepspeed_config": write_json("e.json", engine)}
    message = mistakes_of(command | spoilt | {"--output_dir": "ds_configs"})
    words = ("gone.csv", "zero_optimisation", "train_batch_size", "not empty")
    assert [word for word in words if word not in message] == []
    with pytest.raises(ValueError, match=r"(?s)does not exist.*max_seq_length"):
        read_evaluate_job(["/none", "--task_name", "sst2", "--data_dir", "/", "--set", "max_seq_length=0"])


def test_the_command_fails_in_three_seconds_with_2_and_writes_nothing(command, write_json, tmp_path):
    """Before torch is loaded: exit code 2, a line on stderr, no traceback, no folder; of two ranks one speaks."""
    spoilt = arguments_of(
        command | {"--deepspeed_config": write_json("bad.json", {"gradient_clipping": "high", "fp61": {}})}
    )
    started = time.perf_counter()
    done = run_python("launch/train.py", *spoilt)
    assert time.perf_counter() - started < 3
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ")
    assert "Traceback" not in done.stderr
    assert "gradient_clipping" in done.stderr
    done = run_deepspeed(2, "launch/train.py", *spoilt)
    assert done.returncode == 2
    assert (done.stdout + done.stderr).count("did you mean fp16") == 1
    assert not (tmp_path / "out").exists()


def test_a_dry_run_prints_everything_and_writes_nothing(command, tmp_path):
    """Both files resolved, steps, groups with counts and rates, bytes per rank, seconds; no output folder.

    Without "json" it is a table with a line for each phase, and what the minutes were measured on. Batch sizes and
    memory can be those of more ranks.
    """
    done = run_script("launch/train.py", *arguments_of(command, "--dry_run", "json", "--world", "4"))
    assert done.returncode == 0, done.stderr
    finetune, prune = json.loads(done.stdout)["phases"]
    assert finetune["time"]["seconds"] > 0
    assert finetune["time"]["examples"] <= finetune["time"]["micro_batch"] == 4
    table = run_script("launch/train.py", *arguments_of(command, "--dry_run")).stdout.splitlines()
    assert table[0].split()[-2:] == ["MiB", "minutes"]
    assert [line.split()[:2] for line in table[1:3]] == [["finetune", "60"], ["prune", "12"]]
    assert "finetune is measured by forwards and backwards of 3 micro-batches" in table[5]
    assert finetune["steps"] == {"total": 60, "warmup": 0}
    assert "auto" not in json.dumps(prune["engine_file"])
    scores = next(group for group in prune["parameter_groups"] if group["name"] == "*.mask_scores")
    counts = {"name": "*.mask_scores", "parameters": 2 * (4 * 32 * 32 + 2 * 32 * 64)}
    assert scores == counts | {"learning_rate": 0.01, "weight_decay": 0.0}
    memory, trained = prune["memory_per_rank"], sum(g["parameters"] for g in prune["parameter_groups"])
    assert memory["optimizer"] == pytest.approx(8 * trained / 4, rel=0.01)
    assert memory["peak"] > memory["process"] + memory["activations"] + 12 * trained / 4
    assert not (tmp_path / "out").exists()


def test_places_that_cannot_be_written_are_told_before_anything_is_scored(tmp_path, monkeypatch):
    """A folder for a file, a file for a folder, no permission; a folder that is not there yet will be made.

    Thresholds are written into the model folder.
    """
    (tmp_path / "file").write_text("")
    # not by permissions: the superuser needs none
    closed = (Path("/proc/1"), tmp_path / "model")
    closed[1].mkdir()
    monkeypatch.setattr("ds_trainer.cli.evaluate.os.access", lambda path, _: Path(path) not in closed)
    with pytest.raises(ValueError, match="cannot be written to, and the thresholds are kept in it"):
        read_calibrate_job([str(closed[1]), "--task_name", "docstrings", "--max_drop", "1"])
    cases = {("output_file", "."), ("output_file", "file/x"), ("predictions_dir", "file"), ("output_file", "/proc/1/x")}
    for flag, place in cases | {("output_file", "/dev/stdout"), ("predictions_dir", "new/below")}:
        with pytest.raises(ValueError) as caught:
            read_evaluate_job([str(tmp_path / "none"), "--task_name", "docstrings", f"--{flag}", str(tmp_path / place)])
        assert (f"--{flag} is {tmp_path / place}: " in str(caught.value)) == ((flag, place) in cases)


def test_threads_are_shared_out_between_ranks_unless_the_user_sets_them(monkeypatch):
    """Each local rank takes its part of the cores, at least one; OMP_NUM_THREADS wins."""
    numbers: list[int] = []
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(set_num_threads=numbers.append))
    cores = len(os.sched_getaffinity(0))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    for local in (1, cores, 2 * cores):
        monkeypatch.setenv("LOCAL_SIZE", str(local))
        share_threads()
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    share_threads()
    assert numbers == [cores, 1, 1]


def test_settings_change_one_field():
    """--set reaches any depth, makes what is missing, and takes bare words as text."""
    target = {"a": {"c": 2}, "f": [{"name": "x"}, {"name": "y"}]}
    for setting in ("a.b=1", "a.d=[1, 2]", "x.y.z=word", "e=null", "f.y.g=1", "f.*.h=2"):
        assign(target, *parse_setting(setting), source="test")
    assert target.pop("f") == [{"name": "x", "h": 2}, {"name": "y", "g": 1, "h": 2}]
    assert target == {"a": {"c": 2, "b": 1, "d": [1, 2]}, "x": {"y": {"z": "word"}}, "e": None}


def test_a_field_of_the_task_has_one_name_for_training_and_evaluation(command, tmp_path):
    """`task.metrics` is taken by both; `metrics` alone by the commands on folders, and training says what to write."""
    (tmp_path / "dev.csv").write_text("text,label\na,b\n")
    files = ["--task_name", "text", "--data_dir", str(tmp_path), "--set", "validation_file=dev.csv"]
    files += ["--set", 'text_columns=["text"]', "--set", "task.label_column=label"]
    for path in ("metrics", "task.metrics"):
        mistakes = Mistakes()
        flags = evaluate_parser().parse_args(["model", *files, "--set", f'{path}=["f1"]'])
        task, _ = read_task(flags, mistakes, "validation")
        assert (mistakes, task.metrics, task.label_column) == ([], ["f1"], "label")
    assert "did you mean task.metrics?" in mistakes_of(command, "--set", 'metrics=["f1"]')


def test_every_command_says_its_version(capsys):
    """On standard output, whatever else it needs. The scripts are the same but for the command's name."""
    scripts = {name: (ROOT / f"launch/{name}.py").read_text().split('"""')[2] for name in COMMANDS}
    assert {text.replace(f'"{name}"', '"train"') for name, text in scripts.items()} == {scripts["train"]}
    for name in COMMANDS:
        with pytest.raises(SystemExit) as caught:
            run_command(getattr(module_of(name), f"{name}_command"), ["--version"])
        assert (caught.value.code, capsys.readouterr().out) == (0, f"ds_trainer {ds_trainer.__version__}\n")


def test_a_plugin_cannot_take_the_name_of_a_task_of_this_library():
    """Neither that of a family nor that of a task of GLUE."""
    for name in ("squad", "sst2"):
        with pytest.raises(ValueError, match=f'a plugin has the task "{name}", which is one of this library'):
            register(tasks={name: Task})


def test_a_plugin_stands_in_for_no_other_module(tmp_path):
    """A file that is named like one of Python's own modules is loaded beside it."""
    (tmp_path / "json.py").write_text("TASKS = TECHNIQUES = {}\n")
    with pytest.raises(UserError, match="neither TASKS nor TECHNIQUES"):
        load_plugin(str(tmp_path / "json.py"))
    assert sys.modules["json"] is json


@pytest.mark.parametrize("missing", ["no_such_module", "pl"])
def test_an_error_inside_a_plugin_keeps_its_traceback(missing, tmp_path, monkeypatch):
    """Only the absence of the plugin itself is reported as such; what it misses is a bug of the plugin."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])  # to which the current folder is added
    (tmp_path / "plugin.py").write_text(f"import {missing}")
    for name in ("plugin.py", "plugin"):
        with pytest.raises(ModuleNotFoundError):
            load_plugin(name)
    for name, message in (("examples/absent.py", "there is no such file"), ("no.such", "there is no such module")):
        with pytest.raises(UserError, match=f"--plugin {name}: {message}"):
            load_plugin(name)
