"""`launch/report.py`: make the report of a run again, from its output folder alone."""

from collections.abc import Sequence
from pathlib import Path

from ds_trainer.cli.command import Parser


def report_command(arguments: Sequence[str]) -> None:
    """Make the report of an output folder again."""
    parser = Parser("report", "Make a run's report again.")
    parser.add_argument("output_dir", type=Path, help="the output folder of a run")
    folder = parser.parse_args(list(arguments)).output_dir
    from ds_trainer.report.page import make_report

    make_report(folder)
