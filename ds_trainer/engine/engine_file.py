"""Read, check and resolve the engine file: DeepSpeed's own JSON, with Hugging Face's "auto" values.

Every mistake is found here, from the text alone, before torch or DeepSpeed is imported (DeepSpeed's own
messages come after its imports, on every rank, or only at the first optimizer step). What DeepSpeed knows
is the matter of `engine_keys.py` and `engine_blocks.py`; what ds_trainer does not do, of `engine_verdicts.py`.

Does not start DeepSpeed, and does not ask what the machine can do (fp16 on a CPU, NVMe paths, compilers).
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ds_trainer.config.recipe import Phase
from ds_trainer.engine.blocks import (
    block_mistakes,
    offloads,
    optimizer_params,
    zero_stage,
)
from ds_trainer.engine.blocks import scheduler_mistakes as scheduler_mistakes
from ds_trainer.engine.keys import (
    flag_at,
    is_auto,
    is_batch_number,
    is_number,
    key_mistakes,
    key_table,
    value_at,
)
from ds_trainer.engine.verdicts import idle_keys, refusals, without_refused
from ds_trainer.files.json_file import read_json
from ds_trainer.files.messages import shown
from ds_trainer.ranks.failures import UserError

DEFAULT_MICRO_BATCH = 32
DEFAULT_GRADIENT_CLIPPING = 1.0  # DeepSpeed's own, for a file that does not say; 0.0 is "none"
DEFAULT_LEARNING_RATE = 5e-5

TRAIN, MICRO, STEPS = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"


@dataclass(frozen=True)
class Said:
    """What the recipe says about values whose home is the engine file; None where it says nothing."""

    train_batch_size: int | None = None
    per_device_train_batch_size: int | None = None
    gradient_accumulation_steps: int | None = None
    max_grad_norm: float | None = None
    learning_rate: float | None = None
    weight_decay: float | None = None
    adam_beta1: float | None = None
    adam_beta2: float | None = None
    adam_epsilon: float | None = None
    bf16: bool | None = None
    fp16: bool | None = None


@dataclass(frozen=True)
class Settled:
    """Those values as they will be used: the engine file's, else the recipe's, else the default."""

    train_batch_size: int
    per_device_train_batch_size: int
    gradient_accumulation_steps: int
    max_grad_norm: float
    learning_rate: float
    weight_decay: float
    adam_beta1: float
    adam_beta2: float
    adam_epsilon: float
    bf16: bool
    fp16: bool


# Where a value lives in the engine file, and what the recipe calls it.
NAMES_IN_RECIPE = {
    TRAIN: "train_batch_size",
    MICRO: "per_device_train_batch_size",
    STEPS: "gradient_accumulation_steps",
    "gradient_clipping": "max_grad_norm",
    "optimizer.params.lr": "learning_rate",
    "optimizer.params.eps": "adam_epsilon",
    "optimizer.params.weight_decay": "weight_decay",
    "scheduler.params.warmup_max_lr": "learning_rate",
    "bf16.enabled": "bf16",
    "bfloat16.enabled": "bf16",
    "fp16.enabled": "fp16",
}
BY_HIDDEN_SIZE: dict[str, Callable[[int], int]] = {
    "reduce_bucket_size": lambda hidden: hidden * hidden,
    "stage3_prefetch_bucket_size": lambda hidden: int(0.9 * hidden * hidden),
    "prefetch_bucket_size": lambda hidden: int(0.9 * hidden * hidden),
    "stage3_param_persistence_threshold": lambda hidden: 10 * hidden,
    "param_persistence_threshold": lambda hidden: 10 * hidden,
}
LOW_PRECISION = {
    "bf16": ("bf16", "bfloat16", "torch.bfloat16"),
    "fp16": ("fp16", "float16", "half", "torch.float16"),
}


def read_engine_file(path: str | Path) -> dict[str, Any]:
    """Read the file as DeepSpeed does: Hjson, so comments and trailing commas are fine, duplicate keys not."""
    return read_json(path, "the engine file")


def check_engine_file(
    config: dict[str, Any], said: Said, world_size: int, *, name: str = "the engine file"
) -> list[str]:
    """Every mistake in the file, and between it and the recipe; empty when good. `name` is the file's."""
    if not isinstance(config, dict):
        return [f"{name} holds {shown(config)}: it must be an object, {{...}}"]
    found = [*refusals(config), *key_mistakes(config, key_table()["keys"]), *block_mistakes(config)]
    found += _precision_mistakes(config, said)
    disagreements = [*_disagreements(config, said, name)]
    # a triangle over numbers that are themselves in question would only repeat them
    return found + disagreements + ([] if disagreements else [*_batch_mistakes(config, said, world_size)])


