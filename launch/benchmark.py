"""Measure model folders side by side: `python launch/benchmark.py FOLDER [FOLDER ...] --batch_sizes 1 32`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the checkout's code, installed or not

from ds_trainer.cli.main import main

if __name__ == "__main__":
    main("benchmark")
