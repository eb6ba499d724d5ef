"""A checkpoint under another number of ranks or ZeRO stage: the same bits, and a run that goes on as before.

As a script, `deepspeed --num_gpus N tests/engine/test_reshard.py FOLDER PLAN` does what the PLAN (JSON) says, in order:
`sources`, precision and stage, are trained and saved; `pairs` of a source's name and a stage are loaded; `refused`
names a source that other models are to refuse. The results go to FOLDER/`out`.
"""

import contextlib
import io
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
import torch.nn.functional as F
from deepspeed.accelerator import get_accelerator
from support.launching import run_deepspeed
from torch import nn

from ds_trainer.engine import engine, reshard
from ds_trainer.engine.engine import Group
from ds_trainer.engine.engine_file import Hyperparameters
from ds_trainer.engine.saved_states import MODEL, SavedEngine, weights_of
from ds_trainer.ranks import distributed
from ds_trainer.ranks.failures import UserError

TENSORS = ("fp32", "exp_avg", "exp_avg_sq")
TOLERANCE = {"fp32": 1e-6, "robin": 1e-6, "skipped": 1e-3, "bf16": 1e-3, "fp16": 1e-3, "offload": 1e-3, "fused": 1e-3}
"""Relative tolerance of the losses after loading: other ranks add in another order, and bf16 and fp16 round."""
STAGES = {"fp32": "00 11 22 33", "bf16": "02 13 20 31", "fp16": "02 13 20 31"}
WAYS = {
    2: STAGES | {"robin": "22 10", "skipped": "20", "offload": "32", "fused": "20 00"},
    1: STAGES | {"robin": "22 01", "skipped": "32", "offload": "23", "fused": "02"},
}
"""Pairs of stages, source's and target's, by the ranks of the source and the kind: the precisions, DeepSpeed's other
order of parameters, every step skipped so far, optimizer states on the CPU, DeepSpeed's own optimizer. Each stage is a
source and a target, since reading knows nothing of the target stage, nor filling of the source's."""


