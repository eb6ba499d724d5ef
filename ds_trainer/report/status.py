"""`status.json` in the output folder, and the last line of a run: its state, and what a resumed run starts from.

An exit code of 0 from DeepSpeed's launcher does not prove that a run is done: a run killed by a signal may give 0 too.
`"state": "finished"` does. After a run was killed, the state remains "running", with the id of a process that is gone.
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
    """The state of this run. Every rank has one; rank 0 writes it, or the rank that reports the loss of rank 0."""

    def __init__(self, output: Path) -> None:
        self._output, self._phase, self._checkpoints = output, "", Path()
        self._begun = False

    def begin(self) -> None:
        """Note that from here on the folder belongs to this run."""
        self._begun = True
        if distributed.is_main():
            self._write("running")

    def phase(self, name: str, folder: Path) -> None:
        """Note that a phase begins, with its checkpoints in `folder`."""
        self._phase, self._checkpoints = name, folder
        self.begin()

    def finished(self, model: Path) -> None:
        """Note that the run is done, and its model is in `model`."""
        if distributed.is_main():
            self._write("finished", exit_code=0, model=str(model))
        distributed.info(f"finished: {model}")

    @contextlib.contextmanager
    def recorded(self) -> Iterator[None]:
        """Record an error that ends the run, and add to its message what a resumed run starts from."""
        try:
            yield
        except Exception as error:
            if self._begun and distributed.rank() == getattr(error, "reporter", 0):
                start = self._next_start()
                state = "stopped" if isinstance(error, StoppedError) else "failed"
                with contextlib.suppress(OSError):
                    self._write(state, exit_code=exit_code(error), message=str(error), left=start)
                # as `add_note` of Python 3.11
                error.__notes__ = [*getattr(error, "__notes__", []), f"{state}: {start}"]
            raise

    def _next_start(self) -> str:
        """Say where the next `--resume` starts."""
        if not self._phase:
            return "no phase was begun; --resume starts the first that is not finished"
        saved = Checkpoints(self._checkpoints).all()
        if saved:
            return f"{saved[-1]} is saved; --resume goes on from it, in phase {self._phase}"
        return f"phase {self._phase} has no checkpoint; --resume starts it"

    def _write(self, state: str, **more: Any) -> None:
        process = {"phase": self._phase, "host": socket.gethostname(), "process": os.getpid()}
        value = {"state": state, **process, "world_size": distributed.world_size(), **more}
        RunFolder(self._output).write_json(STATUS_FILE, value)
