"""Being asked to stop: by a signal, or by the end of the launcher; all ranks stop after the same step.

A signal only leaves a note; the loop looks at the notes of all ranks where it can stop. A second signal ends the
process at once.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any

from ds_trainer import distributed
from ds_trainer.failures import StoppedError
from ds_trainer.launcher import launchers

SIGNALS = (signal.SIGUSR1, signal.SIGINT, signal.SIGTERM)
"""Those of users and schedulers; SIGUSR1 is what Slurm is mostly told to send before time is up."""

_REASONS = ("", "its launcher is gone", *(found.name for found in SIGNALS))
_SAME = 2.0  # seconds: Ctrl-C reaches a rank from the terminal, and again as SIGTERM from DeepSpeed's launcher
_LOOK = 1.0  # seconds between two looks at the launcher


class StopRequests:
    """Gathers the requests to stop this run. To be used as a context, from the main thread."""

    def __init__(self) -> None:
        self._reason, self._when = 0, 0.0
        self._before: dict[int, Any] = {}
        self._over = threading.Event()

    def __enter__(self) -> StopRequests:
        self._before = {number: signal.signal(number, self._signalled) for number in SIGNALS}
        threading.Thread(target=self._watch_launchers, name="launcher-watch", daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._over.set()
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def check(self) -> None:
        """Raise StoppedError on every rank if any of them was asked to stop. Every rank must ask at the same place."""
        reason = distributed.largest(self._reason)
        if reason:
            raise StoppedError(_REASONS[reason])

    def _signalled(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._reason and now - self._when > _SAME:
            os._exit(128 + number)
        if not self._reason:
            self._ask(signal.Signals(number).name)

    def _ask(self, reason: str) -> None:
        self._reason, self._when = _REASONS.index(reason), time.monotonic()
        # not by the log, whose lock the interrupted code may hold
        os.write(2, f"rank {distributed.rank()}: {reason}: stopping after this step\n".encode())

    def _watch_launchers(self) -> None:
        known = launchers()
        while not self._over.wait(_LOOK):
            if not self._reason and not all(found.alive for found in known):
                self._ask(_REASONS[1])
                return
