"""Read an engine checkpoint parameter by parameter: each as whole tensors, whatever number of ranks wrote it.

DeepSpeed's universal checkpoint is not used: its converter cannot read checkpoints without ZeRO, and keeps other
settings of the groups at each stage. Not supported: tensor, pipeline and expert parallelism, MiCS, states on NVMe,
elastic ZeRO 1.

How DeepSpeed stores the fp32 weights and the optimizer's tensors on N ranks, for one group of parameters A, B, C:

    without ZeRO   every rank has all of A, B, C, each under its index (fused 16 bit: one flat tensor A|B|C)
    ZeRO 1 and 2   one flat tensor A|B|C with padding, cut into N equal parts wherever the cut falls
    ZeRO 3         each parameter is padded and cut into N equal parts; rank r has A_r|B_r|C_r
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ds_trainer.ranks.failures import UserError

State = dict[str, Any]
"""The state of one parameter: `fp32`, the optimizer's tensors of the same shape, and its scalars (`step`)."""

NAMES = "parameter_names"
"""The key in `client_state` of the names of every group's parameters."""
MODEL = "mp_rank_00_model_states.pt"
_SHARD = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_00_optim_states\.pt")
_SCALE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
"""The states of a dynamic loss scale; DeepSpeed's other fields of it are settings."""


