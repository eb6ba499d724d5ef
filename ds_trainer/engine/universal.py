"""Load an engine checkpoint under another number of ranks, or another ZeRO stage, than it was written under.

`as_universal` writes what is between, the form of DeepSpeed's universal checkpoint; `load` fills an engine from it.
DeepSpeed's own loader is not used: it stops at the way from ZeRO 1 and 2 to 3, back, and to none, gives every group the
first one's rate under ZeRO 3, and leaves frozen parameters and buffers at what the model was built with.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

from ds_trainer.engine.universal_form import ENGINE_KEYS, GROUPS, MODEL, NAMES, State, as_universal, read, refuse_nvme
from ds_trainer.ranks.failures import UserError

__all__ = ["as_universal", "load", "parameter_names", "set_scaler", "slices", "stepping"]
Engine = Any


def parameter_names(engine: Engine) -> dict[str, list[list[str]]]:
    """What has to be saved in `client_state`: every group's parameters. With ZeRO the checkpoint names them itself."""
    return {} if engine.zero_optimization() else {NAMES: [list(group) for group in _trained(engine)]}


def load(engine: Engine, target: Path) -> dict[str, Any]:
    """Fill a freshly started engine from the universal form; gives the `client_state`. Every rank takes part.

    Weights, their fp32 masters, the optimizer's states, rates and steps, the schedule, the loss scale, the engine's
    counts, frozen parameters and buffers: all are the source's, bit by bit. A ValueError where the engine's
    parameters or groups are others.
    """
    common, groups = read(target / MODEL), read(target / GROUPS)
    refuse_nvme(engine.config, "this run's engine file")
    trained = _trained(engine)
    _check_same(groups[NAMES], [list(group) for group in trained], target)
    partitioned = _kind(engine) == "partitioned_weights"
    if partitioned:
        engine.optimizer.checkpoint_event_prologue()
    _fill_untrained(engine, common["module"], {name for group in trained for name in group})
    _fill_trained(engine, trained, target / "zero")
    if partitioned:
        engine.optimizer.checkpoint_event_epilogue()
    for own, saved in zip(_base(engine).param_groups, groups["param_groups"], strict=True):
        own.update(saved)
    set_scaler(engine.optimizer, groups["scaler"])
    if engine.lr_scheduler is not None and common["lr_scheduler"] is not None:
        engine.lr_scheduler.load_state_dict(common["lr_scheduler"])
    for count in ("global_steps", "global_samples", "skipped_steps"):
        setattr(engine, count, common[count])
    return {key: value for key, value in common.items() if key not in ENGINE_KEYS and key != NAMES}


def slices(engine: Engine) -> Iterator[_Slice]:
    """What this rank steps, in fp32, of every trained parameter, by name; without ZeRO, all of them."""
    return _slices(engine, _trained(engine))


def stepping(engine: Engine) -> list[torch.optim.Optimizer]:
    """The optimizers that make the steps: with `offload_optimizer.ratio` under ZeRO 3 one on the host, one beside."""
    beside = getattr(engine.optimizer, "backup_optimizer", None)
    return [_base(engine), *([beside] if beside is not None else [])]


@dataclass(frozen=True)
class _Slice:
    """Where a parameter's values `offset : offset + length` lie on this rank: at `start` of what is stepped."""

    group: int
    name: str
    master: torch.Tensor
    start: int
    length: int
    offset: int


def _kind(engine: Engine) -> str:
    """Which of DeepSpeed's wrappers the optimizer is in."""
    name = type(engine.optimizer).__name__
    if isinstance(engine.optimizer, torch.optim.Optimizer):
        return "plain"
    kinds = {
        "FP16_Optimizer": "fused",
        "FP16_UnfusedOptimizer": "unfused",
        "BF16_Optimizer": "bf16",
        "DeepSpeedZeroOptimizer": "partitioned_states",
        "DeepSpeedZeroOptimizer_Stage3": "partitioned_weights",
    }
    if name not in kinds:
        raise UserError(f"DeepSpeed's {name} cannot change ranks or stage: resume under those of the checkpoint")
    return kinds[name]


def _base(engine: Engine) -> Any:
    """torch's optimizer inside of the wrapper."""
    return engine.optimizer if _kind(engine) == "plain" else engine.optimizer.optimizer


