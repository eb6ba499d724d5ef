"""Let the ranks of one attempt meet in a store that still holds the entries of earlier attempts.

torchrun keeps one store over all its restarts when it is given `--master_port` (torch 2.13, static rendezvous). In it,
a rank that comes before the others would read the addresses and the notices of processes that are dead.
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

    Rank 0 draws a random name for the attempt and writes it down. Each other rank reads the name, draws a random word,
    and writes it below the name as its answer. Rank 0 collects one answer of every rank into a list, and a rank whose
    word is in the list has met rank 0.

    A rank that comes before rank 0 reads the name of an earlier attempt, below which it may even see a whole list. But
    that list cannot have its word, which is new, so the rank goes on reading the name until rank 0 has replaced it.

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
