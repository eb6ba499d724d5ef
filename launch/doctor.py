"""Check the hosts of a hostfile before a run: `python launch/doctor.py --hostfile FILE [--output_dir DIR]`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the checkout's code, installed or not

from ds_trainer.cli.doctor import doctor_command

if __name__ == "__main__":
    sys.exit(doctor_command(sys.argv[1:]))
