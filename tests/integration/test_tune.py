"""`launch/tune.py` with real trials: some run out of memory, hang, are killed, or print "error" and succeed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.launching import ROOT, environment

from ds_trainer.cli.train import read_train_job

MICRO = "train_micro_batch_size_per_gpu"
SABOTAGE = """
import os, resource, sys, time
from ds_trainer.techniques.technique import Technique

class Sabotage(Technique):
    name, Spec = "sabotage", bool

TECHNIQUES = {"sabotage": Sabotage}

def sabotaged(micro):
    return f"train_micro_batch_size_per_gpu={micro}" in sys.argv

if "--trial" in sys.argv and "train_micro_batch_size_per_gpu" not in str(sys.argv):
    print("error: this is no error", file=sys.stderr, flush=True)
if sabotaged(8):
    from ds_trainer import trial
    start_engine = trial.engine.start_engine
    def in_a_small_space(*args):
        import torch
        space = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize() + 2**27
        resource.setrlimit(resource.RLIMIT_AS, (space, space))
        large = torch.ones(2**26)
        return start_engine(*args)
    trial.engine.start_engine = in_a_small_space
if sabotaged(4):
    os.kill(os.getpid(), 9)
if sabotaged(2):
    print("hangs", flush=True)
    time.sleep(600)
"""


@pytest.fixture(scope="module")
def words(taught_recipe, tmp_path_factory) -> list[str]:
    """The tuning of a phase with masks and a teacher: user's files that print an error, micro-batches that go wrong."""
    folder = tmp_path_factory.mktemp("tune")
    (folder / "sabotage.py").write_text(SABOTAGE)
    (folder / "recipe.json").write_text(json.dumps(taught_recipe))
    (folder / "space.json").write_text(json.dumps({"ranks": [1], MICRO: [8, 4, 2]}))
    files = ["--deepspeed_config", "ds_configs/zero2.json", "--recipe", str(folder / "recipe.json")]
    files += [
        "--plugin",
        "sabotage",
        "--space",
        str(folder / "space.json"),
        "--trial_timeout",
        "25s",
        "--trial_seconds",
        "0.2s",
    ]
    return [*files, "--output_dir", str(folder / "out")]


def start(words: list[str], folder: Path) -> subprocess.Popen[str]:
    path = f"{folder}{os.pathsep}{environment()['PYTHONPATH']}"
    command = [sys.executable, "launch/tune.py", *words]
    return subprocess.Popen(
        command, cwd=ROOT, env=environment() | {"PYTHONPATH": path}, stderr=subprocess.PIPE, text=True
    )


def trials_of(out: Path) -> list[dict]:
    file = out / "trials.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


@pytest.fixture(scope="module")
def outcome(words) -> tuple[Path, str, list[dict]]:
    """The output folder of a tuning that was ended while its last candidate hung, and of a second call that went on;
    what that one printed; and the trials that the first had finished."""
    out = Path(words[-1])
    first = start(words, out.parent)
    end = time.monotonic() + 200
    while not any("hangs" in log.read_text() for log in out.glob("trials/*/output.log")):
        assert first.poll() is None, first.stderr.read()[-3000:]
        assert time.monotonic() < end
        time.sleep(0.1)
    first.send_signal(signal.SIGTERM)
    assert first.wait(30) == 128 + signal.SIGINT
    finished = trials_of(out)
    second = start(words, out.parent)
    _, printed = second.communicate(timeout=300)
    assert second.returncode == 0, printed[-3000:]
    return out, printed, finished


def outcomes(trials: list[dict]) -> dict[str, str]:
    return {trial["label"].rpartition(" ")[2]: trial["outcome"] for trial in trials}


def test_every_trial_has_an_outcome_and_the_search_goes_on(outcome):
    """The one that printed "error" counts, for it left its results."""
    out, _, _ = outcome
    expected = {"rank": "measured", "8": "out of memory", "4": "killed", "2": "hung"}
    assert outcomes(trials_of(out)) == expected
    page = (out / "tuned.md").read_text()
    assert "ran out of memory" in page
    assert "no result after 25 s" in page


def test_an_ended_tuning_leaves_no_process_and_goes_on(outcome):
    """What had been measured, or lacks memory, is not tried again; what was killed is."""
    out, printed, finished = outcome
    assert outcomes(finished) == {"rank": "measured", "8": "out of memory", "4": "killed"}
    assert printed.count("known: ") == 2
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has ended in between
            assert str(out).encode() not in path.read_bytes()


def test_the_winner_is_an_engine_file_for_training(outcome, words):
    out, _, _ = outcome
    files = ["--deepspeed_config", str(out / "tuned.json"), "--recipe", words[words.index("--recipe") + 1]]
    job = read_train_job([*files, "--output_dir", str(out / "new")])
    assert job.engine_config["zero_optimization"]["stage"] == 2


def test_trials_report_speed_and_memory(outcome):
    """Six batches of the phase's own examples, timed over and over, and a peak near the foretold one."""
    own = trials_of(outcome[0])[0]
    assert len(own["seconds"]) == 6
    assert own["examples"] == 16
    assert own["details"]["rounds"] >= 2
    assert 0.7 < own["predicted"] / own["peak"] < 1.3
