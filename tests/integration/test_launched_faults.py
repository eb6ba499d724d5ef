"""Runs under DeepSpeed's launcher, and torchrun, whose launchers are hit: no rank trains on alone, nothing is lost."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.exhaustive import chosen
from support.interrupting import Run, running, status_of
from support.killing import PHASE, alike, arguments, finish, trained, write
from support.launching import ROOT, environment, free_port

EVERY, STEPS = 10, 80


@dataclass(frozen=True)
class Hit:
    """What is done to a run, the exit codes that DeepSpeed's runner may have, and what the run says of its end: a
    pattern."""

    act: Callable[[Run], None]
    codes: tuple[int, ...]
    state: str
    message: str


HITS = {
    "SIGTERM to the launcher": Hit(lambda run: run.launcher.terminate(), (1,), "stopped", "SIGTERM"),
    "SIGTERM to the runner": Hit(lambda run: run.process.terminate(), (-15,), "stopped", "its launcher is gone"),
    # the launcher answers Ctrl-C with SIGTERM, and either may come first
    "Ctrl-C": Hit(lambda run: os.killpg(run.process.pid, signal.SIGINT), (-2, 1), "stopped", "SIGINT|SIGTERM"),
    "SIGKILL of the launcher": Hit(lambda run: run.launcher.kill(), (0,), "stopped", "its launcher is gone"),
    "SIGKILL of the runner": Hit(lambda run: run.process.kill(), (-9,), "stopped", "its launcher is gone"),
    "SIGUSR1 to a rank": Hit(lambda run: run.ranks[1].send_signal(signal.SIGUSR1), (5,), "stopped", "SIGUSR1"),
    "SIGKILL of a rank": Hit(lambda run: run.ranks[1].kill(), (247, 4), "failed", r"rank 1 \(host"),
}


@pytest.fixture(scope="module")
def words(taught_recipe, tmp_path_factory) -> list[str]:
    return arguments(write(tmp_path_factory.mktemp("recipe"), taught_recipe), EVERY, STEPS)


@pytest.fixture(scope="module")
def whole(server, words, tmp_path_factory) -> Path:
    """The run that nothing happens to."""
    output = tmp_path_factory.mktemp("whole") / "out"
    finish(server, output, words)
    return output


def test_a_run_that_is_hit_ends_as_one_that_is_not(server, words, whole, tmp_path):
    """Each time all processes end, the code and status.json are as documented, and --resume goes on; in the end records
    and weights are, bit by bit, those of the run that nothing happened to."""
    output = tmp_path / "out"
    for name in chosen(HITS, lambda name: name == "SIGKILL of the runner"):
        hit = HITS[name]
        with running(2, output, *words, "--resume") as run:
            before = trained(output)
            run.wait_until(lambda step=before: trained(output) > step)
            hit.act(run)
            assert run.end() in hit.codes, name
            status = status_of(output)
            assert (name, status["state"]) == (name, hit.state)
            assert re.search(hit.message, status["message"]), name
            assert status["left"] in run.text
    finish(server, output, words)
    assert alike(output, whole)


def run_and_kill_a_rank(command: list[str], output: Path) -> subprocess.CompletedProcess[str]:
    """Run a command that restarts a run; one of its ranks is killed once it trains."""
    port = free_port()
    place = [word.format(port=port) for word in command]
    with subprocess.Popen(
        place, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        said = []
        killed = False
        for line in process.stdout:
            said.append(line)
            if not killed and trained(output) > EVERY:
                os.kill(status_of(output)["process"], signal.SIGKILL)
                killed = True
    return subprocess.CompletedProcess(place, process.returncode, "".join(said))


def test_the_restart_loop_goes_on_until_the_run_is_finished(words, whole, tmp_path):
    """A rank is killed in the first attempt; the second goes on from its checkpoint, and the loop ends with 0."""
    output = tmp_path / "out"
    deepspeed = [str(Path(sys.executable).with_name("deepspeed")), "--num_gpus", "2", "--master_port", "{port}"]
    files = ["--deepspeed_config", "ds_configs/zero2.json", "--output_dir", str(output), "--resume", *words]
    done = run_and_kill_a_rank(
        ["bash", "launch/restart.sh", "3", str(output), *deepspeed, "launch/train.py", *files], output
    )
    assert done.returncode == 0, done.stdout[-4000:]
    # whichever of the two dead ranks the launcher looks at first: the killed one, or the one that names it
    assert re.search(r"restart: attempt 1 of 3 ended with (247|4), the run is failed", done.stdout), done.stdout[-4000:]
    assert f"{PHASE}: resumed from {output / f'checkpoint-{EVERY}'}" in done.stdout
    assert alike(output, whole)


def test_torchrun_restarts_a_run(words, whole, tmp_path):
    """PyTorch's elastic agent starts all ranks again after one was killed; DeepSpeed 0.19.8 no longer has its own."""
    output = tmp_path / "out"
    torchrun = [str(Path(sys.executable).with_name("torchrun")), "--nproc_per_node", "2"]
    files = ["--deepspeed_config", "ds_configs/zero2.json", "--output_dir", str(output), "--resume", *words]
    done = run_and_kill_a_rank(
        [*torchrun, "--max-restarts", "2", "--master_port", "{port}", "launch/train.py", *files], output
    )
    assert done.returncode == 0, done.stdout[-4000:]
    assert f"{PHASE}: resumed from {output / f'checkpoint-{EVERY}'}" in done.stdout
    assert alike(output, whole)


@pytest.mark.parametrize(("code", "attempts"), [(1, 3), (2, 1), (3, 1), (5, 1), (6, 1)])
def test_the_restart_loop_does_not_repeat_what_a_restart_cannot_mend(tmp_path, code, attempts):
    """Its own exit code is the command's; what would happen again, or was asked for, ends it at once."""
    tries = tmp_path / "tries"
    command = ["bash", "launch/restart.sh", "3", str(tmp_path), "bash", "-c", f"echo x >> {tries}; exit {code}"]
    assert subprocess.run(command, cwd=ROOT, check=False).returncode == code
    assert tries.read_text().count("x") == attempts
