"""Make of a model folder what is deployed: `python launch/export.py FOLDER --onnx --quantize int8 --task_name sst2`."""

import sys

from ds_trainer.cli.export import export_command
from ds_trainer.cli.train import run_command
from ds_trainer.ranks.distributed import leave

if __name__ == "__main__":
    leave(run_command(export_command, sys.argv[1:]))
