"""Runs under DeepSpeed's launcher, and torchrun, whose processes are hit: no rank trains on alone, nothing is lost."""

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
from support.killing import ENDLESS, PHASE, status_of, trained
from support.launching import ROOT, chosen, environment, free_port

BIN = Path(sys.executable).parent


class Launched:
    """A training command under a launcher, in a session of its own, all of which ends with the test."""

    def __init__(self, launcher: list[str], output: Path, *arguments: str) -> None:
        files = ["--deepspeed_config", "ds_configs/zero2.json", "--output_dir", str(output), *arguments]
        command = [str(BIN / launcher[0]), *launcher[1:], "--master_port", str(free_port()), "launch/train.py", *files]
        self.output, self.log = output, output.with_name("said.txt")
        self.process = psutil.Popen(
            command,
            cwd=ROOT,
            env=environment(),
            stdout=self.log.open("w"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    @property
    def text(self) -> str:
        return self.log.read_text(errors="replace")

    @property
    def launcher(self) -> psutil.Process:
        return self.process.children()[0]

    @property
    def ranks(self) -> list[psutil.Process]:
        return sorted(self.launcher.children(), key=lambda process: process.environ()["RANK"])

    def alive(self) -> list[psutil.Process]:
        """Those of the run's session that still run."""
        own = [process for process in psutil.process_iter(["pid"]) if _session(process.pid) == self.process.pid]
        return [process for process in own if process.status() != psutil.STATUS_ZOMBIE]

    def wait_until(self, reached: Callable[[], object], seconds: float = 180) -> None:
        end = time.monotonic() + seconds
        while not reached():
            assert time.monotonic() < end, f"not reached in {seconds} s:\n{self.text[-4000:]}"
            time.sleep(0.02)

    def end(self) -> int:
        """The exit code of the command, once no process of the run is left."""
        self.wait_until(lambda: self.process.poll() is not None and not self.alive())
        return self.process.returncode


def _session(pid: int) -> int:
    try:
        return os.getsid(pid)
    except OSError:  # it has ended
        return -1


@pytest.fixture
def launched() -> Iterator[Callable[..., Launched]]:
    """Launch runs, of which nothing is left at the end of the test."""
    runs: list[Launched] = []

    def launch(*arguments) -> Launched:
        runs.append(Launched(*arguments))
        return runs[-1]

    yield launch
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
    "SIGKILL of the runner": Hit(lambda run: run.process.kill(), (-9,), "stopped", "its launcher is gone"),
    "SIGTERM to the launcher": Hit(lambda run: run.launcher.terminate(), (1,), "stopped", "SIGTERM"),
    "SIGTERM to the runner": Hit(lambda run: run.process.terminate(), (-15,), "stopped", "its launcher is gone"),
    # the launcher answers Ctrl-C with SIGTERM, and either may come first
    "Ctrl-C": Hit(lambda run: os.killpg(run.process.pid, signal.SIGINT), (-2, 1), "stopped", "SIGINT|SIGTERM"),
    "SIGKILL of the launcher": Hit(lambda run: run.launcher.kill(), (0,), "stopped", "its launcher is gone"),
    "SIGUSR1 to a rank": Hit(lambda run: run.ranks[1].send_signal(signal.SIGUSR1), (5,), "stopped", "SIGUSR1"),
    "SIGKILL of a rank": Hit(lambda run: run.ranks[1].kill(), (247, 4), "failed", r"rank 1 \(host"),
}


@pytest.mark.parametrize("name", chosen(HITS, lambda name: name == "SIGKILL of the runner"))
def test_a_run_whose_processes_are_hit_ends_with_all_of_them(launched, words, tmp_path, name):
    """No process is left, the code and status.json are as documented, and what was saved is named."""
    hit, run = HITS[name], launched(["deepspeed", "--num_gpus", "2"], tmp_path / "out", *words, *ENDLESS)
    run.wait_until(lambda: trained(run.output) or run.process.poll() is not None)
    hit.act(run)
    assert run.end() in hit.codes, run.text[-4000:]
    status = status_of(run.output)
    assert status["state"] == hit.state
    assert re.search(hit.message, status["message"])
    assert status["left"] in run.text


def test_torchrun_restarts_a_run(launched, words, tmp_path):
    """PyTorch's elastic agent starts all ranks again after one was killed; DeepSpeed 0.19.8 no longer has its own."""
    launcher = ["torchrun", "--nproc_per_node", "1", "--max-restarts", "1"]
    run = launched(launcher, tmp_path / "out", *words, "--resume")
    run.wait_until(lambda: list(run.output.glob("checkpoint-*/complete.json")) or run.process.poll() is not None)
    os.kill(status_of(run.output)["process"], signal.SIGKILL)
    assert run.end() == 0, run.text[-4000:]
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
