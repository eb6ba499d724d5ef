"""Measure model folders side by side: `python launch/benchmark.py FOLDER [FOLDER ...] --batch_sizes 1 32`."""

import sys

from ds_trainer.cli.benchmark import benchmark_command
from ds_trainer.cli.train import run_command
from ds_trainer.ranks.distributed import leave

if __name__ == "__main__":
    leave(run_command(benchmark_command, sys.argv[1:]))