def _trained(engine: Engine) -> list[dict[str, torch.nn.Parameter]]:
    """The parameters of every group by name, in the optimizer's order."""
    optimizer, kind = engine.optimizer, _kind(engine)
    if kind == "plain":
        groups = [group["params"] for group in optimizer.param_groups]
    elif kind == "partitioned_weights":
        groups = [[] for _ in optimizer.optimizer.param_groups]
        for sub, members in enumerate(optimizer.fp16_groups):
            groups[optimizer.sub_group_to_group_id[sub]].extend(members)
    else:
        names = {"bf16": "bf16_groups", "partitioned_states": "bit16_groups"}
        groups = getattr(optimizer, names.get(kind, "fp16_groups"))
    return [{engine.param_names[parameter]: parameter for parameter in group} for group in groups]


def _check_same(saved: list[list[str]], own: list[list[str]], target: Path) -> None:
    """A ValueError where the groups do not hold the same parameters."""
    there, here = ({(g, name) for g, group in enumerate(groups) for name in group} for groups in (saved, own))
    if len(saved) == len(own) and there == here:
        return
    other = ", ".join(sorted(name for _, name in there ^ here)[:4]) or "none"
    raise UserError(
        f"{target} trains {len(there)} parameters in {len(saved)} groups and this run {len(here)} in {len(own)}; "
        f"differences: {other}: resume with the recipe that wrote it"
    )


def _slices(engine: Engine, trained: list[dict[str, torch.nn.Parameter]]) -> Iterator[_Slice]:
    """What this rank holds of the trained parameters."""
    optimizer, kind = engine.optimizer, _kind(engine)
    if kind == "partitioned_weights":
        yield from _partitions(engine)
        return
    if kind in ("bf16", "partitioned_states"):
        yield from _shares(engine)
        return
    for g, group in enumerate(trained):
        start = 0
        for i, (name, parameter) in enumerate(group.items()):
            size = parameter.numel()
            if kind == "plain":
                yield _Slice(g, name, parameter, 0, size, 0)
            elif kind == "unfused":
                yield _Slice(g, name, optimizer.fp32_groups[g][i], 0, size, 0)
            else:
                yield _Slice(g, name, optimizer.fp32_groups_flat[g], start, size, 0)
                start += size


def _shares(engine: Engine) -> Iterator[_Slice]:
    """ZeRO 1 and 2: this rank's share of each group's parameters in a row.

    Not by DeepSpeed's `_hp_mapping`, which has them in another order where `round_robin_gradients` is set.
    """
    optimizer, rows = engine.optimizer, getattr(engine.optimizer, "round_robin_bit16_groups", None)
    for g, row in enumerate(rows if rows is not None else optimizer.bf16_groups):
        master = _base(engine).param_groups[g]["params"][0]
        first = torch.distributed.get_rank(optimizer.real_dp_process_group[g]) * master.numel()
        sizes = [parameter.numel() for parameter in row]
        starts = [0, *accumulate(sizes)] if rows is None else optimizer.round_robin_bit16_offsets[g]
        for parameter, size, start in zip(row, sizes, starts, strict=False):
            low, high = max(start, first), min(start + size, first + master.numel())
            if low < high:
                yield _Slice(g, engine.param_names[parameter], master, low - first, high - low, low - start)


def _partitions(engine: Engine) -> Iterator[_Slice]:
    """ZeRO 3: this rank's part of every parameter; the last rank's may be shorter or empty."""
    optimizer = engine.optimizer
    rank = torch.distributed.get_rank(optimizer.dp_process_group)
    for sub, members in enumerate(optimizer.fp16_groups):
        start, group = 0, optimizer.sub_group_to_group_id[sub]
        for parameter in members:
            part = parameter.ds_tensor.ds_numel
            length = max(0, min(part, parameter.ds_numel - rank * part))
            name = engine.param_names[parameter]
            yield _Slice(group, name, optimizer.fp32_partitioned_groups_flat[sub], start, length, rank * part)
            start += part


