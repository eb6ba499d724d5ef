"""The ranks of one attempt meet each other, whatever entries of earlier attempts the store has."""

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from torch.distributed import DistStoreError, HashStore

from ds_trainer.ranks.attempts import fresh

WORLD = 3
LONG = timedelta(seconds=60)


def attempt(store, order=range(WORLD), wait=0.05):
    """Let all ranks meet, coming in this order; return for each whether the key existed that every attempt writes."""

    def join(rank):
        place = fresh(store, rank, WORLD, LONG)
        existed = place.check([f"address/{rank}"])
        place.set(f"address/{rank}", "here")
        return existed, place

    with ThreadPoolExecutor(WORLD) as pool:
        joined = {}
        for rank in order:
            joined[rank] = pool.submit(join, rank)
            threading.Event().wait(wait)
        places = [joined[rank].result() for rank in range(WORLD)]
    assert all(place.check([f"address/{rank}" for rank in range(WORLD)]) for _, place in places), "not the same part"
    return [existed for existed, _ in places]


def test_the_next_attempt_sees_nothing_of_the_last():
    """Whichever rank comes first: three attempts in one store, rank 0 last, first and in between."""
    store = HashStore()
    for order in ((1, 2, 0), (0, 1, 2), (2, 0, 1)):
        assert attempt(store, order) == [False] * WORLD


def test_an_attempt_that_broke_off_before_all_had_met_does_no_harm():
    """Rank 2 was killed before it answered, and rank 0 while it waited: the others' answers stay in the store."""
    store = HashStore()
    with pytest.raises(DistStoreError):
        fresh(store, 0, WORLD, timedelta(seconds=0.2))
    with pytest.raises(DistStoreError, match="rank 1 was not met"):
        fresh(store, 1, WORLD, timedelta(seconds=0.2))
    assert attempt(store, (1, 2, 0)) == [False] * WORLD
