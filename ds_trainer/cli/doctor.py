"""`launch/doctor.py`: check the hosts of a hostfile before a run, and print one table."""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from ds_trainer.cli.command import Mistakes, Parser
from ds_trainer.hosts.doctor import MASTER_PORT, DoctorJob, doctor

_RANGES = {"ssh_port": (1, 65535), "master_port": (1, 65535), "timeout": (5, 3600)}


def doctor_command(arguments: Sequence[str]) -> int:
    """Check the hosts; the exit code is 0 if all is well, 1 after a fault, 2 for a wrong hostfile."""
    flags = doctor_parser().parse_args(list(arguments))
    return doctor(read_doctor_job(flags), as_json=flags.json)


def read_doctor_job(flags: argparse.Namespace) -> DoctorJob:
    """Check the flags; a UserError has every mistake, one a line."""
    mistakes, ssh_args = Mistakes(), list[str]()
    for name, (least, most) in _RANGES.items():
        value = getattr(flags, name)
        if value is not None and not least <= value <= most:
            mistakes.append(f"--{name} is {value}: give {least} to {most}")
    try:
        ssh_args = shlex.split(flags.ssh_args)
    except ValueError as error:
        mistakes.append(f"--ssh_args is {flags.ssh_args!r}: {error}")
    mistakes.raise_all()
    fields = {name: value for name, value in vars(flags).items() if name != "json"}
    return DoctorJob(**fields | {"ssh_args": tuple(ssh_args)})


def doctor_parser() -> argparse.ArgumentParser:
    parser = Parser("doctor", "Check a hostfile's hosts before a run.")
    add = parser.add_argument
    add("--hostfile", type=Path, required=True, help="as for deepspeed: a line `NAME slots=N` a host")
    add("--output_dir", type=Path, help="the run's: must be one folder for all hosts")
    add("--ssh_port", type=int, help="as for deepspeed")
    ssh_args = "ssh's flags, as in PDSH_SSH_ARGS_APPEND, from which they are taken by default"
    add("--ssh_args", default=os.environ.get("PDSH_SSH_ARGS_APPEND", ""), help=ssh_args)
    add("--master_addr", help="as for deepspeed")
    add("--master_port", type=int, default=MASTER_PORT, help=f"as for deepspeed ({MASTER_PORT})")
    add("--timeout", type=int, default=60, help="seconds for each command on a host (60)")
    add("--json", action="store_true", help="print the rows as JSON")
    return parser
