"""Ask a host about itself: a script that `launch/doctor.py` sends to the host's python by ssh.

It needs nothing but Python 3.8, so that an older one than ours can still say its version, and writes nothing. Its
arguments are the name of a function and the request, which is JSON in base64. Its answer is one line of JSON behind a
mark, because a login may print other lines.
"""

import base64
import contextlib
import hashlib
import json
import os
import platform
import signal
import socket
import subprocess
import sys
import time
from importlib import metadata

MARK = "ds_trainer-doctor:"
PACKAGES = ("torch", "deepspeed", "transformers", "numpy")


def facts(request: dict) -> dict:
    """Return versions and addresses of this host, and whether it sees the file `token` of another host."""
    # from the metadata, because a broken package cannot be imported; the first of two of a name is the one in use
    installed = {package.metadata["Name"]: package.version for package in reversed([*metadata.distributions()])}
    digest, top = hashlib.sha256(), os.path.join(request["project"], "ds_trainer")
    for path in sorted(os.path.join(folder, name) for folder, _, names in os.walk(top) for name in names):
        if path.endswith((".py", ".json")):
            with open(path, "rb") as file:
                digest.update(os.path.relpath(path, top).encode() + b"\0" + file.read() + b"\0")
    versions = {"python": platform.python_version(), **{name: installed.get(name) for name in PACKAGES}}
    addresses = []
    # DeepSpeed makes the ranks meet at the first address that `hostname -I` prints on the first host
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        found = subprocess.run(["hostname", "-I"], capture_output=True, text=True, timeout=10, check=True)
        addresses = found.stdout.split()
    return {
        "versions": {**versions, top: digest.hexdigest()[:12] if os.path.isdir(top) else None},
        "addresses": addresses,
        "sees_output": sees_token(*request["token"]) if request.get("token") else True,
    }


def sees_token(path: str, text: str) -> bool:
    """Whether this host sees a file of another host, and can write to its folder."""
    for _ in range(4):  # a network file system may take a moment to show a new file
        with contextlib.suppress(OSError), open(path) as file:
            if file.read() == text:
                return os.access(os.path.dirname(path), os.W_OK)
        time.sleep(0.5)
    return False


def listen(request: dict) -> dict:
    """Listen on `port` of all addresses until all `callers` have come, or half of the time limit is over."""
    end = time.monotonic() + request["seconds"] / 2
    with socket.socket() as server, contextlib.suppress(TimeoutError):  # a caller that did not come reports it
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            server.bind(("", request["port"]))
        except OSError as error:
            return {"error": f"port {request['port']}: {error.strerror}"}
        server.listen(request["callers"])
        for _ in range(request["callers"]):
            server.settimeout(max(0.1, end - time.monotonic()))
            caller, _ = server.accept()
            with caller:
                caller.recv(1)  # the caller closes first, so that the port is free at once
    return {}


def connect(request: dict) -> dict:
    """Connect to `port` of `address`, whose listener may take a moment to start."""
    address, end = (request["address"], request["port"]), time.monotonic() + request["seconds"] / 2
    while True:
        try:
            socket.create_connection(address, max(0.1, end - time.monotonic())).close()
            return {}
        except OSError as error:
            if time.monotonic() >= end:
                return {"error": "{}:{}: {}".format(*address, error.strerror or error)}
        time.sleep(0.2)


if __name__ == "__main__":
    request = json.loads(base64.b64decode(sys.argv[2]))
    signal.alarm(request["seconds"])  # or the process would stay behind where ssh is cut off
    answer = {"facts": facts, "listen": listen, "connect": connect}[sys.argv[1]](request)
    print(MARK + json.dumps(answer), flush=True)
