"""Ask the hosts of a hostfile by ssh: all at once, with the variables that DeepSpeed exports, within a time limit."""

import base64
import json
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from ds_trainer.hosts import probe
from ds_trainer.hosts.hostfile import Host, export_commands

PROJECT = Path(__file__).resolve().parents[2]
_NOT_STARTED = (126, 127)  # the exit codes of a shell that cannot start a program
T = TypeVar("T")


@dataclass(frozen=True)
class Reply:
    """A host's answer, or an error; `ssh_failed` where the error is one of ssh, or the host has sent nothing."""

    value: dict[str, Any] = field(default_factory=dict)
    error: str = ""
    ssh_failed: bool = False


@dataclass(frozen=True)
class Remote:
    """How to run this python on a host; `ssh` is the command without the host, or empty for this machine's shell."""

    exports: Mapping[str, str]
    ssh: tuple[str, ...]
    timeout: int
    """Seconds for each command."""

    def ask(self, host: Host, function: str, **request: Any) -> Reply:
        """Run a function of `probe.py` with the host's python. The script is sent along, so the host needs no copy."""
        values = {"project": str(PROJECT), "seconds": self.timeout, **request}
        packed = base64.b64encode(json.dumps(values).encode()).decode()
        python = shlex.join([sys.executable, "-u", "-", function, packed])
        # where the project does not exist, the facts say so
        shell = " ".join([*export_commands(self.exports), f"cd {shlex.quote(str(PROJECT))} 2>/dev/null;", python])
        command = [*self.ssh, host.name, shell] if self.ssh else ["bash", "-c", shell]
        try:
            done = subprocess.run(
                command,
                input=Path(probe.__file__).read_text(),
                capture_output=True,
                timeout=self.timeout + 5,
                encoding="utf-8",
                errors="replace",  # a login may print in any encoding
            )
        except subprocess.TimeoutExpired:
            return Reply(error=f"no answer within {self.timeout} s", ssh_failed=True)
        except OSError as error:
            return Reply(error=str(error), ssh_failed=True)
        for line in done.stdout.splitlines():
            if line.startswith(probe.MARK):
                value = json.loads(line.removeprefix(probe.MARK))
                return Reply(value, value.get("error", ""))
        *_, last = [f"it ends with {done.returncode}", *filter(str.strip, done.stderr.splitlines())]
        if done.returncode in _NOT_STARTED:
            return Reply(error=f"{sys.executable} cannot be started: {last.strip()}")
        return Reply(error=last.strip(), ssh_failed=bool(self.ssh) and done.returncode == 255)  # ssh's own exit code


def at_once(call: Callable[[Host], T], hosts: Sequence[Host]) -> dict[Host, T]:
    """Call a function for every host in parallel."""
    with ThreadPoolExecutor(max_workers=min(64, len(hosts))) as pool:
        return dict(zip(hosts, pool.map(call, hosts), strict=True))
