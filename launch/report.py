"""Make the report of a run again, from its output folder alone: `python launch/report.py OUTPUT_DIR`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the checkout's code, installed or not

from ds_trainer.cli.main import main

if __name__ == "__main__":
    main("report")
