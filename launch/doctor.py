"""Check the hosts of a hostfile before a run: `python launch/doctor.py --hostfile FILE [--output_dir DIR]`."""

import sys

from ds_trainer.cli.doctor import doctor_command

if __name__ == "__main__":
    sys.exit(doctor_command(sys.argv[1:]))
