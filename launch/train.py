"""Train a recipe on DeepSpeed: `deepspeed launch/train.py --deepspeed_config FILE --recipe FILE --output_dir DIR`."""

import sys

from ds_trainer.command import run_command, train_command

if __name__ == "__main__":
    sys.exit(run_command(train_command, sys.argv[1:]))
