"""Learn why a collective failed: which rank is lost, and what happened to it.

The error of a collective only says that some rank is missing, and often only some ranks raise it. So the ranks share a
notice board, a part of the key-value store by which they met, with at most one notice for each rank:

1. A rank that ends with an error posts a notice: "failed" with its error, "waits" where the error is only that a
   collective failed, or "out of memory".
2. A thread of every other rank sees the first notice, and posts where its main thread is: it "waits" in a collective,
   or is "busy" in another line of code.
3. The rank of step 1 gives the others five seconds to post. Then a rank without a notice is gone or stopped, and a
   rank that failed is the cause. If neither exists, a busy rank hangs.
4. A rank may wait for ever, because some collectives have no timeout. Its thread ends it after 15 more seconds.

Rank 0 holds the store: when its process ends, no rank can read the board. So every rank reads it before it posts.
"""

import contextlib
import faulthandler
import json
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from typing import Any

from ds_trainer.ranks import distributed
from ds_trainer.ranks.failures import LostRankError, NonFiniteLossError, OutOfMemoryError, StoppedError, first_line
from ds_trainer.ranks.stopping import is_running

_POLL = 0.5  # seconds between two looks at the board
_GRACE = 5.0  # seconds that all ranks have to post
_HUNG = 15.0  # seconds after the first notice in which a rank must have ended by itself

_FAILED, _WAITS, _BUSY, _OUT = "failed", "waits", "busy", "out of memory"
"""The states of ranks on the board."""

_SIGNS = ("gloo", "nccl", "connection", "timed out", "timeout", "socket", "rendezvous")
"""Words in the errors of collectives, by which they are recognised: most of them are plain RuntimeErrors."""


class RankWatch:
    """This rank's access to the notice board, and the thread that reads it. Every rank makes one after all have met."""

    def __init__(self) -> None:
        from torch.distributed import PrefixStore, distributed_c10d

        # a second connection: a store serves one request at a time, and on the first one a process group may wait
        self._board: Any = PrefixStore("ds_trainer", distributed_c10d._get_default_store().clone())  # type: ignore[attr-defined]
        self._roster = distributed.broadcast(distributed.gather((socket.gethostname(), os.getpid())))
        self._notices: dict[int, list[str]] = {}
        """State and text of each rank that has posted. Both threads replace the dict, and never change it."""
        self.over = threading.Event()
        """Ends the thread when it is set."""
        threading.Thread(target=self._watch, name="rank-watch", daemon=True).start()

    def explained(self, error: Exception) -> Exception:
        """Return the error to end with: this one, or a better one that names the lost rank."""
        if isinstance(error, NonFiniteLossError | StoppedError):
            return error  # every rank raises it, so none is lost
        # an error of a collective is an effect, whose cause is on another rank; any other error is a cause itself
        in_collective, out = _is_of_a_collective(error), isinstance(error, OutOfMemoryError)
        # if the thread has read the cause already, the board is not needed; and it may be gone together with rank 0
        if not (in_collective and self._texts(_OUT)):
            with contextlib.suppress(RuntimeError):
                self._post(_OUT if out else _WAITS if in_collective else _FAILED, str(error) if out else _named(error))
                if isinstance(error, OutOfMemoryError):  # where several ranks run out, the first to post prints it
                    error.reporter = int(self._board.compare_set("reporter", "", str(error.reporter)))
            # whoever returns ends its process, and rank 0 takes the board along: first all say what they know
            end = time.monotonic() + _GRACE
            while time.monotonic() < end and self._read() and len(self._notices) < distributed.world_size():
                time.sleep(_POLL / 5)
        if not in_collective:
            return error
        for rank, text in self._texts(_OUT).items():
            return OutOfMemoryError(text, rank)
        lost = self._lost() or {
            rank: f"{self._who(rank)} hangs, in {text}" for rank, text in self._texts(_BUSY).items()
        }
        message = "; ".join(lost.values()) or f"a rank was lost, and none can be named: {_named(error)}"
        # one rank prints for all: the first that is not lost itself, or that failed and so is still there to say it
        able_to_print = [rank for rank in range(len(self._roster)) if rank not in lost or rank in self._texts(_FAILED)]
        return LostRankError(message, next(iter(able_to_print), 0))

    def _texts(self, state: str) -> dict[int, str]:
        """Return the texts of the ranks that posted a state."""
        return {rank: text for rank, (posted, text) in self._notices.items() if posted == state}

    def _lost(self) -> dict[int, str]:
        """Describe the ranks that failed, or have posted nothing."""
        lost = {rank: f"{self._who(rank)} failed: {text}" for rank, text in self._texts(_FAILED).items()}
        for rank, (host, pid) in enumerate(self._roster):
            if rank == distributed.rank() or rank in self._notices:
                continue
            state = "does not answer: it is stopped, or its host is down or cut off"
            if host == socket.gethostname() and not is_running(pid):
                state = "is gone: it was killed, by hand or because memory ran out"
            lost[rank] = f"{self._who(rank)} {state}"
        return lost

    def _who(self, rank: int) -> str:
        host, pid = self._roster[rank]
        return f"rank {rank} (host {host}, process {pid})"

    def _post(self, state: str, text: str) -> None:
        self._board.set(f"post/{distributed.rank()}", json.dumps([state, text]))
        self._board.add("posts", 1)

    def _read(self) -> bool:
        """Read the board; False where it cannot be reached, because rank 0 has ended."""
        try:
            posted = [rank for rank in range(len(self._roster)) if self._board.check([f"post/{rank}"])]
            self._notices = {rank: json.loads(self._board.get(f"post/{rank}")) for rank in posted}
        except RuntimeError:
            return False
        return True

    def _watch(self) -> None:
        """Run the thread: once another rank has posted, post where this rank is, and end it if it hangs."""
        while not self.over.wait(_POLL):
            with contextlib.suppress(RuntimeError):  # rank 0 has ended, and the board with it
                if not self._board.add("posts", 0):
                    continue
                # read before posting: the others wait for this notice, and may then end, rank 0 and its board included
                self._read()
                if not self._board.check([f"post/{distributed.rank()}"]):
                    self._post(*_whereabouts())
                self._read()
            # once a rank is lost, a collective may never end: NCCL waits on the device, and some have no timeout
            if not self.over.wait(_HUNG):
                self._end()

    def _end(self) -> None:
        """End this process, whose main thread does not come back."""
        if self._texts(_OUT):  # another rank prints it; with NCCL this one waits on the device, and no error wakes it
            os._exit(OutOfMemoryError.exit_code)
        with contextlib.suppress(OSError):
            faulthandler.dump_traceback(all_threads=True)
            others = "; ".join(self._lost().values()) or "others have ended"
            print(f"rank {distributed.rank()} hangs, and ends too: {others}", file=sys.stderr, flush=True)
        os._exit(LostRankError.exit_code)


