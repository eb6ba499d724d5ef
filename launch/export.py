"""Make of a model folder what is deployed: `python launch/export.py FOLDER --onnx --quantize int8 --task_name sst2`."""

import sys

from ds_trainer.command import run_command
from ds_trainer.distributed import leave
from ds_trainer.export_command import export_command

if __name__ == "__main__":
    leave(run_command(export_command, sys.argv[1:]))
