"""Check the hosts of a hostfile before a run: `launch/doctor.py`.

Every host is asked at once, by ssh as DeepSpeed's launcher starts the ranks, with the variables that it will export.
Nothing is written but a file with a random token into the output folder, which is removed. Torch is not loaded here,
so that a broken one is noticed too. What is not checked is the traffic of a real collective.
"""

import base64
import contextlib
import json
import os
import secrets
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ds_trainer.doctor import probe
from ds_trainer.doctor.hostfile import Host, export_commands, exported_variables, read_hostfile
from ds_trainer.files.run_folder import check_output_folder
from ds_trainer.files.writing import existing_above
from ds_trainer.ranks.failures import UserError

PROJECT = Path(__file__).resolve().parents[2]
OK, FAILED, SKIPPED = "ok", "FAILED", "skipped"
_SSH_CURES = {
    "permission denied": "make a key without a passphrase (ssh-keygen) and copy it to the host: ssh-copy-id {0}",
    "host key verification failed": "log in once by hand, or: ssh-keyscan {0} >> ~/.ssh/known_hosts",
    "connection refused": "start sshd on the host (apt install openssh-server), or give its port with --ssh_port",
    "": "is the host up, its name known, the port open, the same python at the same path? Try: ssh {0} true",
}
"""Parts of ssh's messages, and what helps; the last one is a part of every message."""


@dataclass(frozen=True)
class Job:
    """A checked command of the doctor."""

    hostfile: Path
    output: Path | None
    ssh: tuple[str, ...]
    """The ssh command without the host."""
    master_addr: str | None
    master_port: int
    timeout: int
    """Seconds for each command on a host."""
    as_json: bool


@dataclass(frozen=True)
class Row:
    """One line of the doctor's table."""

    check: str
    host: str
    result: str
    found: str
    cure: str = ""


def examine(job: Job) -> list[Row]:
    """Make all checks: the files, this machine, each host, and whether the ranks can meet."""
    mistakes: list[str] = []
    try:
        hosts = read_hostfile(job.hostfile)
        exported = exported_variables(PROJECT, mistakes)
    except UserError as error:
        return [Row("hostfile", "all", FAILED, str(error), "write a line `NAME slots=RANKS` for each host")]
    rows = [Row("hostfile", "all", OK, f"{len(hosts)} hosts, {sum(host.slots for host in hosts)} ranks")]
    rows += [Row(".deepspeed_env", "this one", FAILED, line, "write one NAME=VALUE a line") for line in mistakes]
    is_local = len(hosts) == 1 and hosts[0].address in ("localhost", "127.0.0.1", probe.socket.gethostname())
    if not is_local and not shutil.which("pdsh"):
        found = "is not on the PATH, and deepspeed starts the hosts by it"
        rows.append(Row("pdsh", "this one", FAILED, found, "apt install pdsh; or see --no_ssh in docs/many_hosts.md"))
    wrong = check_output_folder(job.output, overwrite=True) if job.output else []
    rows += [Row("output folder", "this one", FAILED, mistake, "give another --output_dir") for mistake in wrong]

    def ask(host: Host, function: str, **request: Any) -> dict[str, Any]:
        return _ask(job, exported, () if is_local else (*job.ssh, host.name), function, request)

    with (
        ThreadPoolExecutor(max_workers=len(hosts)) as pool,
        contextlib.nullcontext() if wrong or not job.output else _token(job.output) as token,
    ):
        answers = list(pool.map(lambda host: ask(host, "facts", token=token), hosts))
        here = probe.facts({"project": str(PROJECT)})
        for host, answer in zip(hosts, answers, strict=True):
            faults = list(_faults(host, answer, here, is_alone=len(hosts) == 1))
            rows += faults or [Row("host", host.name, OK, "answers, and has the versions of this one")]
        if any("error" in answer for answer in answers):
            return [*rows, Row("master port", "all", SKIPPED, "a host does not answer")]
        # DeepSpeed takes the first address that `hostname -I` prints on the first host
        address = next(filter(None, [job.master_addr, *answers[0]["addresses"]]), hosts[0].address)
        meeting = [pool.submit(ask, hosts[0], "listen", port=job.master_port, callers=len(hosts) - 1)]
        meeting += [pool.submit(ask, host, "connect", address=address, port=job.master_port) for host in hosts[1:]]
        replies = [reply.result().get("error") for reply in meeting]
    taken = "give another --master_port to deepspeed, or end the process that has it"
    closed = f"open all TCP ports between the hosts; is {address} an address that all reach? If not: --master_addr"
    for host, fault in zip(hosts, replies, strict=True):
        cure = taken if host is hosts[0] else closed
        is_well = Row("master port", host.name, OK, f"{address}:{job.master_port} is reached")
        rows.append(Row("master port", host.name, FAILED, fault, cure) if fault else is_well)
    return rows


