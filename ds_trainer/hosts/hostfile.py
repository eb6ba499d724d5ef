"""The files about hosts that DeepSpeed's launcher reads, the hostfile and `.deepspeed_env`: every mistake and its line.

Stricter than DeepSpeed, which starts a local run where the hostfile is missing, takes `slots=4x` for 4, and lets a
comment in `.deepspeed_env` swallow the command that is to run on the hosts.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ds_trainer.files.reading import read_file
from ds_trainer.ranks.failures import UserError

EXAMPLE = "worker-1 slots=8"
_LABEL = r"\w([\w-]{0,61}\w)?"
_NAME = re.compile(rf"([A-Za-z_][\w.-]*@)?{_LABEL}(\.{_LABEL})*", re.ASCII)
_MISREAD = re.compile(r"[\"`\\]|\$\(")
"""What DeepSpeed puts between double quotes as it is, and the hosts' shells take for their own."""
_PLAIN = re.compile(r"[\w@%+=:,./-]+", re.ASCII)
"""What a shell takes as it stands."""
_EXPORTED = ("MLFLOW", "PYTHON", "MV2", "UCX")
"""What the names of the variables start with that DeepSpeed hands on from the shell."""


@dataclass(frozen=True)
class Host:
    """A line of a hostfile."""

    name: str
    """As ssh takes it; maybe USER@NAME."""
    slots: int

    @property
    def address(self) -> str:
        """The name without the user."""
        return self.name.rpartition("@")[2]


def read_hostfile(path: Path) -> list[Host]:
    """The hosts of a hostfile, in its order, which is the ranks'; a ValueError tells every mistake, one a line."""
    if not os.path.isfile(path):
        raise UserError(f"there is no file {path}: DeepSpeed would only warn, and train on this machine alone")
    try:
        text = read_file(path).decode("utf-8")
    except UnicodeDecodeError:
        raise UserError(f"{path} is not UTF-8: save it as plain text") from None
    hosts, mistakes = parse_hostfile(text)
    if not hosts and not mistakes:
        mistakes = [f"no host in it: write a line for each, e.g. {EXAMPLE}"]
    if mistakes:
        raise UserError("\n".join(mistakes))
    return hosts


def parse_hostfile(text: str) -> tuple[list[Host], list[str]]:
    """The hosts that a hostfile's text names, and its mistakes with their line numbers."""
    seen: dict[str, int] = {}
    hosts, mistakes = [], []
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip() or line.strip().startswith("#"):
            continue
        try:
            host = _parse_line(line.strip())
        except ValueError as error:
            mistakes.append(f"line {number}: {error}")
            continue
        if host.name in seen:
            mistakes.append(f"line {number}: {host.name} is in line {seen[host.name]} already")
        seen.setdefault(host.name, number)
        hosts.append(host)
    return hosts, mistakes


def _parse_line(line: str) -> Host:
    words = line.split("#")[0].split()
    if not _NAME.fullmatch(words[0]):
        raise UserError(f"{_short(words[0])!r} is no host name or IPv4 address")
    if len(words) != 2 or not re.fullmatch(r"slots=[0-9]{1,6}", words[1]):
        raise UserError(f"{_short(line)!r} is not of the form {EXAMPLE!r}")
    slots = int(words[1].removeprefix("slots="))
    if slots == 0:
        raise UserError(f"{words[0]} has slots=0: give the number of ranks on it, or take the line out")
    return Host(words[0], slots)


def environment_files() -> list[Path]:
    """The files, of those there are, whose lines DeepSpeed exports on every host."""
    name = os.environ.get("DS_ENV_FILE", ".deepspeed_env")
    paths = dict.fromkeys(os.path.abspath(os.path.join(place, name)) for place in (os.path.expanduser("~"), "."))
    return [Path(path) for path in paths if os.path.isfile(path)]


def parse_environment(text: str) -> tuple[dict[str, str], list[str]]:
    """The variables of a `.deepspeed_env`, and its mistakes by line number; no text of a line, it may be a secret."""
    values, mistakes = {}, []
    for number, line in enumerate(text.splitlines(), start=1):
        name, equals, value = (part.strip() for part in line.partition("="))
        if not line.strip():
            mistakes.append(f"line {number} is blank: DeepSpeed stops at it")
        elif line.strip().startswith("#"):
            mistakes.append(f"line {number} is a comment: DeepSpeed knows none, and sends it to the hosts' shells")
        elif not equals or not re.fullmatch(r"[A-Za-z_]\w*", name):
            mistakes.append(f"line {number} is not of the form NAME=VALUE")
        elif _MISREAD.search(value):
            mistakes.append(f"line {number}: the value holds a quote, a backslash or $(: the remote shell reads it")
        else:
            values[name] = value
    return values, mistakes


def exports(environment: Mapping[str, str], said: Mapping[str, str], project: str) -> dict[str, str]:
    """What DeepSpeed exports on the hosts: `said` in `.deepspeed_env`, some of this shell's, the project's path."""
    path = ":".join([project, *filter(None, [environment.get("PYTHONPATH")])])
    shell = {name: value for name, value in environment.items() if name.startswith(_EXPORTED)}
    return {**shell, "PYTHONPATH": path, **said}


def misread(values: Mapping[str, str]) -> list[str]:
    """The names of the variables whose values the hosts' shells would not take as they are."""
    return [name for name, value in values.items() if _MISREAD.search(value) or not re.fullmatch(r"[A-Za-z_]\w*", name)]


def is_plain(path: str) -> bool:
    """Whether a shell takes the path as it stands, with no quotes around it, as DeepSpeed gives it."""
    return _PLAIN.fullmatch(path) is not None


def export_commands(values: Mapping[str, str]) -> Iterable[str]:
    """The shell's words for it; quoted as DeepSpeed does, so that `$PATH` means the remote one."""
    for name, value in values.items():
        plain = not value or is_plain(value)
        yield f"export {name}={value};" if plain else f'export {name}="{value}";'


def _short(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}..."
