"""Have DeepSpeed check a resolved engine file before a run writes anything.

DeepSpeed makes its checks all over the start of an engine, so an engine is started, over a small stand-in for the
model. Only the start of training shows what depends on the model itself (modules that the file names, memory), or on a
disk or a server (NVMe, the log in to a monitor).
"""

import copy
import logging
import traceback
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from ds_trainer.engine.engine import start_engine, stop_engine
from ds_trainer.engine.engine_file import MICRO, STEPS, TRAIN
from ds_trainer.engine.keys import flag_at, value_at
from ds_trainer.engine.optim import Group, Hyperparameters
from ds_trainer.ranks import distributed
from ds_trainer.ranks.failures import UserError

_PACKAGE = Path(__file__).parents[1]
_WIDTH = 64  # DeepSpeed quantizes weights in groups of 8, and cuts them among the ranks
_MONITORS = {"tensorboard": "tb", "wandb": "wandb", "comet": "comet"}
"""The monitors that need a package, with DeepSpeed's short name."""


def rehearse(config: Mapping[str, Any], base: Hyperparameters) -> None:
    """Start and stop an engine by the file; collective. Raises UserError with DeepSpeed's words where it refuses."""
    model = nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH) for _ in range(_group_count(config))))
    groups = [
        Group(name, base.lr, base.weight_decay, dict(layer.named_parameters()))
        for name, layer in model.named_children()
    ]
    level_before = logging.root.manager.disable
    logging.disable(max(level_before, logging.WARNING))  # the start of training prints the same warnings
    try:
        _check_monitors(config)
        batch = {TRAIN: config[MICRO] * config[STEPS] * distributed.world_size()}  # a dry run may be for other ranks
        engine = start_engine(model, groups, _without_traces(config) | batch, base, lambda step: 1.0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch expects a step of the optimizer before
            engine.lr_scheduler.step()  # torch's schedulers read some of their parameters only now
        stop_engine(engine)
    # neither DeepSpeed nor torch has a type of its own for the errors by which it refuses a file
    except (ArithmeticError, AssertionError, ImportError, NotImplementedError, TypeError, ValueError) as error:
        raised_in = traceback.extract_tb(error.__traceback__)[-1].filename
        if Path(raised_in).is_relative_to(_PACKAGE):
            raise  # a bug of ours, which needs its traceback
        reason = str(error) or repr(error)
        raise UserError(f"DeepSpeed refuses the engine file (--deepspeed_config): {reason}") from error
    finally:
        logging.disable(level_before)


def _group_count(config: Mapping[str, Any]) -> int:
    """Return how many groups a scheduler with a rate for each expects; `scheduler_mistakes` knows the real ones.

    Else two, as most phases have at least: some optimizers refuse more than one.
    """
    params = value_at(config, "scheduler.params") or {}
    return max((len(value) for value in params.values() if isinstance(value, list)), default=2)


def _check_monitors(config: Mapping[str, Any]) -> None:
    from deepspeed.monitor import utils

    for block, name in _MONITORS.items():
        if flag_at(config, f"{block}.enabled"):
            getattr(utils, f"check_{name}_availability")()


def without_monitors(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the file without what would write to a server or a log, or print."""
    traces = {*_MONITORS, "csv_monitor", "comms_logger", "flops_profiler"}
    return copy.deepcopy({key: value for key, value in config.items() if key not in traces})


def _without_traces(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the file without monitors, and without what would write to a disk."""
    plain = without_monitors(config)
    zero = plain.get("zero_optimization")
    if isinstance(zero, dict):
        for part in ("offload_optimizer", "offload_param"):
            if value_at(zero, f"{part}.device") == "nvme":
                zero[part]["device"] = "cpu"
    return plain
