"""Check the hosts of a hostfile before a run, and print one table: `launch/doctor.py`.

Each check runs on every host at once, by ssh, as DeepSpeed will run the ranks there. Nothing is written but a file with
a random token into the output folder, which is removed. Torch is not loaded here, so that a broken one is found, too.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import sys
import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ds_trainer.files.whole_file import read_file
from ds_trainer.hosts import probe as doctor_probe
from ds_trainer.hosts.checks import (
    FACT_CHECKS,
    FAILED,
    Row,
    Setting,
    all_reduce_row,
    check_facts,
    check_names,
    common_interface,
    connect_row,
    path_row,
    port_row,
    skipped,
    ssh_row,
)
from ds_trainer.hosts.hostfile import Host, environment_files, exports, misread, parse_environment, read_hostfile
from ds_trainer.hosts.remote import Remote, Reply, at_once

PROJECT = str(Path(__file__).resolve().parent.parent)
_ALL = "all"


@dataclass(frozen=True)
class Job:
    """A checked doctor's command."""

    hostfile: Path
    output: Path | None
    ssh: tuple[str, ...]
    master_addr: str | None
    master_port: int
    timeout: int
    as_json: bool


def examine(job: Job) -> list[Row]:
    """All checks, in the order in which one needs another."""
    rows, exported = check_environment()
    try:
        hosts = read_hostfile(job.hostfile)
    except ValueError as error:
        cure = "write a line `NAME slots=RANKS` for each host: see launch/hostfile.example"
        failed = Row("hostfile", _ALL, "FAILED", str(error), cure)
        return [failed, *rows, skipped("all others", _ALL, "hostfile failed")]
    ranks = f"{len(hosts)} hosts, {sum(host.slots for host in hosts)} ranks"
    addresses = {host: doctor_probe.resolve(host.address) for host in hosts}
    here = doctor_probe.facts({"project": PROJECT})
    local = len(hosts) == 1 and addresses[hosts[0]] in (*here["interfaces"].values(), "127.0.0.1", "127.0.1.1")
    names = check_names(hosts, addresses, here["name"])
    used = [] if local else [_pdsh(), path_row(list(dict.fromkeys((PROJECT, os.getcwd(), sys.executable))))]
    rows = [Row("hostfile", _ALL, "ok", ranks), *rows, *used, *names]
    ssh = () if local else job.ssh
    remote = Remote(PROJECT, sys.executable, exported, ssh, job.timeout)
    rows += [_local_ssh(job, hosts[0])] if local else []
    unknown = {row.host for row in names if row.result == FAILED}
    rows += [skipped(check, name, "name failed") for name in sorted(unknown) for check in ("ssh", *FACT_CHECKS)]
    with _token(job.output) as (folder, path, token):
        asked = at_once(lambda host: _facts(remote, host, path), [host for host in hosts if host.name not in unknown])
    facts = {host: reply.value for host, reply in asked.items() if not reply.error}
    interface = common_interface(facts, addresses)
    setting = Setting(hosts, here, remote.exports, PROJECT, sys.executable, token, folder, interface)
    for host, reply in asked.items():
        rows += _host_rows(host, reply, setting, local)
    rows += [Row("output folder", _ALL, "FAILED", folder, "give another --output_dir")] if path and not token else []
    between = _between(job, remote, setting, facts, rows)
    if all(row.result == "ok" for row in between):  # NCCL does not go by a host's own name
        harmless = ("own name", FAILED)
        rows = [replace(row, result="warning") if (row.check, row.result) == harmless else row for row in rows]
    return [*rows, *between]


