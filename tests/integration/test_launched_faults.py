"""Runs under DeepSpeed's launcher, and torchrun, whose processes are hit: no rank trains on alone, nothing is lost.

The launchers run as they are, but that they fork where they would start Python.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from support.forked_ranks import FORK_PYTHONS, ForkedRun
from support.killing import ENDLESS, PHASE, status_of, trained
from support.launching import ROOT, free_port


@dataclass(frozen=True)
class Launched:
    """A training command under a launcher, in a session of its own."""

    run: ForkedRun

    @property
    def runner(self) -> psutil.Process:
        return psutil.Process(self.run.pids[0])

    @property
    def launcher(self) -> psutil.Process:
        return self.runner.children()[0]

    @property
    def ranks(self) -> list[psutil.Process]:
        return self.launcher.children()

    def alive(self) -> list[psutil.Process]:
        """Those of the run's session that still run."""
        own = [process for process in psutil.process_iter() if _session(process.pid) == self.run.pids[0]]
        return [process for process in own if process.status() != psutil.STATUS_ZOMBIE]

    def end(self) -> int:
        """The exit code of the command, once no process of the run is left."""
        end = time.monotonic() + 120
        while self.alive():
            assert time.monotonic() < end, f"{self.alive()} still run:\n{self.run.text[-4000:]}"
            time.sleep(0.02)
        return self.run.codes()[0]


def _session(pid: int) -> int:
    try:
        return os.getsid(pid)
    except OSError:  # it has ended
        return -1


@pytest.fixture
def launch(server, words, tmp_path) -> Iterator[Callable[..., Launched]]:
    """Launch a run, of which nothing is left at the end of the test."""
    runs = []

    def start(launcher: str, *arguments: str) -> Launched:
        name, *flags = launcher.split()
        files = ["--deepspeed_config", "ds_configs/zero2.json", "--output_dir", str(tmp_path / "out"), *words]
        command = [str(Path(sys.executable).with_name(name)), *flags, "--master_port", str(free_port())]
        logs = (tmp_path / "log.txt",) * 2
        run = server.start(0, [*command, "launch/train.py", *files, *arguments], logs, {0: FORK_PYTHONS})
        runs.append(Launched(run))
        return runs[-1]

    yield start
    for process in [process for run in runs for process in run.alive()]:
        process.kill()


@dataclass(frozen=True)
class Hit:
    """What is done to a run, the exit codes that DeepSpeed's runner may have, and a pattern of what the run says."""

    act: Callable[[Launched], None]
    codes: tuple[int, ...]
    state: str
    message: str


HITS = {
    "SIGKILL of the runner": Hit(lambda run: run.runner.kill(), (-9,), "stopped", "its launcher is gone"),
    "SIGTERM to the launcher": Hit(lambda run: run.launcher.terminate(), (1,), "stopped", "SIGTERM"),
    "SIGTERM to the runner": Hit(lambda run: run.runner.terminate(), (-15,), "stopped", "its launcher is gone"),
    # the launcher answers Ctrl-C with SIGTERM, and either may come first
    "Ctrl-C": Hit(lambda run: os.killpg(run.runner.pid, signal.SIGINT), (-2, 1), "stopped", "SIGINT|SIGTERM"),
    "SIGKILL of the launcher": Hit(lambda run: run.launcher.kill(), (0,), "stopped", "its launcher is gone"),
    "SIGUSR1 to a rank": Hit(lambda run: run.ranks[1].send_signal(signal.SIGUSR1), (5,), "stopped", "SIGUSR1"),
    "SIGKILL of a rank": Hit(lambda run: run.ranks[1].kill(), (247, 4), "failed", r"rank 1 \(host"),
}


@pytest.mark.parametrize("name", HITS)
def test_a_run_whose_processes_are_hit_ends_with_all_of_them(launch, name):
    """No process is left, the code and status.json are as documented, and what was saved is named."""
    hit, launched = HITS[name], launch("deepspeed --num_gpus 2", *ENDLESS)
    run = launched.run
    assert run.wait_until(lambda: trained(run.output)), run.text[-4000:]
    hit.act(launched)
    assert launched.end() in hit.codes, run.text[-4000:]
    status = status_of(run.output)
    assert status["state"] == hit.state
    assert re.search(hit.message, status["message"])
    assert status["left"] in run.text


def test_torchrun_restarts_a_run(launch):
    """PyTorch's elastic agent starts all ranks again after one was killed; DeepSpeed 0.19.8 no longer has its own."""
    launched = launch("torchrun --nproc_per_node 2 --max-restarts 1", "--resume")
    run = launched.run
    assert run.wait_until(lambda: list(run.output.glob("checkpoint-*/complete.json"))), run.text[-4000:]
    os.kill(status_of(run.output)["process"], signal.SIGKILL)
    assert launched.end() == 0, run.text[-4000:]
    assert f"{PHASE}: resumed from " in run.text
    assert status_of(run.output)["state"] == "finished"


@pytest.mark.parametrize(("code", "attempts"), [(1, 3), (2, 1), (3, 1), (5, 1), (6, 1)])
def test_the_restart_loop_does_not_repeat_what_a_restart_cannot_mend(tmp_path, code, attempts):
    """Its own exit code is the command's; what would happen again, or was asked for, ends it at once."""
    done, tries = restarted(tmp_path, f"exit {code}")
    assert (done.returncode, tries) == (code, attempts)


def test_the_restart_loop_goes_on_until_the_run_is_finished(tmp_path):
    """The state that a run writes counts, for a launcher can end with 0 though a rank was killed."""
    states = "state=failed; [ $(wc -l < tries) = 1 ] || state=finished"
    done, tries = restarted(tmp_path, f"""{states}; printf '{{\n "state": "%s",\n}}' $state > status.json; exit 0""")
    assert (done.returncode, tries) == (0, 2)
    assert "restart: attempt 1 of 3 ended with 0, the run is failed" in done.stderr


def restarted(folder: Path, code: str) -> tuple[subprocess.CompletedProcess[str], int]:
    """How launch/restart.sh ends with a command that runs this shell code in the folder, and how often it was run."""
    command = ["bash", "launch/restart.sh", "3", str(folder), "bash", "-c", f"cd {folder}; echo x >> tries; {code}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return done, (folder / "tries").read_text().count("x")
