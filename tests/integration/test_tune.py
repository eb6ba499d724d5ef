"""`launch/tune.py` with real trials: some run out of memory, hang, are killed, or print "error" and succeed."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import psutil
from support.forked_ranks import FORK_PYTHONS, ForkedRun

from ds_trainer.cli.train import read_train_job

MICRO = "train_micro_batch_size_per_gpu"
SABOTAGE = """
import json, os, resource, sys, time
from ds_trainer.techniques.technique import Technique

class Sabotage(Technique):
    name, Spec = "sabotage", bool

TECHNIQUES = {"sabotage": Sabotage}

engine = {}
if any("engine_of_trial" in word for word in sys.argv):
    engine = json.load(open(sys.argv[sys.argv.index("--deepspeed_config") + 1]))
    print("error: this is no error", file=sys.stderr, flush=True)
micro = engine.get("train_micro_batch_size_per_gpu")
if micro == 8:
    from ds_trainer.run import loop
    train_step = loop.train_step
    def in_a_small_space(*args):
        import torch
        space = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize() + 2**27
        resource.setrlimit(resource.RLIMIT_AS, (space, space))
        large = torch.ones(2**26)
        return train_step(*args)
    loop.train_step = in_a_small_space
if micro == 4:
    os.kill(os.getpid(), 9)
if micro == 2:
    print("hangs", flush=True)
    time.sleep(600)
"""


def outcomes(out: Path) -> dict[str, str]:
    """The outcomes of the trials by micro-batch, or None for the user's own files."""
    trials = [json.loads(path.read_text()) for path in out.glob("trials/*/trial.json")]
    return {trial["settings"].get(MICRO): trial["outcome"] for trial in trials}


def test_every_trial_has_an_outcome_and_an_ended_tuning_goes_on(server, taught_recipe, tmp_path):
    """Of a phase with masks and a teacher. Ended while a candidate hangs, it leaves no process.

    The second call repeats only what was killed; the trial that printed "error" counts, for it has logged its speed.
    The winner is an engine file for training.
    """
    (tmp_path / "sabotage.py").write_text(SABOTAGE)
    first, second = taught_recipe["phases"]
    (tmp_path / "recipe.json").write_text(json.dumps(taught_recipe | {"phases": [first | {"max_steps": 1}, second]}))
    out = tmp_path / "out"
    words = ["launch/tune.py", "--deepspeed_config", "ds_configs/zero2.json", "--recipe", str(tmp_path / "recipe.json")]
    words += ["--plugin", str(tmp_path / "sabotage.py"), "--space", json.dumps({MICRO: [8, 4, 2]})]
    words += ["--trial_timeout", "8s", "--trial_steps", "8", "--num_gpus", "1", "--output_dir", str(out)]

    def start(name: str) -> ForkedRun:
        return server.start(0, words, (tmp_path / name, tmp_path / name), {0: FORK_PYTHONS})

    run = start("first.txt")
    assert run.wait_until(lambda: any("hangs" in log.read_text() for log in out.glob("trials/*/output.log"))), run.text
    below = psutil.Process(run.pids[0]).children(recursive=True)
    os.kill(run.pids[0], signal.SIGTERM)
    assert run.codes() == [128 + signal.SIGINT]
    assert below
    assert not [process for process in below if process.is_running()]
    finished = {None: "measured", 8: "out of memory", 4: "killed"}
    assert outcomes(out) == finished
    run = start("second.txt")
    assert run.codes() == [0], run.text[-3000:]
    assert outcomes(out) == {**finished, 2: "hung"}
    assert run.text.count("known: ") == 2
    assert all(text in run.text for text in ("ran out of memory", "logged nothing for 8 s", "train with:"))
    tuned = ["--deepspeed_config", str(out / "tuned.json"), "--recipe", str(out / "tuned_recipe.json")]
    job = read_train_job([*tuned, "--output_dir", str(out / "new")])
    assert job.engine_config["zero_optimization"]["stage"] == 2
