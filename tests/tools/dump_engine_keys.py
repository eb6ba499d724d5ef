"""Write ds_trainer/engine/keys.json: every key that the installed DeepSpeed takes, read from its source.

Two sources: sections that are pydantic models are read field by field; sections read with plain
`dict.get` are parsed once with a dict that notes every key it is asked for and the type of its default.
Types that neither source tells are added by hand below (`BY_HAND`), with where they come from.

    python tests/tools/dump_engine_keys.py            # rewrite the table
    python tests/tools/dump_engine_keys.py --print    # show it only
"""

import argparse
import enum
import inspect
import json
import pathlib
import types
import typing

import deepspeed
import pydantic
import torch
from deepspeed.comm.config import CommsLoggerConfig
from deepspeed.compile.config import CompileConfig
from deepspeed.inference.config import WeightQuantConfig
from deepspeed.monitor.config import CometConfig, CSVConfig, TensorBoardConfig, WandbConfig
from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.ops.lamb import FusedLamb
from deepspeed.ops.lion import DeepSpeedCPULion, FusedLion
from deepspeed.runtime import config as ds
from deepspeed.runtime import engine as ds_engine
from deepspeed.runtime import lr_schedules
from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
from deepspeed.runtime.tensor_parallel.config import TPTrainingConfig
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.utils.config import DeepSpeedThroughputTimerConfig

TABLE = pathlib.Path(__file__).parents[2] / "ds_trainer" / "engine" / "keys.json"

