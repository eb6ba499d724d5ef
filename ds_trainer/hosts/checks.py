"""The checks of `launch/doctor.py`: the answers of a host become rows, each with a result and, if need be, a cure."""

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ds_trainer.files.redaction import redacted
from ds_trainer.hosts.hostfile import Host
from ds_trainer.hosts.remote import PROJECT

OK, FAILED, WARNING, SKIPPED = "ok", "FAILED", "warning", "skipped"
FACT_CHECKS = ("python", "versions", "project", "own name", "build tools", "clock", "output folder")
"""The checks that need only the facts of one host."""
SAME_PYTHON = "install the same version at the same path on every host"
_CLOCK_SECONDS = 60  # includes the way of the question, by a slow ssh
GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
_SSH_CURES = {
    "permission denied": "make a key without a passphrase (ssh-keygen) and copy it to the host: ssh-copy-id {host}",
    "host key verification failed": "log in once by hand, or: ssh-keyscan {address} >> ~/.ssh/known_hosts",
    "identification has changed": "the host was installed anew, or is another: ssh-keygen -R {address}, and log in",
    "connection refused": "start sshd on the host (apt install openssh-server), or give its port with --ssh_port",
    "could not resolve": "write the name into /etc/hosts of this machine, or into the DNS",
    "no such file": "install ssh on this machine (apt install openssh-client)",
    "": "is the host up, the address right, the port open to this machine? Try: ssh {host} true",
}
"""Parts of ssh's messages, and what helps; the last one is a part of every message."""


@dataclass(frozen=True)
class Row:
    """One line of the doctor's table."""

    check: str
    host: str
    result: str
    found: str
    cure: str = ""


def judged(check: str, host: str, ok: object, found: str, cure: str) -> Row:
    """Make the row of a check; one that is ok needs no cure."""
    return Row(check, host, OK, found) if ok else Row(check, host, FAILED, found, cure)


def skipped(checks: Iterable[str], hosts: Iterable[Host], why: str) -> list[Row]:
    """Make the rows of checks that another fault makes impossible."""
    return [Row(check, host.name, SKIPPED, why) for host in hosts for check in checks]


def name_rows(hosts: Sequence[Host], addresses: Mapping[Host, str | None], own_name: str) -> list[Row]:
    """Check that each host has an address that no other has, and that is not this machine's loopback."""
    rows, first = [], dict[str, Host]()
    for host in hosts:
        address, cure = addresses[host], ""
        found = address or f"{host.address} has no address"
        other = first.setdefault(found, host)
        if not address:
            cure = "correct it in the hostfile, or write it with its address into /etc/hosts of this machine"
        elif other != host:
            found, cure = f"{address} is the address of {other.name}", "keep one line, with the slots of both"
        elif address.startswith("127.") and len(hosts) > 1 and host.address != own_name:
            found, cure = f"{address} is every machine's own address", "give the name that the other hosts know it by"
        rows.append(judged("name", host.name, not cure, found, cure))
    return rows


def ssh_row(host: Host, error: str) -> Row:
    """Make the row of ssh; its message decides which cure is likely."""
    cure = next(cure for words, cure in _SSH_CURES.items() if words in error.lower())
    cure = cure.format(host=host.name, address=host.address)
    return judged("ssh", host.name, not error, error or "answers without a password", cure)


def fact_rows(host: Host, facts: Mapping[str, Any], here: Mapping[str, Any], folder: Path | None) -> list[Row]:
    """Compare the facts of one host with those of this machine; `folder` holds the token, if one was written."""
    copy = f"share {PROJECT}, or copy it to the same path on that host"
    install = f"share the environment, or install these versions there by {sys.executable} -m pip install"
    mount = f"mount one file system (such as NFS) at {folder} on every host, which the user of ssh can write to"
    output = facts["output_folder"]
    return [
        _same("python", host, {sys.executable: facts["python"]}, {sys.executable: here["python"]}, SAME_PYTHON),
        _same("versions", host, facts["versions"], here["versions"], install),
        _same("project", host, {str(PROJECT): facts["source"]}, {str(PROJECT): here["source"]}, copy),
        _own_name(host, facts),
        _build_tools(host, facts["tools"], here["tools"]["ninja"]),
        _clock(host, facts["clock"]),
        judged("output folder", host.name, not output, f"{folder} {output or 'is shared'}", mount)
        if folder
        else Row("output folder", host.name, SKIPPED, "no --output_dir that can be written here is given"),
    ]


def _same(check: str, host: Host, values: Mapping[str, Any], here: Mapping[str, Any], cure: str) -> Row:
    """Check that values on a host are those of this machine; None stands for a missing one."""
    wrong = [f"{name} {values[name] or 'is missing'}, here {here[name]}" for name in here if values[name] != here[name]]
    found = "; ".join(wrong) or ", ".join(f"{name} {value}" for name, value in here.items())
    return judged(check, host.name, not wrong, found, cure)


def _own_name(host: Host, facts: Mapping[str, Any]) -> Row:
    """Gloo listens at the address of the host's own name, unless a variable names the interface to listen at."""
    name, address, interfaces = facts["name"], facts["own_address"], facts["interfaces"]
    likely = {facts["known_address"], *facts["addresses"][:1]} - {"127.0.0.1"}
    known = next((interface for interface, its in interfaces.items() if its in likely), "INTERFACE")
    cure = f"in .deepspeed_env: {GLOO_INTERFACE}={known} (with GPUs NCCL_SOCKET_IFNAME too)"
    if given := facts["gloo_interface"]:
        found = f"{GLOO_INTERFACE} is {given}; the interfaces are {', '.join(interfaces)}"
        return judged("own name", host.name, any(part in interfaces for part in given.split(",")), found, cure)
    found = f"{name} is {address}" if address else f"{name} has no address"
    ok = address and not address.startswith("127.")
    found += "" if ok else ", which other hosts cannot reach"
    return judged("own name", host.name, ok, found, f"write the real address into its /etc/hosts, or {cure}")


def _build_tools(host: Host, tools: Mapping[str, str | None], ninja: str | None) -> Row:
    """Check that a command by ssh can compile, and with the same `ninja` as on this machine."""
    path = f"in .deepspeed_env: PATH={os.path.dirname(ninja or 'FOLDER_OF_NINJA/')}:$PATH"
    if missing := " and no ".join(tool for tool in tools if not tools[tool]):
        found = f"no {missing} on the PATH of a command by ssh; DeepSpeed compiles parts of itself"
        return Row("build tools", host.name, FAILED, found, f"{path}, or on that host: apt install g++ ninja-build")
    if ninja not in (None, tools["ninja"]):
        found = f"ninja is {tools['ninja']}, here {ninja}: in a shared folder each compiles anew what the other has"
        return Row("build tools", host.name, WARNING, found, path)
    return Row("build tools", host.name, OK, "exist")


def _clock(host: Host, ahead: float) -> Row:
    """Check the clock: in a shared folder, ninja recompiles what a host with a fast clock has compiled."""
    if abs(ahead) < _CLOCK_SECONDS:
        return Row("clock", host.name, OK, f"agrees to {_CLOCK_SECONDS} s")
    return Row("clock", host.name, WARNING, f"is {ahead:+,.0f} s from this one", "let NTP set it: apt install chrony")


def shown(row: Row) -> Row:
    """Remove secrets, and characters that control a terminal: parts of a row are texts of other hosts."""
    found, cure = (
        "".join(char if char.isprintable() or char == "\n" else "?" for char in redacted(text))
        for text in (row.found, row.cure)
    )
    return replace(row, found=found, cure=cure)
