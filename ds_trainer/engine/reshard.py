"""Load an engine checkpoint under another number of ranks, or another ZeRO stage, than it was written under.

A rank steps a part of some parameters. It reads each of these parameters whole (`saved_states.py`), and copies its
part. DeepSpeed's way, the universal checkpoint, is not used. It needs the disk space of a second checkpoint. It cannot
go from ZeRO 1 or 2 to 3, back, or to no ZeRO. Under ZeRO 3 it gives every group the rate of the first one. And it
leaves frozen parameters and buffers as the model was built.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ds_trainer.engine.saved_states import NAMES, SavedEngine, State, dynamic_scale, refuse_nvme
from ds_trainer.ranks.failures import UserError

Engine = Any
_WRAPPERS = {
    "FP16_Optimizer": "fused",
    "FP16_UnfusedOptimizer": "unfused",
    "DeepSpeedZeroOptimizer": "partitioned_states",
    "DeepSpeedZeroOptimizer_Stage3": "partitioned_weights",
}
"""DeepSpeed's wrappers of optimizers: two without ZeRO, one for ZeRO 1 and 2, and one for ZeRO 3."""


@dataclass(frozen=True)
class Slice:
    """The part of a parameter that this rank steps.

    `master[start : start + length]`, flat and in fp32, holds the parameter's values `offset : offset + length`.
    """

    group: int
    name: str
    master: torch.Tensor
    start: int
    length: int
    offset: int


def parameter_names(engine: Engine) -> dict[str, list[list[str]]]:
    """Return the `client_state` of a checkpoint without ZeRO: every group's parameter names.

    DeepSpeed stores the names itself in a checkpoint with ZeRO, for which nothing is returned.
    """
    if engine.zero_optimization():
        return {}
    return {NAMES: [[engine.param_names[parameter] for parameter in group] for group in _whole_groups(engine)]}


def load(engine: Engine, checkpoint: Path) -> None:
    """Fill a freshly started engine from a checkpoint of any number of ranks and any ZeRO stage; collective.

    The engine then has the checkpoint's weights, fp32 masters, optimizer states, rates, step counts, schedule, loss
    scale, frozen parameters and buffers, bit by bit. The parameter groups must be the same (`checkpoint.check_fits`).
    Raises UserError where the engine has other parameters.
    """
    saved = SavedEngine.of(checkpoint)
    refuse_nvme(engine.config, "this run's engine file")
    # by name, and never by position: another stage has other groups of tensors, and another order in them
    trained = {parameter.name for parameter in saved.parameters()}
    untrained = saved.untrained(trained)
    # checked before anything is overwritten: an engine that is half loaded could not even go on as it was
    missing = [n for p, n in engine.param_names.items() if n not in (trained if p.requires_grad else untrained)]
    if missing:
        raise UserError(
            f"{checkpoint} has no {', '.join(sorted(missing)[:4])}, or trains what this run freezes, or the other way "
            f"round: resume with the recipe that wrote it"
        )
    partitioned = _kind(engine) == "partitioned_weights"
    if partitioned:  # weights that are now whole on every rank are put back into their partitions
        engine.optimizer.checkpoint_event_prologue()
    _fill_untrained(engine, untrained)
    # the masters come first, since the weights of the model are computed from them, as after every step
    _fill_trained(engine, saved)
    _update_model(engine)
    if partitioned:
        engine.optimizer.checkpoint_event_epilogue()
    # the parameters of a group are this engine's tensors: only its rate, decay and the like come from the checkpoint
    for group, saved_group in zip(_base(engine).param_groups, saved.optimizer()["param_groups"], strict=True):
        group.update({key: value for key, value in saved_group.items() if key != "params"})
    set_scaler(engine.optimizer, saved.scaler())
    if engine.lr_scheduler is not None and saved.model["lr_scheduler"] is not None:
        engine.lr_scheduler.load_state_dict(saved.model["lr_scheduler"])
    for name in ("global_steps", "global_samples", "skipped_steps"):
        setattr(engine, name, saved.model[name])


