"""Score a model folder: `python launch/evaluate.py MODEL --task_name sst2 --data_dir DIR`, or under `deepspeed`.

Or a checkpoint: `python launch/evaluate.py OUT/checkpoint-N`; or all: `OUT --all_checkpoints`.
"""

import sys

from ds_trainer.command import run_command
from ds_trainer.distributed import leave
from ds_trainer.evaluate_command import evaluate_command

if __name__ == "__main__":
    leave(run_command(evaluate_command, sys.argv[1:]))
