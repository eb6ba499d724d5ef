"""Runs of the product that are interrupted: start one, wait until it trains, hit one of its processes."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
from support.launching import ROOT, environment, free_port

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


def records_of(file: Path) -> list[dict]:
    """The records of a log that may just be written."""
    found = []
    for line in file.read_text().splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            found.append(json.loads(line))
    return found


def without_rates(record: dict) -> dict:
    """A record without what depends on the clock or on the machine."""
    return {
        name: value for name, value in record.items() if not name.endswith("_per_s") and "memory" not in name.split("/")
    }


def status_of(output: Path) -> dict:
    return json.loads((output / "status.json").read_text())


def _session(process: psutil.Process) -> int:
    try:
        return os.getsid(process.pid)
    except OSError:
        return -1
