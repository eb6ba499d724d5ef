"""Processes forked from one that has already loaded what takes seconds to load.

They are real processes with the real engine, and start in a tenth of a second, so that a test can afford many, and can
afford to kill them. As a script, this is the process they are forked from: it reads requests as JSON lines and answers
with the ids of the processes, then with how they ended. It ends with the process that has started it.
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
from functools import cache
from pathlib import Path
from typing import NoReturn

from support.launching import ROOT, Done, environment, free_port

LOADED_ONCE = (
    "deepspeed.module_inject.auto_ep_layer",
    "deepspeed.runtime.superoffload.superoffload_stage3",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "markdown_it",
    "matplotlib.backends.backend_agg",
    "torch.utils.cpp_extension",
    "torch.utils.tensorboard",
    "transformers.models.bert.modeling_bert",
    "ds_trainer.cli.train",
    "ds_trainer.run.run",
    "ds_trainer.run.scoring",
    "ds_trainer.tasks.text.text_task",
)
"""The modules that a run loads, so that no rank loads them again."""


class ForkedRun:
    """A script on its ranks, in order, and what they print."""

    def __init__(self, server: ForkServer, pids: list[int], log: Path, output: Path) -> None:
        self.server, self.pids, self.log, self.output = server, pids, log, output

    @property
    def text(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""  # the ranks make it

    def kill(self) -> None:
        """Kill all ranks at once, as when the power fails."""
        for pid in self.pids:
            os.kill(pid, signal.SIGKILL)
        self.codes()

    def wait_until(self, reached, seconds: float = 120) -> bool:
        """Wait until `reached()`; where the run ends before, return False."""
        end = time.monotonic() + seconds
        while not reached():
            if not any(_is_alive(pid) for pid in self.pids):
                return bool(reached())
            assert time.monotonic() < end, f"not reached in {seconds} s:\n{self.text[-4000:]}"
            time.sleep(0.002)
        return True

    def codes(self) -> list[int]:
        """The exit codes of all ranks, once they have ended; negative for a signal."""
        return self.server.ask({"end": self.pids})

    def code(self, seconds: float) -> int | None:
        """The exit code as of DeepSpeed's launcher: when a rank fails, the others are ended. None is a timeout."""
        return self.server.ask({"end": self.pids, "seconds": seconds})


class ForkServer:
    """Starts runs, one after the other or several at once. It ends when it is left, or with this process."""

    def __init__(self) -> None:
        # by its last word a rank that is forked from a launcher knows that as DeepSpeed's, whose end ends the rank
        command, pipe = [sys.executable, __file__, "deepspeed"], subprocess.PIPE
        self.process = subprocess.Popen(command, cwd=ROOT, env=environment(), stdin=pipe, stdout=pipe, text=True)
        assert self._answer() == "ready"

    def run(
        self,
        ranks: int,
        output: Path,
        *arguments: str,
        engine: str = "ds_configs/zero2.json",
        sabotage: dict[int, str] | None = None,
    ) -> ForkedRun:
        """Start `launch/train.py` on this number of ranks; `sabotage` is code that a rank runs before."""
        log = output.with_name(f"{output.name}.{time.monotonic_ns()}.txt")
        words = ["launch/train.py", "--deepspeed_config", engine, "--output_dir", str(output), *arguments]
        return self.start(ranks, words, (log, log), sabotage)

    def start(
        self, ranks: int, words: list[str], logs: tuple[Path, Path], sabotage: dict[int, str] | None = None
    ) -> ForkedRun:
        """Start a script on ranks, or on 0 as a process without any; standard output and error go to `logs`.

        Every process leads a session, as under DeepSpeed's launcher.
        """
        request = {"ranks": ranks, "port": free_port(), "words": words, "environment": environment()}
        request |= {
            "logs": list(map(str, logs)),
            "sabotage": {str(rank): code for rank, code in (sabotage or {}).items()},
        }
        pids = self.ask(request)
        output = Path(words[words.index("--output_dir") + 1]) if "--output_dir" in words else logs[0]
        return ForkedRun(self, pids, logs[1], output)

    def run_to_its_end(self, ranks: int, words: list[str], timeout: float) -> Done:
        """Run a script to its end; a process without ranks, and what it starts, forks where it would start Python."""
        with tempfile.TemporaryDirectory() as folder:
            logs = (Path(folder, "stdout"), Path(folder, "stderr"))
            code = self.start(ranks, words, logs, {} if ranks else {0: FORK_PYTHONS}).code(timeout)
            texts = [log.read_text(errors="replace") for log in logs]
        if code is None:
            raise subprocess.TimeoutExpired(words, timeout, *texts)
        return subprocess.CompletedProcess(words, code, *texts)

    def ask(self, request):
        """Send a request to the server, and return its answer."""
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def _answer(self):
        return json.loads(self.process.stdout.readline())


