"""Find the fastest settings: `python launch/tune.py --deepspeed_config FILE --recipe FILE --output_dir DIR`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the checkout's code, installed or not

from ds_trainer.cli.main import main

if __name__ == "__main__":
    main("tune")
