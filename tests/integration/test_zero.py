"""Pruning, distillation and exits under DeepSpeed equal a plain torch loop: methods, ZeRO stages, precisions, ranks.

So do the gradients of losses over tokens, however a global batch is cut.
"""

from __future__ import annotations

import json
from functools import cache
from itertools import pairwise

import pytest
import torch
from support.launching import run_deepspeed
from support.zero_matrix import DISTILLED, EXITS, METHODS, Case, cases, cuts, reference

TOLERANCE = {"fp32": 2e-6, "autocast": 3e-4, "bf16": 3e-3}
"""Of the loss, relative. bf16 at ZeRO 0 goes through DeepSpeed's unfused fp16 optimizer: hence 3e-3."""

reference_of = cache(reference)


@pytest.fixture(scope="module")
def outputs(tmp_path_factory):
    """What a number of ranks writes, as a file; each number is run once."""

    @cache
    def run(ranks):
        out = tmp_path_factory.mktemp("zero") / "losses.json"
        done = run_deepspeed(ranks, "tests/support/zero_matrix.py", str(out), timeout=900)
        assert done.returncode == 0, done.stderr[-3000:]
        return out

    return run


@pytest.mark.parametrize(
    ("ranks", "case"), [(ranks, case) for ranks in (1, 2) for case in cases(ranks)], ids=lambda value: str(value)
)
def test_losses_equal_the_reference(ranks, case, outputs):
    """Every step's loss and density are those of one process: fp32 master weights, AdamW, clipping."""
    expected = reference_of(Case(case.plain_method, 0, case.precision))
    found = json.loads(outputs(ranks).read_text())[str(case)]
    assert found["losses"] == pytest.approx(expected["losses"], rel=TOLERANCE[case.precision])
    for one, two in zip(found["readings"], expected["readings"], strict=True):
        assert one == pytest.approx(two, rel=TOLERANCE[case.precision])
        assert one.get("prune/density") == two.get("prune/density")


@pytest.mark.parametrize(("ranks", "stage"), [(1, 3), (2, 1), (2, 3)])
def test_a_partitioned_teacher_is_held_in_parts(ranks, stage, outputs):
    """Each rank keeps its share of the teacher's values (and what fills up the last part); a whole one keeps all."""
    losses = json.loads(outputs(ranks).read_text())
    (parts,) = losses[str(Case("partitioned", stage, "fp32"))]["teacher_values"]
    (whole,) = losses[str(Case("whole", stage, "fp32"))]["teacher_values"]
    assert whole / ranks <= parts <= 1.01 * whole / ranks


@pytest.mark.parametrize("ranks", [1, 2])
def test_only_the_search_for_a_cutoff_waits_for_the_device(ranks, outputs):
    """Between two records the techniques read no value from the device, but for the choice of single weights."""
    for case, seen in json.loads(outputs(ranks).read_text()).items():
        teaches = case.partition("-zero")[0] in {*DISTILLED, *EXITS} - {"both", "all"}
        choice = [f"ds_trainer/techniques/prune/{name}.py" for name in ("masked", "selection")]
        assert {*seen["waits"]} <= {*choice * (not teaches)}, case


@pytest.mark.parametrize("method", [*METHODS, *DISTILLED, *EXITS])
def test_the_reference_is_no_trivial_case(method):
    """The loss changes at every step, and some weights are pruned, not all: so the agreement above says something.

    The gates of l0 start open, by its paper.
    """
    found = reference_of(Case(method, 0, "fp32"))
    assert all(abs(a - b) > 1e-4 for a, b in pairwise(found["losses"]))
    if method in METHODS and method != "l0":
        assert 0 < found["readings"][-1]["prune/density"] < 1


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_gradient_of_a_global_batch_does_not_depend_on_how_it_is_cut(ranks, outputs):
    """MLM, CLM (also packed, and of conversations), tags, and all their terms, with documents of 3 to 30 words, under
    ZeRO 0 to 3.

    So it is with the top k of a cached teacher, which the ranks fill together.
    """
    gradients = torch.load(f"{outputs(ranks)}.pt")
    whole = torch.load(f"{outputs(1)}.pt")
    for cut in cuts(ranks):
        expected = whole[f"{cut.task}-zero0-accumulation1"]
        difference, size = (
            torch.cat([value.flatten() for value in values]).norm()
            for values in ([gradients[str(cut)][name] - value for name, value in expected.items()], expected.values())
        )
        assert size > 0.1
        assert difference < 1e-5 * size, f"{cut} on {ranks} ranks: {float(difference / size):.2g}"