def _is_alive(pid: int) -> bool:
    """Whether a process has not ended; a zombie, until the server is asked, has."""
    with contextlib.suppress(OSError):
        text = Path(f"/proc/{pid}/stat").read_text()
        return text[text.rindex(")") + 2] not in "ZX"
    return False


@cache
def warm_server() -> ForkServer:
    """The server that the tests of this process share."""
    return ForkServer()


def _serve() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # DeepSpeed writes there as it is loaded
    for name in LOADED_ONCE:
        importlib.import_module(name)
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    get_checkpoint_conversion_mapping("bert")  # compiles a thousand patterns
    gc.freeze()  # else each rank's first collections go through, and so copy, all that the libraries made
    print('"ready"', file=answers, flush=True)
    forks: set[int] = set()
    for line in sys.stdin:
        request = json.loads(line)
        if "words" in request:
            answer = [_fork(request, rank) for rank in range(max(1, request["ranks"]))]
            forks.update(answer)
        else:
            forks.difference_update(request["end"])
            answer = _end_of(request["end"], request["seconds"]) if "seconds" in request else _codes_of(request["end"])
        print(json.dumps(answer), file=answers, flush=True)
    _signal(forks, signal.SIGKILL)  # of a test that failed


def _codes_of(pids: list[int]) -> list[int]:
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]


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
            _codes_of(list(running))
            return code or None
        time.sleep(0.005)
    return code


def _signal(pids: set[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _fork(request: dict, rank: int) -> int:
    sys.stdout.flush()  # what it holds is not the fork's to write
    pid = os.fork()
    if not pid:
        _become(request, rank)
    return pid


def _become(request: dict, rank: int) -> NoReturn:
    """Run the request's script as a rank that DeepSpeed's launcher has started, or as a process without ranks."""
    os.setsid()
    os.dup2(os.open("/dev/null", os.O_RDONLY), 0)  # else a process that stays keeps the server's requests
    for stream, name in enumerate(request["logs"], start=1):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    _set_environment(request["environment"])
    words = request["words"]
    if request["ranks"]:
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": request["ranks"], "LOCAL_SIZE": request["ranks"]}
        place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": request["port"], "CROSS_RANK": 0, "CROSS_SIZE": 1}
        os.environ.update({name: str(value) for name, value in place.items()})
        words.insert(1, f"--local_rank={rank}")
    exec(request["sabotage"].get(str(rank), ""), {})
    _run_python(words)


def _set_environment(environment: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)


def _run_python(words: list[str]) -> NoReturn:
    """Do what `python WORDS` does, in this process: run a script, with -m a module, or with -c code."""
    code: object = 1
    words = [word for word in words if word != "-u"]
    try:
        if words[0] == "-m":
            sys.argv, sys.path[0] = words[1:], os.getcwd()
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        elif words[0] == "-c":
            sys.argv = ["-c", *words[2:]]
            exec(words[1], {"__name__": "__main__"})
        else:
            sys.argv, sys.path[0] = words, str(Path(words[0]).parent)
            runpy.run_path(words[0], run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code or 0
    except BaseException:  # noqa: BLE001 - it is printed, and the process ends here whatever it was
        traceback.print_exc()
    sys.stdout.flush()
    os._exit(code if isinstance(code, int) else 1)


FORK_PYTHONS = "from support.forked_ranks import fork_pythons; fork_pythons()"
"""What a process runs before its script, as `sabotage`, so that it forks where it would start Python."""


def fork_pythons() -> None:
    """Have this process, and those that it starts, fork where they would start Python again.

    So what starts processes, as DeepSpeed's launcher and torchrun do, runs as it is, without loading all for each.
    """
    start, launchers = (
        subprocess._fork_exec,
        [str(Path(sys.executable).with_name(n)) for n in ("deepspeed", "torchrun")],
    )

    def fork(words, *others):
        # as _posixsubprocess.fork_exec takes them: pairs of pipe ends for the three streams, and one for an error
        folder, environment, pipes, new_session = others[3], others[4], others[5:13], others[14]
        words = list(map(os.fsdecode, words))
        if words[0] not in (sys.executable, *launchers):
            return start(words, *others)
        if pid := os.fork():
            return pid
        if new_session:
            os.setsid()
        for stream, end in enumerate((pipes[0], pipes[3], pipes[5])):
            if end != -1:
                os.dup2(end, stream)
        for end in {*pipes} - {-1, 0, 1, 2}:
            os.close(end)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        os.chdir(folder or ".")
        if environment is not None:
            _set_environment(dict(os.fsdecode(entry).split("=", 1) for entry in environment))
        _run_python(words if words[0] in launchers else words[1:])

    subprocess._fork_exec = fork


if __name__ == "__main__":
    _serve()
