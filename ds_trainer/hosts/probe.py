"""What a host tells about itself, for `launch/doctor.py`: a script that is sent to the host's python by ssh.

It needs nothing but Python and writes nothing. The request, JSON in base64, is its argument; its answer is one line of
JSON behind a mark, since a login may print things of its own.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time

MARK = "ds_trainer-doctor:"
PACKAGES = ("torch", "deepspeed", "transformers", "numpy")
_SIOCGIFADDR = 0x8915


def facts(request: dict) -> dict:
    """Versions, tools, names, addresses and clock of this host; what it sees of `project` and `token`."""
    return {
        "time": time.time(),
        "python": ".".join(str(part) for part in sys.version_info[:3]),
        "versions": versions(),
        "source": source_hash(request["project"]),
        "tools": {tool: shutil.which(tool) for tool in ("ninja", "c++")},
        "name": socket.gethostname(),
        "own_address": resolve(socket.gethostname()),
        "interfaces": interfaces(),
        "addresses": first_addresses(),
        "token": read_token(request.get("token")),
    }


def versions() -> dict:
    """The installed packages' versions, from their metadata: nothing is imported, so a broken one is told, too."""
    from importlib import metadata

    have = {found.metadata["Name"]: found.version for found in reversed([*metadata.distributions()])}
    return {package: have.get(package) for package in PACKAGES}


def source_hash(project: str) -> str | None:
    """Of the library's and the commands' source; None where the project is not there."""
    digest = hashlib.sha256()
    for part in ("ds_trainer", "launch"):
        top = os.path.join(project, part)
        if not os.path.isdir(top):
            return None
        names = [os.path.join(folder, name) for folder, _, files in os.walk(top) for name in files]
        for path in sorted(names):
            if path.endswith((".py", ".json")):
                with open(path, "rb") as file:
                    digest.update(os.path.relpath(path, project).encode() + b"\0" + file.read() + b"\0")
    return digest.hexdigest()[:12]


def resolve(name: str) -> str | None:
    try:
        return socket.gethostbyname(name)
    except (OSError, UnicodeError):  # not found; or no name at all, such as one with an empty part
        return None


def interfaces() -> dict:
    """The IPv4 address of every interface that has one."""
    import fcntl

    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                reply = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:  # it has none
                continue
            found[name] = socket.inet_ntoa(reply[20:24])
    return found


def first_addresses() -> list | None:
    """`hostname -I`, whose first one DeepSpeed takes for the ranks to meet at; None where that does not work."""
    try:
        done = subprocess.run(["hostname", "-I"], capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.split()


def read_token(path: str | None) -> dict | None:
    """What the file holds, or why it cannot be read; a network's file system may take a moment to show it."""
    if path is None:
        return None
    for last in (False, False, False, True):
        try:
            with open(path) as file:
                return {"text": file.read(), "writable": os.access(os.path.dirname(path), os.W_OK)}
        except OSError as error:
            if last:
                return {"error": error.strerror, "folder": os.path.isdir(os.path.dirname(path))}
        time.sleep(0.5)
    return None


def listen(request: dict) -> dict:
    """Listen on `port` of all addresses, say so, and wait for `callers` to come and go."""
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            server.bind(("", request["port"]))
        except OSError as error:
            return {"error": error.strerror}
        server.listen(request["callers"])
        answer({"listening": True})
        for _ in range(request["callers"]):
            caller, _ = server.accept()
            with caller:
                caller.recv(1)  # the caller leaves first: the port is free at once
    return {"done": True}


def connect(request: dict) -> dict:
    """Connect to `port` of `address`; tell the own address that it went out from."""
    try:
        with socket.create_connection((request["address"], request["port"]), timeout=request["seconds"] / 2) as call:
            return {"address": call.getsockname()[0]}
    except OSError as error:
        return {"error": error.strerror or str(error)}


def answer(value: dict) -> None:
    print(MARK + json.dumps(value), flush=True)


if __name__ == "__main__":
    asked = json.loads(base64.b64decode(sys.argv[1]))
    signal.alarm(asked["seconds"])  # nothing stays behind where the ssh is gone
    answer({"facts": facts, "listen": listen, "connect": connect}[asked["do"]](asked))
