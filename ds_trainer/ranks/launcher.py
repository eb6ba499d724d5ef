"""Find the processes that started this rank, and notice when they end.

DeepSpeed's runner starts `deepspeed.launcher.launch`, on other hosts through ssh and a shell, and that starts the
ranks. A process that is killed leaves those below it running, so a rank watches all of them up to the one that a user
would call the launcher.
"""

import os
from dataclasses import dataclass
from pathlib import Path

_MAX_ANCESTORS = 6  # the rank's launch.py, a shell, sshd's session, the runner, and some room
_SHELLS = ("sh", "bash", "dash", "zsh", "ksh")


@dataclass(frozen=True)
class Process:
    """A process of this host; `born`, in clock ticks since boot, tells it from a later one with the same id."""

    pid: int
    parent: int
    name: str
    born: int

    @property
    def command(self) -> str:
        """The command line; empty where it cannot be read."""
        try:
            return Path(f"/proc/{self.pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            return ""

    @property
    def alive(self) -> bool:
        """Whether the process still runs."""
        now = process(self.pid)
        return now is not None and now.born == self.born


def process(pid: int) -> Process | None:
    """Return the process with this id; None where there is none, or only a zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    name = text[text.index("(") + 1 : text.rindex(")")]  # which may have blanks and brackets in it
    state, parent, *rest = text[text.rindex(")") + 2 :].split()
    return None if state in "ZX" else Process(pid, int(parent), name, int(rest[17]))


def launchers() -> list[Process]:
    """Return the processes that this rank depends on, its parent first; none where no launcher started it.

    They are the parent, whatever it is, and all processes from it up to the highest one that starts ranks. A shell in
    which a user typed the command is not among them: the user may log out while the run goes on.
    """
    chain: list[Process] = []
    highest = 0
    pid = os.getppid() if "RANK" in os.environ else 0
    while pid > 1 and len(chain) < _MAX_ANCESTORS and (ancestor := process(pid)):
        chain.append(ancestor)
        pid, is_shell = ancestor.parent, ancestor.name in _SHELLS
        if ancestor.name.startswith("sshd"):  # ssh's end of a login; above it is the server of the host
            return chain
        if "deepspeed" in ancestor.command and not is_shell:
            highest = len(chain) - 1
        elif not (is_shell and " -c " in ancestor.command):  # as ssh starts a command, not a shell to type into
            break
    return chain[: highest + 1]
