"""Read the hostfile and `.deepspeed_env`, the two files about hosts that DeepSpeed's launcher reads.

The checks are stricter than DeepSpeed's, which trains on this machine alone where the hostfile is missing, reads
`slots=4x` as 4, and sends a comment in `.deepspeed_env` to the hosts' shells, where it swallows the command.
"""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ds_trainer.files.messages import quoted
from ds_trainer.files.reading import read_file
from ds_trainer.ranks.failures import UserError, raise_mistakes

_EXAMPLE = "worker-1 slots=8"
_LABEL = r"\w([\w-]{0,61}\w)?"
_NAME = re.compile(rf"([A-Za-z_][\w.-]*@)?{_LABEL}(\.{_LABEL})*", re.ASCII)
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
    hosts, mistakes, lines = list[Host](), list[str](), dict[str, int]()
    for number, line in enumerate(text.split("\n"), start=1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        slots = re.fullmatch(r"slots=([1-9][0-9]{0,5})", words[-1])
        if not _NAME.fullmatch(words[0]):
            mistakes.append(f"line {number}: {quoted(words[0])} is no host name or IPv4 address")
        elif len(words) != 2 or not slots:
            mistakes.append(f"line {number}: {quoted(line.strip())} is not of the form '{_EXAMPLE}'")
        elif words[0] in lines:
            mistakes.append(f"line {number}: {words[0]} is in line {lines[words[0]]} already: keep one of the two")
        else:
            hosts.append(Host(words[0], int(slots[1])))
            lines[words[0]] = number
    if not hosts and not mistakes:
        mistakes = [f"{path} names no host: write a line for each, such as {_EXAMPLE}"]
    raise_mistakes(mistakes)
    return hosts


def exported_variables(project: Path, mistakes: list[str]) -> dict[str, str]:
    """Return the variables that DeepSpeed exports on the hosts: some of this shell's, and those of `.deepspeed_env`.

    The mistakes in the file are added to `mistakes`. They show nothing of its lines, which may hold secrets.
    """
    path = ":".join(filter(None, [str(project), os.environ.get("PYTHONPATH")]))
    values = {name: value for name, value in os.environ.items() if name.startswith(_EXPORTED)} | {"PYTHONPATH": path}
    name = os.environ.get("DS_ENV_FILE", ".deepspeed_env")
    for file in dict.fromkeys(folder.absolute() / name for folder in (Path.home(), Path())):
        for number, line in enumerate(
            read_file(file).decode(errors="replace").splitlines() if file.is_file() else (), 1
        ):
            name, equals, value = (part.strip() for part in line.partition("="))
            if equals and re.fullmatch(r"[A-Za-z_]\w*", name):
                values[name] = value
            else:
                mistakes.append(f"{file}, line {number}, is not NAME=VALUE; no blank lines and comments are allowed")
    return values


def export_commands(values: dict[str, str]) -> Iterator[str]:
    """Yield shell commands that export the values, quoted as by DeepSpeed: `$PATH` is the host's own."""
    for name, value in values.items():
        yield f'export {name}="{value}";'