def name_of(kind: str, stage: int | str, ranks: int) -> str:
    return f"{kind}-zero{stage}-ranks{ranks}"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Write sources with 2 ranks; load them with 1 rank, and write its sources; load those with 2 ranks.

    Some are loaded with the same ranks, and one goes from 2 ranks, stage 2, to 1 rank, stage 3, to 2 ranks, stage 2, to
    stage 0.
    """
    folder, results = tmp_path_factory.mktemp("universal"), []
    ways = {ranks: [(k, *map(int, way)) for k, ways in WAYS[ranks].items() for way in ways.split()] for ranks in WAYS}
    sources = {ranks: sorted({(kind, source) for kind, source, _ in ways[ranks]}) for ranks in WAYS}
    loads = {ranks: [[name_of(kind, a, ranks), b] for kind, a, b in ways[ranks]] for ranks in WAYS}
    start, same_ranks = name_of("fp16", 2, 2), (("fp32", 2, 3), ("bf16", 3, 0), ("fp16", 0, 1))
    plans = [
        (2, {"sources": sources[2], "pairs": [[name_of(kind, a, 2), b] for kind, a, b in same_ranks]}),
        (1, {"sources": sources[1], "pairs": [*loads[2], [start, 3, f"{start}+1"]], "refused": name_of("fp32", 1, 2)}),
        (2, {"pairs": [*loads[1], [f"{start}+1", 2, f"{start}+2"], [f"{start}+2", 0]]}),
    ]
    for ranks, plan in plans:
        plan["out"] = f"{len(results)}.json"
        done = run_deepspeed(ranks, "tests/engine/test_reshard.py", str(folder), json.dumps(plan))
        assert done.returncode == 0, done.stderr[-3000:]
        results.append(json.loads((folder / plan["out"]).read_text()))
    return folder, results


def contents(folder: Path) -> dict[str, Any]:
    """All that a checkpoint has to carry. A moment that is not there yet is zero."""
    saved = SavedEngine.of(folder)
    parameters = {parameter.name: parameter for parameter in saved.parameters()}
    values: dict[str, Any] = saved.untrained(set(parameters))
    for name, one in parameters.items():
        zeros = torch.zeros(one.shape)
        values |= {f"{key} {name}": one.tensor(key) if key in one.tensors() else zeros for key in TENSORS}
    steps = {float(one.scalars()["step"]) for one in parameters.values() if "step" in one.scalars()}
    scaler = saved.scaler() or {}  # without ZeRO it has no hysteresis
    values["scaler"] = [scaler.get(name) for name in ("cur_scale", "cur_iter", "last_overflow_iter")]
    values |= {"steps": steps, "schedule": saved.model["lr_scheduler"]}
    values["groups"] = [{k: v for k, v in g.items() if k != "params"} for g in saved.optimizer()["param_groups"]]
    return values | {name: saved.model[name] for name in ("global_steps", "global_samples", "skipped_steps")}


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """The entries whose bits are not the same."""
    same = {k: torch.equal(v, after[k]) if torch.is_tensor(v) else v == after[k] for k, v in before.items()}
    return [key for key, equal in same.items() if not equal] + sorted(after.keys() - before.keys())


@pytest.mark.parametrize("launch", range(3), ids=["2to2", "2to1 and a chain", "1to2 and a chain"])
@pytest.mark.parametrize("kind", TOLERANCE)
def test_other_ranks_and_stages_carry_every_bit(kind, launch, runs):
    """fp32 weights, both moments, the step, rates, schedule, loss scale, counts, frozen weights, buffers: saved again,
    they are those of the source. The next two steps have the losses of the run that went on, and nothing is printed.
    """
    folder, results = runs
    for load in results[launch]["loaded"]:
        if load["source"].startswith(f"{kind}-"):
            assert (load["different"], load["printed"]) == ([], ""), load["kept"]
            assert differences(contents(folder / load["source"]), contents(folder / load["kept"])) == [], load["kept"]
            assert load["losses"] == pytest.approx(load["expected"], rel=TOLERANCE[kind]), load["kept"]


def test_the_sources_are_no_trivial_ones(runs):
    """fp16's first step was skipped; rates differ by group and have moved; moments and untrained values are there."""
    state = contents(runs[0] / name_of("fp16", 2, 2))
    assert [state[name] for name in ("global_steps", "global_samples", "skipped_steps")] == [3, 24, 1]
    assert state["scaler"][1:] == [3, 0]
    assert [group["lr"] for group in state["groups"]] == pytest.approx([r * 0.9**2 for r in (1e-2, 2e-2, 5e-3)])
    assert state["exp_avg_sq embedding.weight"].count_nonzero() > 40
    assert state["fp32 embedding.weight"].half().float().ne(state["fp32 embedding.weight"]).any()
    assert state["seen"].gt(1).all()


def test_the_weights_are_read_without_an_engine(runs):
    """The weights have the bits and the precision that the engine computed with; frozen and tied ones too, under every
    stage, and before buffers."""
    dtypes = {"fp16": torch.float16, "skipped": torch.float16, "fp32": torch.float32, "robin": torch.float32}
    sources = sorted(path.with_suffix("") for path in runs[0].glob("*.pt"))
    assert {source.name.split("-")[0] for source in sources} == TOLERANCE.keys()
    for source in sources:
        dtype = dtypes.get(source.name.split("-")[0], torch.bfloat16)
        expected = torch.load(source.with_suffix(".pt"))["weights"]
        expected["decoder.weight"] = expected["embedding.weight"]
        weights = weights_of(source, dtype)
        assert weights.keys() == expected.keys()
        assert {name for name, value in weights.items() if value.dtype != dtype} <= {"seen"}
        assert list(weights).index("seen") > list(weights).index("embedding.weight")
        assert [name for name, value in expected.items() if not torch.equal(weights[name], value)] == []


