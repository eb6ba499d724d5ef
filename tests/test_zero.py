"""Pruning, distillation and exits under DeepSpeed equal a plain torch loop: methods, ZeRO stages, precisions, ranks."""

from __future__ import annotations

import json
from functools import cache
from itertools import pairwise

import pytest
from launching import run_deepspeed
from zero_matrix import CASES, DISTILLED, EXITS, METHODS, Case, reference

TOLERANCE = {"fp32": 2e-6, "autocast": 3e-4, "bf16": 3e-3}
"""Of the loss, relative. bf16 at ZeRO 0 goes through DeepSpeed's unfused fp16 optimizer: hence 3e-3."""

reference_of = cache(reference)


@pytest.fixture(scope="module", params=[1, 2], ids=["1rank", "2ranks"])
def losses(request, tmp_path_factory):
    out = tmp_path_factory.mktemp("zero") / "losses.json"
    done = run_deepspeed(request.param, "tests/zero_matrix.py", str(out))
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(out.read_text())


@pytest.mark.parametrize("case", CASES, ids=str)
def test_losses_equal_the_reference(case, losses):
    """Every step's loss, density and exit losses are those of one process: fp32 master weights, AdamW, clipping."""
    expected, found = reference_of(Case(case.method, 0, case.precision)), losses[str(case)]
    assert found["losses"] == pytest.approx(expected["losses"], rel=TOLERANCE[case.precision])
    for one, two in zip(found["readings"], expected["readings"], strict=True):
        assert one == pytest.approx(two, rel=TOLERANCE[case.precision])
        assert one.get("prune/density") == two.get("prune/density")


@pytest.mark.parametrize("stage", range(4))
def test_a_partitioned_teacher_is_held_in_parts(stage, losses, request):
    """Each rank keeps its share of the teacher's values (and what fills up the last part); a whole one keeps all."""
    ranks = {"1rank": 1, "2ranks": 2}[request.node.callspec.id.split("-")[0]]
    (parts,) = losses[str(Case("partitioned", stage, "fp32"))]["teacher_values"]
    (whole,) = losses[str(Case("whole", stage, "fp32"))]["teacher_values"]
    assert whole / ranks <= parts <= 1.01 * whole / ranks


@pytest.mark.parametrize("method", sorted(METHODS.keys() - {"l0"}))
def test_the_reference_prunes(method):
    """Some and not all, so that the agreement of densities says something; the gates of l0 start open, by its paper."""
    densities = [found["prune/density"] for found in reference_of(Case(method, 0, "fp32"))["readings"]]
    assert 0 < densities[-1] < 1


@pytest.mark.parametrize("method", [*METHODS, *DISTILLED, *EXITS])
def test_the_reference_learns(method):
    """The cases are no trivial ones: the loss changes at every step, and so the agreement says something."""
    losses = reference_of(Case(method, 0, "fp32"))["losses"]
    assert all(abs(a - b) > 1e-4 for a, b in pairwise(losses))
