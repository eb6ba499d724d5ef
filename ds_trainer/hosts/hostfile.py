"""Read the hostfile and `.deepspeed_env`, the two files about hosts that DeepSpeed's launcher reads.

The checks are stricter than DeepSpeed's, which trains on this machine alone where the hostfile is missing, reads
`slots=4x` as 4, and sends a comment in `.deepspeed_env` to the hosts' shells, where it swallows the command.
"""

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from ds_trainer.files.messages import quoted
from ds_trainer.files.reading import read_file
from ds_trainer.ranks.failures import UserError, raise_mistakes

EXAMPLE = "worker-1 slots=8"
_LABEL = r"\w([\w-]{0,61}\w)?"
_NAME = re.compile(rf"([A-Za-z_][\w.-]*@)?{_LABEL}(\.{_LABEL})*", re.ASCII)
_MISREAD = re.compile(r"[\"`\\]|\$\(")
_PLAIN = re.compile(r"[\w@%+=:,./-]+", re.ASCII)
"""A word that means the same to a shell with and without quotes."""
_EXPORTED = ("MLFLOW", "PYTHON", "MV2", "UCX")
"""DeepSpeed exports those variables of the shell whose names start with one of these."""


@dataclass(frozen=True)
class Host:
    """A line of a hostfile: the name as ssh takes it, perhaps USER@NAME, and the number of ranks."""

    name: str
    slots: int

    @property
    def address(self) -> str:
        """The name without the user."""
        return self.name.rpartition("@")[2]


def read_hostfile(path: Path) -> list[Host]:
    """Return the hosts in the order of the hostfile, which is the order of the ranks.

    Raises UserError with every mistake, one a line.
    """
    if not path.is_file():
        raise UserError(f"{path} does not exist: DeepSpeed would only warn, and train on this machine alone")
    try:
        text = read_file(path).decode()
    except UnicodeDecodeError:
        raise UserError(f"{path} is not UTF-8: save it as plain text") from None
    hosts, mistakes = parse_hostfile(text)
    if not hosts and not mistakes:
        mistakes = [f"{path} names no host: write a line for each, such as {EXAMPLE}"]
    raise_mistakes(mistakes)
    return hosts


def parse_hostfile(text: str) -> tuple[list[Host], list[str]]:
    """Return the hosts of a hostfile, and its mistakes with their line numbers."""
    hosts, mistakes, lines = list[Host](), list[str](), dict[str, int]()
    for number, line in enumerate(text.split("\n"), start=1):
        words = line.split("#")[0].split()
        if not words:
            continue
        slots = re.fullmatch(r"slots=([1-9][0-9]{0,5})", words[-1])
        if not _NAME.fullmatch(words[0]):
            mistakes.append(f"line {number}: {quoted(words[0])} is no host name or IPv4 address")
        elif len(words) != 2 or not slots:
            mistakes.append(f"line {number}: {quoted(line.strip())} is not of the form {EXAMPLE!r}")
        elif words[0] in lines:
            mistakes.append(f"line {number}: {words[0]} is in line {lines[words[0]]} already")
        else:
            hosts.append(Host(words[0], int(slots[1])))
            lines[words[0]] = number
    return hosts, mistakes


def environment_files() -> list[Path]:
    """Return the existing files whose lines DeepSpeed exports on every host."""
    name = os.environ.get("DS_ENV_FILE", ".deepspeed_env")
    paths = dict.fromkeys(folder.absolute() / name for folder in (Path.home(), Path()))
    return [path for path in paths if path.is_file()]


def parse_environment(text: str) -> tuple[dict[str, str], list[str]]:
    """Return the variables of a `.deepspeed_env`, and its mistakes by line number.

    The mistakes show nothing of the lines, which may hold secrets.
    """
    values, mistakes = {}, []
    for number, line in enumerate(text.splitlines(), start=1):
        name, equals, value = (part.strip() for part in line.partition("="))
        if not equals or not re.fullmatch(r"[A-Za-z_]\w*", name):
            mistakes.append(f"line {number} is not NAME=VALUE; blank lines and comments are not allowed either")
        elif is_misread(value):
            mistakes.append(f"line {number}: the hosts' shells would read the quote, backslash or $( in the value")
        else:
            values[name] = value
    return values, mistakes


def exports(environment: Mapping[str, str], configured: Mapping[str, str], project: Path) -> dict[str, str]:
    """Return the variables that DeepSpeed exports on the hosts.

    They are some of this shell's `environment`, the path of the project, and those `configured` in `.deepspeed_env`.
    """
    path = ":".join([str(project), *filter(None, [environment.get("PYTHONPATH")])])
    shell = {name: value for name, value in environment.items() if name.startswith(_EXPORTED)}
    return {**shell, "PYTHONPATH": path, **configured}


def is_misread(value: str) -> bool:
    """Whether a shell would act on a character of the value between double quotes, where DeepSpeed writes it."""
    return _MISREAD.search(value) is not None


def is_plain(path: str) -> bool:
    """Whether a shell takes the path as it is without quotes around it, which is how DeepSpeed writes it."""
    return _PLAIN.fullmatch(path) is not None


def export_commands(values: Mapping[str, str]) -> Iterator[str]:
    """Yield shell commands that export the values, quoted as by DeepSpeed: `$PATH` is the host's own."""
    for name, value in values.items():
        yield f"export {name}={value};" if not value or is_plain(value) else f'export {name}="{value}";'