def check_environment() -> tuple[list[Row], dict[str, str]]:
    """The rows of what DeepSpeed exports on the hosts, from files and from this shell, and what of it can be."""
    rows, said = [], dict[str, str]()
    for path in environment_files():
        try:
            values, mistakes = parse_environment(read_file(path).decode(errors="replace"))
        except ValueError as error:
            values, mistakes = {}, [str(error)]
        said |= values
        found = "\n".join(mistakes) or ", ".join(values) or "is empty"
        cure = f"correct {path}: one NAME=VALUE a line and nothing else" if mistakes else ""
        rows.append(Row(".deepspeed_env", "this one", "FAILED" if mistakes else "ok", found, cure))
    rows = rows or [Row(".deepspeed_env", "this one", "ok", "there is none")]
    values = exports(os.environ, said, PROJECT)
    wrong = misread(values)
    if wrong:
        found = f"{', '.join(wrong)}: a quote, a backslash or $( in it would be read by the hosts' shells"
        rows.append(Row("exports", "this one", "FAILED", found, "unset it, or take these characters out"))
    return rows, {name: value for name, value in values.items() if name not in wrong}


def _pdsh() -> Row:
    if path := shutil.which("pdsh"):
        return Row("pdsh", "this one", "ok", path)
    cure = "apt install pdsh; or start each host by hand, with --no_ssh --node_rank N --master_addr ADDRESS"
    return Row("pdsh", "this one", "FAILED", "deepspeed starts the hosts with it, and it is not on the PATH", cure)


def _local_ssh(job: Job, host: Host) -> Row:
    """This machine alone needs no ssh, but DeepSpeed tries it before it starts."""
    error = Remote("", "", {}, job.ssh, job.timeout).ready(host)
    if not error:
        return ssh_row(host, "")
    cure = "run deepspeed with --no_ssh_check --master_addr 127.0.0.1, or without the hostfile"
    return Row("ssh", host.name, "warning", f"{error}: not needed here, but deepspeed wants it", cure)


@contextlib.contextmanager
def _token(output: Path | None) -> Iterator[tuple[str, str | None, str]]:
    """A file with a random text in the output folder, or in the nearest folder above: folder, path and text.

    Without an output folder there is none; where it cannot be written, the folder is the reason and the text empty.
    """
    if output is None:
        yield "", None, ""
        return
    above = (output.absolute(), *output.absolute().parents)
    folder = next(path for path in above if os.path.isdir(path))
    path, token = folder / f".ds_trainer_doctor_{secrets.token_hex(8)}", secrets.token_hex(16)
    place = output
    try:
        with contextlib.suppress(FileNotFoundError):
            os.stat(output)  # its name may be too long, or lead through a file
        place = folder
        path.write_text(token)
    except OSError as error:
        yield f"{place} cannot be written here: {error.strerror}", str(path), ""
        return
    try:
        yield str(folder), str(path), token
    finally:
        path.unlink(missing_ok=True)


def _facts(remote: Remote, host: Host, token: str | None) -> Reply:
    asked = time.time()
    reply = remote.probe(host, "facts", token=token)
    return replace(reply, value={**reply.value, "asked": asked, "answered": time.time()})


def _host_rows(host: Host, reply: Reply, setting: Setting, local: bool) -> list[Row]:
    if reply.ssh_failed:
        return [ssh_row(host, reply.error), *(skipped(check, host.name, "ssh failed") for check in FACT_CHECKS)]
    rows = [] if local else [ssh_row(host, "")]
    if reply.error:
        cure = "install the same version at the same path on every host"
        rows.append(Row("python", host.name, "FAILED", reply.error, cure))
        return [*rows, *(skipped(check, host.name, "python failed") for check in FACT_CHECKS[1:])]
    return [*rows, *check_facts(host, reply.value, setting)]


