"""Pick exit thresholds: `python launch/calibrate.py MODEL --recipe OUTPUT_DIR/recipe.json --max_drop 0.5`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the checkout's code, installed or not

from ds_trainer.cli.main import main

if __name__ == "__main__":
    main("calibrate")
