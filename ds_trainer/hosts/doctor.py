"""Check the hosts of a hostfile before a run, and print one table: `launch/doctor.py`.

Each check runs on every host at once by ssh, with the variables that DeepSpeed will export there. Nothing is written
but a file with a random token into the output folder, which is removed. Torch is not loaded here, so that a broken one
is noticed too.
"""

import contextlib
import os
import secrets
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ds_trainer.files.reading import read_file
from ds_trainer.files.run_folder import check_output_folder
from ds_trainer.files.tables import aligned
from ds_trainer.files.writing import existing_above
from ds_trainer.hosts import checks, probe
from ds_trainer.hosts.checks import FAILED, OK, SKIPPED, WARNING, Row, judged, skipped
from ds_trainer.hosts.hostfile import (
    Host,
    environment_files,
    exports,
    is_misread,
    is_plain,
    parse_environment,
    read_hostfile,
)
from ds_trainer.hosts.remote import PROJECT, Remote, Reply, at_once
from ds_trainer.ranks.failures import UserError

_ALL, _HERE = "all", "this one"  # stand for a host in rows that belong to none


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


def examine(job: Job) -> list[Row]:
    """Make all checks, in the order in which one needs the other."""
    environment, exported = environment_rows()
    try:
        hosts = read_hostfile(job.hostfile)
    except UserError as error:
        cure = "write a line `NAME slots=RANKS` for each host"
        rest = Row("all others", _ALL, SKIPPED, "hostfile failed")
        return [Row("hostfile", _ALL, FAILED, str(error), cure), *environment, rest]
    addresses = {host: probe.resolve(host.address) for host in hosts}
    here = probe.facts({"project": str(PROJECT)})
    local = len(hosts) == 1 and addresses[hosts[0]] in (*here["interfaces"].values(), "127.0.0.1", "127.0.1.1")
    ranks = f"{len(hosts)} hosts, {sum(host.slots for host in hosts)} ranks"
    rows = [Row("hostfile", _ALL, OK, ranks), *environment, *([] if local else _launcher_rows())]
    rows += checks.name_rows(hosts, addresses, here["name"])
    remote = Remote(exported, () if local else job.ssh, job.timeout)
    mistakes = check_output_folder(job.output, overwrite=True) if job.output else []
    rows += [Row("output folder", _HERE, FAILED, mistake, "give another --output_dir") for mistake in mistakes]
    with contextlib.nullcontext() if mistakes or not job.output else _token(job.output) as token:
        replies = at_once(
            lambda host: remote.ask(host, "facts", token=token, known_address=addresses[host], asked=time.time()), hosts
        )
    folder = Path(token[0]).parent if token else None
    rows += [row for host, reply in replies.items() for row in _host_rows(host, reply, here, folder)]
    if local:
        unneeded = "not needed for this machine alone; deepspeed tries it unless --no_ssh_check is given"
        rows = [replace(row, result=SKIPPED, found=unneeded) if row.check == "ssh" else row for row in rows]
    broken = [row for row in rows if row.result == FAILED and row.check in ("name", "ssh", "python", "project")]
    if broken:
        why = f"{broken[0].check} failed on {broken[0].host}"
        return [*rows, *skipped(["master port", "all-reduce"], hosts, why)]
    # DeepSpeed takes the first address that `hostname -I` prints on the first host
    address = next(filter(None, [job.master_addr, *replies[hosts[0]].value["addresses"]]), hosts[0].address)
    network = network_rows(remote, hosts, address, job.master_port)
    if all(row.result == OK for row in network):
        # NCCL, and a single host, do not need the host's own name: if the all-reduce works, it is no fault
        milder = {"result": WARNING} if len(hosts) > 1 else {"result": OK, "cure": ""}
        rows = [replace(row, **milder) if (row.check, row.result) == ("own name", FAILED) else row for row in rows]
    return [*rows, *network]


def environment_rows() -> tuple[list[Row], dict[str, str]]:
    """Check what DeepSpeed will export on the hosts: `.deepspeed_env`, and variables of this shell.

    Returns the rows, and the variables that arrive as they are.
    """
    rows, configured = [], dict[str, str]()
    for path in environment_files():
        try:
            values, mistakes = parse_environment(read_file(path).decode(errors="replace"))
        except UserError as error:
            values, mistakes = {}, [str(error)]
        configured |= values
        found, cure = "\n".join(mistakes) or ", ".join(values), f"correct {path}: one NAME=VALUE a line, nothing else"
        rows.append(judged(".deepspeed_env", _HERE, not mistakes, found, cure))
    rows = rows or [Row(".deepspeed_env", _HERE, OK, "does not exist")]
    values = exports(os.environ, configured, PROJECT)
    if misread := [name for name in values if is_misread(values[name])]:
        found = f"{', '.join(misread)}: the hosts' shells would read the quote, backslash or $( in the value"
        rows.append(Row("exports", _HERE, FAILED, found, "unset it, or take these characters out"))
    return rows, {name: value for name, value in values.items() if name not in misread}