def slices(engine: Engine) -> Iterator[Slice]:
    """Yield the part of every trained parameter that this rank steps; without ZeRO that is the whole parameter."""
    optimizer, kind = engine.optimizer, _kind(engine)
    if kind == "partitioned_weights":
        yield from _slices_of_partitions(engine)
        return
    if kind == "partitioned_states":
        yield from _slices_of_shares(engine)
        return
    for g, group in enumerate(_whole_groups(engine)):
        start = 0
        for i, parameter in enumerate(group):
            name, size = engine.param_names[parameter], parameter.numel()
            if kind == "plain":
                yield Slice(g, name, parameter, 0, size, 0)
            elif kind == "unfused":
                yield Slice(g, name, optimizer.fp32_groups[g][i], 0, size, 0)
            else:
                yield Slice(g, name, optimizer.fp32_groups_flat[g], start, size, 0)
                start += size


def set_scaler(optimizer: Any, saved: Mapping[str, Any] | None) -> None:
    """Set the states of a dynamic loss scale; its settings stay those of the engine file."""
    scaler = getattr(optimizer, "loss_scaler", None) or getattr(optimizer, "loss_scale_config", None)
    if saved is not None and scaler is not None and dynamic_scale(vars(scaler)):
        vars(scaler).update({name: value for name, value in saved.items() if hasattr(scaler, name)})


def _kind(engine: Engine) -> str:
    """Return the kind of DeepSpeed's wrapper around the optimizer; "plain" without a wrapper."""
    if isinstance(engine.optimizer, torch.optim.Optimizer):
        return "plain"
    name = type(engine.optimizer).__name__
    if name not in _WRAPPERS:
        raise UserError(f"DeepSpeed's {name} cannot change ranks or stage: resume under those of the checkpoint")
    return _WRAPPERS[name]


def _base(engine: Engine) -> Any:
    """Return torch's optimizer inside of the wrapper."""
    return engine.optimizer if _kind(engine) == "plain" else engine.optimizer.optimizer


def _whole_groups(engine: Engine) -> list[list[torch.nn.Parameter]]:
    """Return the parameters of every group of an optimizer without ZeRO."""
    if _kind(engine) == "plain":
        return [group["params"] for group in engine.optimizer.param_groups]
    return list(engine.optimizer.fp16_groups)


def _slices_of_shares(engine: Engine) -> Iterator[Slice]:
    """Yield the parts under ZeRO 1 and 2: a group's parameters, put end to end with padding, are one row of values.

    The row is cut into one equal share per rank, wherever the cuts fall in a parameter. With `round_robin_gradients`
    the row has another order than DeepSpeed's `_hp_mapping`, so that the mapping cannot be used.
    """
    optimizer = engine.optimizer
    for g, row in enumerate(optimizer.round_robin_bit16_groups):
        master = _base(engine).param_groups[g]["params"][0]
        first = torch.distributed.get_rank(optimizer.real_dp_process_group[g]) * master.numel()
        for parameter, start in zip(row, optimizer.round_robin_bit16_offsets[g], strict=True):
            low, high = max(start, first), min(start + parameter.numel(), first + master.numel())
            if low < high:
                yield Slice(g, engine.param_names[parameter], master, low - first, high - low, low - start)


def _slices_of_partitions(engine: Engine) -> Iterator[Slice]:
    """Yield the parts under ZeRO 3: one of every parameter. The parts of the last ranks may be shorter, or empty."""
    # the flat tensors are of DeepSpeed's sub-groups, but step counts are kept by group, so each part names its group
    optimizer = engine.optimizer
    rank = torch.distributed.get_rank(optimizer.dp_process_group)
    for sub, members in enumerate(optimizer.fp16_groups):
        # every rank's flat tensor has equal parts, padding included, so `start` moves by whole parts on all of them
        start, group = 0, optimizer.sub_group_to_group_id[sub]
        for parameter in members:
            part = parameter.ds_tensor.ds_numel
            length = max(0, min(part, parameter.ds_numel - rank * part))
            name = engine.param_names[parameter]
            yield Slice(group, name, optimizer.fp32_partitioned_groups_flat[sub], start, length, rank * part)
            start += part