MODELS = {
    "zero_optimization": DeepSpeedZeroConfig,
    "fp16": DeepSpeedFP16Config,
    "bf16": DeepSpeedBF16Config,
    "bfloat16": DeepSpeedBF16Config,
    "tensorboard": TensorBoardConfig,
    "wandb": WandbConfig,
    "csv_monitor": CSVConfig,
    "comet": CometConfig,
    "comms_logger": CommsLoggerConfig,
    "hybrid_engine": ds.HybridEngineConfig,
    "compile": CompileConfig,
    "tensor_parallel": TPTrainingConfig,
    "weight_quantization": WeightQuantConfig,
}
# Sections read with dict.get, and their sub-sections: parsed with a dict that notes what it is asked.
PLAIN = {
    "activation_checkpointing": {},
    "aio": {},
    "autotuning": {"model_info": {}},
    "checkpoint": {"parallel_write": {}, "writer": {}},
    "data_types": {},
    "expert_parallel": {},
    "flops_profiler": {},
    "optimizer": {},
    "scheduler": {},
    "torch_autocast": {},
}
DTYPES = [name for kind in ds.DtypeEnum for name in kind._all_values if isinstance(name, str)]
POSITIVE = {"types": ["int"], "above": 0}
FILLED = {"filled": True}  # an "auto" that ds_trainer fills, although DeepSpeed has no use for it there
BATCH = {"types": ["int", "null"], "above": 0, **FILLED}  # null is how DeepSpeed writes "not given"
RATE = {"types": ["number"], "min": 0}
RATES = {"types": ["number", "list", "null"], "min": 0, "items": RATE}  # a list has one rate per parameter group
# What the source does not say in a form that can be read. Keys are dotted paths; entries are merged in.
BY_HAND: dict[str, dict] = {
    "train_batch_size": BATCH,
    "train_micro_batch_size_per_gpu": BATCH,
    "gradient_accumulation_steps": BATCH,
    "steps_per_print": {"types": ["number", "null"]},
    "vocabulary_size": {"types": ["int", "null"]},
    "log_level": {"types": ["str", "null"]},
    # ValueError in get_communication_data_type; the value is lowered first
    "communication_data_type": {"types": ["str", "null"], "enum": ["fp16", "bf16", "fp32"], "any_case": True},
    "seq_parallel_communication_data_type": {
        "types": ["str", "null"],
        "enum": ["fp16", "bf16", "fp32"],
        "any_case": True,
    },
    "gradient_allreduce_op": {"enum": list(ds.GRADIENT_ALLREDUCE_OP_SUPPORTED), "any_case": True},
    "gradient_clipping": {"types": ["number"], "min": 0, **FILLED},
    # read in deepspeed.initialize, before DeepSpeedConfig
    "sequence_parallel_size": {**POSITIVE, "default": 1},
    "data_parallel_size": POSITIVE,
    # read_zero_config_deprecated: "zero_optimization": true with this beside it
    "zero_optimization": {"types": ["dict", "bool"]},
    "allgather_size": {"types": ["int"]},
    # read by transformers, ignored by the training engine
    "inference": {"types": ["dict"], "open": True},
    "datastates_ckpt": {"types": ["bool", "dict", "null"], "open": True, "on_by_presence": True},
    # read with copy.copy of whole blocks: their keys depend on the user's metrics and schedules
    "data_efficiency": {"types": ["dict"], "open": True},
    # get_pipeline_config keeps whatever it is given
    "pipeline": {"types": ["dict"], "open": True},
    "timers": {"types": ["dict"]},
    "data_types.grad_accum_dtype": {"types": ["str", "null"], "enum": DTYPES},
    "data_types.param_dtype": {"types": ["str", "null"], "enum": DTYPES},
    "data_types.buffer_dtype": {"types": ["str", "null"], "enum": DTYPES},
    "data_types.keep_in_fp32_modules": {"types": ["list"], "items": {"types": ["str"]}, "own_auto": True},
    "torch_autocast.enabled": {"types": ["bool"], **FILLED},
    "torch_autocast.dtype": {"types": ["str"], "enum": DTYPES},
    "torch_autocast.lower_precision_safe_modules": {"types": ["list"], "items": {"types": ["str"]}},
    "checkpoint.tag_validation": {"types": ["str"], "enum": ["WARN", "IGNORE", "FAIL"], "any_case": True},
    "checkpoint.writer": {"types": ["dict", "null"], "on_by_presence": True},
    "checkpoint.writer.type": {
        "types": ["str", "null"],
        "enum": ["MOCK", "PYTHON", "FAST"],
        "any_case": True,
    },
    "checkpoint.writer.data_parallel": {
        "types": ["str", "null"],
        "enum": ["REPLICA", "SOCKET", "MACHINE"],
        "any_case": True,
    },
    "checkpoint.writer.io_buffer_size": {"types": ["number"]},
    "aio": {"types": ["dict", "null"]},
    # the name of intra_op_parallelism up to 0.15, still in the documentation of transformers; ignored
    "aio.thread_count": {"types": ["int"], "default": 1},
    "activation_checkpointing.number_checkpoints": {"types": ["int", "null"]},
    "autotuning.model_info": {"types": ["dict", "null"]},
    # the autotuner, a program of its own, reads more than the engine does
    "autotuning": {"open": True},
    "flops_profiler.output_file": {"types": ["str", "null"]},
    "optimizer.type": {"types": ["str"]},
    "optimizer.params": {"types": ["dict"], "open": True},
    "optimizer.params.fp32_optimizer_states": {"types": ["bool"], "default": True},
    "optimizer.params.lr": {**RATE, **FILLED},
    "optimizer.params.weight_decay": {**RATE, **FILLED},
    "optimizer.params.eps": {"types": ["number", "list"], "min": 0, **FILLED},  # Adafactor's is a pair
    "optimizer.params.betas": {"types": ["list"], "length": 2, "items": {**RATE, "below": 1}, **FILLED},
    "optimizer.legacy_fusion": {"types": ["bool"]},
    "scheduler.type": {"types": ["str"]},
    "scheduler.params": {"types": ["dict"], "open": True},
    "scheduler.params.warmup_min_lr": {**RATES, **FILLED},
    "scheduler.params.warmup_max_lr": {**RATES, **FILLED},
    "scheduler.params.warmup_num_steps": {**POSITIVE, **FILLED},
    "scheduler.params.total_num_steps": {"types": ["number"], **FILLED},
    "scheduler.params.cycle_min_lr": RATES,
    "scheduler.params.cycle_max_lr": RATES,
    "scheduler.params.lr_range_test_min_lr": RATES,
    "scheduler.params.lr_range_test_step_size": POSITIVE,
    "scheduler.params.base_lr": RATES,
    "scheduler.params.max_lr": RATES,
    # an older name, which DeepSpeed reads only where the newer one is absent
    "bfloat16": {"alias_of": "bf16"},
    # a field validator: float(v) >= 0
    "fp16.loss_scale": {"min": 0},
    "zero_optimization.zenflow": {"on_by_presence": True},
    # model validators of ZenFlowConfig
    "zero_optimization.zenflow.select_strategy": {"enum": ["auto", "step", "epoch"], "own_auto": True},
    "zero_optimization.zenflow.select_interval": {"types": ["int"], "own_auto": True},
    "zero_optimization.zenflow.update_interval": {"types": ["int"], "min": 1, "own_auto": True},
    # a "before" validator turns one text into a list of one
    "zero_optimization.leaf_module": {"types": ["dict", "null"]},
    "zero_optimization.leaf_module.classes": {"types": ["list", "str"]},
    "zero_optimization.leaf_module.names": {"types": ["list", "str"]},
    "zero_optimization.leaf_module.name_suffixes": {"types": ["list", "str"]},
    # "auto" is these keys' own word
    "expert_parallel.load_balance_coeff": {"types": ["null"]},
    "expert_parallel.score_apply": {"types": ["str"], "own_auto": True},
    "expert_parallel.combine_impl": {"types": ["str"], "own_auto": True},
    "expert_parallel.row_weighting_impl": {"types": ["str"], "own_auto": True},
    "expert_parallel.score_func": {"types": ["str"], "own_auto": True},
    "expert_parallel.top_k": {"types": ["int", "str"], "own_auto": True},
    "expert_parallel.routed_scaling_factor": {"types": ["number", "str"], "own_auto": True},
}
# An annotation that is not among these is a Python object that JSON cannot write: accepted, unchecked.
JSON_TYPES = {
    bool: "bool",
    int: "int",
    float: "number",
    str: "str",
    pathlib.Path: "str",
    list: "list",
    tuple: "list",
    dict: "dict",
    type(None): "null",
}
SCALARS = (bool, int, float, str)


