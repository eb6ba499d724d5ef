"""Make the report of a run again, from its output folder alone: `python launch/report.py OUTPUT_DIR`."""

import sys

from ds_trainer.cli.train import run_command
from ds_trainer.ranks.distributed import leave
from ds_trainer.report.page import report_command

if __name__ == "__main__":
    leave(run_command(report_command, sys.argv[1:]))
