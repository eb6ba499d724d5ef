"""Out of memory: one error that says where, on which rank and host, and what to change."""

from __future__ import annotations

import contextlib
import os
import socket
import traceback
from collections.abc import Callable, Iterator

from ds_trainer.ranks import distributed
from ds_trainer.ranks.failures import OutOfMemoryError, first_line, ran_out

_ELSEWHERE = "Free memory on this host, or take one with more."


@contextlib.contextmanager
def told_if_out(where: str, told: Callable[[], str] = lambda: _ELSEWHERE) -> Iterator[None]:
    """Raise OutOfMemoryError if memory runs out inside; `told` adds, in whole sentences, what was held and the cure."""
    try:
        yield
    except Exception as error:
        if not ran_out(error):
            raise
        # the frames hold the activations, and what is still to be done needs some memory, too
        for source in (error, error.__cause__, error.__context__):
            traceback.clear_frames(source.__traceback__ if source else None)
        said = told()
        process = f"rank {distributed.rank()} (host {socket.gethostname()}, process {os.getpid()})"
        cause = first_line(error) or type(error).__name__
        raise OutOfMemoryError(f"{process} ran out of memory{where}: {cause}. {said}", distributed.rank()) from error
