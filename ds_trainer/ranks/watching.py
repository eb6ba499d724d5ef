"""What became of the other ranks: a notice board in the store of their rendezvous.

A collective only says that somebody is missing. So a rank that fails posts why, all others say where they are, and
those that wait in a collective name the one that does not.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from ds_trainer.ranks import distributed
from ds_trainer.ranks.failures import LostRankError, NonFiniteLossError, OutOfMemoryError, StoppedError
from ds_trainer.ranks.launcher import process

_LOOK = 0.5  # seconds between two looks at the board
_GRACE = 5.0  # seconds for all to post
_HUNG = 15.0  # seconds after which a rank that others gave up ends itself

_OUT = "out of memory"
"""The state of a rank that ended for want of it."""

_SIGNS = ("gloo", "nccl", "connection", "timed out", "timeout", "socket", "rendezvous")
"""What errors of collectives speak of; most are plain RuntimeErrors."""


class RankWatch:
    """This rank's place at the board. Every rank makes one, after all have joined."""

    def __init__(self) -> None:
        from torch.distributed import PrefixStore, distributed_c10d

        # its own connection: a wait of another thread would block the one that a process group uses
        self._board: Any = PrefixStore("ds_trainer", distributed_c10d._get_default_store().clone())  # type: ignore[attr-defined]
        mine = {"host": socket.gethostname(), "pid": os.getpid()}
        self._roster: list[dict[str, Any]] = distributed.broadcast(distributed.gather(mine))
        self._main = threading.main_thread().ident
        self._over = threading.Event()
        self._posts: dict[int, dict[str, Any]] = {}
        threading.Thread(target=self._watch, name="rank-watch", daemon=True).start()

    def close(self) -> None:
        self._over.set()

    def explained(self, error: Exception) -> Exception:
        """The error to end with: this rank's own, or who was lost, where it only says that somebody was."""
        if isinstance(error, NonFiniteLossError | StoppedError):
            return error  # every rank has it
        lost = _is_of_a_collective(error)
        if not (lost and self._starved()):  # known already, it needs no board, which is gone where rank 0 is
            with contextlib.suppress(RuntimeError):
                if isinstance(error, OutOfMemoryError):
                    self._post(_OUT, str(error))
                    if error.teller == distributed.rank():  # of several ranks that run out the first one tells
                        error.teller = int(self._board.compare_set("teller", "", str(distributed.rank())))
                else:
                    self._post("waits" if lost else "failed", _first_line(error))
            self._gather_posts()
        if not lost:
            return error
        if starved := self._starved():
            return starved
        missing = self._missing() or self._busy()
        text = "; ".join(missing.values()) or f"a rank was lost, and none can be named: {_first_line(error)}"
        teller = next((r for r in range(distributed.world_size()) if r not in missing or self._told_itself(r)), 0)
        return LostRankError(text, teller)

    def _starved(self) -> OutOfMemoryError | None:
        """The error of a rank that ran out of memory and tells it, for this rank, which lacks it now, to end with."""
        posts = [(rank, post["text"]) for rank, post in list(self._posts.items()) if post["state"] == _OUT]
        return OutOfMemoryError(posts[0][1], posts[0][0]) if posts else None

    def _told_itself(self, rank: int) -> bool:
        return self._posts.get(rank, {}).get("state") == "failed"

    def _missing(self) -> dict[int, str]:
        """The ranks that failed or are not there, and what is known of them."""
        there = {distributed.rank(), *self._posts}
        found = {rank: self._absence(rank) for rank in range(len(self._roster)) if rank not in there}
        failed = {rank: post["text"] for rank, post in list(self._posts.items()) if post["state"] == "failed"}
        return found | {rank: f"{self._who(rank)} failed: {text}" for rank, text in failed.items()}

    def _busy(self) -> dict[int, str]:
        """The ranks that neither fail nor wait for others: they hang, if none is missing."""
        busy = {rank: post["text"] for rank, post in list(self._posts.items()) if post["state"] == "busy"}
        return {rank: f"{self._who(rank)} hangs, in {text}" for rank, text in busy.items()}

    def _absence(self, rank: int) -> str:
        own = self._roster[rank]
        if own["host"] == socket.gethostname() and process(own["pid"]) is None:
            return f"{self._who(rank)} is gone: it was killed, by hand or for want of memory"
        return f"{self._who(rank)} does not answer: it is stopped, or its host is down or cut off"

    def _who(self, rank: int) -> str:
        return f"rank {rank} (host {self._roster[rank]['host']}, process {self._roster[rank]['pid']})"

    def _post(self, state: str, text: str) -> None:
        self._board.set(f"post/{distributed.rank()}", json.dumps({"state": state, "text": text}))
        self._board.add("posts", 1)

    def _gather_posts(self) -> None:
        """Read the board until all are on it: other ranks see this one's post, and write their own."""
        end = time.monotonic() + _GRACE
        while time.monotonic() < end:
            if not self._read() or len(self._posts) == distributed.world_size():
                return
            time.sleep(_LOOK / 5)

    def _read(self) -> bool:
        """Take over what is posted; False where the board cannot be reached: it is rank 0's."""
        try:
            for rank in range(distributed.world_size()):
                if self._board.check([f"post/{rank}"]):
                    self._posts[rank] = json.loads(self._board.get(f"post/{rank}"))
        except RuntimeError:
            return False
        return True

    def _watch(self) -> None:
        """Once another rank has posted, say where this one is; end it if it hangs."""
        while not self._over.wait(_LOOK):
            try:
                if not self._board.add("posts", 0):
                    continue
                self._read()  # before the post that the others wait for: they may end then, and the board with rank 0
                if not self._board.check([f"post/{distributed.rank()}"]):
                    self._post(*self._whereabouts())
                self._read()
            except RuntimeError:
                pass  # rank 0 is gone, and with it the board
            if not self._over.wait(_HUNG):
                if self._starved():  # with NCCL a rank waits on the device, and no error wakes it
                    os._exit(OutOfMemoryError.exit_code)
                with contextlib.suppress(OSError):
                    faulthandler.dump_traceback(all_threads=True)
                    others = "; ".join(self._missing().values()) or "others have ended"
                    sys.stderr.write(f"rank {distributed.rank()} hangs, and ends too: {others}\n")
                    sys.stderr.flush()
                os._exit(LostRankError.exit_code)

    def _whereabouts(self) -> tuple[str, str]:
        frame = sys._current_frames().get(self._main or 0)
        files: list[str] = []
        while frame is not None:
            files.append(
                f"{frame.f_code.co_qualname if sys.version_info >= (3, 11) else frame.f_code.co_name} "
                f"({frame.f_code.co_filename}, line {frame.f_lineno})"
            )
            frame = frame.f_back
        waits = any("torch/distributed" in place for place in files[:6])
        return ("waits", "") if waits else ("busy", files[0] if files else "code of its own")


