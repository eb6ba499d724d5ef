"""What ends a run beside a user's mistake, with the exit code it has.

| code | meaning |
|---|---|
| 0 | done |
| 1 | an error that this library did not foresee, with its traceback |
| 2 | a mistake in what the user wrote: files, flags, data |
| 3 | a loss or a gradient is not finite |
| 4 | a rank was lost: killed, hung, failed or out of reach |
| 5 | stopped as asked, by a signal or because the launcher is gone; what was trained is saved |
| 6 | a rank ran out of memory |
| 128 + n | ended at once by signal n, the second one |
"""

from __future__ import annotations


class UserError(ValueError):
    """A mistake in what the user wrote; the message says what was found, what is allowed and what to change."""

    exit_code = 2


class NonFiniteLossError(ArithmeticError):
    """A term of the loss is infinite or no number: every rank stops, and what was saved before stays as it is."""

    exit_code = 3


class LostRankError(RuntimeError):
    """Another rank does not take part any more; raised on the ranks that notice, told by the rank `teller`."""

    exit_code = 4

    def __init__(self, message: str, teller: int = 0) -> None:
        super().__init__(message)
        self.teller = teller


class StoppedError(RuntimeError):
    """The run was asked to stop, and every rank knows; the message is the reason."""

    exit_code = 5


class OutOfMemoryError(Exception):
    """A rank ran out of memory, of a GPU or of the host; every rank ends with it, and the rank `teller` tells."""

    exit_code = 6

    def __init__(self, message: str, teller: int = 0) -> None:
        super().__init__(message)
        self.teller = teller


def ran_out(error: Exception) -> bool:
    """Whether an error of torch, numpy, Python or the system says that there is no memory left."""
    text = str(error).lower()
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError | OSError) and any(sign in text for sign in _SIGNS_OF_MEMORY)
    )


_SIGNS_OF_MEMORY = ("out of memory", "can't allocate memory", "cannot allocate memory", "bad_alloc", "alloc_failed")
"""What torch's allocators, CUDA's libraries, C++ and the system say; most are plain RuntimeErrors."""


def exit_code(error: Exception) -> int:
    """The exit code of a process that this error ends."""
    return error.exit_code if isinstance(error, ENDINGS) else 1


ENDINGS = (UserError, NonFiniteLossError, LostRankError, StoppedError, OutOfMemoryError)
"""The errors that this library foresees: each is printed without a traceback."""


def first_line(error: BaseException) -> str:
    """What an error says first, and what follows a colon at that line's end; empty where it says nothing."""
    first, *others = [line.strip() for line in str(error).strip().splitlines()] or [""]
    return f"{first} {others[0]}" if first.endswith(":") and others else first
