"""What ends a run beside a user's mistake, with the exit code it has.

| code | meaning |
|---|---|
| 0 | done |
| 1 | an error that this library did not foresee, with its traceback |
| 2 | a mistake in what the user wrote: files, flags, data |
| 3 | a loss or a gradient is not finite |
| 4 | a rank was lost: killed, hung, failed or out of reach |
| 5 | stopped as asked, by a signal or because the launcher is gone; what was trained is saved |
| 128 + n | ended at once by signal n, the second one |
"""

from __future__ import annotations


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
