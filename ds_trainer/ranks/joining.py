"""Surround the work of several ranks: they meet, and an error names the rank that is lost or ran out of memory."""

import contextlib
import json
import os
import socket
import traceback
from collections.abc import Callable, Iterator
from typing import Any

from ds_trainer.ranks import distributed
from ds_trainer.ranks.failures import OutOfMemoryError, RankError, first_line, ran_out
from ds_trainer.ranks.watching import rendezvous, watched


def silence_transformers() -> None:
    """Keep transformers from logging and drawing progress bars: this library reports itself what a user needs."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


@contextlib.contextmanager
def joined(timeout: int = distributed.TIMEOUT) -> Iterator[None]:
    """Join the other ranks, which may keep each other waiting for `timeout` seconds, and leave them at the end.

    `transformers` is silenced, which would print on every rank what this library prints on one. An error that only
    reports that a rank is missing is replaced by one that names the rank and the cause.
    """
    silence_transformers()
    rendezvous(lambda: distributed.start(timeout), timeout)
    try:
        with watched(), told_if_out(""):
            yield
    except RankError:  # a process group without one of its ranks cannot be left in order
        distributed.free_shared_memory()
        raise
    except BaseException:
        distributed.stop()
        raise
    distributed.stop()


@contextlib.contextmanager
def told_if_out(
    where: str, advice: Callable[[], str] = lambda: "Free memory on this host, or take one with more."
) -> Iterator[None]:
    """Raise OutOfMemoryError where memory runs out inside.

    Its message has `where`, such as " in the evaluation", and `advice`: whole sentences on what was held and the cure.
    """
    try:
        yield
    except Exception as error:
        if not ran_out(error):
            raise
        # the frames hold the activations, and the message and what follows need some memory too
        for source in (error, error.__cause__, error.__context__):
            traceback.clear_frames(source.__traceback__ if source else None)
        process = f"rank {distributed.rank()} (host {socket.gethostname()}, process {os.getpid()})"
        cause = first_line(error) or type(error).__name__
        message = f"{process} ran out of memory{where}: {cause}. {advice()}"
        raise OutOfMemoryError(message, distributed.rank()) from error


def print_json(value: dict[str, Any]) -> None:
    """Print JSON on rank 0's standard output."""
    if distributed.is_main():
        print(json.dumps(value, indent=2), flush=True)
