"""The universal form of an engine checkpoint: what DeepSpeed saved, by parameter, whatever the ranks and ZeRO stage.

It is that of DeepSpeed's universal checkpoint, bit by bit: `zero/NAME/` for every trained parameter, with the whole of
`fp32.pt`, of the optimizer's tensors (`exp_avg.pt`, `exp_avg_sq.pt`) and of its `step.pt`. DeepSpeed's converter is not
used: it knows no checkpoints without ZeRO, and what it keeps of the groups' settings differs by stage. Not done:
tensor, pipeline and expert parallelism, MiCS, states on NVMe, elastic ZeRO 1.
"""

from __future__ import annotations

import pickle
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ds_trainer.ranks.failures import UserError

State = dict[str, Any]
"""Of one parameter: `fp32`, the optimizer's tensors of the same shape, and its scalars (`step`)."""

NAMES = "parameter_names"
"""Where `client_state` has the groups' parameters."""
ENGINE_KEYS = frozenset(
    (
        *("module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params"),
        *("frozen_param_fragments", "lr_scheduler", "data_sampler", "random_ltd", "skipped_steps", "global_steps"),
        *("global_samples", "dp_world_size", "mp_world_size", "checkpoint_parallel_dimensions", "ds_config"),
        "ds_version",
    )
)
"""What DeepSpeed saves; the rest is `client_state`."""
MODEL = "mp_rank_00_model_states.pt"
GROUPS = Path("zero", "optimizer_state.pt")
_SHARD = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_00_optim_states\.pt")
SCALER = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