def idle_warnings(config: dict[str, Any], phases: Sequence[Said], world_size: int, *, name: str) -> list[str]:
    """One line that names what has no effect in any phase in a file without mistakes; none where all has."""
    unknown: dict[str, None] = dict.fromkeys(("hidden_size", "total_steps", "warmup_steps"))
    idle = [idle_keys(resolve_engine_file(config, said, world_size, **unknown)) for said in phases]
    everywhere = [key for key in idle[0] if all(key in keys for keys in idle)]
    return [f"without effect in {name}: {', '.join(everywhere)}"] if everywhere else []


def settled_numbers(config: dict[str, Any], said: Said, world_size: int) -> Settled:
    """Settle every value between a file without mistakes and what the recipe says."""
    train, micro, steps = _batch_triangle(config, said, world_size)
    betas = value_at(config, "optimizer.params.betas") or [
        _first(said.adam_beta1, 0.9),
        _first(said.adam_beta2, 0.999),
    ]
    return Settled(
        train_batch_size=train,
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=steps,
        max_grad_norm=_first(value_at(config, "gradient_clipping"), said.max_grad_norm, DEFAULT_GRADIENT_CLIPPING),
        learning_rate=_first(value_at(config, "optimizer.params.lr"), said.learning_rate, DEFAULT_LEARNING_RATE),
        weight_decay=_first(value_at(config, "optimizer.params.weight_decay"), said.weight_decay, 0.0),
        adam_beta1=betas[0],
        adam_beta2=betas[1],
        adam_epsilon=_first(value_at(config, "optimizer.params.eps"), said.adam_epsilon, 1e-8),
        bf16=_low_precision(config, said, "bf16"),
        fp16=_low_precision(config, said, "fp16"),
    )


def resolve_engine_file(
    config: dict[str, Any],
    said: Said,
    world_size: int,
    *,
    hidden_size: int | None,
    total_steps: int | None,
    warmup_steps: int | None,
) -> dict[str, Any]:
    """A new config with every "auto" filled that can be; what needs an argument that is None stays "auto".

    Resolving the result again, with more known, fills the rest. Raises ValueError with every mistake.
    """
    mistakes = check_engine_file(config, said, world_size)
    if mistakes:
        raise UserError("\n".join(mistakes))
    numbers = settled_numbers(config, said, world_size)
    resolved = copy.deepcopy(without_refused(config))
    resolved[TRAIN] = numbers.train_batch_size
    resolved[MICRO] = numbers.per_device_train_batch_size
    resolved[STEPS] = numbers.gradient_accumulation_steps
    resolved["gradient_clipping"] = numbers.max_grad_norm
    _fill_precision(resolved, config, said, numbers)
    _fill_optimizer(resolved, said, numbers)
    _fill_scheduler(resolved, numbers, total_steps, warmup_steps)
    zero = resolved.get("zero_optimization")
    for key, fill in BY_HIDDEN_SIZE.items():
        if hidden_size is not None and isinstance(zero, dict) and zero.get(key) == "auto":
            zero[key] = fill(hidden_size)
    _fill_with_defaults(resolved, key_table()["keys"], False)
    return resolved


# Looking into a config that may be wrong


def _first(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)


# Between the file and the recipe


def _disagreements(config: dict[str, Any], said: Said, name: str) -> Iterator[str]:
    for path, field in NAMES_IN_RECIPE.items():
        here, there = value_at(config, path), getattr(said, field)
        if isinstance(here, bool | int | float) and there is not None and here != there:
            yield _disagreement(path, here, name, field, there)
    betas = value_at(config, "optimizer.params.betas")
    if isinstance(betas, list) and len(betas) == 2:
        for index, field in enumerate(("adam_beta1", "adam_beta2")):
            there = getattr(said, field)
            if there is not None and betas[index] != there:
                yield _disagreement(f"optimizer.params.betas[{index}]", betas[index], name, field, there)


