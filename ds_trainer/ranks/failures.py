"""The errors that end a command, and its exit codes.

| code | meaning |
|---|---|
| 0 | done |
| 1 | an error that this library did not foresee, with its traceback |
| 2 | a mistake in what the user wrote: files, flags, data |
| 3 | a loss or a gradient is not finite |
| 4 | a rank was lost: killed, hung, failed or out of reach |
| 5 | stopped on request, by a signal or because the launcher is gone; the training so far is saved |
| 6 | a rank ran out of memory; in a tuning, no candidate fits |
| 7 | no candidate of a tuning ran to its end |
| 128 + n | ended at once by signal n, the second one |
"""

from collections.abc import Iterable


class UserError(ValueError):
    """A mistake in what the user wrote; the message says what was read, what is allowed and what to change."""

    exit_code = 2


def raise_mistakes(mistakes: Iterable[str]) -> None:
    """Raise one UserError with a line for each mistake, 30 at most; do nothing if there is none."""
    if lines := list(dict.fromkeys(mistakes)):
        more = [f"and {len(lines) - 30:,} more mistakes"] if len(lines) > 30 else []
        raise UserError("\n".join(lines[:30] + more))


class NonFiniteLossError(ArithmeticError):
    """A term of the loss is infinite or NaN. Every rank stops; saved checkpoints stay as they are."""

    exit_code = 3


class StoppedError(RuntimeError):
    """The run is to stop. Every rank raises it after the same step; the message is the reason."""

    exit_code = 5


class RankError(Exception):
    """One rank ends all the others. Every rank raises it, and the rank `reporter` prints it."""

    def __init__(self, message: str, reporter: int = 0) -> None:
        super().__init__(message)
        self.reporter = reporter


class LostRankError(RankError):
    """Another rank no longer takes part."""

    exit_code = 4


class OutOfMemoryError(RankError):
    """A rank ran out of memory, of a GPU or of the host."""

    exit_code = 6


class NothingFitsError(Exception):
    """No candidate of a tuning fits into memory."""

    exit_code = 6


class TuningFailedError(Exception):
    """No candidate of a tuning ran to its end."""

    exit_code = 7


_SIGNS_OF_MEMORY = ("out of memory", "can't allocate memory", "cannot allocate memory", "bad_alloc", "alloc_failed")
"""Words of torch's allocators, CUDA's libraries, C++ and the system; most of these errors are plain RuntimeErrors."""


def exit_code(error: Exception) -> int:
    """Return the exit code of a process that this error ends: 1 for an error that this library did not foresee."""
    return getattr(error, "exit_code", 1)


def ran_out(error: Exception) -> bool:
    """Whether an error of torch, numpy, Python or the system says that no memory is free."""
    if isinstance(error, MemoryError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError | OSError) and any(sign in text for sign in _SIGNS_OF_MEMORY)


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, with the second one where the first ends with a colon."""
    first, *others = [line.strip() for line in str(error).strip().splitlines()] or [""]
    return f"{first} {others[0]}" if first.endswith(":") and others else first
