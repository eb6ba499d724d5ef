"""Read, check and resolve the engine file: DeepSpeed's own JSON, with Hugging Face's "auto" values.

The check works on the text alone, before torch is loaded, so that a mistake shows within seconds. It reports unknown
keys and wrong types (`keys.py`), values that differ between the engine file and the recipe, and combinations that
DeepSpeed accepts although it then ignores a part of them or trains wrongly. What DeepSpeed refuses itself is left to it
(`engine.py`).
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ds_trainer.engine import keys
from ds_trainer.files.messages import shown
from ds_trainer.recipe.recipe import Phase
from ds_trainer.recipe.schedules import LrSchedule

DEFAULT_MICRO_BATCH = 32
DEFAULTS = {
    "gradient_clipping": 1.0,  # DeepSpeed's own, for a file without the key; 0.0 turns clipping off
    "optimizer.params.lr": 5e-5,
    "optimizer.params.weight_decay": 0.0,
    "optimizer.params.eps": 1e-8,
}
TRAIN, MICRO, STEPS = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"


@dataclass(frozen=True)
class Hyperparameters:
    """The hyperparameters of AdamW under torch's names, as resolved from the engine file and the recipe."""

    lr: float
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8


@dataclass(frozen=True)
class EngineNumbers:
    """The numbers that a phase is trained with: the engine file's, else the recipe's, else the default."""

    train_batch_size: int
    per_device_train_batch_size: int
    gradient_accumulation_steps: int
    max_grad_norm: float
    optimizer: Hyperparameters


NAMES_IN_RECIPE = {
    TRAIN: "train_batch_size",
    MICRO: "per_device_train_batch_size",
    STEPS: "gradient_accumulation_steps",
    "gradient_clipping": "max_grad_norm",
    "optimizer.params.lr": "learning_rate",
    "optimizer.params.eps": "adam_epsilon",
    "optimizer.params.weight_decay": "weight_decay",
    "scheduler.params.warmup_max_lr": "learning_rate",
    "scheduler.params.warmup_num_steps": "warmup_steps",
    "bf16.enabled": "bf16",
    "fp16.enabled": "fp16",
}
"""The recipe's field for a key of the engine file."""
TRACES = ("tensorboard", "wandb", "comet", "csv_monitor", "comms_logger", "flops_profiler")
"""The sections that make DeepSpeed write to a server or a log, or print."""
_LEAST_BUCKET = 4_000_000
BY_HIDDEN_SIZE: dict[str, Callable[[int], int]] = {
    "reduce_bucket_size": lambda hidden: max(hidden * hidden, _LEAST_BUCKET),
    "prefetch_bucket_size": lambda hidden: max(int(0.9 * hidden * hidden), _LEAST_BUCKET),
    "param_persistence_threshold": lambda hidden: 10 * hidden,
}
"""The values for "auto" in `zero_optimization`, in elements, by the model's hidden size; also of `stage3_...`.

They are those of Hugging Face's Trainer, except that the buckets of a narrow model are not smaller than what keeps the
latency of a collective below its time: 4 million elements are 8 to 16 MB, which take half a millisecond at 25 GB/s.
With MiniLM's 384 * 384 the gradients of a step were summed in 81 parts."""
LOW_PRECISION = {
    "bf16": ("bf16", "bfloat16", "torch.bfloat16"),
    "fp16": ("fp16", "float16", "half", "torch.float16"),
}
SCHEDULES: dict[str, LrSchedule] = {
    "WarmupLR": "constant_with_warmup",
    "WarmupDecayLR": "linear",
    "WarmupCosineLR": "cosine",
}
"""DeepSpeed's schedules that have the shape of one of the recipe's."""
SCHEDULERS = (*SCHEDULES, "OneCycle", "LRRangeTest")
"""All of DeepSpeed's; torch's others neither take its optimizers nor have rates that follow from the step."""
_DEFAULT_WARMUP = 1000  # DeepSpeed's own, for one of these without warmup_num_steps


