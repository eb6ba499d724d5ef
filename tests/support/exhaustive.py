"""Every combination, or each method once and representatives of the rest: `pytest --exhaustive` runs all."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import TypeVar

EXHAUSTIVE = "DS_TRAINER_EXHAUSTIVE_TESTS"
"""The environment variable that `--exhaustive` sets, for the drivers that tests start as well."""
T = TypeVar("T")


def exhaustive() -> bool:
    return EXHAUSTIVE in os.environ


def chosen(cases: Iterable[T], represents: Callable[[T], bool]) -> list[T]:
    """All cases, or those that represent the others."""
    return [case for case in cases if exhaustive() or represents(case)]