def _disagreement(path: str, here: Any, name: str, field: str, there: Any) -> str:
    return (
        f"{path} is {shown(here)} in {name}, but {field} is {shown(there)} in the recipe: "
        f'say it in one place, or write "auto" in {name}'
    )


def _batch_numbers(config: dict[str, Any], said: Said) -> dict[str, Any]:
    there = {key: getattr(said, NAMES_IN_RECIPE[key]) for key in (TRAIN, MICRO, STEPS)}
    return {key: _first(value_at(config, key), value) for key, value in there.items()}


def _batch_triangle(config: dict[str, Any], said: Said, ranks: int) -> tuple[int, int, int]:
    """train, micro and accumulation, two of which give the third; rounded down where they do not divide."""
    train, micro, steps = _batch_numbers(config, said).values()
    if train is None:
        micro, steps = _first(micro, DEFAULT_MICRO_BATCH), _first(steps, 1)
        train = micro * steps * ranks
    elif micro is None:
        steps = _first(steps, 1)
        micro = train // (steps * ranks)
    elif steps is None:
        steps = train // (micro * ranks)
    return int(train), int(micro), int(steps)


def _batch_mistakes(config: dict[str, Any], said: Said, world_size: int) -> Iterator[str]:
    numbers = _batch_numbers(config, said)
    for key, value in numbers.items():
        if value is not None and not is_batch_number(value):
            if value_at(config, key) is None:
                yield f"{NAMES_IN_RECIPE[key]} is {shown(value)} in the recipe: write a whole number above 0"
            return
    train, micro, steps = _batch_triangle(config, said, world_size)
    if train == micro * steps * world_size:
        return
    given = [f"{key} {int(value)}" for key, value in numbers.items() if value is not None and key != TRAIN]
    factors = " x ".join([*given, _counted(world_size)])
    if len(given) == 2:
        product = micro * steps * world_size
        yield f'{TRAIN} is {train}, but {factors} = {product}: change one of them or write "auto"'
    else:
        yield f'{TRAIN} is {train}, which {factors} does not divide: change one of them or write "auto"'


def _counted(ranks: int) -> str:
    return f"{ranks} rank" if ranks == 1 else f"{ranks} ranks"


# Precision


def _low_precision(config: dict[str, Any], said: Said, kind: str) -> bool:
    """Whether the engine's own "bf16" or "fp16" mode is on: by the file, else by the recipe.

    A torch_autocast of that type is what the recipe asks for already.
    """
    section = _section(config, kind)
    by_recipe = bool(getattr(said, kind)) and not (_autocast(config, said) and _autocast_type(config) == kind)
    return bool(_first(flag_at(config, f"{section}.enabled"), by_recipe))


def _section(config: dict[str, Any], kind: str) -> str:
    return "bfloat16" if kind == "bf16" and "bfloat16" in config and "bf16" not in config else kind


def _autocast_type(config: dict[str, Any]) -> str:
    dtype = value_at(config, "torch_autocast.dtype")
    if dtype is None:
        return "bf16"
    return next((kind for kind, names in LOW_PRECISION.items() if dtype in names), "")


def _autocast(config: dict[str, Any], said: Said) -> bool:
    if isinstance(config.get("torch_autocast"), dict) and is_auto(config["torch_autocast"].get("enabled")):
        return bool(getattr(said, _autocast_type(config), None))
    return bool(flag_at(config, "torch_autocast.enabled"))