class Noted(dict):
    """A dict that notes each key it is asked for, with the default it was asked with."""

    def __init__(self, values: dict | None = None):
        super().__init__(values or {})
        self.noted: dict[str, object] = {}

    def get(self, key, default=None):
        self.noted[key] = default if self.noted.get(key) is None else self.noted[key]
        return super().get(key, default)

    def __getitem__(self, key):
        self.noted.setdefault(key, None)
        return super().__getitem__(key)

    def __contains__(self, key):
        self.noted.setdefault(key, None)
        return super().__contains__(key)

    def keys(self):  # `key in d.keys()` is how DeepSpeed asks
        return self

    def __iter__(self):
        return iter(list(super().keys()))

    def __copy__(self):
        return self


def entry_of_annotation(annotation: object) -> dict:
    """The JSON types, enum values and sub-keys of a pydantic annotation; {} where JSON cannot say."""
    origin = typing.get_origin(annotation)
    if origin in (typing.Union, types.UnionType):
        merged: dict = {"types": []}
        for part in map(entry_of_annotation, typing.get_args(annotation)):
            merged["types"] += part.pop("types", [])
            merged.update(part)
        return merged if merged["types"] else {}
    if origin is typing.Literal:
        return {"types": ["str"], "enum": list(typing.get_args(annotation))}
    kind = origin or annotation
    if not isinstance(kind, type):
        return {}
    if issubclass(kind, enum.Enum):
        values = list(dict.fromkeys(member.value for member in kind))
        return {"types": ["int" if isinstance(values[0], int) else "str"], "enum": values}
    if issubclass(kind, pydantic.BaseModel):
        return {"types": ["dict"], "keys": keys_of_model(kind)}
    entry: dict = {"types": [JSON_TYPES[kind]]} if kind in JSON_TYPES else {}
    if kind is list and typing.get_args(annotation):
        entry["items"] = entry_of_annotation(typing.get_args(annotation)[0])
    return entry


def keys_of_model(model: type[pydantic.BaseModel]) -> dict:
    """Every name that the model takes: aliases first, the field's own name as `alias_of` beside it."""
    keys: dict = {}
    for field_name, field in model.model_fields.items():
        entry = entry_of_annotation(field.annotation)
        for limit in field.metadata:
            for ours, theirs in (("above", "gt"), ("min", "ge"), ("below", "lt"), ("max", "le")):
                if getattr(limit, theirs, None) is not None:
                    entry[ours] = getattr(limit, theirs)
        extra = field.json_schema_extra or {}
        if extra.get("deprecated"):
            entry["deprecated"] = extra.get("new_param", "")
        if isinstance(field.default, SCALARS) and not isinstance(field.default, enum.Enum):
            entry["default"] = field.default if isinstance(field.default, bool) else plain(field.default)
        name = field.alias or field_name
        keys[name] = entry
        if name != field_name:
            keys[field_name] = {**entry, "alias_of": name}
    return keys


def plain(value):
    """DeepSpeed's printing subclass of int as an int."""
    return int(value) if isinstance(value, int) else value


def keys_of_noted(noted: Noted) -> dict:
    """Entries of a dict that was parsed: the type of each default, no type where the default is None."""
    keys: dict = {}
    for key, default in noted.noted.items():
        if isinstance(default, float):
            keys[key] = {"types": ["number"]}
        elif type(default) in JSON_TYPES and default is not None:
            keys[key] = {"types": [JSON_TYPES[type(default)]]}
        else:
            keys[key] = {}
        if isinstance(default, SCALARS):
            keys[key]["default"] = default
    for key in noted:
        if isinstance(noted[key], Noted):
            keys[key] = {"types": ["dict"], "keys": keys_of_noted(noted[key])}
    return keys


