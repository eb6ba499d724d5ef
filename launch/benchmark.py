"""Measure model folders side by side: `python launch/benchmark.py FOLDER [FOLDER ...] --batch_sizes 1 32`."""

import sys

from ds_trainer.benchmark_command import benchmark_command
from ds_trainer.command import run_command
from ds_trainer.distributed import leave

if __name__ == "__main__":
    leave(run_command(benchmark_command, sys.argv[1:]))