def _between(
    job: Job, remote: Remote, setting: Setting, facts: Mapping[Host, Mapping[str, Any]], rows: Sequence[Row]
) -> list[Row]:
    """The checks of what is between hosts; they need all of them."""
    hosts = setting.hosts
    broken = [row for row in rows if row.result == FAILED and row.check in ("name", "ssh", "python", "project")]
    if broken:
        why = f"{broken[0].check} failed on {broken[0].host}"
        return [skipped(check, host.name, why) for check in ("master port", "all-reduce") for host in hosts]
    address = job.master_addr or next(iter(facts[hosts[0]]["addresses"] or []), None)
    if not address and len(hosts) == 1:
        address = "127.0.0.1"
    if not address:
        cure = "give deepspeed, and this command, --master_addr ADDRESS"
        first = Row("master port", hosts[0].name, "FAILED", "`hostname -I` there gives no address", cure)
        return [first, *(skipped("all-reduce", host.name, "master port failed") for host in hosts)]
    ports = check_ports(remote, hosts, address, job.master_port)
    if any(row.result == FAILED for row in ports):
        return [*ports, *(skipped("all-reduce", host.name, "master port failed") for host in hosts)]
    return [*ports, *check_all_reduce(remote, setting, address, job.master_port)]


def check_ports(remote: Remote, hosts: Sequence[Host], address: str, port: int) -> list[Row]:
    """The first host can listen on the port, and the others reach it."""
    first, *others = hosts

    def call(host: Host) -> Reply:
        return remote.probe(host, "connect", address=address, port=port)

    listening, calls = remote.while_listening(first, port, len(others), lambda: at_once(call, others))
    rows = [port_row(first, port, listening.error)]
    if calls is None:
        return [*rows, *(skipped("master port", host.name, f"{port} is not free") for host in others)]
    return [*rows, *(connect_row(host, f"{address}:{port}", reply.error) for host, reply in calls.items())]


def check_all_reduce(remote: Remote, setting: Setting, address: str, port: int) -> list[Row]:
    """One rank on every host, summed over all, by torch alone."""
    ranks = {host: rank for rank, host in enumerate(setting.hosts)}
    meeting = {"address": address, "port": port, "world": len(ranks)}
    replies = at_once(
        lambda host: remote.module(host, "ds_trainer.hosts.rank", {**meeting, "rank": ranks[host]}), setting.hosts
    )
    return [all_reduce_row(host, reply.value, reply.error, setting) for host, reply in replies.items()]


def table(rows: Sequence[Row], width: int | None = None) -> str:
    """The rows under each other; hosts with the same finding share one, found and cure are wrapped to the width."""
    width = width or shutil.get_terminal_size((160, 24)).columns
    hosts = len({row.host for row in rows if row.check == "ssh"})
    merged: dict[tuple[str, str, str, str], list[str]] = {}
    for row in rows:
        merged.setdefault((row.check, row.result, row.found, row.cure), []).append(row.host)
    order = list(dict.fromkeys(row.check for row in rows))
    cells = [("check", "host", "result", "found", "cure")]
    for (check, result, found, cure), names in sorted(merged.items(), key=lambda item: order.index(item[0][0])):
        where = f"all {hosts}" if len(names) == hosts > 1 else ", ".join(names)
        cells.append((check, where, result, found, cure))
    lengths = [max(len(line[column]) for line in cells) for column in range(3)]
    lengths[1] = min(lengths[1], 24)
    rest = max(60, width - sum(lengths) - 8)
    needed = [max(len(part) for line in cells for part in line[column].split("\n")) for column in (3, 4)]
    found_length = needed[0] if sum(needed) <= rest else min(needed[0], max(rest * 2 // 5, rest - needed[1]))
    lengths += [found_length, min(needed[1], rest - found_length)]
    return "\n".join(line for row in cells for line in _lines(row, lengths))


def _lines(cells: Sequence[str], lengths: Sequence[int]) -> Iterator[str]:
    columns = [
        [part for line in cell.split("\n") for part in textwrap.wrap(line, length, break_on_hyphens=False) or [""]]
        for cell, length in zip(cells, lengths, strict=True)
    ]
    for number in range(max(map(len, columns))):
        parts = [column[number] if number < len(column) else "" for column in columns]
        yield "  ".join(part.ljust(length) for part, length in zip(parts, lengths, strict=True)).rstrip()
