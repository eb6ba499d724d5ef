"""Score a model folder: `python launch/evaluate.py MODEL --task_name sst2 --data_dir DIR`, or under `deepspeed`."""

import sys

from ds_trainer.command import evaluate_command, run_command
from ds_trainer.distributed import leave

if __name__ == "__main__":
    leave(run_command(evaluate_command, sys.argv[1:]))
