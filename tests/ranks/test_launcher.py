"""Which processes a rank depends on, and what its commands set before torch is loaded."""

import pytest
from support.launching import run_python

from ds_trainer.ranks import launcher
from ds_trainer.ranks.launcher import Process, launchers

RANK, LAUNCH = "python -u launch/train.py", "python -u -m deepspeed.launcher.launch --world_info=x"
RUNNER = "/venv/bin/python /venv/bin/deepspeed --num_gpus 2 launch/train.py"
CHAINS = {
    "one host, from a terminal": (
        ["python " + LAUNCH, "python " + RUNNER, "bash -bash", "sshd sshd: me", "sshd sshd"],
        2,
    ),
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
    table = {}
    for place, line in enumerate(chain):
        name, _, command = line.partition(" ")
        table[100 + place] = (Process(100 + place, 101 + place, name, 1), command)
    monkeypatch.setattr(launcher, "process", lambda pid: table[pid][0] if pid in table else None)
    monkeypatch.setattr(Process, "command", property(lambda process: table[process.pid][1]))
    monkeypatch.setattr(launcher.os, "getppid", lambda: 100)
    monkeypatch.setenv("RANK", "0")
    assert [found.pid for found in launchers()] == [100 + place for place in range(expected)]


def test_a_process_that_a_user_started_depends_on_none(monkeypatch):
    """Started by hand, it may outlive its shell."""
    monkeypatch.delenv("RANK", raising=False)
    assert launchers() == []


def test_a_process_is_told_from_a_later_one_of_its_id():
    """By when it was born; one that has ended is none."""
    this = launcher.process(launcher.os.getpid())
    assert this.alive
    assert not Process(this.pid, this.parent, this.name, this.born + 1).alive
    assert launcher.process(2**22 + 1) is None


@pytest.mark.parametrize(
    ("variable", "value"), [("X", "10000 False"), ("GOMP_SPINCOUNT", "5 False"), ("OMP_WAIT_POLICY", "None False")]
)
def test_a_command_limits_openmps_spinning_before_torch_is_loaded(variable, value):
    """OpenMP's library reads the variable when it is loaded; a user's own setting wins."""
    code = (
        f"import os, sys; os.environ[{variable!r}] = '5'; from ds_trainer.cli import command, main; "
        "sys.argv = ['x', '--help']; command.run_command = "
        "lambda *_: print(os.environ.get('GOMP_SPINCOUNT'), 'torch' in sys.modules) or 0; main.main('doctor')"
    )
    done = run_python("-c", code)
    assert done.stdout.strip() == value, done.stderr
