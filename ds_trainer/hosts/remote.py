"""Ask the hosts of a hostfile: a command by ssh with what DeepSpeed exports there, within a time limit, all at once."""

from __future__ import annotations

import base64
import contextlib
import json
import shlex
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from ds_trainer.hosts import probe as doctor_probe
from ds_trainer.hosts.hostfile import Host, export_commands

_MOST_AT_ONCE = 64
_NOT_STARTED = (126, 127)
# a login may print in any encoding, or in none
_TEXT: Mapping[str, Any] = {"encoding": "utf-8", "errors": "replace"}
T = TypeVar("T")


@dataclass(frozen=True)
class Reply:
    """What came back: a value, or in its place an error."""

    value: dict[str, Any] = field(default_factory=dict)
    error: str = ""
    ssh_failed: bool = False
    """The error is ssh's own, or its silence."""


@dataclass(frozen=True)
class Remote:
    """How to run something on a host."""

    project: str
    python: str
    exports: Mapping[str, str]
    ssh: tuple[str, ...]
    """The ssh command up to the host; empty for this machine's own shell."""
    timeout: int
    """Seconds for each command."""

    def probe(self, host: Host, what: str, **request: Any) -> Reply:
        """Have the host's python run a part of `doctor_probe`, which is sent along; `cd` may fail, as it will tell."""
        return self._ask(host, self._probe_words(what, request), Path(doctor_probe.__file__).read_text())

    def module(self, host: Host, module: str, request: Mapping[str, Any]) -> Reply:
        """Have the host's python run a module of the project there."""
        return self._ask(host, ["-m", module, _packed({**request, "seconds": self.timeout})], "")

    def ready(self, host: Host) -> str:
        """What ssh says where it cannot log in; nothing where it can."""
        try:
            words = [*self.ssh, host.name, "true"]
            done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, timeout=self.timeout, **_TEXT)
        except subprocess.TimeoutExpired:
            return self._silence()
        except OSError as error:
            return str(error)
        return "" if done.returncode == 0 else _last_line(done.stderr) or f"it ends with {done.returncode}"

    def while_listening(self, host: Host, port: int, callers: int, then: Callable[[], T]) -> tuple[Reply, T | None]:
        """Listen on a port of the host for so many callers, and meanwhile do `then`; None where it cannot listen."""
        words = self._command(host, self._probe_words("listen", {"port": port, "callers": callers}))
        with tempfile.TemporaryFile("w+", **_TEXT) as errors:
            try:
                process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, **_TEXT)
            except OSError as error:
                return Reply(error=str(error)), None
            watch = threading.Timer(self.timeout, process.kill)
            watch.start()
            try:
                said = self._listening(process)
                if said.get("listening"):
                    return Reply(said), then()
            finally:
                watch.cancel()
                process.kill()
                process.wait()
                assert process.stdout is not None
                process.stdout.close()
            errors.seek(0)
            return Reply(said, said.get("error") or _last_line(errors.read()) or "no answer"), None

    def _listening(self, process: subprocess.Popen[str]) -> dict[str, Any]:
        """Send the probe; its answer, empty where there is none."""
        assert process.stdin is not None
        assert process.stdout is not None
        # where the process has ended, its own words say why
        with contextlib.suppress(OSError), process.stdin as pipe:
            pipe.write(Path(doctor_probe.__file__).read_text())
        return next(filter(None, map(_answer, process.stdout)), {})

    def _probe_words(self, what: str, request: Mapping[str, Any]) -> list[str]:
        asked = {"do": what, "project": self.project, "seconds": self.timeout, **request}
        return ["-", _packed(asked)]

    def _command(self, host: Host, words: Sequence[str]) -> list[str]:
        python = shlex.join([self.python, "-u", *words])
        script = " ".join([*export_commands(self.exports), f"cd {shlex.quote(self.project)} 2>/dev/null;", python])
        return [*self.ssh, host.name, script] if self.ssh else ["bash", "-c", script]

    def _ask(self, host: Host, words: Sequence[str], sent: str) -> Reply:
        try:
            done = subprocess.run(
                self._command(host, words), input=sent, capture_output=True, timeout=self.timeout + 5, **_TEXT
            )
        except subprocess.TimeoutExpired:
            return Reply(error=self._silence(), ssh_failed=True)
        except OSError as error:
            return Reply(error=str(error), ssh_failed=True)
        answers = list(filter(None, map(_answer, done.stdout.splitlines())))
        if answers and "error" not in answers[-1]:
            return Reply(answers[-1])
        if answers:
            return Reply(answers[-1], answers[-1]["error"])
        ssh_failed = bool(self.ssh) and done.returncode == 255
        if done.returncode in _NOT_STARTED:
            return Reply(error=f"{self.python} cannot be started: {_last_line(done.stderr)}")
        return Reply(error=_last_line(done.stderr) or f"it ends with {done.returncode}", ssh_failed=ssh_failed)

    def _silence(self) -> str:
        return f"no answer within {self.timeout} s"


def at_once(call: Callable[[Host], T], hosts: Iterable[Host]) -> dict[Host, T]:
    """The call for every host, in parallel."""
    hosts = list(hosts)
    with ThreadPoolExecutor(max_workers=min(_MOST_AT_ONCE, max(1, len(hosts)))) as pool:
        return dict(zip(hosts, pool.map(call, hosts), strict=True))


def _packed(request: Mapping[str, Any]) -> str:
    return base64.b64encode(json.dumps(dict(request)).encode()).decode()


def _answer(line: str) -> dict[str, Any] | None:
    return json.loads(line.removeprefix(doctor_probe.MARK)) if line.startswith(doctor_probe.MARK) else None


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""
