"""Processes forked from one that has already loaded what takes seconds to load.

They are real processes with the real engine, and start in a tenth of a second, so that a test can afford many, and can
afford to kill them. As a script, this is the process they are forked from: it reads requests as JSON lines and answers
with the ids of the ranks, then with how they ended.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import NoReturn

from support.launching import ROOT, environment, free_port

LOADED_ONCE = (
    "deepspeed.module_inject.auto_ep_layer",
    "torchmetrics.functional",
    "transformers.models.bert.modeling_bert",
    "ds_trainer.cli.train",
    "ds_trainer.run.run",
    "ds_trainer.run.scoring",
    "ds_trainer.tasks.text.text_task",
)
"""The modules that a run loads, so that no rank loads them again."""


class ForkedRanks:
    """One run: its ranks, in order, and what they wrote."""

    def __init__(self, server: ForkServer, pids: list[int], log: Path, output: Path) -> None:
        self.server, self.pids, self.log, self.output = server, pids, log, output

    @property
    def text(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""  # the ranks make it

    def kill(self) -> None:
        """All of them at once, as when the power fails."""
        for pid in self.pids:
            os.kill(pid, signal.SIGKILL)

    def alive(self) -> bool:
        """Whether any has not ended; a zombie, until the server is asked, has."""
        return any(_is_alive(pid) for pid in self.pids)

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
        codes = self.server.ask({"end": self.pids})
        self.server.running.difference_update(self.pids)
        return codes


class ForkServer:
    """Starts runs, one after the other or several at once. To be used as a context."""

    def __enter__(self) -> ForkServer:
        self.process = subprocess.Popen(
            [sys.executable, __file__],
            cwd=ROOT,
            env=environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.running: set[int] = set()
        assert self._answer() == "ready"
        return self

    def __exit__(self, *_: object) -> None:
        _signal({pid for pid in self.running if _is_alive(pid)}, signal.SIGKILL)  # of a test that failed
        self.process.kill()
        self.process.wait()

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
        words = ["--deepspeed_config", engine, "--output_dir", str(output), *arguments]
        asked = {"ranks": ranks, "port": free_port(), "log": str(log), "arguments": words}
        pids = self.ask(asked | {"sabotage": {str(rank): code for rank, code in (sabotage or {}).items()}})
        self.running.update(pids)
        return ForkedRanks(self, pids, log, output)

    def run_script(self, ranks: int, words: list[str], timeout: float) -> subprocess.CompletedProcess[str]:
        """Run a script to its end on so many ranks, or on 0 as a process without ranks.

        When a rank fails, the others are ended as DeepSpeed's launcher ends them, and its exit code is the result's.
        """
        with tempfile.TemporaryDirectory() as folder:
            files = [Path(folder, name) for name in ("stdout", "stderr")]
            request = {"ranks": ranks, "port": free_port(), "script": words, "environment": environment()}
            pids = self.ask(request | {"files": list(map(str, files)), "timeout": timeout})
            self.running.update(pids)
            code = self._answer()
            self.running.difference_update(pids)
            texts = [file.read_text(errors="replace") for file in files]
        if code is None:
            raise subprocess.TimeoutExpired(words, timeout, *texts)
        return subprocess.CompletedProcess(words, code, *texts)

    def ask(self, request):
        """Send a request to the server, and return its first answer."""
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def _answer(self):
        return json.loads(self.process.stdout.readline())


def _is_alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        text = Path(f"/proc/{pid}/stat").read_text()
        return text[text.rindex(")") + 2] not in "ZX"
    return False


@cache
def warm_server() -> ForkServer:
    """The server that the tests of this process share; `close_warm_server` ends it."""
    return ForkServer().__enter__()


def close_warm_server() -> None:
    if warm_server.cache_info().currsize:
        warm_server().__exit__()
        warm_server.cache_clear()


def _serve() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # DeepSpeed writes there as it is loaded

    def say(value) -> None:
        print(json.dumps(value), file=answers, flush=True)

    for name in LOADED_ONCE:
        importlib.import_module(name)
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    get_checkpoint_conversion_mapping("bert")  # compiles a thousand patterns
    gc.freeze()  # else each rank's first collections go through, and so copy, all that the libraries made
    say("ready")
    for line in sys.stdin:
        for answer in _answers(json.loads(line)):
            say(answer)


def _answers(request: dict) -> Iterator[object]:
    if "end" in request:
        yield [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in request["end"]]
    elif "script" in request:
        pids = [_fork(_be_script, request, rank) for rank in range(max(1, request["ranks"]))]
        yield pids
        yield _end_of(pids, request["timeout"])
    else:
        yield [_fork(_be_rank, request, rank) for rank in range(request["ranks"])]


def _fork(become: Callable[[dict, int], NoReturn], request: dict, rank: int) -> int:
    sys.stdout.flush()  # what it holds is not the fork's to write
    pid = os.fork()
    if not pid:
        become(request, rank)
    return pid


def _end_of(pids: list[int], seconds: float) -> int | None:
    """The exit code of the first process that fails, 0 where none does, None where they are too slow."""
    end, running, code, told = time.monotonic() + seconds, set(pids), 0, float("inf")
    while running:
        for pid, status in [os.waitpid(pid, os.WNOHANG) for pid in running]:
            running.discard(pid)
            if pid and status and not code:
                code = os.waitstatus_to_exitcode(status)
                told = time.monotonic() + 1  # as often the launcher looks, so that others can say why they end
                end = min(end, told + 30)
        if running and time.monotonic() > told:
            _signal(running, signal.SIGTERM)
            told = float("inf")
        if running and time.monotonic() > end:
            _signal(running, signal.SIGKILL)
            for late in running:
                os.waitpid(late, 0)
            return code or None
        time.sleep(0.005)
    return code


def _signal(pids: set[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _be_rank(request: dict, rank: int) -> NoReturn:
    os.setsid()
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.environ.update(_place(request, rank))
    from ds_trainer.cli.command import run_command
    from ds_trainer.cli.train import train_command
    from ds_trainer.ranks.distributed import leave

    exec(request["sabotage"].get(str(rank), ""), {})
    leave(run_command(train_command, request["arguments"]))


def _be_script(request: dict, rank: int) -> NoReturn:
    for stream, name in enumerate(request["files"], start=1):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    os.environ.clear()
    os.environ.update(request["environment"])
    script, *arguments = request["script"]
    sys.argv, sys.path[0] = [script, *arguments], str(Path(script).parent)
    if request["ranks"]:
        os.environ.update(_place(request, rank))
        sys.argv.insert(1, f"--local_rank={rank}")
    code: object = 1
    try:
        runpy.run_path(script, run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code
    except BaseException:  # noqa: BLE001 - it is printed, and the process ends here whatever it was
        traceback.print_exc()
    sys.stdout.flush()
    os._exit(code if isinstance(code, int) else 1)


def _place(request: dict, rank: int) -> dict[str, str]:
    """The environment variables by which DeepSpeed's launcher tells a rank its place."""
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": request["ranks"], "LOCAL_SIZE": request["ranks"]}
    place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": request["port"], "CROSS_RANK": 0, "CROSS_SIZE": 1}
    return {name: str(value) for name, value in place.items()}


if __name__ == "__main__":
    _serve()
