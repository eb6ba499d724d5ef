"""Meet the ranks of this attempt, in a store that may still hold what earlier attempts wrote.

torchrun keeps one store over all its restarts when it is given `--master_port` (torch 2.13, static rendezvous): a rank
that comes first would read the addresses of dead processes, and the notices that they left.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

INIT_METHOD = "attempt://"
"""What `init_process_group` is told, once `register` was called."""

_LOOK = 0.05  # seconds between two looks at the store


def register() -> None:
    """Make INIT_METHOD known to torch."""
    from torch.distributed import register_rendezvous_handler

    register_rendezvous_handler("attempt", _rendezvous)


def _rendezvous(url: str, *, timeout: timedelta, **options: Any) -> Iterator[tuple[Any, int, int]]:
    """As `env://`, but the store holds only what the ranks of this attempt write."""
    from torch.distributed import rendezvous

    for store, rank, world_size in rendezvous("env://", timeout=timeout, **options):
        yield fresh(store, rank, world_size, timeout), rank, world_size


def fresh(store: Any, rank: int, world_size: int, timeout: timedelta) -> Any:
    """A part of `store` that no earlier attempt wrote to, the same for all ranks. Every rank calls it.

    Rank 0 names the attempt; the others answer under that name with one of their own, until rank 0 lists it. An earlier
    attempt's name, answers and list may all be there, but that list lacks the new answer.

    Raises:
        DistStoreError: not all ranks have come within `timeout`.
    """
    from torch.distributed import DistStoreError, PrefixStore

    meeting, mine, ranks = PrefixStore("attempts", store), uuid.uuid4().hex, range(1, world_size)
    meeting.set_timeout(timeout)
    if rank == 0:
        meeting.set("current", mine)
        answers = [meeting.get(f"{mine}/{other}").decode() for other in ranks]
        meeting.set(f"{mine}/met", json.dumps(answers))
        return PrefixStore(mine, store)
    end = time.monotonic() + timeout.total_seconds()
    while time.monotonic() < end:
        attempt = meeting.get("current").decode()
        meeting.set(f"{attempt}/{rank}", mine)
        if meeting.check([f"{attempt}/met"]) and mine in json.loads(meeting.get(f"{attempt}/met")):
            return PrefixStore(attempt, store)
        time.sleep(_LOOK)
    raise DistStoreError(f"rank {rank} was not met by rank 0 in time")
