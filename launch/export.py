"""Make of a model folder what is deployed: `python launch/export.py FOLDER --onnx --quantize int8 --task_name sst2`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the checkout's code, installed or not

from ds_trainer.cli.main import main

if __name__ == "__main__":
    main("export")
