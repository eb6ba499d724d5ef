"""The bytes of a step's collectives by arithmetic equal those of DeepSpeed's own communication log."""

from __future__ import annotations

import json

import pytest
from support.launching import ROOT, run_deepspeed, run_script

from ds_trainer.engine.rank_memory import ModelSizes, PhaseMemory
from ds_trainer.engine.rank_traffic import describe_traffic, on_the_wire, rank_traffic

SIZES = ModelSizes(trained=1000, frozen=200, largest=300, each=(300, 300, 200, 200, 150, 50))
BATCH = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 1}


def config(stage: int, accumulation: int = 1, **more) -> dict:
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0, **more}
    return BATCH | {"gradient_accumulation_steps": accumulation, "zero_optimization": zero}


@pytest.fixture(scope="module")
def cases(tmp_path_factory):
    out = tmp_path_factory.mktemp("traffic") / "out.json"
    done = run_deepspeed(2, "tests/support/traffic_worker.py", str(out))
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(out.read_text())


def test_arithmetic_equals_deepspeeds_log(cases):
    """Every operation of every case: stages, precisions, accumulation, techniques, within 5%."""
    exact = {name: case for name, case in cases.items() if case["exact"]}
    assert len(exact) == len(cases) - 1
    for name, case in exact.items():
        scalars = 64 * len(case["log"])  # the overflow, the norm, and whether a gathered parameter was changed
        for operation in {*case["log"], *case["foretold"]}:
            foretold, logged = case["foretold"].get(operation, 0), case["log"].get(operation, 0)
            assert foretold == pytest.approx(logged, rel=0.05, abs=scalars), f"{name}: {operation}"


def test_deepspeeds_log_has_all_but_the_stop_signal(cases):
    """What torch's dispatcher sees is what the log has, and eight bytes a rank by which ranks agree to stop."""
    for name, case in cases.items():
        seen, logged = dict(case["dispatched"]), case["log"]
        seen["all_reduce"] -= 2 * 8
        assert {op: size for op, size in seen.items() if size} == {op: size for op, size in logged.items() if size}, (
            name
        )


def test_only_techniques_that_choose_weights_wait_for_the_device(cases):
    """Heads, a teacher and exits read nothing from it between two records; a cutoff through weights does, by layer.

    What all cases share is DeepSpeed's, the model's own, and the stop signal, which is on the host.
    """
    for name, case in cases.items():
        ours = {place for place in case["waits"] if place.startswith("ds_trainer/techniques")}
        assert all("prune/selection.py" in place or place.endswith(" just_below") for place in ours), name
        assert bool(ours) == (case["technique"] in ("prune", "prune global")), name


def test_stage_2_pays_for_every_micro_batch():
    """Stage 1 reduces gradients once a step, stage 2 in each micro-batch; stage 3 also gathers in each."""
    one, four = ([rank_traffic(SIZES, config(stage, steps), 4) for stage in range(4)] for steps in (1, 4))
    assert one[0] == four[0] == {"all_reduce": 4000}
    assert one[1] == four[1] == one[2] == {"all_reduce": 4000, "all_gather": 1000}
    assert four[2] == {"all_reduce": 16_000, "all_gather": 1000}
    assert (one[3], four[3]) == (
        {"reduce_scatter": 4000, "all_gather": 1200},
        {"reduce_scatter": 16_000, "all_gather": 4800},
    )


def test_small_parameters_are_gathered_once_a_step():
    """And large ones twice in each micro-batch, where they do not stay from the forward to the backward."""
    released = {"stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 0}
    zero3 = config(3, 2, **(released | {"stage3_param_persistence_threshold": 200}))
    assert rank_traffic(SIZES, zero3, 4)["all_gather"] == 4 * (600 + 2 * 2 * 600) // 4


def test_communication_data_type_is_the_width_of_gradients_alone():
    asked = config(1) | {"bf16": {"enabled": True}, "communication_data_type": "fp32"}
    assert rank_traffic(SIZES, asked, 2) == {"all_reduce": 4000, "all_gather": 1000}


def test_rings_send_what_other_ranks_need():
    """An all_reduce is a reduce_scatter and an all_gather; one rank alone sends nothing."""
    assert on_the_wire({"all_reduce": 800}, 8) == on_the_wire({"reduce_scatter": 800, "all_gather": 100}, 8) == 1400
    assert rank_traffic(SIZES, config(3), 1) == {}
    assert on_the_wire({}, 1) == 0


def test_a_partitioned_teacher_is_gathered_for_each_micro_batch():
    """`--dry_run` tells it of the phase's ranks."""
    file = config(0, 2) | {"train_batch_size": 16}
    memory = PhaseMemory(SIZES, 0, (), teacher=500, shared_teacher=800, process=0, on_gpu=False)
    told = describe_traffic(memory, file)
    assert told == {"ranks": 4, "all_reduce": 4000, "all_gather": 400, "sent_in_rings": 7200}


def test_the_scale_plan_has_the_tables_of_today():
    """`python tests/bench/traffic.py --write docs/scaling.md` writes them."""
    done = run_script("tests/bench/traffic.py", "--tables")
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout in (ROOT / "docs/scaling.md").read_text()
