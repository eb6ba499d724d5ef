"""`launch/doctor.py`: check the hosts of a hostfile before a run, and print one table."""

import argparse
import json
import os
import shlex
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from ds_trainer.cli.command import Mistakes, Parser
from ds_trainer.doctor.doctor import FAILED, Job, examine
from ds_trainer.files.redaction import redacted
from ds_trainer.files.tables import aligned


def doctor_command(arguments: Sequence[str]) -> int:
    """Check the hosts; the exit code is 0 if all is well, 1 if a check failed, 2 if the hostfile is wrong."""
    job = read_doctor_job(arguments)
    rows = [redacted(asdict(row)) for row in examine(job)]
    lines = [{name: " ".join(filter(str.isprintable, text)) for name, text in row.items()} for row in rows]
    print(json.dumps(rows, indent=2) if job.as_json else aligned(lines))
    failed = {row["check"] for row in rows if row["result"] == FAILED}
    return 2 if "hostfile" in failed else int(bool(failed))


def read_doctor_job(arguments: Sequence[str]) -> Job:
    """Parse and check a doctor's command; a UserError has every mistake, one a line."""
    flags, mistakes = doctor_parser().parse_args(list(arguments)), Mistakes()
    for name, least, most in (("ssh_port", 1, 65535), ("master_port", 1, 65535), ("timeout", 5, 3600)):
        value = getattr(flags, name)
        if value is not None and not least <= value <= most:
            mistakes.append(f"--{name} is {value}: give {least} to {most}")
    mistakes.raise_all()
    # a host that falls silent is given up after 15 s, in place of TCP's quarter of an hour
    patience = ["-o", "BatchMode=yes", "-o", f"ConnectTimeout={min(10, flags.timeout)}"]
    patience += ["-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=2"]
    port = ["-p", str(flags.ssh_port)] if flags.ssh_port else []
    ssh = ("ssh", "-T", *flags.ssh_args, *patience, *port)
    return Job(flags.hostfile, flags.output_dir, ssh, flags.master_addr, flags.master_port, flags.timeout, flags.json)


def doctor_parser() -> argparse.ArgumentParser:
    parser = Parser("doctor", "Check a hostfile's hosts before a run.")
    add = parser.add_argument
    add("--hostfile", type=Path, required=True, help="as for deepspeed: a line `NAME slots=N` a host")
    add("--output_dir", type=Path, help="the run's: must be one folder for all hosts")
    add("--ssh_port", type=int, help="as for deepspeed")
    ssh_args = "ssh's flags, as in PDSH_SSH_ARGS_APPEND, from which they are taken by default"
    add("--ssh_args", type=shlex.split, default=os.environ.get("PDSH_SSH_ARGS_APPEND", ""), help=ssh_args)
    add("--master_addr", help="as for deepspeed")
    add("--master_port", type=int, default=29500, help="as for deepspeed (29500)")
    add("--timeout", type=int, default=60, help="seconds for each command on a host (60)")
    add("--json", action="store_true", help="print the rows as JSON")
    return parser


if __name__ == "__main__":  # a tuning on several hosts starts it
    from ds_trainer.cli.main import main

    main("doctor")