@contextlib.contextmanager
def watched() -> Iterator[None]:
    """While the ranks work together, errors name the rank that caused them."""
    if distributed.world_size() == 1:
        yield
        return
    watch = RankWatch()
    try:
        yield
    except Exception as error:
        explained: Any = watch.explained(error)
        explained.teller = getattr(explained, "teller", 0)
        if explained is error:
            raise
        raise explained from error
    finally:
        watch.close()


def rendezvous(join: Callable[[], None], timeout: int) -> None:
    """Join the other ranks; LostRankError where they do not come in time."""
    try:
        join()
    except Exception as error:
        if distributed.world_size() == 1 or not _is_of_a_collective(error):
            raise
        place = ":".join(os.environ.get(name, "?") for name in ("MASTER_ADDR", "MASTER_PORT"))
        raise LostRankError(
            f"rank {distributed.rank()} (host {socket.gethostname()}): the {distributed.world_size()} ranks have not "
            f"found each other at {place} within {timeout} s: {_first_line(error)}",
            distributed.rank(),
        ) from error


def _is_of_a_collective(error: Exception) -> bool:
    from torch.distributed import DistError

    text = str(error).lower()
    return isinstance(error, DistError) or (isinstance(error, RuntimeError) and any(sign in text for sign in _SIGNS))


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
