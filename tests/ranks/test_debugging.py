"""Remote debugging: rank 0 alone listens, at 127.0.0.1 alone, until a debugger has attached; or one clear error."""

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from support.launching import ROOT, environment, free_port

from ds_trainer.ranks.debugging import wait_for_debugger
from ds_trainer.ranks.failures import UserError

pytest.importorskip("debugpy")
LISTENING = "0A"


def listening(port: int) -> set[str]:
    """The local addresses, in hex as the kernel writes them, that listen at a port."""
    addresses = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *_ = line.split()
            if state == LISTENING and int(local.split(":")[1], 16) == port:
                addresses.add(local.split(":")[0])
    return addresses


def attached(port: int) -> socket.socket:
    """A debugger, as far as attaching goes: the Debug Adapter Protocol over TCP."""
    connection = socket.create_connection(("127.0.0.1", port), timeout=60)
    stream = connection.makefile("rwb")

    def exchange(command: str, wanted: str, **arguments: Any) -> None:
        """Send a request, and read up to the event or the response of that name."""
        body = json.dumps({"seq": 1, "type": "request", "command": command, "arguments": arguments}).encode()
        stream.write(b"Content-Length: %d\r\n\r\n%b" % (len(body), body))
        stream.flush()
        message: dict[str, Any] = {}
        while wanted not in (message.get("event"), message.get("command")):
            length = 0
            while (line := stream.readline().strip()) or not length:
                if line.lower().startswith(b"content-length"):
                    length = int(line.split(b":")[1])
            message = json.loads(stream.read(length))

    exchange("initialize", "initialize", adapterID="test", clientID="test")
    exchange("attach", "initialized", justMyCode=True)
    exchange("configurationDone", "attach")
    return connection


def wait_for_line(process: subprocess.Popen[str], wanted: str) -> None:
    """Read the process's errors up to a line; a process that does not write it is killed after two minutes."""
    assert process.stderr
    watch = threading.Timer(120, process.kill)
    watch.start()
    try:
        lines = []
        for line in process.stderr:
            lines.append(line)
            if wanted in line:
                return
        raise AssertionError(f"no line {wanted!r}: {''.join(lines)[-2000:]}")
    finally:
        watch.cancel()


WAITING = """
import sys
from ds_trainer.ranks import debugging, distributed
distributed.start_logging()
debugging.wait_for_debugger(int(sys.argv[1]))
"""


def test_it_listens_on_loopback_alone_and_goes_on_once_attached():
    """The kernel's table says so while it waits; a debugger attaches, and the process runs to its end."""
    port = free_port()
    process = subprocess.Popen([sys.executable, "-c", WAITING, str(port)], cwd=ROOT, stderr=subprocess.PIPE, text=True)
    try:
        wait_for_line(process, f"rank 0 waits for a debugger on 127.0.0.1:{port}")
        assert listening(port) == {"0100007F"}
        assert process.poll() is None
        with attached(port):
            code = process.wait(timeout=120)
    finally:
        process.kill()
        process.wait()
    error = process.stderr.read()
    assert code == 0, error[-2000:]
    assert "Traceback" not in error


def test_it_waits_no_longer_than_its_launcher_lives(tiny_recipe, write_json, tmp_path):
    """A launcher that is killed leaves its rank running: the command ends by itself, says why, and listens no more."""
    port = free_port()
    command = ["--deepspeed_config", "ds_configs/zero0.json", "--recipe", write_json("recipe.json", tiny_recipe)]
    command += ["--output_dir", str(tmp_path / "out"), "--dry_run", "--debug_port", str(port)]
    launcher = "import signal, subprocess, sys; print(subprocess.Popen(sys.argv[1:]).pid, flush=True); signal.pause()"
    process = subprocess.Popen(
        [sys.executable, "-c", launcher, sys.executable, "launch/train.py", *command],
        cwd=ROOT,
        env=environment() | {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"},
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    rank = os.pidfd_open(int(process.stdout.readline()))
    try:
        wait_for_line(process, f"rank 0 waits for a debugger on 127.0.0.1:{port}")
        process.kill()
        process.wait()
        ended, _, _ = select.select([rank], [], [], 30)
        assert ended
    finally:
        process.kill()
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(rank, signal.SIGKILL)
        os.close(rank)
    assert "its launcher is gone, and no debugger came" in process.stderr.read()
    assert listening(port) == set()


def test_a_port_that_is_taken_is_a_users_mistake(monkeypatch):
    """Of rank 0 alone, which listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=rf"--debug_port {port} cannot be listened on at 127\.0\.0\.1: .*another"):
            wait_for_debugger(port)
        monkeypatch.setenv("RANK", "1")
        wait_for_debugger(port)


def test_without_debugpy_the_error_says_how_to_get_it(monkeypatch):
    """It is an extra: a run without it needs none."""
    monkeypatch.setitem(sys.modules, "debugpy", None)
    with pytest.raises(UserError, match="pip install debugpy"):
        wait_for_debugger(free_port())