def _ask(
    job: Job, exported: dict[str, str], ssh: tuple[str, ...], function: str, request: dict[str, Any]
) -> dict[str, Any]:
    """Run a function of `probe.py` with the host's python, to which the script is sent; an answer may be an error."""
    values = {"project": str(PROJECT), "seconds": job.timeout, **request}
    packed = base64.b64encode(json.dumps(values).encode()).decode()
    python = shlex.join([sys.executable, "-u", "-", function, packed])
    shell = " ".join([*export_commands(exported), f"cd {shlex.quote(str(PROJECT))} 2>/dev/null;", python])
    try:
        done = subprocess.run(
            [*ssh, shell] if ssh else ["bash", "-c", shell],
            input=Path(probe.__file__).read_text(encoding="utf-8"),
            capture_output=True,
            timeout=job.timeout + 5,
            encoding="utf-8",
            errors="replace",  # a login may print in any encoding
        )
    except subprocess.TimeoutExpired:
        return {"error": f"no answer within {job.timeout} s"}
    except OSError as error:
        return {"error": str(error)}
    for line in done.stdout.splitlines():
        if line.startswith(probe.MARK):
            return dict(json.loads(line.removeprefix(probe.MARK)))
    *_, last = [f"it ends with {done.returncode}", *filter(str.strip, done.stderr.splitlines())]
    is_missing = done.returncode in (126, 127)  # the exit codes of a shell that cannot start a program
    return {"error": f"{sys.executable} cannot be started: {last.strip()}" if is_missing else last.strip()}


def _faults(host: Host, answer: Mapping[str, Any], here: Mapping[str, Any], is_alone: bool) -> Iterator[Row]:
    """Compare a host's answer with the facts of this machine, `here`, and yield a row for each fault."""
    if error := answer.get("error"):
        cure = next(cure for words, cure in _SSH_CURES.items() if words in error.lower())
        yield Row("ssh", host.name, FAILED, error, cure.format(host.name))
        return
    there = answer["versions"]
    wrong = [
        f"{name} {there.get(name) or 'is missing'}, here {version}"
        for name, version in here["versions"].items()
        if there.get(name) != version
    ]
    if wrong:
        cure = f"share {PROJECT} and the environment, or install the same at the same paths"
        yield Row("versions", host.name, FAILED, "; ".join(wrong), cure)
    name, address = answer["name"], answer["own_address"]
    if not is_alone and not answer["gloo_interface"] and (not address or address.startswith("127.")):
        found = f"{name} is {address or 'without an address'} there, which other hosts cannot reach"
        cure = "write the real address into its /etc/hosts, or GLOO_SOCKET_IFNAME=INTERFACE into .deepspeed_env"
        yield Row("own name", host.name, FAILED, found, f"{cure} (with GPUs NCCL_SOCKET_IFNAME too)")
    if missing := " and no ".join(tool for tool, path in answer["tools"].items() if not path):
        cure = f"in .deepspeed_env: PATH={os.path.dirname(sys.executable)}:$PATH; or apt install g++ ninja-build"
        found = f"no {missing} on the PATH of a command by ssh; DeepSpeed compiles parts of itself"
        yield Row("build tools", host.name, FAILED, found, cure)
    if not answer["sees_output"]:
        cure = "mount one file system (such as NFS) there on every host, which the user of ssh can write to"
        yield Row("output folder", host.name, FAILED, "is another folder than here, or cannot be written", cure)


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
