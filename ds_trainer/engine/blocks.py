"""What the blocks of the engine file may say: optimizer, scheduler, ZeRO, and what cannot stand together.

Every rule stands in DeepSpeed's source; told here because DeepSpeed tells it late, or not at all.
"""

from collections.abc import Collection, Iterator, Sequence
from typing import Any

from ds_trainer.engine.keys import (
    flag_at,
    is_auto,
    is_batch_number,
    is_number,
    key_table,
    nearest_of,
    unknown_key,
    value_at,
)
from ds_trainer.files.messages import shown

FILLED_OPTIMIZER_PARAMS = ("lr", "betas", "eps", "weight_decay")
FILLED_SCHEDULER_PARAMS = ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps")
# The rates that a scheduler sets on every group alike when they are one number, and the value that it
# takes where the key is absent (None: the groups keep their own). A list gives one rate per group.
SHARED_RATES: dict[str, dict[str, float | None]] = {
    "WarmupLR": {"warmup_max_lr": None},
    "WarmupDecayLR": {"warmup_max_lr": 0.001},
    "OneCycle": {"cycle_min_lr": None, "cycle_max_lr": None},
    "LRRangeTest": {"lr_range_test_min_lr": 0.001},
    "OneCycleLR": {"max_lr": None},
    "CyclicLR": {"base_lr": None, "max_lr": None},
}


def block_mistakes(config: dict[str, Any]) -> Iterator[str]:
    """What DeepSpeed refuses or passes over in the optimizer, scheduler and ZeRO blocks, and between them."""
    yield from _optimizer_mistakes(config)
    yield from _scheduler_block_mistakes(config)
    yield from _zero_mistakes(config)
    yield from _other_conflicts(config)


def scheduler_mistakes(config: dict[str, Any], group_rates: Sequence[float]) -> list[str]:
    """What is wrong with the `scheduler` block for parameter groups that have these learning rates.

    DeepSpeed's schedulers take one rate per group as a list; a single number is set on every group.
    """
    kind = value_at(config, "scheduler.type")
    params = value_at(config, "scheduler.params")
    shared = SHARED_RATES.get(kind, {}) if isinstance(kind, str) else {}
    found = []
    for key, absent in shared.items():
        value = params.get(key, absent) if isinstance(params, dict) else absent
        where = f"scheduler.params.{key}"
        if isinstance(value, list) and len(value) != len(group_rates):
            found.append(f"{where} has {len(value)} rates, but there are {len(group_rates)} parameter groups")
        elif value is not None and not isinstance(value, list) and len(set(group_rates)) > 1:
            rates = ", ".join(str(rate) for rate in group_rates)
            said = shown(value) if isinstance(params, dict) and key in params else f"absent, so {value}"
            found.append(
                f"{where} is {said}, which {kind} sets on every parameter group, but the groups have rates "
                f"of their own ({rates}): remove the scheduler block and use the recipe's lr_scheduler_type, "
                f"or write one rate per group, [{rates}]"
            )
    return found


def optimizer_params(kind: str) -> Collection[str] | None:
    """The parameters that a known optimizer type takes; None where they are open."""
    ours, torchs = key_table()["optimizers"], key_table()["torch_optimizers"]
    return ours[kind.lower()] if kind.lower() in ours else torchs[kind]


def zero_stage(config: dict[str, Any]) -> int:
    """The ZeRO stage; 0 where the file does not say."""
    stage = value_at(config, "zero_optimization.stage")
    if config.get("zero_optimization") is True:  # the format of 2020: true is stage 1
        return 1
    return int(stage) if is_number(stage) else 0


def offloads(config: dict[str, Any], what: str) -> bool:
    """Whether "optimizer" or "param" is offloaded, in today's or in the deprecated spelling."""
    deprecated = "cpu_offload" if what == "optimizer" else "cpu_offload_param"
    device = value_at(config, f"zero_optimization.offload_{what}.device")
    return device in ("cpu", "nvme") or bool(flag_at(config, f"zero_optimization.{deprecated}"))