def noted_tree(tree: dict) -> Noted:
    return Noted({key: noted_tree(value) for key, value in tree.items()})


def top_level() -> dict:
    """Parse a config of noting dicts with DeepSpeedConfig and return what it asked for, at every level."""
    config = noted_tree(PLAIN)
    config.update(
        dict.fromkeys(("train_batch_size", "gradient_accumulation_steps", "train_micro_batch_size_per_gpu"), 1)
    )
    for name, kind in (("optimizer", "AdamW"), ("scheduler", "WarmupLR")):
        dict.__setitem__(config[name], "type", kind)
    dict.__setitem__(config["torch_autocast"], "dtype", "bfloat16")
    dict.__setitem__(config["torch_autocast"], "lower_precision_safe_modules", [])
    # parse_autoep_config returns early on an empty block
    dict.__setitem__(config["expert_parallel"], "enabled", False)
    ds.DeepSpeedConfig(config)
    keys = keys_of_noted(config)
    for removed in ds._REMOVED_TOP_LEVEL_CONFIG_KEYS:
        keys.pop(removed, None)
    for name, model in MODELS.items():
        keys[name] = {"types": ["dict"], "keys": keys_of_model(model), "auto_is_default": True}
    keys["timers"] = {
        "keys": {
            "throughput": {
                "types": ["dict"],
                "keys": keys_of_model(DeepSpeedThroughputTimerConfig),
                "auto_is_default": True,
            }
        }
    }
    return keys


def add_by_hand(keys: dict) -> dict:
    for path, entry in BY_HAND.items():
        *parents, last = path.split(".")
        level = keys
        for parent in parents:
            level = level[parent].setdefault("keys", {})
        level.setdefault(last, {}).update(entry)
    return keys


def parameters(*classes: type, more: tuple[str, ...] = ()) -> list[str]:
    """The keyword parameters of the classes together, without self and the parameters to train."""
    skipped = {"self", "params", "model_params", "optimizer"}
    names = {name for kind in classes for name in inspect.signature(kind).parameters} - skipped
    return sorted(names | set(more))


def optimizers() -> dict:
    """Names DeepSpeed compares in lower case and names of torch.optim, with their parameters (null: any)."""
    adam = parameters(
        FusedAdam,
        DeepSpeedCPUAdam,
        torch.optim.AdamW,
        more=("torch_adam", "adam_w_mode", "fp32_optimizer_states", "overlap_step"),
    )
    engine = ds_engine.DeepSpeedEngine
    muon = sorted({*engine._MUON_HALF_KEYS, *engine._ADAM_HALF_KEYS, "muon_lr", "adam_lr"} | set(adam))
    known = {
        "adam": adam,
        "adamw": adam,
        "muon": muon,
        "adagrad": parameters(DeepSpeedCPUAdagrad, torch.optim.Adagrad),
        "lamb": [name for name in parameters(FusedLamb) if name != "max_grad_norm"],
        "lion": parameters(DeepSpeedCPULion, FusedLion),
    }
    return {name: known.get(name) for name in ds.DEEPSPEED_OPTIMIZERS}


def torch_classes(module: types.ModuleType, base: type) -> dict:
    """The classes of the module below base, with their parameters."""
    return {
        name: parameters(kind)
        for name, kind in sorted(vars(module).items())
        if isinstance(kind, type) and issubclass(kind, base) and kind is not base and name[0] != "_"
    }


def schedulers() -> dict:
    """DeepSpeed's schedules with their parameters."""
    return {name: parameters(getattr(lr_schedules, name)) for name in lr_schedules.VALID_LR_SCHEDULES}


def table() -> dict:
    schedule = torch.optim.lr_scheduler
    return {
        "written_by": "tests/tools/dump_engine_keys.py",
        "deepspeed": deepspeed.__version__,
        "torch": torch.__version__.split("+")[0],
        "keys": add_by_hand(top_level()),
        "removed": [
            *ds._REMOVED_TOP_LEVEL_CONFIG_KEYS,
            *(f"zero_optimization.{key}" for key in ds._REMOVED_ZERO_CONFIG_KEYS),
        ],
        "optimizers": optimizers(),
        "torch_optimizers": torch_classes(torch.optim, torch.optim.Optimizer),
        "schedulers": schedulers(),
        "torch_schedulers": dict.fromkeys(torch_classes(schedule, schedule.LRScheduler)),
    }


def text() -> str:
    return json.dumps(table(), indent=1, sort_keys=True) + "\n"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--print", action="store_true", help="show the table, write nothing")
    if parser.parse_args().print:
        print(text(), end="")
    else:
        TABLE.write_text(text())
