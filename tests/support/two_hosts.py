"""Two hosts on one machine, to run `deepspeed --hostfile` for real.

A host is a network, mount, host-name and process namespace with its own address, /etc/hosts, /etc/ssh, home and sshd;
a veth pair joins the two and the file system is shared. Only the scratch folder is written. Every process of a host
ends with its first one, and that with the test process, even by SIGKILL: nothing can be left behind.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from support.launching import ROOT

INTERFACE = "dsn0"
SSHD = "/usr/sbin/sshd"
HOSTS = (1, 2)
TOOLS = {
    "ip": "iproute2",
    "ssh": "openssh-client",
    "ssh-keygen": "openssh-client",
    SSHD: "openssh-server",
    "pdsh": "pdsh",
    "unshare": "util-linux",
    "nsenter": "util-linux",
    "setpriv": "util-linux",
    "mount": "mount",
    "hostname": "hostname",
}
"""What the hosts are made with, and the Debian package of each."""

# The first process of a host: makes its files its own, tells it, and lives until it is killed. SIGCHLD ignored: the
# kernel buries the orphans.
_INIT = """
import signal, socket, subprocess, sys
name, folder = sys.argv[1:]
socket.sethostname(name)
for own, place in (("ssh", "/etc/ssh"), ("hosts", "/etc/hosts"), ("nsswitch.conf", "/etc/nsswitch.conf")):
    subprocess.run(["mount", "--bind", f"{folder}/{own}", place], check=True)
subprocess.run(["mount", "-t", "tmpfs", "tmpfs", "/run"], check=True)
subprocess.run(["mkdir", "/run/sshd"], check=True)
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
print("up", flush=True)
while True:
    signal.pause()
