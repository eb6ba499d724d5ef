"""Make the report of a run again, from its output folder alone: `python launch/report.py OUTPUT_DIR`."""

import sys

from ds_trainer.cli.report import report_command
from ds_trainer.cli.train import run_command
from ds_trainer.ranks.distributed import leave

if __name__ == "__main__":
    leave(run_command(report_command, sys.argv[1:]))
