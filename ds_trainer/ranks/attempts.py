"""Meet the ranks of this attempt in a store that may still hold what earlier attempts wrote.

torchrun keeps one store over all its restarts when it is given `--master_port` (torch 2.13, static rendezvous). A rank
that comes first would read the addresses of dead processes there, and the notices that they left.
"""

import contextlib
import json
import time
import uuid
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

INIT_METHOD = "attempt://"
"""The `init_method` for `init_process_group`, once `register` was called."""

_POLL = 0.05  # seconds


def register() -> None:
    """Register INIT_METHOD with torch."""
    from torch.distributed import register_rendezvous_handler

    with contextlib.suppress(RuntimeError):  # a notebook's second run has it already
        register_rendezvous_handler("attempt", _rendezvous)


def _rendezvous(url: str, *, timeout: timedelta, **options: Any) -> Iterator[tuple[Any, int, int]]:
    """Do what `env://` does, with a store that holds only what the ranks of this attempt write."""
    from torch.distributed import rendezvous

    for store, rank, world_size in rendezvous("env://", timeout=timeout, **options):
        yield fresh(store, rank, world_size, timeout), rank, world_size


def fresh(store: Any, rank: int, world_size: int, timeout: timedelta) -> Any:
    """Return a part of `store` that no earlier attempt wrote to, the same one on every rank. Every rank calls it.

    Rank 0 draws a name for the attempt. Each other rank answers below the name that it reads with a random word of its
    own, until rank 0's list has that word. A rank that reads the name of an earlier attempt may see its answers and its
    list too, but that list cannot have the new word, so the rank reads the name again.

    Raises:
        DistStoreError: not all ranks have come within `timeout`.
    """
    from torch.distributed import DistStoreError, PrefixStore

    meeting, word, others = PrefixStore("attempts", store), uuid.uuid4().hex, range(1, world_size)
    meeting.set_timeout(timeout)
    if rank == 0:
        meeting.set("current", word)
        answers = [meeting.get(f"{word}/{other}").decode() for other in others]
        meeting.set(f"{word}/met", json.dumps(answers))
        return PrefixStore(word, store)
    end = time.monotonic() + timeout.total_seconds()
    while time.monotonic() < end:
        attempt = meeting.get("current").decode()
        meeting.set(f"{attempt}/{rank}", word)
        if meeting.check([f"{attempt}/met"]) and word in json.loads(meeting.get(f"{attempt}/met")):
            return PrefixStore(attempt, store)
        time.sleep(_POLL)
    raise DistStoreError(f"rank {rank} was not met by rank 0 in time")
