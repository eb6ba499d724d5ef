"""Let a debugger of another program attach to a run: debugpy (the extra `debug`), on rank 0 and this host alone.

Whoever attaches can run code as this user: nothing listens on any address but 127.0.0.1. From another machine, forward
the port by ssh. The other ranks wait for rank 0 as they always do, which `--timeout` bounds.
"""

from __future__ import annotations

import importlib.util
import os
import socket
import time

from ds_trainer.ranks import distributed
from ds_trainer.ranks.failures import StoppedError, UserError
from ds_trainer.ranks.launcher import launchers

_HOST = "127.0.0.1"
_LOOK = 0.2  # seconds between two looks for the debugger and the launcher


def debug_port_mistakes(port: int | None) -> list[str]:
    """Why no debugger could be waited for at a port; only rank 0, which is to listen, tries it."""
    if port is None or not distributed.is_main():
        return []
    if not 1 <= port <= 65535:
        return [f"--debug_port is {port}: give a port from 1 to 65535"]
    if importlib.util.find_spec("debugpy") is None:
        return ["--debug_port needs debugpy, which is not installed: pip install 'ds_trainer[debug]'"]
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as debugpy's: a port just left is free
        try:
            probe.bind((_HOST, port))
        except OSError as error:
            return [f"--debug_port {port} cannot be listened on at {_HOST}: {error.strerror}; give another"]
    return []


def wait_for_debugger(port: int) -> None:
    """Listen at the port on rank 0 until a debugger has attached; on other ranks do nothing.

    ValueError where the port cannot be listened on, StoppedError where the launcher ends meanwhile.
    """
    if not distributed.is_main():
        return
    os.environ.setdefault("PYDEVD_DISABLE_FILE_VALIDATION", "1")  # it warns of breakpoints in Python's own modules
    import debugpy

    debugpy.configure(subProcess=False)  # a compiler's process is nobody's to attach to
    try:
        debugpy.listen((_HOST, port))
    except (OSError, RuntimeError) as error:
        raise UserError(f"--debug_port {port} cannot be listened on at {_HOST}: {error}; give another") from error
    above = launchers()
    distributed.info(f"rank 0 waits for a debugger on {_HOST}:{port}")
    while not debugpy.is_client_connected():
        if not all(found.alive for found in above):
            raise StoppedError(f"rank 0: its launcher is gone, and no debugger came to {_HOST}:{port}: stopped")
        time.sleep(_LOOK)
