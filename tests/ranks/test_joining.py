"""Remote debugging: rank 0 alone listens, at 127.0.0.1 alone, until a debugger has attached; or one clear error."""

import re
import socket
import subprocess
import sys
import threading
import weakref

import numpy as np
import psutil
import pytest
import torch
from support.launching import ROOT, free_port

from ds_trainer.ranks import distributed, joining
from ds_trainer.ranks.failures import OutOfMemoryError, StoppedError, UserError, exit_code
from ds_trainer.ranks.joining import out_of_memory_named, wait_for_debugger

debugpy = pytest.importorskip("debugpy")


def test_it_listens_on_loopback_alone_until_a_debugger_comes():
    """The kernel's table says so while it waits; where no debugger comes, a signal ends it."""
    port = free_port()
    waiting = (
        f"from ds_trainer.ranks import joining, distributed as d; d.start_logging(); joining.wait_for_debugger({port})"
    )
    process = subprocess.Popen([sys.executable, "-c", waiting], cwd=ROOT, stderr=subprocess.PIPE, text=True)
    watch = threading.Timer(120, process.kill)
    watch.start()
    try:
        lines = iter(process.stderr.readline, "")
        assert any(f"rank 0 waits for a debugger on 127.0.0.1:{port}" in line for line in lines)
        sockets = [one for one in psutil.net_connections("inet") if one.status == "LISTEN" and one.laddr.port == port]
        assert {one.laddr.ip for one in sockets} == {"127.0.0.1"}
        assert process.poll() is None
    finally:
        watch.cancel()
        process.kill()
        process.wait()


def test_it_waits_until_a_debugger_has_attached_or_its_launcher_is_gone(monkeypatch):
    """A launcher that is killed leaves its rank running, which would wait for ever."""
    answers = iter([False, True, *[False] * 100])  # a busy machine may be late to end what is killed
    for name in ("configure", "listen"):
        monkeypatch.setattr(debugpy, name, lambda *_, **__: None)
    monkeypatch.setattr(debugpy, "is_client_connected", lambda: next(answers))
    wait_for_debugger(5678)
    launcher = subprocess.Popen(["sleep", "60"])
    monkeypatch.setattr(joining, "launchers", lambda: [psutil.Process(launcher.pid)])
    launcher.kill()  # and not waited for: a zombie has ended
    with pytest.raises(StoppedError, match="its launcher is gone, and no debugger came"):
        wait_for_debugger(5678)
    launcher.wait()


def test_a_port_that_is_taken_is_a_users_mistake(monkeypatch):
    """Of rank 0 alone, which listens; and so is a debugger that is not installed."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=rf"--debug_port {port} cannot be listened on at 127\.0\.0\.1: .*another"):
            wait_for_debugger(port)
        monkeypatch.setitem(sys.modules, "debugpy", None)
        with pytest.raises(UserError, match="pip install debugpy"):
            wait_for_debugger(port)
        monkeypatch.setenv("RANK", "1")
        wait_for_debugger(port)


@pytest.mark.parametrize("allocate", [torch.empty, np.empty, bytearray])
def test_whatever_allocator_fails_it_is_one_error_with_a_code_of_its_own(allocate):
    """Torch, numpy and Python each have another error for it; what the failed step held is free again."""
    kept = []

    def step() -> None:
        activations = torch.ones(10)
        kept.append(weakref.ref(activations))
        allocate(10**15)

    with pytest.raises(OutOfMemoryError) as error, out_of_memory_named(" in a test", lambda: "Lower it."):
        step()
    assert re.fullmatch(r"rank 0 \(host .+\) ran out of memory in a test: .+\. Lower it\.", str(error.value))
    assert exit_code(error.value) == 6
    assert kept[0]() is None
    # only rank 0 scores: the other ranks end with the same exit code, and without a message
    of_others = distributed._for_other_ranks(MemoryError("Unable to allocate 7 PiB"))
    assert (type(of_others), getattr(of_others, "reporter", None)) == (OutOfMemoryError, 0)


def test_other_errors_stay_what_they_are():
    """A wrong shape is no matter of memory; an error that was reported already stays the same."""
    for mistake in (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), OutOfMemoryError("x"), KeyError("x")):
        with pytest.raises(type(mistake)) as error, out_of_memory_named("", str):
            raise mistake
        assert error.value is mistake