"""

HostsFile = Literal["good", "debian"]


def missing() -> str | None:
    """Why hosts cannot be made here; None where they can."""
    if os.geteuid() != 0:
        return "two hosts need root"
    lacking = sorted({package for tool, package in TOOLS.items() if not shutil.which(tool)})
    if lacking:
        return f"two hosts need the Debian packages {' '.join(lacking)}"
    trial = ["unshare", "--net", "--mount", "--uts", "--pid", "--fork", "--mount-proc", "ip", "link", "add", INTERFACE]
    done = subprocess.run([*trial, "type", "veth", "peer", "name", "peer0"], capture_output=True, text=True)
    return f"no namespaces or veth pairs here: {done.stderr.strip()}" if done.returncode else None


class TwoHosts:
    """Hosts 1 and 2, up from `with` on. `hostfile` names them host1 and host2."""

    def __init__(self, scratch: Path) -> None:
        self.scratch = scratch
        self.addresses = {1: "10.77.0.1", 2: "10.77.0.2"}
        self.hostfile = scratch / "hostfile"
        self._parents: dict[int, subprocess.Popen[str]] = {}
        self.inits: dict[int, int] = {}
        """The first process of each host that is up, by its id outside."""

    def __enter__(self) -> TwoHosts:
        self._write_files()
        try:
            for host in HOSTS:
                self._start(host)
            self._join()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for host in [*self.inits]:
            self.kill(host)
            os.close(self._network)

    def home(self, host: int) -> Path:
        return self.scratch / f"host{host}" / "home"

    def environment(self, host: int) -> dict[str, str]:
        """Of a command in a host: the virtual environment's programs first, the host's own home."""
        path = f"{Path(sys.executable).parent}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        quiet = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "LANG": "C.UTF-8"}
        return {"PATH": path, "HOME": str(self.home(host)), "TMPDIR": str(self.scratch / "tmp"), **quiet}

    def start(self, host: int, command: Sequence[str], more: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
        """Start a command in a host, its output as text in pipes; it ends when what is returned is killed."""
        environment = {**self.environment(host), **(more or {})}
        inside = [*self._enter(host, "-n", "-m", "-p", "-u"), f"--wd={ROOT}", "--", "setpriv", "--pdeathsig", "KILL"]
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.Popen([*inside, *command], env=environment, text=True, **pipes)

    def run(
        self, host: int, command: Sequence[str], more: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a command in a host to its end; after 5 minutes it is killed and TimeoutExpired raised."""
        process = self.start(host, command, more)
        try:
            out, err = process.communicate(timeout=300)
        except BaseException:
            process.kill()
            process.communicate()
            raise
        return subprocess.CompletedProcess(list(command), process.returncode, out, err)

    def processes(self, host: int) -> dict[int, str]:
        """The command lines in a host by outside process id, but for its first process and sshd."""
        found = processes_in(os.readlink(f"/proc/{self.inits[host]}/ns/pid"))
        return {p: line for p, line in found.items() if p != self.inits[host] and not line.startswith("sshd:")}

    def cut_link(self) -> None:
        """No packet passes from now on, and host 1 is told nothing: as if host 2's cable were pulled."""
        self._ip(2, "link", "set", INTERFACE, "down")

    def mend_link(self) -> None:
        self._ip(2, "link", "set", INTERFACE, "up")

    def kill(self, host: int) -> None:
        """Every process of the host ends at once; with the link cut before, nobody is told."""
        # held, the network outlives the processes: else host 1 would lose its own interface, and ssh to itself, with it
        self._network = os.open(f"/proc/{self.inits[host]}/ns/net", os.O_RDONLY)
        os.kill(self.inits.pop(host), signal.SIGKILL)
        parent = self._parents.pop(host)
        parent.wait()
        assert parent.stdout is not None
        parent.stdout.close()

    def boot(self, host: int) -> None:
        """Start a killed host again."""
        other = next(iter(self.inits))
        subprocess.run([*self._enter(other, "-n"), "ip", "link", "del", INTERFACE], check=True)
        os.close(self._network)
        self._start(host)
        self._join()

    def write_hosts_file(self, host: int, style: HostsFile) -> None:
        """Rewrite a host's /etc/hosts, while it is up or before."""
        names = {address: f"host{other}" for other, address in self.addresses.items()}
        if style == "debian":
            names = {"127.0.1.1": f"host{host}"} | {a: n for a, n in names.items() if n != f"host{host}"}
        lines = ["127.0.0.1 localhost", *(f"{a} {n}" for a, n in names.items())]
        # in place, since the mount is of this very file
        (self.scratch / f"host{host}" / "hosts").write_text("\n".join(lines) + "\n")

    def stop_sshd(self, host: int) -> None:
        pid_file = self.scratch / f"host{host}" / "sshd.pid"
        self.run(host, ["kill", pid_file.read_text().strip()])
        wait_until(lambda: not pid_file.exists(), f"the end of host {host}'s sshd")

    def start_sshd(self, host: int) -> None:
        folder = self.scratch / f"host{host}"
        done = self.run(host, [SSHD, "-f", str(folder / "ssh" / "sshd_config"), "-E", str(folder / "sshd.log")])
        assert done.returncode == 0, done.stderr
        wait_until((folder / "sshd.pid").exists, f"host {host}'s sshd")

    def _enter(self, host: int, *spaces: str) -> list[str]:
        return ["nsenter", "-t", str(self.inits[host]), *spaces]

    def _ip(self, host: int, *arguments: str) -> None:
        subprocess.run([*self._enter(host, "-n"), "ip", *arguments], check=True, capture_output=True)

    def _start(self, host: int) -> None:
        folder = self.scratch / f"host{host}"
        (folder / "sshd.pid").unlink(missing_ok=True)
        spaces = ["--net", "--mount", "--uts", "--pid", "--fork", "--kill-child=KILL", "--mount-proc"]
        init = [sys.executable, "-S", "-c", _INIT, f"host{host}", str(folder)]
        with (folder / "init.err").open("w") as log:
            parent = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", "unshare", *spaces, *init],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        self._parents[host] = parent
        assert parent.stdout is not None
        said = parent.stdout.readline()
        assert said == "up\n", (folder / "init.err").read_text()
        self.inits[host] = _child_of(parent.pid)

    def _join(self) -> None:
        """The veth pair between the hosts, then the sshds."""
        ends = ["type", "veth", "peer", "name", INTERFACE, "netns", str(self.inits[2])]
        self._ip(1, "link", "add", INTERFACE, *ends)
        for host in HOSTS:
            self._ip(host, "addr", "add", f"{self.addresses[host]}/24", "dev", INTERFACE)
            for name in (INTERFACE, "lo"):
                self._ip(host, "link", "set", name, "up")
            if not (self.scratch / f"host{host}" / "sshd.pid").exists():
                self.start_sshd(host)

    def _write_files(self) -> None:
        keys = self.scratch / "keys"
        for folder in (keys, self.scratch / "tmp", *(self.home(host) for host in HOSTS)):
            folder.mkdir(parents=True)
        self.scratch.chmod(0o755)
        for name in ("id", "host1", "host2"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(keys / name)], check=True)
        (keys / "authorized").write_text((keys / "id.pub").read_text())
        known = [f"host{h},{self.addresses[h]} {(keys / f'host{h}.pub').read_text()}" for h in HOSTS]
        (keys / "known_hosts").write_text("".join(known))
        self.hostfile.write_text("".join(f"host{h} slots=1\n" for h in HOSTS))
        for host in HOSTS:
            folder = self.scratch / f"host{host}"
            (folder / "ssh").mkdir()
            (folder / "ssh" / "sshd_config").write_text(self._sshd_config(host))
            (folder / "ssh" / "ssh_config").write_text(self._ssh_config())
            (folder / "nsswitch.conf").write_text("passwd: files\ngroup: files\nhosts: files\n")  # there is no DNS
            self.write_hosts_file(host, "good")

    def _sshd_config(self, host: int) -> str:
        folder, keys = self.scratch / f"host{host}", self.scratch / "keys"
        session = {"HOME": str(self.home(host)), "TMPDIR": str(self.scratch / "tmp")}
        lines = [
            *(f"HostKey {keys / f'host{host}'}", f"PidFile {folder / 'sshd.pid'}"),
            *(f"AuthorizedKeysFile {keys / 'authorized'}", "StrictModes no", "UsePAM no"),
            *("PermitRootLogin prohibit-password", "PasswordAuthentication no"),
            *("KbdInteractiveAuthentication no", "UseDNS no"),
            "SetEnv " + " ".join(f"{name}={value}" for name, value in session.items()),
        ]
        return "\n".join(lines) + "\n"

    def _ssh_config(self) -> str:
        keys = self.scratch / "keys"
        files = [f"IdentityFile {keys / 'id'}", f"UserKnownHostsFile {keys / 'known_hosts'}"]
        return (
            "\n    ".join(["Host *", *files, "BatchMode yes", "StrictHostKeyChecking yes", "ConnectTimeout 10"]) + "\n"
        )


def processes_in(space: str) -> dict[int, str]:
    """The command lines of a process namespace, given as its link in /proc."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it may end meanwhile
            if os.readlink(entry / "ns" / "pid") == space:
                found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
    return found


def wait_until(done, what: str, seconds: float = 10) -> None:
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end, f"waited {seconds} s for {what}"
        time.sleep(0.02)


def _child_of(parent: int) -> int:
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            # the name, in parentheses, may hold blanks; then come the state and the parent
            if int((entry / "stat").read_text().rpartition(")")[2].split()[1]) == parent:
                return int(entry.name)
    raise AssertionError(f"process {parent} has no child")
