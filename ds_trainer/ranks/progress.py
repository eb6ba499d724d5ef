"""How far a slow part of the work has come: a bar on a terminal, and a line every few seconds elsewhere, on rank 0."""

import sys
import time
from collections.abc import Iterable, Iterator, Sized
from typing import TypeVar

from tqdm import tqdm

from ds_trainer.ranks import distributed

SECONDS_BETWEEN_LINES = 10.0
"""Work that is done sooner writes no line."""

T = TypeVar("T")


def progress(items: Iterable[T], doing: str, unit: str, total: int | None = None) -> Iterator[T]:
    """Yield the items, and show how many of them are done: `progress(layers, "cutting", "layer")`.

    `doing` says what is done to an item, and `unit` what one is called. `total` is the number of items where they have
    no length; without it only those that are done are counted.
    """
    if total is None and isinstance(items, Sized):
        total = len(items)
    if not distributed.is_main():
        yield from items
        return
    if sys.stderr.isatty():
        yield from tqdm(items, desc=doing, unit=unit, total=total, leave=False, dynamic_ncols=True)
        return
    start = last_line = time.monotonic()
    for done, item in enumerate(items):
        now = time.monotonic()
        if done and now - last_line >= SECONDS_BETWEEN_LINES:
            last_line = now
            rest = f" of {total:,} {unit}s, about {(total - done) * (now - start) / done:.0f} s to go" if total else ""
            distributed.info(f"{doing}: {done:,}{rest or f' {unit}s'}")
        yield item
