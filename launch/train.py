"""Train a recipe on DeepSpeed: `deepspeed launch/train.py --deepspeed_config FILE --recipe FILE --output_dir DIR`."""

import sys

from ds_trainer.cli.train import run_command, train_command
from ds_trainer.ranks.distributed import leave

if __name__ == "__main__":
    leave(run_command(train_command, sys.argv[1:]))