def _whereabouts() -> tuple[str, str]:
    """Return whether the main thread waits in a collective or is busy, and in which line."""
    # a collective waits in C++, so the Python frames nearest to it tell what the main thread is in
    frames = traceback.extract_stack(sys._current_frames()[threading.main_thread().ident or 0])[::-1]
    if any("torch/distributed" in frame.filename for frame in frames[:6]):
        return _WAITS, ""
    return _BUSY, f"{frames[0].name} ({frames[0].filename}, line {frames[0].lineno})"


@contextlib.contextmanager
def naming_lost_ranks() -> Iterator[None]:
    """Replace an error that another rank caused by one that names this rank and the cause."""
    if distributed.world_size() == 1:
        yield
        return
    watch = RankWatch()
    try:
        yield
    except Exception as error:
        explained: Any = watch.explained(error)
        explained.reporter = getattr(explained, "reporter", 0)
        if explained is error:
            raise
        raise explained from error
    finally:
        watch.over.set()


@contextlib.contextmanager
def naming_missing_ranks(timeout: int) -> Iterator[None]:
    """Let the error of ranks that have not met within `timeout` seconds name their meeting place."""
    try:
        yield
    except Exception as error:
        if distributed.world_size() == 1 or not _is_of_a_collective(error):
            raise
        place = ":".join(os.environ.get(name, "?") for name in ("MASTER_ADDR", "MASTER_PORT"))
        raise LostRankError(
            f"rank {distributed.rank()} (host {socket.gethostname()}): the {distributed.world_size()} ranks have not "
            f"met at {place} within {timeout} s: {_named(error)}",
            distributed.rank(),
        ) from error


def _is_of_a_collective(error: Exception) -> bool:
    from torch.distributed import DistError

    text = str(error).lower()
    return isinstance(error, DistError) or (isinstance(error, RuntimeError) and any(sign in text for sign in _SIGNS))


def _named(error: Exception) -> str:
    return f"{type(error).__name__}: {first_line(error)}"