def _optimizer_mistakes(config: dict[str, Any]) -> Iterator[str]:
    block = config.get("optimizer")
    if not isinstance(block, dict):
        return
    kind, params = block.get("type"), block.get("params", {})
    if kind is None:
        yield 'optimizer has no type: write one such as "AdamW", or remove the block'
    if not isinstance(kind, str) or not isinstance(params, dict):
        return
    ours, torchs = key_table()["optimizers"], key_table()["torch_optimizers"]
    if kind.lower() not in ours and kind not in torchs:
        yield _unknown_type("optimizer", kind, [*ours, *torchs])
        return
    yield from _parameter_mistakes("optimizer", params, optimizer_params(kind), FILLED_OPTIMIZER_PARAMS)
    if "max_grad_norm" in params:
        yield "optimizer.params.max_grad_norm is refused by DeepSpeed: use the top-level gradient_clipping"
    stage, tested = zero_stage(config), key_table()["zero_optimizers"]
    if stage > 0 and kind.lower() not in tested and not flag_at(config, "zero_allow_untested_optimizer"):
        yield (
            f'optimizer.type is "{kind}", which DeepSpeed has not tested with ZeRO stage {stage}: '
            'write "zero_allow_untested_optimizer": true, or zero_optimization.stage 0'
        )
    if kind.lower() == "lamb" and value_at(config, "fp16.loss_scale"):
        yield "optimizer.type Lamb needs dynamic loss scaling: write fp16.loss_scale 0"


def _parameter_mistakes(
    block: str, params: dict[str, Any], allowed: Collection[str] | None, filled: Sequence[str]
) -> Iterator[str]:
    """Unknown parameters, an "auto" that nothing fills, rates and shares that are no numbers."""
    for key, value in params.items():
        here = f"{block}.params.{key}"
        if allowed is not None and key not in allowed and key != "max_grad_norm":
            yield unknown_key(here, key, allowed)
        elif is_auto(value):
            if key not in filled:
                yield f'{here} is "auto", which nothing can fill: write its value'
        elif (wanted := _wanted(key, value)) is not None:
            yield f"{here} is {shown(value)}: write {wanted}"


def _wanted(key: str, value: Any) -> str | None:
    """What the parameter should be; None where the value is good, or the parameter is not known here."""
    if key == "betas":
        return None if _are_betas(value) else "two numbers from 0 to below 1, such as [0.9, 0.999]"
    if key in ("warmup_num_steps", "lr_range_test_step_size"):
        return None if is_batch_number(value) else "a whole number above 0"
    if key == "total_num_steps":
        return None if is_number(value) else "a number"
    if key.endswith("_lr") or key == "max_lr":
        good = value is None or _are_rates(value)
        return None if good else "a number of at least 0, or a list of one per parameter group"
    # eps of Adafactor is a pair
    if key in ("lr", "weight_decay") or (key == "eps" and not isinstance(value, list)):
        return None if is_number(value) and value >= 0 else "a number of at least 0"
    return None