def _fill_trained(engine: Engine, saved: SavedEngine) -> None:
    """Load the fp32 masters and the optimizer's states; without masters, the weights."""
    base = _base(engine)
    base.state.clear()  # some wrappers take a step with zero gradients as they are built, and count it
    shapes = {name: getattr(p, "ds_shape", p.shape) for p, name in engine.param_names.items()}
    parts = {part.name: part for part in slices(engine)}  # a rank has one part of a parameter, or none
    # Torch's optimizers without ZeRO count the steps of each parameter. Everywhere else a group has one count: its
    # parameters are in one flat tensor, or DeepSpeed's FusedAdam counts on the last of them only. A group's count is
    # the largest of those saved, since the counts of parameters that had no gradient at first are behind.
    is_deepspeeds = type(base).__module__.startswith("deepspeed.")
    counts_each = _kind(engine) in ("plain", "unfused") and not is_deepspeeds
    step_counts: dict[Any, State] = {}
    for parameter in saved.parameters():
        part = parts.get(parameter.name)
        if part is None:  # other ranks step all of it, and this one need not read it from disk
            continue
        if parameter.shape != shapes[part.name]:
            before, now = list(parameter.shape), list(shapes[part.name])
            raise UserError(f"{part.name} is {before} in the checkpoint and {now} in this run's model")
        for key in parameter.tensors():
            # a fresh optimizer makes its states at its first step, and would start them at zero
            if key != "fp32" and key not in base.state[part.master]:
                base.state[part.master][key] = torch.zeros_like(part.master)
            place = part.master.data if key == "fp32" else base.state[part.master][key]
            whole = parameter.tensor(key)
            if part.length == place.numel() == whole.numel():
                place.copy_(whole.view(place.shape))  # also where `place` is not contiguous
            else:
                values = whole.view(-1)[part.offset : part.offset + part.length]
                place.view(-1)[part.start : part.start + part.length].copy_(values)
        # the state of Adam is only right with the number of steps that it is corrected for
        count = step_counts.setdefault(part.master if counts_each else part.group, {})
        for key, value in parameter.scalars().items():
            count[key] = max(count.get(key, value), value)
    on_device = base.defaults.get("fused") or base.defaults.get("capturable")
    for part in parts.values():
        for key, value in step_counts[part.master if counts_each else part.group].items():
            # DeepSpeed's optimizers keep a step count as a number, and torch's as a tensor
            tensor = torch.tensor(float(value), device=part.master.device if on_device else "cpu")
            base.state[part.master][key] = int(value) if is_deepspeeds else tensor


def _update_model(engine: Engine) -> None:
    """Compute the model's weights from the optimizer's fp32 masters, on every rank."""
    kind, optimizer = _kind(engine), engine.optimizer
    if kind == "partitioned_weights":
        for sub in range(len(optimizer.fp16_groups)):
            optimizer._reassign_or_swap_out_partitioned_parameters(sub)
    elif kind == "partitioned_states":
        # DeepSpeed links the parameters to their states at the first step that is not skipped, and only once. The
        # states are new tensors now; while there are none yet, that step still comes.
        optimizer._hp_optimizer_states_linked = False
        if any(optimizer.optimizer.state.values()):
            optimizer._lazy_init_hp_params_optimizer_state()
        optimizer.update_lp_params()
    elif kind != "plain":
        parameters = {name: parameter for parameter, name in engine.param_names.items()}
        for part in slices(engine):
            values = part.master.data.reshape(-1)[part.start : part.start + part.length]
            parameters[part.name].data.copy_(values.view(parameters[part.name].shape))


def _fill_untrained(engine: Engine, saved: Mapping[str, torch.Tensor]) -> None:
    """Load frozen parameters, and the buffers that a state dict has."""
    frozen = [(name, parameter) for parameter, name in engine.param_names.items() if not parameter.requires_grad]
    for name, parameter in frozen:
        if hasattr(parameter, "ds_tensor"):  # ZeRO 3 partitions frozen parameters, too
            part, rank = parameter.ds_tensor, torch.distributed.get_rank(parameter.ds_process_group)
            values = saved[name].reshape(-1)[rank * part.ds_numel : (rank + 1) * part.ds_numel]
            part.data.view(-1)[: values.numel()].copy_(values)
        else:
            parameter.data.copy_(saved[name])
    for name, buffer in engine.module.named_buffers():
        if name in saved:
            buffer.copy_(saved[name])