def weights_of(checkpoint: Path, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return the model's whole state dict from an engine checkpoint, bit by bit; tied weights under all their names.

    `dtype` is that of the engine's model. ZeRO 3 saves trained weights only as fp32 masters, which are rounded to it
    here as in the model; the other stages save the model itself. Parameters come before buffers: DeepSpeed leaves
    buffers in fp32, and transformers takes the dtype of a model from the first tensor.
    """
    if (checkpoint / MODEL).is_file():
        model = _read(checkpoint / MODEL)
        buffers = set(model["buffer_names"])
        return dict(sorted(model["module"].items(), key=lambda item: item[0] in buffers))
    saved = SavedEngine.of(checkpoint)
    weights = {parameter.name: parameter.tensor("fp32").to(dtype) for parameter in saved.parameters()}
    weights |= saved.untrained(set(weights))
    return weights | {name: weights[first] for name, first in saved.model["shared_params"].items()}


@dataclass(frozen=True)
class SavedParameter:
    """A trained parameter in a checkpoint. Its tensors are mapped, and only read from disk when they are used."""

    name: str
    shape: torch.Size
    parts: Sequence[tuple[State, int, int]]
    """Where its values lie, by rank: (flat state, start, length). Values beyond the parameter's size are padding."""

    def tensor(self, key: str) -> torch.Tensor:
        """Join the values of all ranks, as a new tensor of the parameter's shape."""
        joined = torch.cat([flat[key].reshape(-1)[start : start + length] for flat, start, length in self.parts])
        return joined[: self.shape.numel()].reshape(self.shape).detach()

    def tensors(self) -> list[str]:
        """Return the keys of the state that are of the parameter's shape."""
        return [key for key, value in self.parts[0][0].items() if torch.is_tensor(value) and key != "step"]

    def scalars(self) -> State:
        """Return the rest of the state, such as the step count; parameters in one flat tensor share it."""
        return {key: value for key, value in self.parts[0][0].items() if key not in self.tensors()}


@dataclass(frozen=True)
class SavedEngine:
    """An engine checkpoint: the file of rank 0 with the model, and with ZeRO the optimizer shard of every rank."""

    folder: Path
    model: dict[str, Any]
    shards: list[dict[str, Any]]

    @classmethod
    def of(cls, folder: Path) -> SavedEngine:
        """Map the files of a checkpoint. Raises UserError where one cannot be read."""
        whole = folder / MODEL
        model = _read(whole if whole.is_file() else _rank_model(folder, 0))
        refuse_nvme(model["ds_config"], str(folder))
        if model["optimizer"] is not None:
            return cls(folder, model, [])
        files = {int(match[1]): path for path in folder.iterdir() if (match := _SHARD.fullmatch(path.name))}
        ranks = range(model["dp_world_size"])
        return cls(folder, model, [_read(files[rank])["optimizer_state_dict"] for rank in ranks])

    @property
    def partitioned(self) -> bool:
        """Whether each weight is cut among the ranks (ZeRO 3)."""
        return bool(self.shards) and "fp32_flat_groups" in self.shards[0]

    def optimizer(self) -> dict[str, Any]:
        """Return torch's state dict of the optimizer on rank 0."""
        if self.shards:
            return self.shards[0]["optimizer_state_dict" if self.partitioned else "base_optimizer_state"]
        return self.model["optimizer"].get("optimizer_state_dict", self.model["optimizer"])

    def scaler(self) -> dict[str, Any] | None:
        """Return the state of a dynamic loss scale; None without one."""
        state = self.model["optimizer"]
        if self.shards:
            scaler = self.shards[0].get("loss_scaler")
            state = vars(scaler) if scaler else {}
        return dynamic_scale(state)

    def parameters(self) -> Iterator[SavedParameter]:
        """Yield every trained parameter, group by group, in the optimizer's order.

        DeepSpeed splits the optimizer's groups into sub-groups under ZeRO 3 (`sub_group_size`). `param_shapes` and the
        flat tensors have one entry per sub-group or, under ZeRO 1 and 2, one per group. The order inside of an entry is
        that of `param_shapes`. DeepSpeed's `param_slice_mappings` has another one with `round_robin_gradients`.
        """
        if not self.shards:
            yield from self._of_whole()
            return
        masters = "fp32_flat_groups" if self.partitioned else "single_partition_of_fp32_groups"
        states = "optimizer_state_dict" if self.partitioned else "base_optimizer_state"
        paddings = self.shards[0].get("param_alignment_paddings")
        for index, shapes in enumerate(self.model["param_shapes"]):
            flats = [{"fp32": shard[masters][index], **shard[states]["state"].get(index, {})} for shard in self.shards]
            start = 0
            for i, (name, shape) in enumerate(shapes.items()):
                # shapes are those of whole parameters, so that the places follow without a look at the tensors
                if self.partitioned:  # each parameter is cut into one equal part per rank, and the last part is padded
                    part = -(-shape.numel() // len(flats))
                    yield SavedParameter(name, shape, [(flat, start, part) for flat in flats])
                    start += part
                else:  # the parameters are put end to end, and padding may follow one of them in the row
                    end = start + shape.numel()
                    yield SavedParameter(name, shape, _parts(flats, start, end))
                    start = end + (paddings[index][i] if paddings else 0)

    def _of_whole(self) -> Iterator[SavedParameter]:
        """Yield the parameters without ZeRO, of which rank 0 has all.

        Each has its master and its state under its index; a fused 16-bit optimizer has one flat tensor for a group.
        """
        if NAMES not in self.model:
            raise UserError(f"{self.folder} does not name its parameters: resume it without ZeRO")
        saved, module = self.model["optimizer"], self.model["module"]
        for g, (group, names) in enumerate(zip(self.optimizer()["param_groups"], self.model[NAMES], strict=True)):
            start = 0
            for i, name in enumerate(names):
                shape = module[name].shape
                if "fp32_groups_flat" in saved:
                    master, index, offset = saved["fp32_groups_flat"][g], group["params"][0], start
                    start += shape.numel()
                else:
                    master = saved["fp32_groups"][g][i] if "fp32_groups" in saved else module[name]
                    index, offset = group["params"][i], 0
                state = {"fp32": master, **self.optimizer()["state"].get(index, {})}
                yield SavedParameter(name, shape, [(state, offset, shape.numel())])

    def untrained(self, trained: set[str]) -> dict[str, torch.Tensor]:
        """Return frozen parameters and buffers by name; a tied parameter only under its first name."""
        module = self.model["module"]
        if not self.partitioned:  # rank 0 has them whole, as all ranks do
            # a tied parameter is in the state dict under each of its names, and among the trained ones under one
            trained_data = {module[name].data_ptr() for name in trained}
            others = {name: value for name, value in module.items() if name not in trained and torch.is_tensor(value)}
            return {name: value.clone() for name, value in others.items() if value.data_ptr() not in trained_data}
        values = {name: module[name].clone() for name in self.model["buffer_names"]}
        shapes = self.model["frozen_param_shapes"] or {}
        models = [_read(_rank_model(self.folder, rank)) for rank in range(len(self.shards))] if shapes else []
        for name, shape in shapes.items():
            joined = torch.cat([model["frozen_param_fragments"][name].reshape(-1) for model in models])
            values[name] = joined[: shape.numel()].reshape(shape).clone()
        return values


def dynamic_scale(scaler: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the states among the fields of one of DeepSpeed's loss scalers; None where its scale is fixed."""
    is_dynamic = scaler.get("dynamic", scaler.get("dynamic_loss_scale"))
    return {name: scaler[name] for name in _SCALE if name in scaler} if is_dynamic else None


def refuse_nvme(config: Mapping[str, Any], where: str) -> None:
    """Raise UserError where states are offloaded to NVMe, whose files belong to a rank and name no parameters."""
    zero = config.get("zero_optimization") or {}
    for part in ("offload_optimizer", "offload_param"):
        if (zero.get(part) or {}).get("device") == "nvme":
            raise UserError(
                f"{where} has {part} on nvme, whose states can only be read under the same ranks and ZeRO stage, by "
                f"--resume: offload to cpu"
            )


def _parts(flats: Sequence[State], start: int, end: int) -> list[tuple[State, int, int]]:
    """Return where the values `start : end` of a row lie that is cut among the ranks, as `SavedParameter.parts`."""
    size = flats[0]["fp32"].numel()  # of a rank's part, the same on all: the last one is padded to it
    ranks = range(start // size, -(-end // size))
    bounds = [(rank, max(start, rank * size), min(end, (rank + 1) * size)) for rank in ranks]
    return [(flats[rank], low - rank * size, high - low) for rank, low, high in bounds]


def _rank_model(folder: Path, rank: int) -> Path:
    return folder / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"


def _read(path: Path) -> dict[str, Any]:
    """Map a file of `torch.save` that holds weights, plain values, and a few objects of DeepSpeed.

    No other object is unpickled, so that a checkpoint of unknown origin runs no code.
    """
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    known = [DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address]
    try:
        with torch.serialization.safe_globals(known):
            return dict(torch.load(path, map_location="cpu", mmap=True, weights_only=True))
    except Exception as error:  # a damaged pickle can raise anything; torch's words advise to run unknown code
        raise UserError(
            f"{path} cannot be read: it is missing or damaged, or holds objects that are neither weights, plain values "
            f"nor DeepSpeed's: use an older checkpoint"
        ) from error
