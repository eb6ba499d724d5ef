"""Rehearses engine files on one rank; started by test_rehearsal.py.

`rehearsal_worker.py CONFIGS OUT` writes, for each file of the JSON list CONFIGS, the error that it is refused by, or
null; and then what the engine of training raises for the first, and what the rehearsals have left behind.
"""

import json
import sys
from pathlib import Path

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime import torch_autocast

from ds_trainer.engine.engine import start_engine
from ds_trainer.engine.optim import Hyperparameters, parameter_groups
from ds_trainer.engine.rehearsal import rehearse
from ds_trainer.ranks import distributed
from ds_trainer.ranks.failures import UserError

BASE = Hyperparameters(0.1)


def refusal(config: dict) -> str | None:
    try:
        rehearse(config, BASE)
    except UserError as error:
        return str(error)
    return None


def error_of_training(config: dict) -> str:
    net = torch.nn.Linear(2, 2)
    try:
        start_engine(net, parameter_groups(net, [], [], BASE), config, BASE, lambda step: 1.0)
    except Exception as error:  # noqa: BLE001 - its type is what the test is about
        return type(error).__name__
    return "started"


def main(configs: list[dict], out: Path) -> None:
    get_accelerator().is_fp16_supported = lambda: True  # DeepSpeed refuses it on a CPU, where torch computes it
    distributed.start()
    linear = torch.nn.functional.linear
    results = {"refusals": [refusal(config) for config in configs], "training": error_of_training(configs[0])}
    results["autocast"] = torch_autocast.is_autocast_initialized()
    results["linear"] = torch.nn.functional.linear is linear
    out.write_text(json.dumps(results))
    distributed.stop()


if __name__ == "__main__":
    main(json.loads(sys.argv[-2]), Path(sys.argv[-1]))
    distributed.leave(0)  # as a run does: threads of gloo can abort Python's own end