def _precision_mistakes(config: dict[str, Any], said: Said) -> Iterator[str]:
    if "bf16" in config and "bfloat16" in config:
        yield "bf16 and bfloat16 are one section, and DeepSpeed passes over the second: keep bf16"
    on = [kind for kind in LOW_PRECISION if _low_precision(config, said, kind)]
    if len(on) == 2:
        yield "fp16 and bf16 are both on: turn one of them off, in the engine file or in the recipe"
        return
    dynamic = not value_at(config, "fp16.loss_scale")
    for key in ("loss_scale_window", "min_loss_scale"):
        value = value_at(config, f"fp16.{key}")
        if "fp16" in on and dynamic and is_number(value) and value <= 0:
            yield f"fp16.{key} is {value}: dynamic loss scaling needs a whole number above 0"
    for path in ("data_types.param_dtype", "data_types.grad_accum_dtype"):
        asked, mode = value_at(config, path), on[0] if on else "fp32"
        same = asked in LOW_PRECISION.get(mode, ("fp32", "float32", "float", "torch.float32"))
        # without ZeRO the gradients are accumulated in the model's own type only
        if asked is not None and not same and (path.endswith("param_dtype") or zero_stage(config) == 0):
            yield f"{path} is {shown(asked)}, but the model trains in {mode}: remove it, or write {mode}"


# Filling


def _fill_precision(resolved: dict[str, Any], config: dict[str, Any], said: Said, numbers: Settled) -> None:
    for kind in LOW_PRECISION:
        section, is_on = _section(config, kind), getattr(numbers, kind)
        if is_on or section in resolved:
            resolved.setdefault(section, {})["enabled"] = is_on
    if "torch_autocast" in config:
        resolved["torch_autocast"]["enabled"] = _autocast(config, said)


def _fill_optimizer(resolved: dict[str, Any], said: Said, numbers: Settled) -> None:
    """Fill what is "auto", what the recipe says and the block does not, and the rate in any case.

    Under offload DeepSpeed refuses an optimizer of ours unless the file says otherwise, so that it gets a
    block to build its own CPU Adam from.
    """
    ours = {
        "lr": numbers.learning_rate,
        "betas": [numbers.adam_beta1, numbers.adam_beta2],
        "eps": numbers.adam_epsilon,
        "weight_decay": numbers.weight_decay,
    }
    block = resolved.get("optimizer")
    if block is None:
        if offloads(resolved, "optimizer") and flag_at(resolved, "zero_force_ds_cpu_optimizer") is not False:
            resolved["optimizer"] = {"type": "AdamW", "params": ours}
        return
    params = block.setdefault("params", {})
    said_here = {
        "lr": True,
        "betas": said.adam_beta1 is not None or said.adam_beta2 is not None,
        "eps": said.adam_epsilon is not None,
        "weight_decay": said.weight_decay is not None,
    }
    allowed = optimizer_params(block["type"]) or ("lr",)
    for key, value in ours.items():
        if is_auto(params.get(key)) or (key not in params and said_here[key] and key in allowed):
            params[key] = value


def _fill_scheduler(
    resolved: dict[str, Any], numbers: Settled, total_steps: int | None, warmup_steps: int | None
) -> None:
    params = value_at(resolved, "scheduler.params") or {}
    ours = {
        "warmup_min_lr": 0,
        "warmup_max_lr": numbers.learning_rate,
        # DeepSpeed refuses 0, which is "no warm-up" to everyone else
        "warmup_num_steps": None if warmup_steps is None else max(1, warmup_steps),
        "total_num_steps": total_steps,
    }
    for key, value in ours.items():
        if is_auto(params.get(key)) and value is not None:
            params[key] = value


def _fill_with_defaults(block: dict[str, Any], known: dict[str, Any], auto_is_default: bool) -> None:
    """Write DeepSpeed's default for each "auto" that DeepSpeed would drop; drop it where there is none."""
    for key in list(block):
        entry = known.get(key, {})
        waits = entry.get("own_auto") or key in BY_HIDDEN_SIZE
        if is_auto(block[key]) and auto_is_default and not waits:
            if "default" in entry:
                block[key] = entry["default"]
            else:
                del block[key]
        elif isinstance(block[key], dict) and "keys" in entry:
            below = auto_is_default or entry.get("auto_is_default", False)
            _fill_with_defaults(block[key], entry["keys"], below)


def said_by(phase: Phase) -> Said:
    """What a phase says about values whose home is the engine file."""
    return Said(**{field.name: getattr(phase, field.name) for field in fields(Said)})
