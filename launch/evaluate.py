"""Score a model folder: `python launch/evaluate.py MODEL --task_name sst2 --data_dir DIR`, or under `deepspeed`.

Or a checkpoint: `python launch/evaluate.py OUT/checkpoint-N`; or all: `OUT --all_checkpoints`.
"""

import sys

from ds_trainer.cli.evaluate import evaluate_command
from ds_trainer.cli.train import run_command
from ds_trainer.ranks.distributed import leave

if __name__ == "__main__":
    leave(run_command(evaluate_command, sys.argv[1:]))
