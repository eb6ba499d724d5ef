"""Score a model folder: `python launch/evaluate.py MODEL --task_name sst2 --data_dir DIR`, or under `deepspeed`.

Or a checkpoint: `python launch/evaluate.py OUT/checkpoint-N`; or all: `OUT --all_checkpoints`.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the checkout's code, installed or not

from ds_trainer.cli.main import main

if __name__ == "__main__":
    main("evaluate")
