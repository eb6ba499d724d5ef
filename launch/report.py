"""Make the report of a run again, from its output folder alone: `python launch/report.py OUTPUT_DIR`."""

import sys

from ds_trainer.command import run_command
from ds_trainer.distributed import leave
from ds_trainer.report_page import report_command

if __name__ == "__main__":
    leave(run_command(report_command, sys.argv[1:]))
