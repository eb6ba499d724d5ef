"""React to signals: all ranks of a run stop after the same step; other commands clean up before they end.

In a run, a signal or the end of the launcher is only noted. Where the loop can stop, it compares the notes of all
ranks, so that all of them stop after the same step. A second signal ends the process at once.

DeepSpeed's runner starts `deepspeed.launcher.launch`, on other hosts through ssh and a shell, and that starts the
ranks. A process that is killed leaves those below it running, so a rank watches all of them up to the one that a user
would call the launcher.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextvars import ContextVar
from types import FrameType
from typing import Any, NoReturn, TypeVar

import psutil

from ds_trainer.ranks import distributed
from ds_trainer.ranks.failures import StoppedError

SIGNALS = (signal.SIGUSR1, signal.SIGINT, signal.SIGTERM)
"""The signals of users and schedulers. Slurm is mostly configured to send SIGUSR1 before the time is up."""

_REASONS = ("", "its launcher is gone", *(number.name for number in SIGNALS))
_SAME_REQUEST = 2.0  # seconds: Ctrl-C comes from the terminal, and again as SIGTERM from DeepSpeed's launcher
_CLOSE = 0  # ends the thread; no signal has this number
T = TypeVar("T")
_POLL = 0.5  # seconds after which the thread looks whether the launcher still runs
_MAX_ANCESTORS = 6  # the rank's launch.py, a shell, sshd's session, the runner, and some room
_SHELLS = ("sh", "bash", "dash", "zsh", "ksh")
_REQUESTS: ContextVar[StopRequests | None] = ContextVar("stop requests", default=None)
"""Those that are being collected, for code that works long without a step, such as a cut."""


class StopRequests:
    """Collect the requests to stop this run; a context manager for the main thread.

    Python runs the handlers of signals in the main thread, but not while that is inside of a collective, where it may
    wait for minutes. So a second thread receives the signals: Python's C code writes the number of each one into a pipe
    (`set_wakeup_fd`), whatever the main thread does, and the second thread reads the pipe.
    """

    def __init__(self) -> None:
        self._reason, self._when = 0, 0.0

    def __enter__(self) -> StopRequests:
        self._inbox, self._outbox = os.pipe()
        os.set_blocking(self._outbox, False)  # set_wakeup_fd requires it
        # a handler that does nothing: without one, a signal would end the process
        self._before: dict[int, Any] = {number: signal.signal(number, lambda *_: None) for number in SIGNALS}
        self._wakeup = signal.set_wakeup_fd(self._outbox, warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._listen, args=(launchers(),), name="stop-requests", daemon=True)
        self._thread.start()
        self._token = _REQUESTS.set(self)
        return self

    def __exit__(self, *_: object) -> None:
        _REQUESTS.reset(self._token)
        signal.set_wakeup_fd(self._wakeup)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        os.write(self._outbox, bytes([_CLOSE]))
        self._thread.join()
        os.close(self._inbox)
        os.close(self._outbox)

    def check(self) -> None:
        """Raise StoppedError on every rank if any rank is to stop. Collective."""
        # every rank must stop, and for the same reason, so all take the one with the largest number
        reason = max(max(distributed.numbers_of_all([self._reason])))
        if reason:
            raise StoppedError(_REASONS[reason])

    def _listen(self, ancestors: Sequence[psutil.Process]) -> None:
        """Read the signals from the pipe, and look in between whether the launchers still run."""
        while True:
            ready, _, _ = select.select([self._inbox], [], [], _POLL)
            for number in os.read(self._inbox, 64) if ready else b"":
                if number == _CLOSE:
                    return
                if number not in SIGNALS:
                    continue
                if self._reason and time.monotonic() - self._when > _SAME_REQUEST:
                    os._exit(128 + number)
                self._note(signal.Signals(number).name)
            if not all(map(is_running, ancestors)):
                self._note(_REASONS[1])

    def _note(self, reason: str) -> None:
        """Keep the first reason and print it."""
        if self._reason:
            return
        self._reason, self._when = _REASONS.index(reason), time.monotonic()
        # not through the log: the main thread may hold its lock while it hangs
        with contextlib.suppress(OSError):  # the reader of standard error may be gone
            os.write(2, f"rank {distributed.rank()}: {reason}: stopping after this step\n".encode())


def is_running(process: psutil.Process | int) -> bool:
    """Whether a process of this host, or one of this id, still runs: a zombie does not, nor a later one of its id."""
    try:
        process = psutil.Process(process) if isinstance(process, int) else process
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def launchers() -> list[psutil.Process]:
    """Return the processes that this rank depends on, its parent first; none where no launcher started it.

    They are the parent, whatever it is, and all processes from it up to the highest one that starts ranks. A shell in
    which a user typed the command is not among them: the user may log out while the run goes on.
    """
    if "RANK" not in os.environ:
        return []
    chain: list[psutil.Process] = []
    highest = 0
    with contextlib.suppress(psutil.Error):  # the chain ends at a process that this user may not see
        for ancestor in psutil.Process().parents()[:_MAX_ANCESTORS]:
            if ancestor.pid == 1:
                break
            chain.append(ancestor)
            name, command = ancestor.name(), " ".join(ancestor.cmdline())
            if name.startswith("sshd"):  # ssh's end of a login; above it is the server of the host
                return chain
            if "deepspeed" in command and name not in _SHELLS:
                highest = len(chain) - 1
            elif not (name in _SHELLS and " -c " in command):  # as ssh starts a command, not a shell to type into
                break
    return chain[: highest + 1]


def in_step(items: Iterable[T], count: int) -> Iterator[T]:
    """Yield `count` items; before each one, all ranks stop together if one of them is asked to; collective.

    Ranks with fewer items than another one take part in its checks.
    """
    iterator, requests = iter(items), _REQUESTS.get()
    for number in range(max(max(distributed.numbers_of_all([count])))):
        if requests:
            requests.check()
        if number < count:
            yield next(iterator)
    yield from iterator  # none is left, but a generator has yet to end


def stop_if_asked() -> None:
    """Raise StoppedError if this rank is asked to stop: for long work that rank 0 does for all inside `on_main`."""
    requests = _REQUESTS.get()
    if requests and requests._reason:
        raise StoppedError(_REASONS[requests._reason])


@contextlib.contextmanager
def leaving() -> Iterator[None]:
    """Raise SystemExit at SIGTERM, as Ctrl-C raises KeyboardInterrupt, so that open contexts clean up."""

    def leave(number: int, frame: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def held_back() -> Iterator[None]:
    """Delay SIGINT and SIGTERM until the end of a block that must not end half done."""
    received: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, lambda number, _: received.append(number)) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if received:
            signal.raise_signal(received[0])
