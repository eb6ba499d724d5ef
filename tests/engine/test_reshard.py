"""A checkpoint under another number of ranks or ZeRO stage: the same bits, and a run that goes on as before."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from support.launching import run_deepspeed

from ds_trainer.engine.saved_states import MODEL, SavedEngine, weights_of
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
        done = run_deepspeed(ranks, "tests/support/reshard_worker.py", str(folder), json.dumps(plan))
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
    folder, results = runs
    for result in results[1:]:
        assert {load["source"].split("-")[0] for load in result["loaded"]} == TOLERANCE.keys()
    state = contents(folder / name_of("fp16", 2, 2))
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


class Pickled:
    """Is unpickled by calling a function with these values."""

    def __init__(self, *reduced: Any) -> None:
        self.reduced = reduced

    def __reduce__(self) -> Any:
        return self.reduced


def test_a_checkpoint_runs_no_code(tmp_path):
    """A file that would call a function when it is unpickled is refused, and calls nothing."""
    called = tmp_path / "called"
    torch.save({"module": Pickled(Path.touch, (called,))}, tmp_path / MODEL)
    with pytest.raises(UserError, match="or holds objects that are neither weights"):
        weights_of(tmp_path, torch.float32)
    assert not called.exists()


def test_another_model_is_refused(runs):
    """A parameter that is trained in one only, and one of another size, are named."""
    one_less, wider = runs[1][1]["refused"]
    assert "has no norm.bias, or trains what this run freezes" in one_less
    assert "unused is [3] in the checkpoint and [9] in this run's model" in wider


def test_a_folder_that_is_no_checkpoint_is_a_mistake(runs, tmp_path):
    """Without a checkpoint's files, or with other things in them, or of a kind that cannot be read: the error names the
    folder and what is wrong."""

    def changed(folder: Path, **values: Any) -> None:
        model = torch.load(folder / MODEL, weights_only=False) | values
        torch.save(
            {key: value for key, value in model.items() if value is not None or key == "optimizer"}, folder / MODEL
        )

    def shard_of(folder: Path) -> Path:
        (path,) = folder.glob("*zero_pp_rank_1_*_optim_states.pt")
        return path

    on_nvme = {"zero_optimization": {"offload_optimizer": {"device": "nvme"}}}
    for source, damage, words in (
        (name_of("fp32", 2, 2), lambda folder: (folder / MODEL).write_bytes(b"what"), f"{MODEL} cannot be read"),
        (name_of("fp32", 2, 2), lambda folder: os.truncate(shard_of(folder), 999), "cannot be read"),
        (name_of("fp32", 2, 1), lambda folder: changed(folder, ds_config=on_nvme), "on nvme"),
        (name_of("fp32", 0, 1), lambda folder: changed(folder, parameter_names=None), "does not name its parameters"),
    ):
        folder = tmp_path / "checkpoint-3"
        shutil.copytree(runs[0] / source, folder)
        damage(folder)
        with pytest.raises(UserError, match="checkpoint-3") as mistake:
            list(SavedEngine.of(folder).parameters())
        assert words in str(mistake.value)
        shutil.rmtree(folder)
