"""What `launch/doctor.py` makes of what it found: one row for a check and a host, with the cure. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from ds_trainer.files.redaction import redacted
from ds_trainer.hosts.hostfile import Host, is_plain

OK, FAILED, WARNING, SKIPPED = "ok", "FAILED", "warning", "skipped"
Result = Literal["ok", "FAILED", "warning", "skipped"]
CLOCK_SECONDS = 5.0
"""More than this apart, and the logs and checkpoints of the hosts tell another order of things."""
IFNAMES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")

# What ssh says, and what then helps.
_SSH_CURES = {
    "permission denied": "make a key without a passphrase (ssh-keygen) and put it there: ssh-copy-id {host}",
    "host key verification failed": "log in once by hand and accept the key, or: ssh-keyscan {address} >> "
    "~/.ssh/known_hosts",
    "identification has changed": "the host was set up anew, or is another: ssh-keygen -R {address}, then log in once",
    "connection refused": "start sshd there (apt install openssh-server), or give its port with --ssh_port",
    "could not resolve": "write the name into /etc/hosts of this machine, or into the DNS",
    "no such file": "install ssh here (apt install openssh-client)",
}
_SSH_CURE = "is the host up, the address right, the port open to this machine? Try: ssh {host} true"


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    check: str
    host: str
    result: Result
    found: str
    cure: str = ""


@dataclass(frozen=True)
class Setting:
    """What the hosts are held against."""

    hosts: Sequence[Host]
    here: Mapping[str, Any]
    """This machine's own facts."""
    exports: Mapping[str, str]
    project: str
    python: str
    token: str
    """What is in the file that was written to the output folder; empty if none was."""
    folder: str
    """Where that file is."""
    interface: str
    """The one to the common network."""


def check_names(hosts: Sequence[Host], addresses: Mapping[Host, str | None], own_name: str) -> list[Row]:
    """Every name has an address of its own, seen from this machine, that is not this machine's loopback."""
    rows, taken = [], dict[str, Host]()
    for host in hosts:
        address = addresses[host]
        if address is None:
            cure = "correct it in the hostfile, or write it with its address into /etc/hosts here"
            rows.append(Row("name", host.name, "FAILED", f"{host.address} has no address", cure))
        elif address in taken:
            cure = "keep one line, with the slots of both"
            rows.append(Row("name", host.name, "FAILED", f"{address} is the address of {taken[address].name}", cure))
        elif address.startswith("127.") and len(hosts) > 1 and host.address != own_name:
            cure = "give the name or address that the other hosts know it by"
            rows.append(Row("name", host.name, "FAILED", f"{address} is every machine's own address", cure))
        else:
            rows.append(Row("name", host.name, "ok", address))
        taken.setdefault(address or "", host)
    return rows


def ssh_row(host: Host, error: str) -> Row:
    """What ssh's own words mean."""
    if not error:
        return Row("ssh", host.name, "ok", "answers without a password")
    cure = next((cure for words, cure in _SSH_CURES.items() if words in error.lower()), _SSH_CURE)
    return Row("ssh", host.name, "FAILED", error, cure.format(host=host.name, address=host.address))


def check_facts(host: Host, facts: Mapping[str, Any], setting: Setting) -> list[Row]:
    """The checks of what one host told of itself."""
    checks = (_python, _versions, _source, _own_name, _tools, _output_folder, _clock)
    return [check(host.name, facts, setting) for check in checks]


FACT_CHECKS = ("python", "versions", "project", "own name", "build tools", "output folder", "clock")
"""The names of these, in their order."""


def _python(host: str, facts: Mapping[str, Any], setting: Setting) -> Row:
    here = setting.here["python"]
    if facts["python"] != here:
        cure = "install the same version at the same path on every host"
        return Row("python", host, "FAILED", f"{setting.python} is {facts['python']}, here {here}", cure)
    return Row("python", host, "ok", f"{setting.python}, {here}")


def _versions(host: str, facts: Mapping[str, Any], setting: Setting) -> Row:
    here, there = setting.here["versions"], facts["versions"]
    wrong = [f"{name} {there[name] or 'is absent'}, here {here[name]}" for name in here if there[name] != here[name]]
    if wrong:
        cure = f"share the environment, or there: {setting.python} -m pip install -c constraints.txt -e ."
        return Row("versions", host, "FAILED", "; ".join(wrong), cure)
    return Row("versions", host, "ok", ", ".join(f"{name} {version}" for name, version in there.items()))


def _source(host: str, facts: Mapping[str, Any], setting: Setting) -> Row:
    cure = f"share {setting.project}, or copy it there to the same path"
    if facts["source"] is None:
        return Row("project", host, "FAILED", f"there is no {setting.project}", cure)
    if facts["source"] != setting.here["source"]:
        return Row("project", host, "FAILED", f"the source of {setting.project} differs from this one's", cure)
    return Row("project", host, "ok", f"{setting.project}, {facts['source']}")


def _own_name(host: str, facts: Mapping[str, Any], setting: Setting) -> Row:
    """Gloo listens at the address of the host's own name, unless it is given an interface."""
    name, address, given = facts["name"], facts["own_address"], setting.exports.get(IFNAMES[0], "")
    there = facts["interfaces"]
    if given and not any(part in there for part in given.split(",")):
        found = f"{IFNAMES[0]} is {given}; the interfaces are {', '.join(there)}"
        return Row("own name", host, "FAILED", found, f"correct it in .deepspeed_env: {ifname_cure(setting)}")
    if given:
        return Row("own name", host, "ok", f"{name} is {address}; {IFNAMES[0]}={given}")
    if (address is None or address.startswith("127.")) and len(setting.hosts) > 1:
        found = f"{name} is {address}" if address else f"{name} has no address"
        cure = f"give {name} its real address in /etc/hosts there, or in .deepspeed_env: {ifname_cure(setting)}"
        return Row("own name", host, "FAILED", f"{found}: the other hosts would be sent there", cure)
    return Row("own name", host, "ok", f"{name} is {address}")


