"""`launch/doctor.py`: check the hosts of a hostfile before a run.

Every host is asked at once, by ssh as DeepSpeed's launcher starts the ranks, with the variables that it will export.
Nothing is written but a file with a random token into the output folder, which is removed. Torch is not loaded here,
so that a broken one is noticed too. What is not checked is the traffic of a real collective.

The hostfile and `.deepspeed_env` are read more strictly than by DeepSpeed, which trains on this machine alone where the
hostfile is missing, reads `slots=4x` as 4, and sends a comment in `.deepspeed_env` to the hosts' shells, where it
swallows the command.
"""

import argparse
import base64
import contextlib
import json
import os
import re
import secrets
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from ds_trainer.cli import probe
from ds_trainer.cli.command import PROJECT, Parser
from ds_trainer.files.messages import Row, aligned, quoted
from ds_trainer.files.reading import read_file
from ds_trainer.files.redaction import redacted
from ds_trainer.files.run_folder import check_output_folder
from ds_trainer.files.writing import existing_above
from ds_trainer.ranks.failures import UserError, raise_mistakes

_LABEL = r"\w([\w-]{0,61}\w)?"
_NAME = re.compile(rf"([A-Za-z_][\w.-]*@)?{_LABEL}(\.{_LABEL})*", re.ASCII)
_EXPORTED = ("MLFLOW", "PYTHON", "MV2", "UCX")
"""DeepSpeed exports those variables of the shell whose names start with one of these."""


def doctor_command(arguments: Sequence[str]) -> int:
    """Check the hosts; the exit code is 0 if all is well, 1 if a check failed, 2 for a wrong flag or hostfile."""
    flags = read_doctor_flags(arguments)
    rows = [redacted(row) for row in examine(flags, read_hostfile(flags.hostfile))]
    # a host's message may hold what would move the terminal's cursor
    print(aligned([{name: "".join(filter(str.isprintable, text)) for name, text in row.items()} for row in rows]))
    return int(any(row["result"] == "FAILED" for row in rows))


