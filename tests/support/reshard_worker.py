"""Trains a small model, saves it, and loads what others saved, under every ZeRO stage; started by test_reshard.py.

`deepspeed --num_gpus N tests/support/reshard_worker.py FOLDER PLAN` does what the PLAN (JSON) says, in order:
`sources`, precision and stage, are trained and saved; `pairs` of a source's name and a stage are loaded;
`refused` names a source that other models are to refuse. The results go to FOLDER/`out`.
"""

import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.nn.functional as F
from deepspeed.accelerator import get_accelerator
from torch import nn

from ds_trainer.engine import engine, reshard
from ds_trainer.engine.engine import Group
from ds_trainer.engine.engine_file import Hyperparameters
from ds_trainer.ranks import distributed

MICRO, BATCH, SAVED_AT, STEPS = 2, 8, 3, 5
BASE = Hyperparameters(1e-2, 0.1)


class Tied(nn.Module):
    """A classifier of tokens whose output is its embedding; sizes that 2 divides not; something of every kind."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(11, 5)
        self.frozen = nn.Linear(5, 7)
        self.layers = nn.ModuleList([nn.Linear(7, 3), nn.Linear(3, 5)])
        self.norm = nn.LayerNorm(5)
        self.decoder = nn.Linear(5, 11)
        self.decoder.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.ones(1))
        self.unused = nn.Parameter(torch.randn(3))
        self.frozen.requires_grad_(False)
        self.register_buffer("seen", torch.full((3,), float(seed)))
        self.register_buffer("passing", torch.ones(2), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.frozen(self.embedding(tokens)))
        self.seen.add_(self.training)
        return self.decoder(self.norm(self.layers[1](torch.tanh(self.layers[0](hidden)))) * self.scale)


def groups_of(model: nn.Module) -> list[Group]:
    """Three, each with a rate and a decay of its own, interleaved in the model."""
    groups = [Group("weights", 1e-2, 0.1), Group("vectors", 2e-2, 0.0), Group("layers", 5e-3, 0.05)]
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            group = groups[2] if name.startswith("layers") else groups[0] if parameter.ndim > 1 else groups[1]
            group.parameters[name] = parameter
    return groups


PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    # scales at which the first step overflows, and all do
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 15, "hysteresis": 1}},
    "robin": {},
    "skipped": {"fp16": {"enabled": True, "initial_scale_power": 40, "hysteresis": 1}},
    "offload": {"bf16": {"enabled": True}, "zero_force_ds_cpu_optimizer": False},
    # of DeepSpeed: without ZeRO in 16 bit, its states are in one tensor a group
    "fused": {
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
    },
}


def started(precision: str, stage: int, model: nn.Module) -> engine.Engine:
    """An engine over `model`; under ZeRO 3 in several sub-groups, some parameters whole on every rank."""
    world = distributed.world_size()
    zero: dict[str, Any] = {"stage": stage, "stage3_param_persistence_threshold": 6, "sub_group_size": 25}
    zero["memory_efficient_linear"] = False  # ZeRO 3 would round otherwise, in every engine after it in the process
    if precision == "robin":
        zero["round_robin_gradients"] = True
    if precision == "offload" and stage:
        zero["offload_optimizer"] = {"device": "cpu"}
    config = {
        "train_micro_batch_size_per_gpu": MICRO,
        "gradient_accumulation_steps": BATCH // MICRO // world,
        "gradient_clipping": 0.5,
        "zero_optimization": zero,
        "steps_per_print": 10**9,
    }
    return engine.start_engine(model, groups_of(model), config | PRECISIONS[precision], BASE, lambda step: 0.9**step)


def train(running: engine.Engine, steps: range) -> list[float]:
    """The global batch's mean loss at each step."""
    losses = []
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(0, 11, (BATCH, 4), generator=generator)
        share = tokens.chunk(distributed.world_size())[distributed.rank()]
        total = torch.zeros(())
        for micro in share.split(MICRO):
            loss = F.cross_entropy(running(micro).float().flatten(0, 1), micro.roll(1, 1).flatten())
            running.backward(loss)
            running.step()
            total += loss.detach() * MICRO / share.shape[0]
        losses.append(float(distributed.mean(total)))
    return losses


def weights_of(running: engine.Engine) -> dict[str, torch.Tensor]:
    """What the engine computes with, by DeepSpeed's own means: all parameters whole, and the buffer."""
    parameters = dict(running.module.named_parameters())
    with deepspeed.zero.GatheredParameters([p for p in parameters.values() if hasattr(p, "ds_id")]):
        return {name: p.detach().clone() for name, p in parameters.items()} | {"seen": running.module.seen.clone()}


def save(running: engine.Engine, folder: Path, tag: str) -> None:
    state = {"step": running.global_steps, "note": {"any": ["value"]}} | reshard.parameter_names(running)
    running.save_checkpoint(str(folder), tag=tag, client_state=state, save_latest=False)
    distributed.barrier()


def make_source(folder: Path, precision: str, stage: int) -> None:
    """Train, save, note the weights, and go on to know what follows."""
    name = f"{precision}-zero{stage}-ranks{distributed.world_size()}"
    running = started(precision, stage, Tied(seed=0))
    train(running, range(SAVED_AT))
    save(running, folder, name)
    weights, losses = weights_of(running), train(running, range(SAVED_AT, STEPS))
    if distributed.is_main():
        torch.save({"weights": weights, "losses": losses}, folder / f"{name}.pt")
    engine.stop_engine(running)


def load_source(folder: Path, source: str, stage: int, keep: str | None = None) -> dict[str, Any]:
    """Load it under `stage` and this number of ranks; save again, under the name `keep`; go on."""
    running = started(source.split("-")[0], stage, Tied(seed=1))
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        reshard.load(running, folder / source)
    expected = torch.load(folder / f"{source.split('+')[0]}.pt")
    weights = weights_of(running)
    different = [name for name, value in expected["weights"].items() if not torch.equal(value, weights[name])]
    keep = keep or f"{source}-as-zero{stage}-ranks{distributed.world_size()}"
    save(running, folder, keep)
    result = {"source": source, "kept": keep, "different": different, "printed": printed.getvalue()}
    result |= {"losses": train(running, range(SAVED_AT, STEPS)), "expected": expected["losses"]}
    engine.stop_engine(running)
    return result


def refusals(folder: Path, source: str) -> list[str]:
    """Return the errors for a model with one more frozen parameter, and to a wider one."""
    frozen, wider = Tied(seed=1), Tied(seed=1)
    frozen.norm.bias.requires_grad_(False)
    wider.unused = nn.Parameter(torch.ones(9))
    errors = []
    for model in (frozen, wider):
        running = started("fp32", 2, model)
        try:
            reshard.load(running, folder / source)
        except ValueError as error:
            errors.append(str(error))
        engine.stop_engine(running)
    return errors


def main(folder: Path, plan: dict[str, Any]) -> None:
    get_accelerator().is_fp16_supported = lambda: True
    distributed.start()
    for precision, stage in plan.get("sources", []):
        make_source(folder, precision, stage)
    loaded = [load_source(folder, *pair) for pair in plan.get("pairs", [])]
    refused = refusals(folder, plan["refused"]) if "refused" in plan else []
    if distributed.is_main():
        (folder / plan["out"]).write_text(json.dumps({"loaded": loaded, "refused": refused}))
    distributed.stop()


if __name__ == "__main__":
    main(Path(sys.argv[-2]), json.loads(sys.argv[-1]))
    distributed.leave(0)  # as a run does: threads of gloo can abort Python's own end
