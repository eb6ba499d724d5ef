"""Training on a GPU, in every precision and ZeRO stage, against the plain loop of one process on the CPU in fp32."""

from __future__ import annotations

import json
from functools import cache, partial
from itertools import product

import pytest
from support import numerics_matrix, resume_matrix
from support.killing import alike
from support.zero_matrix import METHODS, RECOMPUTED, Case, reference, under_engine

from ds_trainer.ranks import distributed
from ds_trainer.run.starting_models import StartingModels

pytestmark = pytest.mark.usefixtures("world")
TOLERANCE = {"fp32": 1e-4, "fp16": 5e-3, "autocast": 1e-2, "bf16": 2e-2}
"""Of the loss, relative: a few roundings of the type in which the products are made."""
CASES = [Case("all", stage, precision) for stage, precision in product(range(4), TOLERANCE)]
CASES += [Case(f"{RECOMPUTED}all", stage, "fp32") for stage in range(4)]
CASES += [Case("partitioned", 3, "fp32"), Case("layers", 2, "fp32"), Case("filled", 1, "fp32")]
# the gates of l0 are drawn on the device, whose random numbers are others than the CPU's
CASES += [Case(method, 2, "fp32") for method in METHODS if "l0" not in method]
reference_of = cache(reference)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_losses_equal_the_reference_of_the_cpu(case):
    """Pruned, distilled, with exits, all at once, with gradient checkpointing: every loss, density and exit's loss."""
    expected, found = reference_of(Case(case.plain_method, 0, "fp32")), under_engine(case)
    assert found["losses"] == pytest.approx(expected["losses"], rel=TOLERANCE[case.precision])
    for one, two in zip(found["readings"], expected["readings"], strict=True):
        assert one == pytest.approx(two, rel=TOLERANCE[case.precision])


@pytest.mark.parametrize("way", [f"fp16-{stage}" for stage in range(4)] + ["autocast-fp16-0", "bf16-2"])
def test_a_step_that_overflows_is_skipped(way):
    """Counted, with a smaller loss scale, finite weights, and the schedule where it was."""
    precision, stage = way.rsplit("-", 1)
    seen = numerics_matrix.run(numerics_matrix.Case(precision, int(stage)))
    assert (seen["global_steps"], seen["skipped_steps"], seen["error"]) == (4, 1, None)
    assert seen["finite"]
    assert seen["rates"][2] == seen["rates"][1] != seen["rates"][3]


@pytest.mark.parametrize("engine", ["zero0-bf16", "zero1-fp16", "zero2-fp32", "zero2-autocast", "zero3-bf16"])
@pytest.mark.usefixtures("deterministic")
def test_a_resumed_run_ends_bit_by_bit_as_one_that_nothing_stopped(engine, taught_recipe, tmp_path, monkeypatch):
    """Dropout, pruning and a teacher; stopped in an epoch, in an evaluation, and at the end of both."""
    monkeypatch.setitem(resume_matrix.CASES, engine, {})
    (tmp_path / "recipe.json").write_text(json.dumps(taught_recipe))
    job_of = partial(resume_matrix.job_of, str(tmp_path / "recipe.json"))
    first = job_of(engine, tmp_path / "teacher")
    first.output.mkdir()
    models = StartingModels(first.recipe, tmp_path / "starting")
    resume_matrix.run_phase(first, 0, models, resume_matrix.StopAfter(0))
    models.add("finetune", first.output / "model")
    for name, stops in {"whole": (), "stopped": resume_matrix.STOPS.values()}.items():
        job = job_of(engine, tmp_path / name)
        resume_matrix.make_run_folder(job, tmp_path, models)
        for count in (*stops, 0):
            if not (job.output / "results.json").exists():
                resume_matrix.run_until_stopped(job, models, count)
    assert alike(tmp_path / "whole", tmp_path / "stopped")


def test_collectives_work_over_the_backend_of_the_device(device, monkeypatch):
    """All of `ranks/distributed.py`, which claims here to be one of two ranks, so that no call takes its short way."""
    import torch
    import torch.distributed as dist

    assert dist.get_backend() == ("nccl" if device.type == "cuda" else "gloo")
    monkeypatch.setattr(distributed, "world_size", lambda: 2)
    values = torch.tensor([1.0, -2.0])
    for reduced, expected in ((distributed.total, 1), (distributed.mean, 0.5)):
        assert reduced(values).device == device
        assert torch.equal(reduced(values).cpu(), values * expected)
    assert distributed.broadcast({"a": [1]}) == {"a": [1]}
    assert distributed.on_main(lambda: "of rank 0") == "of rank 0"
    assert distributed.gather("mine")[0] == "mine"
    assert distributed.numbers_of_all([3, 4])[0] == [3, 4]
    distributed.on_each_host(lambda: None)
    distributed.barrier()