def _tools(host: str, facts: Mapping[str, Any], setting: Setting) -> Row:
    lacking = [tool for tool, path in facts["tools"].items() if not path]
    if lacking:
        here = setting.here["tools"]["ninja"]
        folder = here.rpartition("/")[0] if here else "FOLDER_OF_NINJA"
        by_path = f"in .deepspeed_env: PATH={folder}:$PATH"
        cure = by_path if lacking == ["ninja"] else "apt install g++ ninja-build there"
        found = f"no {' and no '.join(lacking)} on the PATH of an ssh command, and DeepSpeed builds parts of itself"
        return Row("build tools", host, "FAILED", found, cure)
    here, there = setting.here["tools"]["ninja"], facts["tools"]["ninja"]
    if here and there != here:
        found = f"ninja is {there}, here {here}: in a shared TORCH_EXTENSIONS_DIR each builds anew what the other built"
        return Row("build tools", host, "warning", found, f"in .deepspeed_env: PATH={here.rpartition('/')[0]}:$PATH")
    return Row("build tools", host, "ok", ", ".join(facts["tools"].values()))


def _output_folder(host: str, facts: Mapping[str, Any], setting: Setting) -> Row:
    if not setting.token:
        return Row("output folder", host, "skipped", "no --output_dir is given")
    seen = facts["token"]
    cure = f"mount one shared file system (NFS, say) at {setting.folder} on every host, or write elsewhere"
    if seen.get("text") == setting.token and seen["writable"]:
        return Row("output folder", host, "ok", f"{setting.folder} is shared")
    if seen.get("text") == setting.token:
        cure = "give the user of ssh the right to write there, on every host"
        return Row("output folder", host, "FAILED", f"{setting.folder} cannot be written", cure)
    found = "is another folder than here" if seen.get("folder") else "is not there"
    return Row("output folder", host, "FAILED", f"{setting.folder} {found}", cure)


def _clock(host: str, facts: Mapping[str, Any], setting: Setting) -> Row:
    """The host's time was taken between two moments of this clock: what lies outside of them is wrong."""
    wrong = max(facts["asked"] - facts["time"], facts["time"] - facts["answered"], 0.0)
    if wrong > CLOCK_SECONDS:
        cure = "let NTP set the clocks (apt install chrony)"
        return Row("clock", host, "warning", f"{wrong:.0f} s from this one", cure)
    return Row("clock", host, "ok", f"within {max(wrong, 1):.0f} s" if wrong else "agrees")


def port_row(host: Host, port: int, error: str) -> Row:
    """Whether the first host can listen on the port where the ranks meet."""
    if error:
        cure = f"give deepspeed another --master_port, or end what has it: ss -ltnp 'sport = :{port}'"
        return Row("master port", host.name, "FAILED", f"{port}: {error}", cure)
    return Row("master port", host.name, "ok", f"{port} is free")


def connect_row(host: Host, place: str, error: str) -> Row:
    """Whether another host reaches it."""
    if error:
        cure = "open all TCP ports between the hosts; if that is an address of another network, give --master_addr"
        return Row("master port", host.name, "FAILED", f"{place}: {error}", cure)
    return Row("master port", host.name, "ok", f"{place} is reached")


def all_reduce_row(host: Host, value: Mapping[str, Any], error: str, setting: Setting) -> Row:
    if error:
        cure = "open all TCP ports between the hosts; if these are not the addresses of their common network, in "
        return Row("all-reduce", host.name, "FAILED", error, f"{cure}.deepspeed_env: {ifname_cure(setting)}")
    via = f", from {value['address']} on {value['interface']}" if value.get("address") else ""
    return Row("all-reduce", host.name, "ok", f"{value['backend']}{via}, {value['seconds']} s")


def ifname_cure(setting: Setting) -> str:
    """The line for `.deepspeed_env`."""
    return f"{IFNAMES[0]}={setting.interface} (with GPUs {IFNAMES[1]})"


def common_interface(facts: Mapping[Host, Mapping[str, Any]], addresses: Mapping[Host, str | None]) -> str:
    """The name of the hosts' interface to their common network, if it is one; else the word INTERFACE."""
    names = set()
    for host, found in facts.items():
        seen = addresses[host] or ""
        own = (found["addresses"] or [""])[0] if seen.startswith("127.") else seen
        names |= {name for name, address in found["interfaces"].items() if address == own}
    return names.pop() if len(names) == 1 else "INTERFACE"


def path_row(paths: Sequence[str]) -> Row:
    """DeepSpeed writes these unquoted into the hosts' shells."""
    if wrong := [path for path in paths if not is_plain(path)]:
        found = f"{' and '.join(map(repr, wrong))}: DeepSpeed writes it unquoted into the hosts' shells"
        return Row("paths", "this one", "FAILED", found, "move it to a path without blanks or other special characters")
    return Row("paths", "this one", "ok", "need no quotes")


def shown(row: Row) -> Row:
    """The row without secrets, and without what would steer a terminal: a part of it is what other hosts say."""
    found, cure = (
        "".join(char if char.isprintable() or char == "\n" else "?" for char in redacted(text))
        for text in (row.found, row.cure)
    )
    return replace(row, found=found, cure=cure)


def skipped(check: str, host: str, why: str) -> Row:
    return Row(check, host, "skipped", why)
