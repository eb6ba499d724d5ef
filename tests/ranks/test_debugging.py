"""Remote debugging: rank 0 alone listens, at 127.0.0.1 alone, until a debugger has attached; or one clear error."""

import json
import socket
import subprocess
import sys
import threading
from typing import Any

import psutil
import pytest
from support.launching import ROOT, free_port

from ds_trainer.ranks import debugging
from ds_trainer.ranks.debugging import wait_for_debugger
from ds_trainer.ranks.failures import StoppedError, UserError

debugpy = pytest.importorskip("debugpy")


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
    watch = threading.Timer(120, process.kill)
    watch.start()
    try:
        lines = iter(process.stderr.readline, "")
        assert any(f"rank 0 waits for a debugger on 127.0.0.1:{port}" in line for line in lines)
        sockets = [one for one in psutil.net_connections("inet") if one.status == "LISTEN" and one.laddr.port == port]
        assert {one.laddr.ip for one in sockets} == {"127.0.0.1"}
        assert process.poll() is None
        with attached(port):
            code = process.wait(timeout=120)
    finally:
        watch.cancel()
        process.kill()
        process.wait()
    error = process.stderr.read()
    assert code == 0, error[-2000:]
    assert "Traceback" not in error


def test_it_waits_no_longer_than_its_launcher_lives(monkeypatch):
    """A launcher that is killed leaves its rank running, which would wait for ever."""
    for name in ("configure", "listen"):
        monkeypatch.setattr(debugpy, name, lambda *_, **__: None)
    monkeypatch.setattr(debugpy, "is_client_connected", lambda: False)
    launcher = subprocess.Popen(["sleep", "60"])
    monkeypatch.setattr(debugging, "launchers", lambda: [psutil.Process(launcher.pid)])
    launcher.kill()  # and not waited for: a zombie has ended
    with pytest.raises(StoppedError, match="its launcher is gone, and no debugger came"):
        wait_for_debugger(5678)
    launcher.wait()


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
