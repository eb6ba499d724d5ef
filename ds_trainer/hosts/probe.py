"""Ask a host about itself: a script that `launch/doctor.py` sends to the host's python by ssh.

It needs nothing but Python 3.8, so that an older one than ours can still say its version, and writes nothing. Its
arguments are the name of a function and the request, which is JSON in base64. Its answer is one line of JSON behind a
mark, because a login may print other lines.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import hashlib
import json
import os
import platform
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
from importlib import metadata

MARK = "ds_trainer-doctor:"
PACKAGES = ("torch", "deepspeed", "transformers", "numpy")
_SIOCGIFADDR = 0x8915  # asks for the IPv4 address of an interface


def facts(request: dict) -> dict:
    """Return versions, tools, names and addresses of this host, and whether it sees `project` and `token`.

    `clock` is the seconds from `asked`, on the clock of the doctor, to now, on the clock of this host.
    """
    # from the metadata, because a broken package cannot be imported; the first of two of a name is the one in use
    installed = {package.metadata["Name"]: package.version for package in reversed([*metadata.distributions()])}
    return {
        "clock": time.time() - request.get("asked", time.time()),
        "python": platform.python_version(),
        "versions": {package: installed.get(package) for package in PACKAGES},
        "source": source_hash(request["project"]),
        "tools": {tool: shutil.which(tool) for tool in ("ninja", "c++")},
        "name": socket.gethostname(),
        "own_address": resolve(socket.gethostname()),
        "interfaces": interfaces(),
        "addresses": first_addresses(),
        "gloo_interface": os.environ.get("GLOO_SOCKET_IFNAME", ""),
        "known_address": request.get("known_address"),
        "output_folder": find_token(*request.get("token") or ()),
    }


def source_hash(project: str) -> str | None:
    """Hash the source of the library; None where the project does not exist."""
    digest, top = hashlib.sha256(), os.path.join(project, "ds_trainer")
    paths = [os.path.join(folder, name) for folder, _, files in os.walk(top) for name in files]
    for path in sorted(path for path in paths if path.endswith((".py", ".json"))):
        with open(path, "rb") as file:
            digest.update(os.path.relpath(path, project).encode() + b"\0" + file.read() + b"\0")
    return digest.hexdigest()[:12] if paths else None


def resolve(name: str) -> str | None:
    """Return the IPv4 address of a name, or None."""
    try:
        return socket.gethostbyname(name)
    except (OSError, UnicodeError):  # a UnicodeError: the name is not even valid
        return None


def interfaces() -> dict:
    """Return the IPv4 address of every interface that has one."""
    addresses = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # this interface has no IPv4 address
                reply = fcntl.ioctl(any_socket.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                addresses[name] = socket.inet_ntoa(reply[20:24])
    return addresses


def first_addresses() -> list:
    """Return what `hostname -I` prints: DeepSpeed makes the ranks meet at the first address of the first host."""
    try:
        return subprocess.run(["hostname", "-I"], capture_output=True, text=True, timeout=10, check=True).stdout.split()
    except (OSError, subprocess.SubprocessError):
        return []


def find_token(path: str = "", text: str = "") -> str:
    """Say why this host does not see the file of another host, or cannot write to its folder; "" if all is well."""
    folder = os.path.dirname(path)
    for _ in range(4 if path else 0):  # a network file system may take a moment to show a new file
        with contextlib.suppress(OSError), open(path) as file:
            if file.read() == text:
                return "" if os.access(folder, os.W_OK) else "cannot be written"
        time.sleep(0.5)
    return "is another folder than here" if os.path.isdir(folder) else "does not exist"


def listen(request: dict) -> dict:
    """Listen on `port` of all addresses until so many `callers` have come, or half of the time limit is over."""
    end = time.monotonic() + request["seconds"] / 2
    with socket.socket() as server, contextlib.suppress(TimeoutError):  # a caller that did not come reports it
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            server.bind(("", request["port"]))
        except OSError as error:
            return {"error": f"{request['port']}: {error.strerror}"}
        server.listen(request["callers"])
        for _ in range(request["callers"]):
            server.settimeout(max(0.1, end - time.monotonic()))
            caller, _ = server.accept()
            with caller:
                caller.recv(1)  # the caller closes first, so that the port is free at once
    return {"found": f"{request['port']} is free"}


def connect(request: dict) -> dict:
    """Connect to `port` of `address`, whose listener may take a moment to start."""
    address, end = (request["address"], request["port"]), time.monotonic() + request["seconds"] / 2
    place = "{}:{}".format(*address)
    while True:
        try:
            socket.create_connection(address, max(0.1, end - time.monotonic())).close()
            return {"found": f"{place} is reached"}
        except OSError as error:
            if time.monotonic() >= end:
                return {"error": f"{place}: {error.strerror or error}"}
        time.sleep(0.2)


def all_reduce(request: dict) -> dict:
    """Take part in an all-reduce as one rank; this alone imports the project, and torch, of this host."""
    try:
        from ds_trainer.hosts.rank import all_reduce

        return all_reduce(request, interfaces())
    except (RuntimeError, ValueError, ImportError, OSError) as error:
        return {"error": str(error)}


if __name__ == "__main__":
    request = json.loads(base64.b64decode(sys.argv[2]))
    signal.alarm(request["seconds"])  # or the process would stay behind where ssh is cut off
    answer = {"facts": facts, "listen": listen, "connect": connect, "all_reduce": all_reduce}[sys.argv[1]](request)
    print(MARK + json.dumps(answer), flush=True)
    os._exit(0)  # the threads of torch's backend may wait for a rank that is gone
