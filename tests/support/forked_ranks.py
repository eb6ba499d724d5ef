"""Ranks of the training command, forked from a process that has already loaded what takes seconds to load.

They are real processes with the real engine, and start in a tenth of a second, so that a test can afford to kill many.
As a script, this is that process: it reads requests as JSON lines and answers with the ids of the ranks, then with how
they ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NoReturn

from support.launching import ROOT, environment, forget_port, free_port


class ForkedRanks:
    """One run: its ranks, in order, and what they wrote."""

    def __init__(self, server: ForkServer, pids: list[int], log: Path, output: Path) -> None:
        self.server, self.pids, self.log, self.output = server, pids, log, output

    @property
    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def kill(self) -> None:
        """All of them at once, as when the power fails."""
        for pid in self.pids:
            os.kill(pid, signal.SIGKILL)

    def alive(self) -> bool:
        """Whether any has not ended; a zombie, until the server is asked, has."""
        return any(_state(pid) not in ("Z", "X", "") for pid in self.pids)

    def wait_until(self, reached, seconds: float = 120) -> bool:
        """Until `reached()`, or until the run has ended: False then."""
        end = time.monotonic() + seconds
        while not reached():
            if not self.alive():
                return bool(reached())
            assert time.monotonic() < end, f"not reached in {seconds} s:\n{self.text[-4000:]}"
            time.sleep(0.002)
        return True

    def codes(self) -> list[int]:
        """The ranks' exit codes, once all have ended; negative for a signal."""
        return self.server.codes()


class ForkServer:
    """Starts one run after the other. To be used as a context."""

    def __enter__(self) -> ForkServer:
        self.process = subprocess.Popen(
            [sys.executable, __file__],
            cwd=ROOT,
            env=environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.ports: list[int] = []
        self.pids: list[int] = []
        assert self._answer() == "ready"
        return self

    def __exit__(self, *_: object) -> None:
        for pid in self.pids:  # of a test that failed
            if _state(pid) not in ("", "Z"):
                os.kill(pid, signal.SIGKILL)
        self.process.kill()
        self.process.wait()
        for port in self.ports:
            forget_port(port)

    def run(
        self,
        ranks: int,
        output: Path,
        *arguments: str,
        engine: str = "ds_configs/zero2.json",
        sabotage: dict[int, str] | None = None,
    ) -> ForkedRanks:
        """Start `launch/train.py` on so many ranks; `sabotage` is code that a rank runs before."""
        log = output.with_name(f"{output.name}.{time.monotonic_ns()}.txt")
        self.ports.append(free_port())
        words = ["--deepspeed_config", engine, "--output_dir", str(output), *arguments]
        asked = {"ranks": ranks, "port": self.ports[-1], "log": str(log), "arguments": words}
        self._ask(asked | {"sabotage": {str(rank): code for rank, code in (sabotage or {}).items()}})
        self.pids = self._answer()
        return ForkedRanks(self, self.pids, log, output)

    def codes(self) -> list[int]:
        self._ask("codes")
        codes, self.pids = self._answer(), []
        return codes

    def _ask(self, request) -> None:
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()

    def _answer(self):
        return json.loads(self.process.stdout.readline())


def _state(pid: int) -> str:
    with contextlib.suppress(OSError):
        text = Path(f"/proc/{pid}/stat").read_text()
        return text[text.rindex(")") + 2]
    return ""


def _serve() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # DeepSpeed writes there as it is loaded

    def say(value) -> None:
        print(json.dumps(value), file=answers, flush=True)

    import deepspeed  # noqa: F401 - loaded once for all ranks

    import ds_trainer.run  # noqa: F401

    say("ready")
    pids: list[int] = []
    for line in sys.stdin:
        request = json.loads(line)
        if request == "codes":
            say([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids])
        else:
            pids = [_fork(request, rank) for rank in range(request["ranks"])]
            say(pids)


def _fork(request: dict, rank: int) -> int:
    pid = os.fork()
    if not pid:
        _be_rank(request, rank)
    return pid


def _be_rank(request: dict, rank: int) -> NoReturn:
    from ds_trainer.cli.command import run_command
    from ds_trainer.cli.train import train_command
    from ds_trainer.ranks.distributed import leave

    os.setsid()
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(log, stream)
    world = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": request["ranks"], "LOCAL_SIZE": request["ranks"]}
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": request["port"], "CROSS_RANK": 0, "CROSS_SIZE": 1}
    os.environ.update({name: str(value) for name, value in (world | place).items()})
    exec(request["sabotage"].get(str(rank), ""), {})
    leave(run_command(train_command, request["arguments"]))


if __name__ == "__main__":
    _serve()
