"""Have DeepSpeed check a resolved engine file before a run writes anything.

DeepSpeed makes its checks all over the start of an engine, so an engine is started, over a small stand-in for the
model. Only the start of training shows what depends on the model itself (modules that the file names, memory), or on a
disk or a server (NVMe, the log in to a monitor).
"""

import copy
import logging
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from ds_trainer.engine.engine import start_engine, stop_engine
from ds_trainer.engine.engine_file import MICRO, STEPS, TRAIN
from ds_trainer.engine.keys import flag_at, value_at
from ds_trainer.engine.optim import Group, Hyperparameters
from ds_trainer.ranks import distributed
from ds_trainer.ranks.failures import UserError

_WIDTH = 64  # DeepSpeed quantizes weights in groups of 8, and cuts them among the ranks
_MONITORS = {"tensorboard": "tb", "wandb": "wandb", "comet": "comet"}
"""The monitors that need a package, with DeepSpeed's short name."""
_STEPS = 5
"""Enough for a rate to leave the 0 from which a warm-up begins."""
_REFUSALS = (ArithmeticError, AssertionError, AttributeError, ImportError, NotImplementedError, TypeError, ValueError)
"""Neither DeepSpeed nor torch has a type of its own for the errors by which it refuses a file."""


def check_with_deepspeed(config: Mapping[str, Any], base: Hyperparameters, rates: Sequence[float]) -> None:
    """Start and stop an engine by the file, with a parameter group for each of the `rates`; collective.

    Raises UserError with DeepSpeed's words where it refuses, and for a scheduler that would silently undo the groups'
    rates by setting one on all of them.
    """
    layers = nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH) for _ in rates))
    groups = [
        Group(str(index), rate, base.weight_decay, dict(layer.named_parameters()))
        for index, (rate, layer) in enumerate(zip(rates, layers, strict=True))
    ]
    plain = without_monitors(config)
    plain[TRAIN] = config[MICRO] * config[STEPS] * distributed.world_size()  # a dry run may be for other ranks
    for part in ("offload_optimizer", "offload_param"):
        if value_at(plain, f"zero_optimization.{part}.device") == "nvme":
            plain["zero_optimization"][part]["device"] = "cpu"  # this must not write to a disk
    level_before = logging.root.manager.disable
    logging.disable(max(level_before, logging.WARNING))  # the start of training prints the same warnings
    try:
        from deepspeed.monitor import utils

        for block, name in _MONITORS.items():
            if flag_at(config, f"{block}.enabled"):
                getattr(utils, f"check_{name}_availability")()
        engine = start_engine(layers, groups, plain, base, lambda step: 1.0)
        for _ in range(_STEPS if "scheduler" in config else 0):
            engine.lr_scheduler.step()
        rates_then = {group["lr"] for group in engine.optimizer.param_groups}
        stop_engine(engine)
        if len(rates_then) < len(set(rates)):
            raise UserError(
                f"scheduler.type {config['scheduler']['type']} sets one rate on parameter groups with different ones "
                f"({', '.join(map(str, rates))}): remove the scheduler block and use the recipe's lr_scheduler_type, "
                f"or write one rate for each group, e.g. [{', '.join(map(str, rates))}]"
            )
    except _REFUSALS as error:
        raised_in = traceback.extract_tb(error.__traceback__)[-1].filename
        if Path(raised_in).is_relative_to(Path(__file__).parents[1]):
            raise  # a bug of ours, which needs its traceback
        reason = str(error) or repr(error)
        raise UserError(f"DeepSpeed refuses the engine file (--deepspeed_config): {reason}") from error
    finally:
        logging.disable(level_before)


def without_monitors(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of the file without what would write to a server or a log, or print."""
    traces = {*_MONITORS, "csv_monitor", "comms_logger", "flops_profiler"}
    return copy.deepcopy({key: value for key, value in config.items() if key not in traces})