def _fill_trained(engine: Engine, trained: list[dict[str, torch.nn.Parameter]], folder: Path) -> None:
    """Weights, masters and the optimizer's states."""
    states = _base(engine).state
    shapes = {name: getattr(p, "ds_shape", p.shape) for group in trained for name, p in group.items()}
    alone = _kind(engine) in ("plain", "unfused") and not _is_deepspeeds(_base(engine))
    counts: dict[Any, State] = {}
    states.clear()  # some wrappers make a step of zero gradients when they are built, and count it
    for own in _slices(engine, trained):
        for path in sorted((folder / own.name).glob("*.pt")):
            key, value = path.stem, torch.load(path, map_location="cpu", mmap=True, weights_only=True)
            if not isinstance(value, dict):
                # a group in flat tensors has one count; without ZeRO those that had no gradient at first are behind,
                # and DeepSpeed's FusedAdam counts on the group's last parameter only
                known = counts.setdefault(own.master if alone else own.group, {})
                known[key] = max(known.get(key, value), value)
                continue
            if value["param"].shape != shapes[own.name]:
                found, wanted = (list(shape) for shape in (value["param"].shape, shapes[own.name]))
                raise UserError(f"{own.name} is {found} in the checkpoint and {wanted} in this run's model")
            if key != "fp32" and key not in states[own.master]:
                states[own.master][key] = torch.zeros_like(own.master)
            _put(own, own.master.data if key == "fp32" else states[own.master][key], value["param"])
    for own in _slices(engine, trained):
        for key, value in counts.get(own.master if alone else own.group, {}).items():
            states[own.master][key] = _scalar(value, _base(engine), own.master.device)
    _spread(engine, trained)


def _put(own: _Slice, place: torch.Tensor, whole: torch.Tensor) -> None:
    """This rank's values of a parameter into the tensor that holds them, among others' or alone."""
    if own.length == place.numel() == whole.numel():
        place.copy_(whole.view(place.shape))
    else:
        place.view(-1)[own.start : own.start + own.length].copy_(whole.view(-1)[own.offset : own.offset + own.length])


def _scalar(value: Any, optimizer: Any, device: torch.device) -> Any:
    """A count as the optimizer keeps it: DeepSpeed's a number, torch's a tensor of its own, counted up in place."""
    if _is_deepspeeds(optimizer):
        return int(value)
    on_device = optimizer.defaults.get("fused") or optimizer.defaults.get("capturable")
    return torch.tensor(float(value), device=device if on_device else "cpu")


def _is_deepspeeds(optimizer: Any) -> bool:
    return type(optimizer).__module__.startswith("deepspeed.")


def _spread(engine: Engine, trained: list[dict[str, torch.nn.Parameter]]) -> None:
    """The model's weights from the optimizer's fp32 ones, on every rank."""
    kind, optimizer = _kind(engine), engine.optimizer
    if kind == "partitioned_weights":
        for sub in range(len(optimizer.fp16_groups)):
            optimizer._reassign_or_swap_out_partitioned_parameters(sub)
        return
    if kind in ("bf16", "partitioned_states"):
        optimizer._hp_optimizer_states_linked = False
        if any(optimizer.optimizer.state.values()):  # else, where every step so far was skipped, at the first one
            optimizer._lazy_init_hp_params_optimizer_state()
        optimizer.update_lp_params()
        return
    parameters = {name: parameter for group in trained for name, parameter in group.items()}
    for own in _slices(engine, trained):
        parameter = parameters[own.name]
        if own.master is not parameter:
            values = own.master.data.reshape(-1)[own.start : own.start + own.length]
            parameter.data.copy_(values.view(parameter.shape))


def _fill_untrained(engine: Engine, saved: Mapping[str, torch.Tensor], trained: set[str]) -> None:
    """Frozen parameters, and the buffers that a state dict has."""
    frozen = {name: parameter for parameter, name in engine.param_names.items() if name not in trained}
    absent = sorted(frozen.keys() - saved.keys())
    if absent:
        raise UserError(f"the checkpoint has no value of {', '.join(absent[:4])}, which this run's model has")
    for name, parameter in frozen.items():
        if hasattr(parameter, "ds_tensor"):
            part, rank = parameter.ds_tensor, torch.distributed.get_rank(parameter.ds_process_group)
            own = saved[name].reshape(-1)[rank * part.ds_numel : (rank + 1) * part.ds_numel]
            part.data.view(-1)[: own.numel()].copy_(own)
        else:
            parameter.data.copy_(saved[name])
    for name, buffer in engine.module.named_buffers():
        if name in saved:
            buffer.copy_(saved[name])


def set_scaler(optimizer: Any, saved: Mapping[str, Any] | None) -> None:
    """The dynamic loss scale goes on where it was; its settings are the engine file's."""
    own = getattr(optimizer, "loss_scaler", None) or getattr(optimizer, "loss_scale_config", None)
    if saved is None or not (getattr(own, "dynamic", False) or getattr(own, "dynamic_loss_scale", False)):
        return
    for name, value in saved.items():
        if hasattr(own, name):
            setattr(own, name, value)
