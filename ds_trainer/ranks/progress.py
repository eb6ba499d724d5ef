"""How far a slow part of the work has come: a bar of rank 0, which moves on a terminal and is rare in a log file."""

import sys
from collections.abc import Iterable, Iterator
from typing import TypeVar

from tqdm import tqdm

from ds_trainer.ranks import distributed

_SECONDS_BETWEEN_LINES = 10.0
"""In a log file each state of the bar is a line. Work that is done sooner writes none."""

T = TypeVar("T")


def progress(items: Iterable[T], doing: str, unit: str, total: int | None = None) -> Iterator[T]:
    """Yield the items, and show how many of them are done: `progress(layers, "cutting", "layer")`.

    `doing` says what is done to an item, and `unit` what one is called. `total` is the number of items where they have
    no length; without it only those that are done are counted.
    """
    wait = 0.0 if sys.stderr.isatty() else _SECONDS_BETWEEN_LINES
    yield from tqdm(
        items,
        desc=doing,
        unit=f" {unit}",
        total=total,
        leave=False,
        delay=wait,
        mininterval=max(wait, 0.1),
        disable=not distributed.is_main(),
        dynamic_ncols=True,
    )