def as_universal(checkpoint: Path, target: Path) -> None:
    """Write the engine checkpoint `checkpoint`, of any number of ranks, in the universal form to the folder `target`.

    No collectives: for one rank, while the others wait. `target` is made aside and is there only when whole; one that
    was there is replaced. A ValueError where `checkpoint` is none, lacks files, or is of a kind that is not known.
    """
    aside = target.with_name(f"{target.name}.making")
    shutil.rmtree(aside, ignore_errors=True)
    try:
        _write(_Source.of(checkpoint), aside)
        shutil.rmtree(target, ignore_errors=True)
        aside.rename(target)
    except (KeyError, IndexError) as error:
        raise UserError(f"{checkpoint} is not as DeepSpeed writes it: it lacks {error}") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def weights_of(checkpoint: Path, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The model's whole state dict from an engine checkpoint, bit by bit; tied weights are under each of their names.

    Parameters come before buffers, which DeepSpeed leaves in fp32: the precision of a model is that of the first.
    `dtype` is what the engine had the model in: ZeRO 3 saves the trained weights as fp32 masters only, of which its
    model holds rounded copies. All other stages save the model itself.
    """
    if (checkpoint / MODEL).is_file():
        model = read(checkpoint / MODEL)
        buffers = set(model["buffer_names"])
        return dict(sorted(model["module"].items(), key=lambda item: item[0] in buffers))
    source = _Source.of(checkpoint)
    for shard in source.shards:
        shard["optimizer_state_dict"]["state"].clear()  # or the moments, twice as much again, would be joined too
    weights = {name: state["fp32"].to(dtype) for _, name, state in source.parameters()}
    weights |= source.untrained(set(weights))
    return weights | {name: weights[first] for name, first in source.model["shared_params"].items()}


@dataclass(frozen=True)
class _Source:
    """An engine checkpoint: what rank 0 saved of the model, and what every rank saved of its optimizer, if it did."""

    folder: Path
    model: dict[str, Any]
    shards: list[dict[str, Any]]

    @classmethod
    def of(cls, folder: Path) -> _Source:
        first = next((p for p in (folder / MODEL, _rank_model(folder, 0)) if p.is_file()), None)
        if first is None:
            raise UserError(
                f"{folder} is no engine checkpoint: it has neither {MODEL} nor {_rank_model(folder, 0).name}"
            )
        model = read(first)
        missing = sorted({"module", "optimizer", "dp_world_size", "global_steps"} - set(model))
        if missing:
            raise UserError(f"{first} is no engine checkpoint: it lacks {', '.join(missing)}")
        if model["mp_world_size"] > 1 or (folder / "mp_rank_01_model_states.pt").exists():
            raise UserError(f"{folder} was written with model parallelism: resume with the same number of ranks")
        refuse_nvme(model["ds_config"], str(folder))
        if model["optimizer"] is not None:
            return cls(folder, model, [])
        files = {int(found[1]): path for path in folder.iterdir() if (found := _SHARD.fullmatch(path.name))}
        absent = [str(rank) for rank in range(model["dp_world_size"]) if rank not in files]
        if absent:
            raise UserError(f"{folder} lacks the optimizer states (*_optim_states.pt) of rank {', '.join(absent)}")
        shards = [read(files[rank])["optimizer_state_dict"] for rank in range(model["dp_world_size"])]
        return cls(folder, model, shards)

    @property
    def partitioned(self) -> bool:
        """Whether the weights too are (ZeRO 3)."""
        return bool(self.shards) and "fp32_flat_groups" in self.shards[0]

    def optimizer(self) -> dict[str, Any]:
        """torch's state dict of rank 0."""
        if self.shards:
            return self.shards[0]["optimizer_state_dict" if self.partitioned else "base_optimizer_state"]
        return self.model["optimizer"].get("optimizer_state_dict", self.model["optimizer"])

    def scaler(self) -> dict[str, Any] | None:
        """The state of a dynamic loss scale."""
        kept = vars(self.shards[0].get("loss_scaler") or _Nothing()) if self.shards else self.model["optimizer"]
        if not kept.get("dynamic", kept.get("dynamic_loss_scale")):
            return None
        return {name: kept[name] for name in SCALER if name in kept}

    def parameters(self) -> Iterator[tuple[int, str, State]]:
        """Group, name and whole state of every trained parameter, one at a time."""
        if self.partitioned:
            return self._of_partitions()
        return self._of_fragments() if self.shards else self._of_whole()

    def _of_partitions(self) -> Iterator[tuple[int, str, State]]:
        """ZeRO 3: every parameter is cut into as many equal parts as there are ranks, the last one padded."""
        group_of = {index: g for g, group in enumerate(self.optimizer()["param_groups"]) for index in group["params"]}
        for index, shapes in enumerate(self.model["param_shapes"]):
            flats = [
                {"fp32": shard["fp32_flat_groups"][index], **shard["optimizer_state_dict"]["state"].get(index, {})}
                for shard in self.shards
            ]
            start = 0
            for name, shape in shapes.items():
                part = -(-shape.numel() // len(flats))
                yield group_of[index], name, self._join(name, shape, [(flat, start, part) for flat in flats])
                start += part

    def _of_fragments(self) -> Iterator[tuple[int, str, State]]:
        """ZeRO 1 and 2: a group's parameters in a row, some with padding after them, are cut among the ranks.

        `param_slice_mappings`, by which DeepSpeed's converter goes, has them in another order than the values where
        `round_robin_gradients` is set; `param_shapes` has theirs.
        """
        if not isinstance(self.optimizer(), dict):
            raise UserError(f"{self.folder} is an elastic checkpoint: resume with the number of ranks that wrote it")
        for group, shapes in enumerate(self.model["param_shapes"]):
            flats = [
                {
                    "fp32": shard["single_partition_of_fp32_groups"][group],
                    **shard["base_optimizer_state"]["state"].get(group, {}),
                }
                for shard in self.shards
            ]
            paddings = self.shards[0].get("param_alignment_paddings")
            size = flats[0]["fp32"].numel() if len(flats) > 1 else 0
            start = 0
            for i, (name, shape) in enumerate(shapes.items()):
                end = start + shape.numel()
                yield group, name, self._join(name, shape, _shares(flats, size, start, end))
                start = end + (paddings[group][i] if paddings else 0)

    def _of_whole(self) -> Iterator[tuple[int, str, State]]:
        """Without ZeRO every rank has all, under an index, or in fused 16 bit under its group's."""
        if NAMES not in self.model:
            raise UserError(f"{self.folder} does not name its parameters: resume it without ZeRO")
        saved, module = self.model["optimizer"], self.model["module"]
        for g, (group, names) in enumerate(zip(self.optimizer()["param_groups"], self.model[NAMES], strict=True)):
            start = 0
            for i, name in enumerate(names):
                shape = module[name].shape
                if "fp32_groups_flat" in saved:
                    master, index, share = saved["fp32_groups_flat"][g], group["params"][0], (start, shape.numel())
                    start += shape.numel()
                else:
                    master = saved["fp32_groups"][g][i] if "fp32_groups" in saved else module[name]
                    index, share = group["params"][i], (0, shape.numel())
                state = self.optimizer()["state"].get(index, {})
                yield g, name, self._join(name, shape, [({"fp32": master, **state}, *share)])

    def _join(self, name: str, shape: torch.Size, parts: Sequence[tuple[State, int, int]]) -> State:
        """One parameter's state, out of (flat state, start, length) by rank; what is beyond its size is padding."""
        whole: State = {}
        for key, first in parts[0][0].items():
            if not torch.is_tensor(first) or key == "step":
                whole[key] = first.clone() if torch.is_tensor(first) else first
                continue
            joined = torch.cat([flat[key].reshape(-1)[start : start + length] for flat, start, length in parts])
            if joined.numel() < shape.numel():
                raise UserError(f"{self.folder} holds {joined.numel()} of the {shape.numel()} values of {name}'s {key}")
            whole[key] = joined[: shape.numel()].reshape(shape).detach().clone()
        return whole

    def untrained(self, trained: set[str]) -> dict[str, torch.Tensor]:
        """Frozen parameters and buffers; not the second names of tied parameters."""
        module = self.model["module"]
        if not self.partitioned:
            places = {module[name].data_ptr() for name in trained}
            others = {name: value for name, value in module.items() if name not in trained and torch.is_tensor(value)}
            return {name: value.clone() for name, value in others.items() if value.data_ptr() not in places}
        found = {name: module[name].clone() for name in self.model["buffer_names"]}
        shapes = self.model["frozen_param_shapes"] or {}
        models = [read(_rank_model(self.folder, rank)) for rank in range(len(self.shards))] if shapes else []
        for name, shape in shapes.items():
            joined = torch.cat([model["frozen_param_fragments"][name].reshape(-1) for model in models])
            found[name] = joined[: shape.numel()].reshape(shape).clone()
        return found


class _Nothing:
    """Has no fields: stands for a loss scale that an optimizer does not have."""


def _shares(flats: Sequence[State], size: int, start: int, end: int) -> list[tuple[State, int, int]]:
    """Where values `start : end` lie in the ranks' flat states, `size` of them on each; all on the only one."""
    if len(flats) == 1:
        return [(flats[0], start, end - start)]
    ranks = range(start // size, -(-end // size))
    bounds = [(rank, max(start, rank * size), min(end, (rank + 1) * size)) for rank in ranks]
    return [(flats[rank], low - rank * size, high - low) for rank, low, high in bounds]


def _rank_model(folder: Path, rank: int) -> Path:
    return folder / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"


def _write(source: _Source, folder: Path) -> None:
    """The universal form, one parameter at a time."""
    groups = [{k: v for k, v in group.items() if k != "params"} for group in source.optimizer()["param_groups"]]
    names: list[list[str]] = [[] for _ in groups]
    for group, name, state in source.parameters():
        names[group].append(name)
        place = folder / "zero" / name
        place.mkdir(parents=True)
        for key, value in state.items():
            torch.save({"param": value} if torch.is_tensor(value) and key != "step" else value, place / f"{key}.pt")
    trained = {name for group in names for name in group}
    model = {k: v for k, v in source.model.items() if k not in ("frozen_param_fragments", "param_shapes")}
    torch.save(model | {"module": source.untrained(trained), "optimizer": None}, folder / MODEL)
    common = {"param_groups": groups, NAMES: names, "scaler": source.scaler(), "ds_version": model["ds_version"]}
    torch.save(common, folder / GROUPS)


def read(path: Path) -> dict[str, Any]:
    """What `torch.save` wrote, mapped and not read: weights, plain values, and the few objects of DeepSpeed's own.

    Nothing else is unpickled: a checkpoint that comes from elsewhere runs no code.
    """
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    known = [DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address]
    try:
        with torch.serialization.safe_globals(known):
            found = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except pickle.UnpicklingError as error:  # of which torch tells how to run such a file's code all the same
        raise UserError(
            f"{path} cannot be read: it is damaged, or holds objects that are neither weights, plain values nor "
            f"DeepSpeed's: use an older checkpoint"
        ) from error
    except Exception as error:  # a damaged pickle can raise anything
        raise UserError(f"{path} cannot be read ({error}): use an older checkpoint") from error
    if not isinstance(found, dict):
        raise UserError(f"{path} is no engine checkpoint: it holds a {type(found).__name__}")
    return found


def refuse_nvme(config: Mapping[str, Any], where: str) -> None:
    """A ValueError where states are offloaded to NVMe: they are in files that know ranks only."""
    zero = config.get("zero_optimization") or {}
    for part in ("offload_optimizer", "offload_param"):
        if (zero.get(part) or {}).get("device") == "nvme":
            raise UserError(
                f"{where} has {part} on nvme, whose states can only be read under the same ranks and ZeRO stage, by "
                f"--resume: offload to cpu"
            )