def check_engine_file(
    config: dict[str, Any], phase: Phase | None, world_size: int, *, name: str = "the engine file"
) -> list[str]:
    """Return every mistake in the file, and between it and a phase of the recipe, which is None if it cannot be read.

    `name` is the file's, for the messages.
    """
    mistakes = [*keys.key_mistakes(config, keys.key_table()["keys"]), *_combination_mistakes(config, phase)]
    disagreements = [*_disagreements(config, phase, name)]
    # the product of batch sizes would only report again that the files disagree on one of them
    return mistakes + disagreements + ([] if disagreements else [*_batch_mistakes(config, phase, world_size)])


def settled_numbers(config: dict[str, Any], phase: Phase | None, world_size: int) -> EngineNumbers:
    """Settle every number between a file without mistakes and the recipe."""
    betas = keys.value_at(config, "optimizer.params.betas")
    beta1, beta2 = betas or (_in_recipe(phase, "adam_beta1"), _in_recipe(phase, "adam_beta2"))
    clipping, lr, decay, eps = (_settled(config, phase, path, default) for path, default in DEFAULTS.items())
    optimizer = Hyperparameters(lr, decay, (_first(beta1, 0.9), _first(beta2, 0.999)), eps)
    return EngineNumbers(*_batch_triangle(config, phase, world_size), clipping, optimizer)


def settled_schedule(config: dict[str, Any], phase: Phase) -> dict[str, Any]:
    """Settle the recipe's fields of the schedule, which other schedules follow: the recipe's, else the file's."""
    block, kind, warmup = config.get("scheduler") or {}, phase.lr_scheduler_type, phase.warmup_steps
    if block.get("type") in SCHEDULES:
        steps = (block.get("params") or {}).get("warmup_num_steps", _DEFAULT_WARMUP)
        kind, warmup = SCHEDULES[block["type"]], _first(warmup, None if keys.is_auto(steps) else steps)
    return {"lr_scheduler_type": kind or "linear", "warmup_steps": warmup or 0}


def resolve_engine_file(
    config: dict[str, Any],
    phase: Phase | None,
    world_size: int,
    *,
    hidden_size: int | None = None,
    total_steps: int | None = None,
    warmup_steps: int | None = None,
) -> dict[str, Any]:
    """Return a new config with every "auto" filled; where it needs an argument that is None, "auto" stays.

    The file has passed `check_engine_file`. Every other "auto" is dropped by DeepSpeed, which takes its default.
    """
    numbers = settled_numbers(config, phase, world_size)
    resolved = copy.deepcopy(keys.without_refused(config))
    for key in (TRAIN, MICRO, STEPS, "gradient_clipping"):
        resolved[key] = getattr(numbers, NAMES_IN_RECIPE[key])
    for section, is_on in _precision_modes(config, phase).items():
        if is_on or section in resolved:
            resolved.setdefault(section, {})["enabled"] = is_on
    _fill_optimizer(resolved, phase, numbers.optimizer)
    if "scheduler" in resolved:
        warmup = {"warmup_min_lr": 0, "warmup_max_lr": numbers.optimizer.lr, "total_num_steps": total_steps}
        if warmup_steps is not None:
            warmup["warmup_num_steps"] = max(1, warmup_steps)  # DeepSpeed refuses 0, "no warm-up" to everyone else
        params = resolved["scheduler"].setdefault("params", {})
        if resolved["scheduler"]["type"] in SCHEDULES and _in_recipe(phase, "warmup_steps") is not None:
            params.setdefault("warmup_num_steps", "auto")
        _fill_auto(params, warmup)
    if hidden_size is not None and isinstance(resolved.get("zero_optimization"), dict):
        for key, size_of in BY_HIDDEN_SIZE.items():
            _fill_auto(resolved["zero_optimization"], dict.fromkeys((key, f"stage3_{key}"), size_of(hidden_size)))
    return resolved


# Checking