def _are_betas(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(is_number(b) and 0 <= b < 1 for b in value)


def _are_rates(value: Any) -> bool:
    return all(is_number(rate) and rate >= 0 for rate in (value if isinstance(value, list) else [value]))


def _unknown_type(block: str, kind: str, known: Collection[str]) -> str:
    return (
        f'{block}.type is "{kind}", which DeepSpeed {key_table()["deepspeed"]} does not have: '
        f"did you mean {nearest_of(kind, known)}? Known: {', '.join(known)}"
    )


def _scheduler_block_mistakes(config: dict[str, Any]) -> Iterator[str]:
    block = config.get("scheduler")
    if not isinstance(block, dict):
        return
    kind, params = block.get("type"), block.get("params")
    if kind is None:
        yield 'scheduler has no type: write one such as "WarmupDecayLR", or remove the block'
    elif isinstance(kind, str) and "params" not in block:
        yield 'scheduler has no params: write "params": {} at least'
    if not isinstance(kind, str) or not isinstance(params, dict):
        return
    ours, torchs = key_table()["schedulers"], key_table()["torch_schedulers"]
    if kind not in ours and kind not in torchs:
        yield _unknown_type("scheduler", kind, [*ours, *torchs])
        return
    wrapped = zero_stage(config) > 0 or flag_at(config, "bf16.enabled") or flag_at(config, "fp16.enabled")
    if kind not in ours and wrapped:
        yield (
            f"scheduler.type is {shown(kind)}, one of torch, which does not take DeepSpeed's optimizer for "
            f"ZeRO, bf16 and fp16: use one of {', '.join(ours)}, or remove the block"
        )
    allowed = ours[kind]["params"] if kind in ours else None
    yield from _parameter_mistakes("scheduler", params, allowed, FILLED_SCHEDULER_PARAMS)
    for key in ours.get(kind, {"needed": []})["needed"]:
        if key not in params:
            yield f"scheduler.params.{key} is missing, which {kind} needs"


def _zero_mistakes(config: dict[str, Any]) -> Iterator[str]:
    stage = zero_stage(config)
    for what, stages in (("optimizer", (1, 2, 3)), ("param", (3,))):
        section = f"zero_optimization.offload_{what}"
        if offloads(config, what) and stage not in stages:
            yield (
                f"{section} is on, but zero_optimization.stage is {stage}: it works with stage "
                f"{' or '.join(map(str, stages))}"
            )
        on_nvme = value_at(config, f"{section}.device") == "nvme"
        if on_nvme and not value_at(config, f"{section}.nvme_path"):
            yield f'{section}.device is "nvme", but its nvme_path is missing: name a folder on that disk'
    ratio = value_at(config, "zero_optimization.offload_optimizer.ratio")
    if is_number(ratio) and ratio < 1 and stage != 3:
        yield f"zero_optimization.offload_optimizer.ratio is {ratio}, which needs zero_optimization.stage 3"
    if flag_at(config, "zero_optimization.compute_grad_norm") is False and stage not in (1, 2):
        yield f"zero_optimization.compute_grad_norm is false, which needs stage 1 or 2, not {stage}"
    yield from _master_weight_mistakes(config, stage)
    yield from _scaling_mistakes(config, stage)


def _master_weight_mistakes(config: dict[str, Any], stage: int) -> Iterator[str]:
    """Master weights in 16 bits: with ZeRO, and on the CPU unless the states of the optimizer are in bf16, too."""
    for section, kind in (("fp16", "fp16"), ("bf16", "bf16"), ("bfloat16", "bf16")):
        masters, states = f"{section}.{kind}_master_weights_and_grads", f"{section}.bf16_optimizer_states"
        for path in (masters, states):
            if flag_at(config, path) and stage == 0:
                yield f"{path} needs zero_optimization.stage 1, 2 or 3, not 0"
        if flag_at(config, states) and not flag_at(config, masters):
            yield f"{states} needs {masters}"
        alone = flag_at(config, masters) and not flag_at(config, states) and not offloads(config, "optimizer")
        if alone and stage > 0:
            instead = "" if kind == "fp16" else f", or {states}"
            yield f"{masters} needs zero_optimization.offload_optimizer with Adam or AdamW{instead}"


def _scaling_mistakes(config: dict[str, Any], stage: int) -> Iterator[str]:
    """Scaling before the reduction, which reduce_scatter leaves out in stage 1 and does not accept in stage 2.

    Stage 3 does not accept it either, and without reduce_scatter it gets a factor wrong that equals the number of
    ranks: the gradients are divided by it, and not multiplied by it afterwards.
    """
    scatters = flag_at(config, "zero_optimization.reduce_scatter") is not False
    for path, default in (("prescale_gradients", False), ("gradient_predivide_factor", 1)):
        if (value_at(config, path) or default) == default or stage == 0:
            continue
        if stage == 3:
            yield f"{path} does not work with zero_optimization.stage 3: remove it"
        elif scatters:
            yield f"{path} needs zero_optimization.reduce_scatter false with stage {stage}: write that, or remove it"


def _other_conflicts(config: dict[str, Any]) -> Iterator[str]:
    if str(value_at(config, "gradient_allreduce_op")).lower() == "sum" and zero_stage(config) == 3:
        yield 'gradient_allreduce_op is "sum", which ZeRO stage 3 cannot do: write "mean"'
    if flag_at(config, "torch_autocast.enabled") and flag_at(config, "zero_optimization.zero_quantized_weights"):
        yield "torch_autocast and zero_optimization.zero_quantized_weights cannot both be on"
