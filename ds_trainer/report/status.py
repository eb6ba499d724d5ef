"""`status.json` in the output folder, and the last line of a run: its state, and from where a resumed run starts.

The state "finished" proves that a run is done. An exit code of 0 from DeepSpeed's launcher does not, since a run that
was killed by a signal may give 0, too. The state of a killed run remains "running", with the id of a process that is
gone.
"""

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ds_trainer.engine.checkpoint import Checkpoints
from ds_trainer.files.run_folder import RunFolder
from ds_trainer.ranks import distributed
from ds_trainer.ranks.failures import StoppedError, exit_code

STATUS_FILE = "status.json"


class RunStatus:
    """The state of this run. Every rank has this object; rank 0 writes the file, or the rank that reports its loss."""

    def __init__(self, output: Path) -> None:
        self._output, self._phase, self._checkpoints = output, "", Path()

    def phase(self, name: str, folder: Path) -> None:
        """Record that a phase begins, with its checkpoints in `folder`: an error before it leaves the file as it is."""
        self._phase, self._checkpoints = name, folder
        if distributed.is_main():
            self._write("running")

    def finished(self, model: Path) -> None:
        """Record that the run is done, and that its model is in `model`."""
        if distributed.is_main():
            self._write("finished", exit_code=0, model=str(model))
        distributed.info(f"finished: {model}")

    @contextlib.contextmanager
    def recorded(self) -> Iterator[None]:
        """Record an error that ends the run, and add to its message from where a resumed run starts."""
        try:
            yield
        except Exception as error:
            if self._phase and distributed.rank() == getattr(error, "reporter", 0):
                start = self._next_start()
                state = "stopped" if isinstance(error, StoppedError) else "failed"
                with contextlib.suppress(OSError):
                    self._write(state, exit_code=exit_code(error), message=str(error), left=start)
                # the same as `add_note`, which Python 3.10 does not have
                error.__notes__ = [*getattr(error, "__notes__", []), f"{state}: {start}"]
            raise

    def _next_start(self) -> str:
        """Return a sentence about where the next `--resume` starts."""
        saved = Checkpoints(self._checkpoints).all()
        if saved:
            return f"{saved[-1]} is saved; --resume goes on from it, in phase {self._phase}"
        return f"phase {self._phase} has no checkpoint; --resume starts it"

    def _write(self, state: str, **more: Any) -> None:
        process = {"phase": self._phase, "host": socket.gethostname(), "process": os.getpid()}
        value = {"state": state, **process, "world_size": distributed.world_size(), **more}
        RunFolder(self._output).write_json(STATUS_FILE, value)
