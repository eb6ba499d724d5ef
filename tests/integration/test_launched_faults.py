"""Runs under DeepSpeed's launcher, and torchrun, whose launchers are hit: no rank trains on alone, nothing is lost."""

from __future__ import annotations

import contextlib
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
from support.killing import PHASE, alike, arguments, finish, records_of, status_of, trained, write
from support.launching import ROOT, chosen, environment, free_port

EVERY, STEPS = 10, 80
GENTLE = 180  # seconds for a run to end by itself; a run that hangs fails the test


class Run:
    """A training command under DeepSpeed's launcher, in a session of its own."""

    def __init__(self, ranks: int, output: Path, *arguments: str, engine: str = "ds_configs/zero2.json") -> None:
        self.output = output
        deepspeed = [str(Path(sys.executable).with_name("deepspeed")), "--num_gpus", str(ranks)]
        self.log = output.with_name(f"{output.name}.{time.monotonic_ns()}.txt")
        self.port = free_port()
        self.process = subprocess.Popen(
            [
                *(*deepspeed, "--master_port", str(self.port), "launch/train.py"),
                *("--deepspeed_config", engine, "--output_dir", str(output), *arguments),
            ],
            cwd=ROOT,
            env=environment(),
            stdout=self.log.open("w"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self.steps_before = len(self.records())

    @property
    def text(self) -> str:
        return self.log.read_text(errors="replace")

    @property
    def launcher(self) -> psutil.Process:
        return self._below("deepspeed.launcher.launch")[0]

    @property
    def ranks(self) -> list[psutil.Process]:
        """By rank."""
        return sorted(self._below("launch/train.py", "--local_rank"), key=lambda p: p.environ()["RANK"])

    def records(self) -> list[dict]:
        file = self.output / "log.jsonl"
        return records_of(file) if file.is_file() else []

    def wait_until(self, reached, seconds: float = 120) -> None:
        """Until `reached()`; the run must still be going on."""
        end = time.monotonic() + seconds
        while not reached():
            assert self.process.poll() is None, f"it ended with {self.process.returncode}:\n{self.text[-4000:]}"
            assert time.monotonic() < end, f"not reached in {seconds} s:\n{self.text[-4000:]}"
            time.sleep(0.02)

    def end(self, seconds: float = GENTLE) -> int:
        """The exit code of the runner, once no process of the run is left."""
        code = self.process.wait(seconds)
        end = time.monotonic() + seconds
        while self.alive():
            assert time.monotonic() < end, f"processes are left: {self.alive()}:\n{self.text[-4000:]}"
            time.sleep(0.05)
        return code

    def alive(self) -> list[psutil.Process]:
        """Those of the run's session that still run."""
        return [p for p in psutil.process_iter() if _session(p) == self.process.pid and p.status() != "zombie"]

    def kill(self) -> None:
        """Everything at once, as when the power fails."""
        for process in self.alive():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait()

    def _below(self, *words: str) -> list[psutil.Process]:
        found = []
        for process in self.alive():
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                command = " ".join(process.cmdline())
                launch = "deepspeed.launcher.launch" in command
                if all(word in command for word in words) and (launch == (words[0] == "deepspeed.launcher.launch")):
                    found.append(process)
        return found


@contextlib.contextmanager
def running(*arguments, **keywords) -> Iterator[Run]:
    """A run of which nothing is left at the end of the test."""
    run = Run(*arguments, **keywords)
    try:
        yield run
    finally:
        run.kill()


def _session(process: psutil.Process) -> int:
    try:
        return os.getsid(process.pid)
    except OSError:
        return -1


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
