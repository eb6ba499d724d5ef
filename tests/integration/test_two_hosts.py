"""`deepspeed --hostfile` over two hosts, a host that goes down, and the doctor of hostfiles.

A host is a network, mount, host-name and process namespace with its own address, /etc/hosts, /etc/ssh, home and sshd;
a veth pair joins the two and the file system is shared. Only the scratch folder is written. Every process of a host
ends with its first one, and that with the test process, even by SIGKILL: nothing can be left behind.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path

import pytest
from support.launching import ROOT, Done, run_deepspeed

from ds_trainer.ranks import machine

SSHD, INTERFACE, ADDRESSES = "/usr/sbin/sshd", "dsn0", {1: "10.77.0.1", 2: "10.77.0.2"}
TOOLS = ("ip", "ssh", "ssh-keygen", SSHD, "pdsh", "unshare", "nsenter", "setpriv", "mount", "hostname")
SPACES = ["--net", "--mount", "--uts", "--pid", "--fork", "--kill-child=KILL", "--mount-proc"]
TIMEOUT = 20
"""Seconds that a rank of the run waits for another."""
# ssh then gives a silent host up by itself; TCP would take a quarter of an hour
KEEP_ALIVE = {"PDSH_SSH_ARGS_APPEND": "-o ServerAliveInterval=5 -o ServerAliveCountMax=2"}
# the parts of DeepSpeed that are built on first use, by whatever run of the tests comes first
EXTENSIONS = (
    os.environ.get("TORCH_EXTENSIONS_DIR") or Path.home() / f".cache/torch_extensions/py3{sys.version_info.minor}_cpu"
)
ENVIRONMENT = f"""\
PATH={Path(sys.executable).parent}:$PATH
TORCH_EXTENSIONS_DIR={EXTENSIONS}
OMP_NUM_THREADS=1
HF_HUB_OFFLINE=1
"""
# The first process of a host: makes its files its own, says so, and lives until it is killed. SIGCHLD is ignored, so
# that the kernel buries the orphans.
INIT = """
import signal, socket, subprocess, sys
name, folder = sys.argv[1:]
socket.sethostname(name)
for mine, place in (("ssh", "/etc/ssh"), ("hosts", "/etc/hosts"), ("nsswitch.conf", "/etc/nsswitch.conf")):
    subprocess.run(["mount", "--bind", f"{folder}/{mine}", place], check=True)
subprocess.run(["mount", "-t", "tmpfs", "tmpfs", "/run"], check=True)
subprocess.run(["mkdir", "/run/sshd"], check=True)
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
print("up", flush=True)
while True:
    signal.pause()
