"""The command that makes the report of a run again."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path


def report_command(arguments: Sequence[str]) -> None:
    """`launch/report.py`: make the report of an output folder again."""
    parser = argparse.ArgumentParser(prog="report.py", description="Make a run's report again.", allow_abbrev=False)
    parser.add_argument("output_dir", type=Path, help="the output folder of a run")
    folder = parser.parse_args(list(arguments)).output_dir
    from ds_trainer.report.page import make_report

    make_report(folder)