def _combination_mistakes(config: dict[str, Any], phase: Phase | None) -> Iterator[str]:
    """Report combinations that DeepSpeed accepts and then trains wrongly, or refuses with an unclear error."""
    for block in ("optimizer", "scheduler"):
        if isinstance(config.get(block), dict) and not config[block].get("type"):
            yield f"{block} has no type, without which DeepSpeed ignores it: write a type, or remove the block"
    if config.get("managed_gradient_accumulation") is False:
        yield "managed_gradient_accumulation is false, but ds_trainer leaves the accumulation to DeepSpeed: remove it"
    stage, scheduler = keys.zero_stage(config), keys.value_at(config, "scheduler.type")
    for key in (TRAIN, MICRO, STEPS):
        if keys.is_number(number := keys.value_at(config, key)) and number <= 0:
            yield f"{key} is {shown(number)}: write a whole number above 0"
    modes = _precision_modes(config, phase)
    if modes["fp16"] and modes["bf16"]:
        yield "fp16 and bf16 are both on: turn one of them off, in the engine file or in the recipe"
    if scheduler not in (None, *SCHEDULERS):
        yield (
            f"scheduler.type is {shown(scheduler)}: write one of {', '.join(SCHEDULERS)}, or remove the block and use "
            f"the recipe's lr_scheduler_type"
        )
    for part, stages in (("optimizer", "1, 2 or 3"), ("param", "3")):
        section = f"zero_optimization.offload_{part}"
        if keys.offloads(config, part) and str(stage) not in stages:
            yield f"{section} is on, but zero_optimization.stage is {stage}: it works with stage {stages}"
        if keys.value_at(config, f"{section}.device") == "nvme" and not keys.value_at(config, f"{section}.nvme_path"):
            yield f'{section}.device is "nvme", but its nvme_path is missing: name a folder on that disk'
    if keys.flag_at(config, "zero_optimization.compute_grad_norm") is False:
        yield (
            "zero_optimization.compute_grad_norm is false, and without the norm nobody notices gradients that are not "
            "finite: remove it"
        )
    # Stages 1 and 2 leave the scaling out where they scatter. Stage 3 never multiplies the gradients by the factor
    # again after the reduction, so that they are too small by it.
    for path, default in (("prescale_gradients", False), ("gradient_predivide_factor", 1)):
        if stage and (keys.value_at(config, path) or default) != default:
            yield f"{path} does not work with ZeRO, and zero_optimization.stage is {stage}: remove it"


def _disagreements(config: dict[str, Any], phase: Phase | None, name: str) -> Iterator[str]:
    """Report every value that the engine file and the recipe both have, where the two differ."""
    pairs = [(path, keys.value_at(config, path), field) for path, field in NAMES_IN_RECIPE.items()]
    betas = keys.value_at(config, "optimizer.params.betas")
    for i, beta in enumerate(betas[:2] if isinstance(betas, list) else []):
        pairs.append((f"optimizer.params.betas[{i}]", beta, f"adam_beta{i + 1}"))
    kind = keys.value_at(config, "scheduler.type")
    if isinstance(kind, str):  # the block wins in DeepSpeed
        if kind not in SCHEDULES and _in_recipe(phase, "warmup_steps"):
            pairs.append(("scheduler.type", kind, "warmup_steps"))
        if _in_recipe(phase, "lr_scheduler_type") != SCHEDULES.get(kind):
            pairs.append(("scheduler.type", kind, "lr_scheduler_type"))
    for path, value, field in pairs:
        other = _in_recipe(phase, field)
        if other is None or value == other or not (isinstance(value, bool | int | float) or path == "scheduler.type"):
            continue
        yield (
            f"{path} is {shown(value)} in {name}, but {field} is {shown(other)} in the recipe: write it in one place"
            + ("" if path == "scheduler.type" else f', or write "auto" in {name}')
        )


def _batch_mistakes(config: dict[str, Any], phase: Phase | None, world_size: int) -> Iterator[str]:
    """Check that train_batch_size = micro-batch x accumulation steps x ranks, where all three are good numbers."""
    numbers = _batch_numbers(config, phase)
    if not all(n is None or (keys.is_number(n) and n == int(n) and n > 0) for n in numbers.values()):
        return
    train, micro, steps = _batch_triangle(config, phase, world_size)
    if train == micro * steps * world_size:
        return
    factors = f"{MICRO} {micro} x {STEPS} {steps} x {world_size} rank{'s' * (world_size > 1)}"
    yield f'{TRAIN} is {train}, but {factors} = {micro * steps * world_size}: change one of them or write "auto"'