def read_doctor_flags(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse a doctor's command, and add the ssh command without the host as `ssh`."""
    flags = doctor_parser().parse_args(list(arguments))
    # a host that falls silent is given up after 15 s, in place of TCP's quarter of an hour
    patience = ["-o", "BatchMode=yes", "-o", f"ConnectTimeout={min(10, flags.timeout)}"]
    patience += ["-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=2"]
    flags.ssh = ["ssh", "-T", *flags.ssh_args, *patience, *(["-p", str(flags.ssh_port)] if flags.ssh_port else [])]
    return flags


def doctor_parser() -> argparse.ArgumentParser:
    parser = Parser("doctor", "Check a hostfile's hosts before a run.")
    add = parser.add_argument
    add("--hostfile", type=Path, required=True, help="as for deepspeed: a line `NAME slots=N` a host")
    add("--output_dir", type=Path, help="the run's: must be one folder for all hosts")
    add("--ssh_port", type=int, help="as for deepspeed")
    ssh_args = "ssh's flags, as in PDSH_SSH_ARGS_APPEND, from which they are taken by default"
    add("--ssh_args", type=shlex.split, default=os.environ.get("PDSH_SSH_ARGS_APPEND", ""), help=ssh_args)
    add("--master_addr", help="as for deepspeed")
    add("--master_port", type=int, default=29500, help="as for deepspeed (29500)")
    add("--timeout", type=int, default=60, help="seconds for each command on a host (60)")
    return parser


def read_hostfile(path: Path) -> dict[str, int]:
    """Return the ranks of each host by its name as ssh takes it, in the order of the file, which is that of the ranks.

    Raises UserError with every mistake, one a line.
    """
    if not path.is_file():
        raise UserError(f"{path} does not exist: DeepSpeed would only warn, and train on this machine alone")
    hosts, mistakes = dict[str, int](), list[str]()
    for number, line in enumerate(read_file(path).decode(errors="replace").split("\n"), start=1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        slots = re.fullmatch(r"slots=([1-9][0-9]{0,5})", words[1]) if len(words) == 2 else None
        if not _NAME.fullmatch(words[0]):
            mistakes.append(f"line {number}: {quoted(words[0])} is no host name or IPv4 address")
        elif not slots:
            mistakes.append(f"line {number}: {quoted(line.strip())} is not of the form 'worker-1 slots=8'")
        elif words[0] in hosts:
            mistakes.append(f"line {number}: {words[0]} is in another line already: keep one of the two")
        else:
            hosts[words[0]] = int(slots[1])
    raise_mistakes(mistakes or ([] if hosts else [f"{path} names no host: write a line for each, worker-1 slots=8"]))
    return hosts


def examine(flags: argparse.Namespace, hosts: dict[str, int]) -> list[Row]:
    """Make all checks: this machine, each host, and whether the ranks can meet. A row is a check of a host."""
    exports, names = exported_variables(), list(hosts)
    first = names[0].rpartition("@")[2]  # without the user
    is_local = len(hosts) == 1 and first in ("localhost", "127.0.0.1", probe.socket.gethostname())
    rows = [_row("hostfile", "all", f"{len(hosts)} hosts, {sum(hosts.values())} ranks")]
    if not is_local and not shutil.which("pdsh"):
        fault = "is not on the PATH, and deepspeed starts the hosts by it"
        rows.append(_row("pdsh", "this one", fault, "apt install pdsh; or see --no_ssh in docs/many_hosts.md"))
    wrong = check_output_folder(flags.output_dir, overwrite=True) if flags.output_dir else []
    rows += [_row("output folder", "this one", mistake, "give another --output_dir") for mistake in wrong]

    def ask(host: str, function: str, **request: Any) -> dict[str, Any]:
        shell = [] if is_local else [*flags.ssh, host]
        return _ask(shell, exports, function, {"project": str(PROJECT), "seconds": flags.timeout, **request})

    with (
        ThreadPoolExecutor(max_workers=len(hosts)) as pool,
        contextlib.nullcontext() if wrong or not flags.output_dir else _token(flags.output_dir) as token,
    ):
        answers = list(pool.map(partial(ask, function="facts", token=token), names))
        here = probe.facts({"project": str(PROJECT)})["versions"]
        for host, answer in zip(names, answers, strict=True):
            faults = list(_faults(host, answer, here))
            rows += faults or [_row("host", host, "answers, and has the versions of this one")]
        if any("error" in answer for answer in answers):
            return [*rows, {"check": "master port", "host": "all", "result": "skipped", "found": "a host is silent"}]
        # DeepSpeed takes the first address that `hostname -I` prints on the first host
        address = next(filter(None, [flags.master_addr, *answers[0]["addresses"]]), first)
        meeting = [pool.submit(ask, names[0], "listen", port=flags.master_port, callers=len(hosts) - 1)]
        meeting += [pool.submit(ask, host, "connect", address=address, port=flags.master_port) for host in names[1:]]
        replies = [reply.result().get("error") for reply in meeting]
    taken = "give another --master_port to deepspeed, or end the process that has it"
    closed = f"open all TCP ports between the hosts; is {address} an address that all reach? If not: --master_addr"
    for host, error in zip(names, replies, strict=True):
        cure = taken if host == names[0] else closed
        is_well = f"{address}:{flags.master_port} is reached"
        rows.append(_row("master port", host, error, cure) if error else _row("master port", host, is_well))
    return rows


def exported_variables() -> str:
    """Return shell commands that export on a host what DeepSpeed exports there.

    These are variables of this shell and those of `.deepspeed_env`, quoted as by DeepSpeed: `$PATH` is the host's own.
    A line at which DeepSpeed stops, or that swallows its command, is a UserError, which shows nothing of the line: it
    may hold a secret.
    """
    path = ":".join(filter(None, [str(PROJECT), os.environ.get("PYTHONPATH")]))
    values = {name: value for name, value in os.environ.items() if name.startswith(_EXPORTED)} | {"PYTHONPATH": path}
    name = os.environ.get("DS_ENV_FILE", ".deepspeed_env")
    for file in dict.fromkeys(folder.absolute() / name for folder in (Path.home(), Path())):
        lines = read_file(file).decode(errors="replace").splitlines() if file.is_file() else []
        for number, line in enumerate(lines, start=1):
            name, equals, value = (part.strip() for part in line.partition("="))
            if not (equals and re.fullmatch(r"[A-Za-z_]\w*", name)):
                raise UserError(f"{file}, line {number}, is not NAME=VALUE; no blank lines and comments are allowed")
            values[name] = value
    return " ".join(f'export {name}="{value}";' for name, value in values.items())


def _row(check: str, host: str, found: str, cure: str = "") -> Row:
    """Return a row of the table, of a check that failed where there is a cure."""
    return {"check": check, "host": host, "result": "FAILED" if cure else "ok", "found": found, "cure": cure}


def _ask(ssh: list[str], exports: str, function: str, request: dict[str, Any]) -> dict[str, Any]:
    """Run a function of `probe.py` with the host's python, to which the script is sent; an answer may be an error."""
    packed = base64.b64encode(json.dumps(request).encode()).decode()
    python = shlex.join([sys.executable, "-u", "-", function, packed])
    shell = f"{exports} cd {shlex.quote(str(PROJECT))} 2>/dev/null; {python}"
    try:
        done = subprocess.run(
            [*ssh, shell] if ssh else ["bash", "-c", shell],
            input=Path(probe.__file__).read_text(encoding="utf-8"),
            capture_output=True,
            timeout=request["seconds"] + 5,
            encoding="utf-8",
            errors="replace",  # a login may print in any encoding
        )
    except subprocess.TimeoutExpired:
        return {"error": f"no answer within {request['seconds']} s"}
    except OSError as error:
        return {"error": str(error)}
    for line in done.stdout.splitlines():
        if line.startswith(probe.MARK):
            return dict(json.loads(line.removeprefix(probe.MARK)))
    *_, last = [f"it ends with {done.returncode}", *filter(str.strip, done.stderr.splitlines())]
    is_missing = done.returncode in (126, 127)  # the exit codes of a shell that cannot start a program
    return {"error": f"{sys.executable} cannot be started: {last.strip()}" if is_missing else last.strip()}


def _faults(host: str, answer: dict[str, Any], here: dict[str, str]) -> Iterator[Row]:
    """Yield a row for each fault in a host's answer; `here` has the versions of this machine."""
    if error := answer.get("error"):
        needed = f"`ssh {host} true` must end well without a question, and python be at the same path"
        yield _row("ssh", host, error, f"{needed}: see docs/many_hosts.md")
        return
    versions = answer["versions"]
    if wrong := [name for name, version in here.items() if versions.get(name) != version]:
        found = "; ".join(f"{name} {versions.get(name) or 'is missing'}, here {here[name]}" for name in wrong)
        yield _row(
            "versions", host, found, f"share {PROJECT} and the environment, or install the same at the same paths"
        )
    if not answer["sees_output"]:
        cure = "mount one file system (such as NFS) there on every host, which the user of ssh can write to"
        yield _row("output folder", host, "is another folder than here, or cannot be written", cure)


@contextlib.contextmanager
def _token(output: Path) -> Iterator[tuple[str, str]]:
    """Write a random text to a file in the output folder, or in the nearest existing folder above it.

    Yields the path and the text. The file is removed at the end.
    """
    path, text = existing_above(output).absolute() / f".ds_trainer_doctor_{secrets.token_hex(8)}", secrets.token_hex(16)
    try:
        path.write_text(text)
        yield str(path), text
    finally:
        path.unlink(missing_ok=True)
