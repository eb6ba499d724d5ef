"""Let a debugger attach to a run: rank 0 waits for one with debugpy (the extra `debug`), on this host only.

A debugger that attaches can run code as this user, so debugpy listens at 127.0.0.1 and no other address. From another
machine, forward the port by ssh. The other ranks wait for rank 0 as they always do, for at most `--timeout` seconds.
"""

import os
import time

from ds_trainer.ranks import distributed
from ds_trainer.ranks.failures import StoppedError, UserError
from ds_trainer.ranks.stopping import is_running, launchers

_HOST = "127.0.0.1"
_POLL = 0.2  # seconds


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