def test_a_checkpoint_runs_no_code(tmp_path):
    """A file is refused whose objects are made by calling a function of their own, here by `pathlib.PosixPath`."""
    torch.save({"module": tmp_path}, tmp_path / MODEL)
    with pytest.raises(UserError, match="or holds objects that are neither weights"):
        weights_of(tmp_path, torch.float32)


def test_another_model_is_refused(runs):
    """A parameter that is trained in one only, and one of another size, are named."""
    one_less, wider = runs[1][1]["refused"]
    assert "has no norm.bias, or trains what this run freezes" in one_less
    assert "unused is [3] in the checkpoint and [9] in this run's model" in wider


def test_a_checkpoint_that_cannot_be_converted_is_a_mistake(runs, tmp_path):
    """Damaged, or of a kind that cannot be read: the error names the folder and what is wrong."""

    def changed(folder: Path, **values: Any) -> None:
        model = torch.load(folder / MODEL, weights_only=False) | values
        torch.save({k: value for k, value in model.items() if value is not None or k == "optimizer"}, folder / MODEL)

    def truncate(folder: Path) -> None:
        (path,) = folder.glob("*zero_pp_rank_1_*_optim_states.pt")
        os.truncate(path, 999)

    on_nvme = {"zero_optimization": {"offload_optimizer": {"device": "nvme"}}}
    for source, damage, words in (
        (name_of("fp32", 2, 2), truncate, "cannot be read"),
        (name_of("fp32", 2, 1), lambda folder: changed(folder, ds_config=on_nvme), "on nvme"),
        (name_of("fp32", 0, 1), lambda folder: changed(folder, parameter_names=None), "does not name its parameters"),
    ):
        folder = tmp_path / "checkpoint-3"
        shutil.copytree(runs[0] / source, folder)
        damage(folder)
        with pytest.raises(UserError, match=f"checkpoint-3.*{words}"):
            list(SavedEngine.of(folder).parameters())
        shutil.rmtree(folder)


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


def weights_in(running: engine.Engine) -> dict[str, torch.Tensor]:
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
    weights, losses = weights_in(running), train(running, range(SAVED_AT, STEPS))
    if distributed.is_main():
        torch.save({"weights": weights, "losses": losses}, folder / f"{name}.pt")
    engine.stop_engine(running)


def load_source(folder: Path, source: str, stage: int, keep: str | None = None) -> dict[str, Any]:
    """Load it under `stage` and this number of ranks; save again, under the name `keep`; go on."""
    running = started(source.split("-")[0], stage, Tied(seed=1))
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        reshard.load(running, folder / source)
    expected = torch.load(folder / f"{source.split('+')[0]}.pt")
    weights = weights_in(running)
    different = [name for name, value in expected["weights"].items() if not torch.equal(value, weights[name])]
    keep = keep or f"{source}-as-zero{stage}-ranks{distributed.world_size()}"
    save(running, folder, keep)
    result = {"source": source, "kept": keep, "different": different, "printed": printed.getvalue()}
    result |= {"losses": train(running, range(SAVED_AT, STEPS)), "expected": expected["losses"]}
    engine.stop_engine(running)
    return result


def refusals(folder: Path, source: str) -> list[str]:
    """Return the errors for a model with one more frozen parameter, and for a wider one."""
    frozen, wider, errors = Tied(seed=1), Tied(seed=1), []
    frozen.norm.bias.requires_grad_(False)
    wider.unused = nn.Parameter(torch.ones(9))
    for model in (frozen, wider):
        running = started("fp32", 2, model)
        with pytest.raises(UserError) as error:
            reshard.load(running, folder / source)
        errors.append(str(error.value))
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
    distributed.leave(0)  # as a run does: threads of gloo can abort Python's own end


if __name__ == "__main__":
    main(Path(sys.argv[-2]), json.loads(sys.argv[-1]))
