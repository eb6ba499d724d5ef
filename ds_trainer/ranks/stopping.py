"""Being asked to stop: by a signal, or by the end of the launcher; all ranks stop after the same step.

A signal only leaves a note; the loop looks at the notes of all ranks where it can stop. A second signal ends the
process at once.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import time
from collections.abc import Sequence
from types import FrameType, TracebackType
from typing import Any

from ds_trainer.ranks import distributed
from ds_trainer.ranks.failures import StoppedError
from ds_trainer.ranks.launcher import Process, launchers

SIGNALS = (signal.SIGUSR1, signal.SIGINT, signal.SIGTERM)
"""Those of users and schedulers; SIGUSR1 is what Slurm is mostly told to send before time is up."""

_REASONS = ("", "its launcher is gone", *(found.name for found in SIGNALS))
_SAME = 2.0  # seconds: Ctrl-C reaches a rank from the terminal, and again as SIGTERM from DeepSpeed's launcher
_OVER = 0  # no signal's number
_LOOK = 0.5  # seconds between two looks at the launcher


class StopRequests:
    """Gathers the requests to stop this run. To be used as a context, from the main thread.

    A thread of its own hears the signals: while the main thread waits in a collective, Python's handlers do not run.
    """

    def __init__(self) -> None:
        self._reason, self._when = 0, 0.0
        self._before: dict[int, Any] = {}
        self._inbox, self._outbox = -1, -1

    def __enter__(self) -> StopRequests:
        self._inbox, self._outbox = os.pipe()
        os.set_blocking(self._outbox, False)
        self._before = {number: signal.signal(number, _leave_to_the_thread) for number in SIGNALS}
        self._wakeup = signal.set_wakeup_fd(self._outbox, warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._listen, args=(launchers(),), name="stop-requests", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        signal.set_wakeup_fd(self._wakeup)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        os.write(self._outbox, bytes([_OVER]))
        self._thread.join()
        os.close(self._inbox)
        os.close(self._outbox)

    def check(self) -> None:
        """Raise StoppedError on every rank if any of them was asked to stop. Every rank must ask at the same place."""
        reason = distributed.largest(self._reason)
        if reason:
            raise StoppedError(_REASONS[reason])

    def _listen(self, known: Sequence[Process]) -> None:
        """Hear signals as they come, and look after the launchers in between."""
        while True:
            ready, _, _ = select.select([self._inbox], [], [], _LOOK)
            for number in os.read(self._inbox, 64) if ready else b"":
                if number == _OVER:
                    return
                if number in SIGNALS:
                    self._signalled(number)
            if not self._reason and not all(found.alive for found in known):
                self._ask(_REASONS[1])

    def _signalled(self, number: int) -> None:
        if self._reason and time.monotonic() - self._when > _SAME:
            os._exit(128 + number)
        if not self._reason:
            self._ask(signal.Signals(number).name)

    def _ask(self, reason: str) -> None:
        self._reason, self._when = _REASONS.index(reason), time.monotonic()
        # not by the log, whose lock a rank that hangs may hold
        with contextlib.suppress(OSError):  # whoever read it may be gone
            os.write(2, f"rank {distributed.rank()}: {reason}: stopping after this step\n".encode())


def _leave_to_the_thread(number: int, frame: FrameType | None) -> None:
    """A handler, so that the signal does not end the process."""
