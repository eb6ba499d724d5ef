"""Pick exit thresholds: `python launch/calibrate.py MODEL --recipe OUTPUT_DIR/recipe.json --max_drop 0.5`."""

import sys

from ds_trainer.cli.train import calibrate_command, run_command
from ds_trainer.ranks.distributed import leave

if __name__ == "__main__":
    leave(run_command(calibrate_command, sys.argv[1:]))
