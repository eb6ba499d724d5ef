"""Which processes a rank depends on, and what its commands set before torch is loaded."""

import os
import subprocess
from types import SimpleNamespace

import psutil
import pytest
from support.launching import run_python

from ds_trainer.ranks import stopping
from ds_trainer.ranks.distributed import limit_spinning
from ds_trainer.ranks.stopping import is_running, launchers

LAUNCH = "python -u -m deepspeed.launcher.launch --world_info=x"
RUNNER = "/venv/bin/python /venv/bin/deepspeed --num_gpus 2 launch/train.py"
CHAINS = {
    "one host, in a script": (["python " + LAUNCH, "python " + RUNNER, "bash bash run.sh", "sshd sshd: me"], 2),
    "another host, by pdsh": (["python " + LAUNCH, "bash bash -c export A=1; python", "sshd sshd: me", "sshd sshd"], 3),
    "another host, the shell gone": (["python " + LAUNCH, "sshd-session sshd: me", "sshd sshd"], 2),
    "torchrun": (["torchrun python torchrun launch/train.py", "bash -bash"], 1),
    "Slurm": (["slurmstepd slurmstepd: [1.0]", "systemd systemd"], 1),
}
"""From the parent up, `name command`; how many of them are the launcher's."""


@pytest.mark.parametrize("case", CHAINS)
def test_it_depends_on_all_up_to_the_launcher_and_on_no_more(monkeypatch, case):
    """A login shell may end, and the host's ssh server restart, but not the session that runs the launcher."""
    chain, expected = CHAINS[case]

    def ancestor(place: int, line: str) -> SimpleNamespace:
        name, _, command = line.partition(" ")
        return SimpleNamespace(pid=100 + place, name=lambda: name, cmdline=command.split)

    above = [ancestor(place, line) for place, line in enumerate(chain)]
    monkeypatch.setattr(stopping.psutil, "Process", lambda: SimpleNamespace(parents=lambda: above))
    monkeypatch.setenv("RANK", "0")
    assert launchers() == above[:expected]
    monkeypatch.delenv("RANK")
    assert launchers() == [], "a process that a user started may outlive its shell"


def test_a_process_that_has_ended_no_longer_runs():
    """It is first a zombie, until its parent has asked for its exit code."""
    child = subprocess.Popen(["sleep", "60"])
    process = psutil.Process(child.pid)
    assert is_running(process)
    assert is_running(os.getpid())
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it has ended, and is a zombie
    assert not is_running(process)
    child.wait()
    assert not is_running(child.pid)


def test_a_command_limits_openmps_spinning_before_torch_is_loaded(monkeypatch):
    """OpenMP's library reads the variable when it is loaded; a user's own setting stays."""
    code = (
        "import os, sys; from ds_trainer.cli import command, main; sys.argv = ['x', '--help']; command.run_command = "
        "lambda *_: print(os.environ.get('GOMP_SPINCOUNT'), 'torch' in sys.modules) or 0; main.main('doctor')"
    )
    done = run_python("-c", code)
    assert done.stdout.strip() == "10000 False", done.stderr
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.setenv(name, "5")
        limit_spinning()
        assert os.environ.get("GOMP_SPINCOUNT", "5") == "5"