"""


def missing() -> str | None:
    """Why hosts cannot be made here; None where they can."""
    if os.geteuid() or not all(map(shutil.which, TOOLS)):
        return f"two hosts need root and {', '.join(TOOLS)}"
    trial = ["unshare", *SPACES, "ip", "link", "add", INTERFACE, "type", "veth", "peer", "name", "peer0"]
    done = subprocess.run(trial, capture_output=True, text=True)
    return f"no namespaces or veth pairs here: {done.stderr.strip()}" if done.returncode else None


REASON = missing()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))


class TwoHosts:
    """Hosts 1 and 2, called host1 and host2, up until `end`."""

    def __init__(self, scratch: Path) -> None:
        self.scratch, self.hostfile, keys = scratch, scratch / "hostfile", scratch / "keys"
        self.parents: dict[int, subprocess.Popen[str]] = {}
        self.inits: dict[int, str] = {}
        """The first process of each host, by its id outside."""
        for folder in (keys, *(scratch / f"host{host}/{name}" for host in ADDRESSES for name in ("home", "ssh"))):
            folder.mkdir(parents=True)
        scratch.chmod(0o755)
        for name in ("id", "host1", "host2"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(keys / name)], check=True)
        known = [
            f"host{host},{address} {(keys / f'host{host}.pub').read_text()}" for host, address in ADDRESSES.items()
        ]
        (keys / "known_hosts").write_text("".join(known))
        self.hostfile.write_text("host1 slots=1\nhost2 slots=1\n")
        for host in ADDRESSES:
            self._write_files(host, keys)
            self._start(host)
        self._ip(1, "link", "add", INTERFACE, "type", "veth", "peer", "name", INTERFACE, "netns", self.inits[2])
        for host, address in ADDRESSES.items():
            self._ip(host, "addr", "add", f"{address}/24", "dev", INTERFACE)
            for name in (INTERFACE, "lo"):
                self._ip(host, "link", "set", name, "up")
            assert self.run(host, SSHD, "-f", "/etc/ssh/sshd_config").returncode == 0

    def _write_files(self, host: int, keys: Path) -> None:
        folder = self.scratch / f"host{host}"
        (folder / "ssh/sshd_config").write_text(
            f"HostKey {keys}/host{host}\nAuthorizedKeysFile {keys}/id.pub\nStrictModes no\nUsePAM no\nUseDNS no\n"
            f"PermitRootLogin prohibit-password\nPasswordAuthentication no\nKbdInteractiveAuthentication no\n"
            f"SetEnv HOME={folder}/home\n"
        )
        (folder / "ssh/ssh_config").write_text(
            f"Host *\n IdentityFile {keys}/id\n UserKnownHostsFile {keys}/known_hosts\n StrictHostKeyChecking yes\n"
        )
        (folder / "nsswitch.conf").write_text("passwd: files\ngroup: files\nhosts: files\n")  # there is no DNS
        lines = ["127.0.0.1 localhost", *(f"{address} host{number}" for number, address in ADDRESSES.items())]
        (folder / "hosts").write_text("\n".join(lines) + "\n")

    def _start(self, host: int) -> None:
        init = [sys.executable, "-S", "-c", INIT, f"host{host}", str(self.scratch / f"host{host}")]
        self.parents[host] = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", "unshare", *SPACES, *init], stdout=subprocess.PIPE, text=True
        )
        assert self.parents[host].stdout.readline() == "up\n"
        children = Path(f"/proc/{self.parents[host].pid}/task/{self.parents[host].pid}/children")
        self.inits[host] = children.read_text().strip()

    def _ip(self, host: int, *arguments: str) -> None:
        subprocess.run(["nsenter", "-t", self.inits[host], "-n", "ip", *arguments], check=True, capture_output=True)

    def start(self, host: int, *command: str) -> subprocess.Popen[str]:
        """Start a command in a host, its output as text in pipes; it ends when what is returned is killed."""
        path = f"{Path(sys.executable).parent}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        mine = {"PATH": path, "HOME": str(self.scratch / f"host{host}/home"), "LANG": "C.UTF-8", **KEEP_ALIVE}
        spaces = ["nsenter", "-t", self.inits[host], "-n", "-m", "-p", "-u", f"--wd={ROOT}", "--"]
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.Popen([*spaces, "setpriv", "--pdeathsig", "KILL", *command], env=mine, text=True, **pipes)

    def run(self, host: int, *command: str) -> Done:
        process = self.start(host, *command)
        try:
            out, err = process.communicate(timeout=300)
        finally:
            process.kill()
        return subprocess.CompletedProcess(list(command), process.returncode, out, err)

    def end(self) -> None:
        for parent in self.parents.values():
            parent.kill()  # and with it, the namespace and all that is in it
            parent.communicate()

    def take_down(self, host: int) -> None:
        """Cut the link, so that nobody is told, and kill every process of the host at once."""
        self._ip(host, "link", "set", INTERFACE, "down")
        os.kill(int(self.inits[host]), signal.SIGSTOP)
        space = os.readlink(f"/proc/{self.inits[host]}/ns/pid")
        for entry in Path("/proc").glob("[0-9]*"):
            if entry.name != self.inits[host] and _space(entry) == space:  # it keeps the network, and so host 1's end
                os.kill(int(entry.name), signal.SIGKILL)


def _space(entry: Path) -> str:
    try:
        return os.readlink(entry / "ns/pid")
    except OSError:  # it has ended
        return ""


def wait_until(done: Callable[[], object], what: str, seconds: float) -> None:
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end, f"waited {seconds} s for {what}"
        time.sleep(0.05)


@pytest.fixture(scope="module")
def hosts(tmp_path_factory) -> Iterator[TwoHosts]:
    pair = TwoHosts(tmp_path_factory.mktemp("hosts"))
    (pair.scratch / "host1/home/.deepspeed_env").write_text(ENVIRONMENT)
    yield pair
    pair.end()


@pytest.fixture(scope="module")
def words(tiny_recipe, tmp_path_factory) -> list[str]:
    """A training of the tiny recipe, its second phase long enough to be cut off there."""
    finetune, prune = tiny_recipe["phases"]
    phases = [{**finetune, "max_steps": 10}, {**prune, "max_steps": 40, "save_steps": 10, "logging_steps": 1}]
    path = tmp_path_factory.mktemp("recipe") / "tiny.json"
    path.write_text(json.dumps({**tiny_recipe, "phases": phases}))
    return ["launch/train.py", "--deepspeed_config", "ds_configs/zero2.json", "--recipe", str(path), "--output_dir"]


@pytest.fixture(scope="module")
def one_host(words, tmp_path_factory) -> Path:
    """The run of two ranks on one host, which also builds what is still to be built."""
    output = tmp_path_factory.mktemp("one") / "out"
    done = run_deepspeed(2, *words, str(output))
    assert done.returncode == 0, done.stderr[-4000:]
    return output


def results(output: Path) -> tuple[dict[tuple[str, int], float], bytes]:
    """The training losses by phase and step, of a step that was done twice the last; and the final weights."""
    records = [json.loads(line) for line in (output / "log.jsonl").read_text().splitlines()]
    losses = {(r["phase"], r["step"]): r["train/loss"] for r in records if "train/loss" in r}
    return losses, (output / "model/model.safetensors").read_bytes()


def test_two_hosts_train_as_two_ranks_on_one_do(one_host, words, hosts, tmp_path):
    """Every training loss, and the final weights to the last bit, are those of 2 ranks on one host."""
    done = hosts.run(1, "deepspeed", "--hostfile", str(hosts.hostfile), *words, str(tmp_path / "out"))
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    assert "host2: " in done.stderr
    assert results(tmp_path / "out") == results(one_host)
    (session,) = json.loads((tmp_path / "out/all_results.json").read_text())["prune"]["trained_on"]
    assert session["hosts"] == {name: {machine.device_name(): 1} for name in ("host1", "host2")}


def examine(hosts: TwoHosts, *arguments: str) -> dict[tuple[str, str], tuple[str, ...]]:
    """Result, what was found and cure by check and host, of a doctor on host 1."""
    command = [sys.executable, "launch/doctor.py", "--hostfile", str(hosts.hostfile), *arguments]
    done = hosts.run(1, *command)
    _, *rows = (re.split(r" {2,}", line) for line in done.stdout.splitlines())
    assert done.returncode == any(result == "FAILED" for _, _, result, *_ in rows), done.stdout + done.stderr
    return {(check, host): (result, *texts) for check, host, result, *texts in rows}


def test_the_doctor_reports_every_fault_of_a_host(hosts, tmp_path):
    """Many at once on host 2, each in its own row with its cure, and nothing else is called wrong; then all is well."""
    fake = hosts.scratch / "numpy.dist-info"
    fake.mkdir()
    (fake / "METADATA").write_text("Metadata-Version: 2.1\nName: numpy\nVersion: 1.0.1\n")
    real = next(f.locate().parent for f in metadata.files("numpy") if f.name == "METADATA")
    mounts = [["--bind", str(fake), str(real)], ["-t", "tmpfs", "tmpfs", str(tmp_path)]]
    for words in mounts:
        assert hosts.run(2, "mount", *words).returncode == 0
    listen = "import socket, time; s = socket.create_server(('', 29500)); print('up', flush=True); time.sleep(600)"
    listener = hosts.start(1, sys.executable, "-c", listen)
    assert listener.stdout.readline() == "up\n"
    rows = examine(hosts, "--output_dir", str(tmp_path / "out"))
    listener.kill()
    listener.communicate()
    for words in mounts:
        assert hosts.run(2, "umount", words[-1]).returncode == 0
    expected = {
        ("versions", "host2"): (f"numpy 1.0.1, here {metadata.version('numpy')}", "install the same"),
        ("output folder", "host2"): ("is another folder", "NFS"),
        ("master port", "host1"): ("Address already in use", "--master_port"),
    }
    for key, (found, cure) in expected.items():
        assert found in rows[key][1]
        assert cure in rows[key][2]
    failed = {key for key, (result, *_) in rows.items() if result == "FAILED"}
    assert failed - {("master port", "host2")} == expected.keys()
    assert {result for result, *_ in examine(hosts, "--output_dir", str(tmp_path / "out")).values()} == {"ok"}
    assert list(tmp_path.iterdir()) == []


def test_a_run_ends_when_a_host_goes_down_and_goes_on_elsewhere(hosts, words, one_host, tmp_path):
    """Soon after its own timeout and ssh's, not with 0, naming the host; the doctor then names it too.

    `--resume` on one host, on as many ranks, loses nothing, to the last bit. This is the last test of the two hosts.
    """
    output, command = tmp_path / "out", ["deepspeed", "--hostfile", str(hosts.hostfile), *words]
    process = hosts.start(1, *command, str(output), "--timeout", str(TIMEOUT))
    saved = output / "checkpoint-20" / "complete.json"
    wait_until(lambda: saved.exists() or process.poll() is not None, "a checkpoint of the second phase", 300)
    hosts.take_down(2)
    start = time.monotonic()
    out, err = process.communicate(timeout=300)
    assert saved.exists(), out + err
    assert not (output / "model").exists()
    assert process.returncode != 0
    assert time.monotonic() - start < 90
    assert "host2" in (out + err).rpartition("error: ")[2]
    assert examine(hosts, "--timeout", "6")["ssh", "host2"][0] == "FAILED"
    done = run_deepspeed(2, *words, str(output), "--resume")
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    assert results(output) == results(one_host)
    sessions = json.loads((output / "all_results.json").read_text())["prune"]["trained_on"]
    assert [list(session["hosts"]) for session in sessions] == [["host1", "host2"], [socket.gethostname()]]
