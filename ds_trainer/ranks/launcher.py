"""Who started this rank, and whether they are still there.

DeepSpeed's runner starts `deepspeed.launcher.launch`, on other hosts through ssh and a shell, and that the ranks.
Killed, each leaves those below it running: so a rank looks up to the one that a user would think of as the launcher.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_FAR = 6  # generations: rank, launch, shell, sshd's session
_SHELLS = ("sh", "bash", "dash", "zsh", "ksh")


@dataclass(frozen=True)
class Process:
    """A process of this host; `born`, in ticks since boot, tells it from a later one of the same id."""

    pid: int
    parent: int
    name: str
    born: int

    @property
    def command(self) -> str:
        try:
            return Path(f"/proc/{self.pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            return ""

    @property
    def alive(self) -> bool:
        now = process(self.pid)
        return now is not None and now.born == self.born


def process(pid: int) -> Process | None:
    """The process of this id; None where there is none, or only what is left of one that ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    name = text[text.index("(") + 1 : text.rindex(")")]  # which may hold blanks and brackets
    state, parent, *rest = text[text.rindex(")") + 2 :].split()
    return None if state in "ZX" else Process(pid, int(parent), name, int(rest[17]))


def launchers() -> list[Process]:
    """The processes that this rank depends on, its parent first; none where no launcher started it.

    A shell in which a user typed the command is none of them: it may be left while the run goes on.
    """
    if "RANK" not in os.environ:
        return []
    chain = list(_ancestors())
    if not chain:
        return []
    upper = next((place for place, found in reversed(list(enumerate(chain))) if _starts_ranks(found)), 0)
    return chain[: upper + 1]


def _ancestors() -> Iterator[Process]:
    """From the parent up, as far as there are launchers and the shells between them."""
    pid = os.getppid()
    for _ in range(_FAR):
        found = process(pid) if pid > 1 else None
        if found is None:
            return
        yield found
        if _is_session(found) or not (_starts_ranks(found) or _runs_one_command(found)):
            return
        pid = found.parent


def _is_session(found: Process) -> bool:
    """Whether it is ssh's end of a login; what is above it is the host's own server."""
    return found.name.startswith("sshd")


def _runs_one_command(found: Process) -> bool:
    """Whether it is a shell that ssh gave a command to, and none that somebody types into."""
    return found.name in _SHELLS and " -c " in found.command


def _starts_ranks(found: Process) -> bool:
    return _is_session(found) or (found.name not in _SHELLS and "deepspeed" in found.command)