# Settling between the file and the recipe


def _first(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)


def _in_recipe(phase: Phase | None, field: str) -> Any:
    """Return a field of the phase; None where the recipe does not set it, or could not be read."""
    return getattr(phase, field, None)


def _settled(config: dict[str, Any], phase: Phase | None, path: str, default: float | None = None) -> Any:
    return _first(keys.value_at(config, path), _in_recipe(phase, NAMES_IN_RECIPE[path]), default)


def _batch_numbers(config: dict[str, Any], phase: Phase | None) -> dict[str, Any]:
    return {key: _settled(config, phase, key) for key in (TRAIN, MICRO, STEPS)}


def _batch_triangle(config: dict[str, Any], phase: Phase | None, ranks: int) -> tuple[int, int, int]:
    """Return train, micro and accumulation, two of which give the third, rounded down where they do not divide."""
    train, micro, steps = _batch_numbers(config, phase).values()
    if train is None:
        micro, steps = _first(micro, DEFAULT_MICRO_BATCH), _first(steps, 1)
        train = micro * steps * ranks
    elif micro is None:
        steps = _first(steps, 1)
        micro = train // (steps * ranks)
    elif steps is None:
        steps = train // (micro * ranks)
    return int(train), int(micro), int(steps)


def _precision_modes(config: dict[str, Any], phase: Phase | None) -> dict[str, bool]:
    """Return which of the sections for bf16, fp16 and torch_autocast are on: by the file, else by the recipe."""
    dtype = keys.value_at(config, "torch_autocast.dtype") or "bf16"
    autocast_kind = next((kind for kind, names in LOW_PRECISION.items() if dtype in names), "")
    section = config.get("torch_autocast")
    autocast = bool(keys.flag_at(config, "torch_autocast.enabled"))
    if isinstance(section, dict) and keys.is_auto(section.get("enabled")):
        autocast = bool(_in_recipe(phase, autocast_kind))
    modes = {"torch_autocast": autocast}
    for kind in LOW_PRECISION:
        # a torch_autocast of this type is what the recipe asks for already
        by_recipe = bool(_in_recipe(phase, kind)) and not (autocast and autocast_kind == kind)
        modes[kind] = bool(_first(keys.flag_at(config, f"{kind}.enabled"), by_recipe))
    return modes


# Filling


def _fill_optimizer(resolved: dict[str, Any], phase: Phase | None, settled: Hyperparameters) -> None:
    """Fill every "auto", the values that only the recipe has, and the learning rate in any case.

    Under offload DeepSpeed builds its own CPU Adam from the block, and refuses an optimizer that it is handed unless
    `zero_force_ds_cpu_optimizer` is false: a file without the block gets one.
    """
    ours = asdict(settled) | {"betas": list(settled.betas)}
    if "optimizer" not in resolved:
        if keys.offloads(resolved, "optimizer") and keys.flag_at(resolved, "zero_force_ds_cpu_optimizer") is not False:
            resolved["optimizer"] = {"type": "AdamW", "params": ours}
        return
    params = resolved["optimizer"].setdefault("params", {})
    fields = {"betas": ("adam_beta1", "adam_beta2"), "eps": ("adam_epsilon",), "weight_decay": ("weight_decay",)}
    for key, value in ours.items():
        in_recipe = key == "lr" or any(_in_recipe(phase, field) is not None for field in fields[key])
        if keys.is_auto(params.get(key)) or (key not in params and in_recipe):
            params[key] = value


def _fill_auto(section: dict[str, Any], values: Mapping[str, Any]) -> None:
    """Write the values that are known in the place of "auto"."""
    section |= {key: value for key, value in values.items() if value is not None and keys.is_auto(section.get(key))}