def _launcher_rows() -> list[Row]:
    """Check what DeepSpeed's launcher needs on this machine to start ranks on others."""
    pdsh = shutil.which("pdsh")
    start = "apt install pdsh; or start each host by hand, with --no_ssh --node_rank N --master_addr ADDRESS"
    wrong = [path for path in {str(PROJECT), str(Path.cwd()), sys.executable} if not is_plain(path)]
    found = f"{' and '.join(map(repr, wrong))}: DeepSpeed writes it unquoted into the hosts' shells"
    move = "move it to a path without blanks or other special characters"
    return [
        judged("pdsh", _HERE, pdsh, pdsh or "is not on the PATH, and deepspeed starts the hosts with it", start),
        judged("paths", _HERE, not wrong, found if wrong else "need no quotes", move),
    ]


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


def _host_rows(host: Host, reply: Reply, here: Mapping[str, Any], folder: Path | None) -> list[Row]:
    """Return the rows of one host; without ssh or python the checks that need them are skipped."""
    ssh = checks.ssh_row(host, reply.error if reply.ssh_failed else "")
    if reply.ssh_failed:
        return [ssh, *skipped(checks.FACT_CHECKS, [host], "ssh failed")]
    if reply.error:
        python = Row("python", host.name, FAILED, reply.error, checks.SAME_PYTHON)
        return [ssh, python, *skipped(checks.FACT_CHECKS[1:], [host], "python failed")]
    return [ssh, *checks.fact_rows(host, reply.value, here, folder)]


def network_rows(remote: Remote, hosts: Sequence[Host], address: str, port: int) -> list[Row]:
    """Check that the ranks can meet: all hosts reach the first one at `port`, and one rank of each sums a number."""
    first, *others = hosts

    def reach(host: Host) -> Reply:
        if host == first:
            return remote.ask(host, "listen", port=port, callers=len(others))
        return remote.ask(host, "connect", address=address, port=port)

    def add(host: Host) -> Reply:
        meeting = {"address": address, "port": port, "rank": hosts.index(host), "world": len(hosts)}
        return remote.ask(host, "all_reduce", **meeting)

    free = f"give another --master_port to deepspeed, or end the process that has it: ss -ltnp 'sport = :{port}'"
    reachable = "open all TCP ports between the hosts; if {0} is not an address of their common network, "
    replies = at_once(reach, hosts)
    rows = _reply_rows("master port", {first: replies.pop(first)}, free)
    if rows[0].result == FAILED:
        rows += skipped(["master port"], others, f"{port} is not free")
    else:
        rows += _reply_rows("master port", replies, f"{reachable.format(address)}give --master_addr")
    if any(row.result == FAILED for row in rows):
        return [*rows, *skipped(["all-reduce"], hosts, "master port failed")]
    cure = f"{reachable.format('that')}write into .deepspeed_env: {checks.GLOO_INTERFACE}=INTERFACE"
    return [*rows, *_reply_rows("all-reduce", at_once(add, hosts), f"{cure} (with GPUs NCCL_SOCKET_IFNAME)")]


def _reply_rows(check: str, replies: dict[Host, Reply], cure: str) -> list[Row]:
    return [
        judged(check, host.name, not reply.error, reply.error or reply.value["found"], cure)
        for host, reply in replies.items()
    ]


def table(rows: Sequence[Row]) -> str:
    """Return the rows as text; hosts with the same result share a line."""
    hosts = len({row.host for row in rows if row.check == "ssh"})
    order = list(dict.fromkeys(row.check for row in rows))
    names: dict[Row, list[str]] = {}
    for row in sorted(rows, key=lambda row: order.index(row.check)):
        names.setdefault(replace(row, host="", found=row.found.replace("\n", "; ")), []).append(row.host)
    hosts_of = {row: f"all {hosts}" if len(among) == hosts > 1 else ", ".join(among) for row, among in names.items()}
    return aligned([{**vars(row), "host": host} for row, host in hosts_of.items()])
