"""Surround work that all ranks do together: they meet first, and an error names the rank that caused it.

Before they meet, rank 0 may wait for a debugger with debugpy (the extra `debug`), on this host only. A debugger that
attaches can run code as this user, so debugpy listens at 127.0.0.1 and no other address. From another machine, forward
the port by ssh. The other ranks wait for rank 0 as they always do, for at most `--timeout` seconds.
"""

import json
import os
import socket
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ds_trainer.ranks import distributed
from ds_trainer.ranks.failures import OutOfMemoryError, RankError, StoppedError, UserError, first_line, ran_out
from ds_trainer.ranks.stopping import is_running, launchers
from ds_trainer.ranks.watching import naming_lost_ranks, naming_missing_ranks

_HOST = "127.0.0.1"
_POLL = 0.2  # seconds


def silence_transformers() -> None:
    """Keep transformers from logging and drawing progress bars: this library reports itself what a user needs."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


@contextmanager
def joined(timeout: int = distributed.TIMEOUT) -> Iterator[None]:
    """Join the other ranks, and leave them at the end. A rank waits at most `timeout` seconds for another.

    An error that only reports that some rank is missing is replaced by one that names the rank and the cause.
    """
    silence_transformers()  # it would print its warnings on every rank
    with naming_missing_ranks(timeout):
        distributed.start(timeout)
    try:
        with naming_lost_ranks(), out_of_memory_named("", lambda: "Free memory on this host, or take one with more."):
            yield
    except RankError:
        if distributed.world_size() == 1:  # without one of its ranks, a process group could not be destroyed
            distributed.stop()
        raise
    except BaseException:
        distributed.stop()
        raise
    distributed.stop()


@contextmanager
def out_of_memory_named(where: str, advice: Callable[[], str]) -> Iterator[None]:
    """Turn every error of an allocator inside into an OutOfMemoryError.

    Its message has `where`, such as " in the evaluation", and ends with `advice`: sentences on the memory in use and
    the cure.
    """
    try:
        yield
    except Exception as error:
        if not ran_out(error):
            raise
        # the frames hold the activations, and writing the message and status.json needs some memory too
        for source in (error, error.__cause__, error.__context__):
            traceback.clear_frames(source.__traceback__ if source else None)
        process = f"rank {distributed.rank()} (host {socket.gethostname()}, process {os.getpid()})"
        cause = first_line(error) or type(error).__name__
        message = f"{process} ran out of memory{where}: {cause}. {advice()}"
        raise OutOfMemoryError(message, distributed.rank()) from error


def wait_for_debugger(port: int) -> None:
    """Listen at the port on rank 0 until a debugger has attached; do nothing on other ranks.

    Raises UserError where it cannot listen, and StoppedError where the launcher ends in the meantime.
    """
    if not distributed.is_main():
        return
    os.environ.setdefault("PYDEVD_DISABLE_FILE_VALIDATION", "1")  # it warns of breakpoints in Python's own modules
    try:
        import debugpy

        debugpy.configure(subProcess=False)  # nobody wants to attach to the compilers that DeepSpeed starts
        debugpy.listen((_HOST, port))
    except ImportError as error:
        raise UserError("--debug_port needs debugpy, which is not installed: pip install debugpy") from error
    except (OSError, RuntimeError) as error:
        raise UserError(f"--debug_port {port} cannot be listened on at {_HOST}: {error}; give another") from error
    above = launchers()
    distributed.info(f"rank 0 waits for a debugger on {_HOST}:{port}")
    while not debugpy.is_client_connected():
        if not all(map(is_running, above)):
            raise StoppedError(f"rank 0: its launcher is gone, and no debugger came to {_HOST}:{port}: stopped")
        time.sleep(_POLL)


def print_json(value: dict[str, Any]) -> None:
    """Print JSON on rank 0's standard output."""
    if distributed.is_main():
        print(json.dumps(value, indent=2), flush=True)
