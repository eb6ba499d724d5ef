"""What ends a run beside a user's mistake, with the exit code it has."""

from __future__ import annotations


class NonFiniteLossError(ArithmeticError):
    """A term of the loss is infinite or no number: every rank stops, and what was saved before stays as it is."""

    exit_code = 3
