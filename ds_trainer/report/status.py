"""`status.json` in the output folder, and the last line of a run: how far it came, and what it left.

An exit code of 0 from DeepSpeed's launcher does not prove that a run is done: killed by a signal, it may give 0 too.
`"state": "finished"` does. A run that was killed says "running", of a process that is no more.
"""

from __future__ import annotations

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
    """What is known of this run; every rank has one, and rank 0's writes, or who tells of rank 0's loss."""

    def __init__(self, output: Path) -> None:
        self._output, self._phase, self._checkpoints = output, "", Path()
        self._begun = False

    def begin(self) -> None:
        """From here on the folder is this run's."""
        self._begun = True
        if distributed.is_main():
            self._write("running")

    def phase(self, name: str, folder: Path) -> None:
        """A phase begins, whose checkpoints are in `folder`."""
        self._phase, self._checkpoints = name, folder
        if distributed.is_main():
            self._write("running")

    def finished(self, model: Path) -> None:
        if distributed.is_main():
            self._write("finished", exit_code=0, model=str(model))
        distributed.info(f"finished: {model}")

    @contextlib.contextmanager
    def told(self) -> Iterator[None]:
        """Write down how the run ends, if by an error, and add to what is said of it what is left."""
        try:
            yield
        except Exception as error:
            teller = distributed.rank() == getattr(error, "teller", 0)
            if self._begun and teller:
                left = self._left()
                state = "stopped" if isinstance(error, StoppedError) else "failed"
                with contextlib.suppress(OSError):
                    self._write(state, exit_code=exit_code(error), message=str(error), left=left)
                add_note(error, f"{state}: {left}")
            raise

    def _left(self) -> str:
        """What the next `--resume` has to go on from."""
        if not self._phase:
            return "no phase was begun; --resume starts the first that is not done"
        saved = Checkpoints(self._checkpoints).all()
        if saved:
            return f"{saved[-1]} is saved; --resume goes on from it, in phase {self._phase}"
        return f"nothing of phase {self._phase} is saved; --resume starts it"

    def _write(self, state: str, **more: Any) -> None:
        own = {"phase": self._phase, "host": socket.gethostname(), "process": os.getpid()}
        RunFolder(self._output).write_json(
            STATUS_FILE, {"state": state, **own, "world_size": distributed.world_size(), **more}
        )


def add_note(error: Exception, note: str) -> None:
    """As `BaseException.add_note` of Python 3.11."""
    error.__notes__ = [*getattr(error, "__notes__", []), note]
