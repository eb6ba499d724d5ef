"""What a command of several ranks has around it: the ranks meet, and an error says which of them is lost."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

from ds_trainer.ranks import distributed
from ds_trainer.ranks.failures import LostRankError, OutOfMemoryError
from ds_trainer.ranks.out_of_memory import told_if_out
from ds_trainer.ranks.watching import rendezvous, watched


@contextlib.contextmanager
def joined(timeout: int = distributed.TIMEOUT) -> Iterator[None]:
    """Among the other ranks, and without `transformers` telling on every rank what this library tells on one.

    An error that only says that a rank is missing becomes one that says which, and why.
    """
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    rendezvous(lambda: distributed.start(timeout), timeout)
    try:
        with watched(), told_if_out(""):
            yield
    except (LostRankError, OutOfMemoryError):  # a process group without one of its ranks cannot be left in order
        distributed.free_shared_memory()
        raise
    except BaseException:
        distributed.stop()
        raise
    distributed.stop()


def print_json(value: dict[str, Any]) -> None:
    """Print JSON on rank 0's standard output."""
    if distributed.is_main():
        print(json.dumps(value, indent=2), flush=True)
