"""Signals that end a command: with what it has put aside removed, or once it has put in place what it has made."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from typing import NoReturn

_ENDING = (signal.SIGINT, signal.SIGTERM)


@contextlib.contextmanager
def leaving() -> Iterator[None]:
    """Inside, SIGTERM raises SystemExit, as Ctrl-C raises KeyboardInterrupt: what was opened is closed again."""
    before = signal.signal(signal.SIGTERM, _leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def held_back() -> Iterator[None]:
    """Inside, neither ends the process; the first that came does so afterwards."""
    came: list[int] = []
    before = {number: signal.signal(number, lambda number, _: came.append(number)) for number in _ENDING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if came:
            signal.raise_signal(came[0])


def _leave(number: int, _: object) -> NoReturn:
    raise SystemExit(128 + number)
