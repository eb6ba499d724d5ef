"""Curves of every threshold and the choice of one, against brute force through the decisions of the running model."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.exhaustive import exhaustive
from torch import Tensor

from ds_trainer.config.exit_specs import MOST_CONFIDENCE, Criterion, ExitPolicy, ExitsSpec
from ds_trainer.techniques.exits.curves import AllHeads, OperatingPoint, choose, choose_per_head, curve
from ds_trainer.techniques.exits.policy import confidence, doubts_of_all, entropy, exit_at

OF_CLASSES: tuple[Criterion, ...] = ("entropy", "confidence", "patience")
SINGLE: tuple[tuple[Criterion, int], ...] = (("entropy", 3), ("confidence", 3), ("patience", 1))
"""Criteria that have a threshold, with the number of classes they go with."""


def made_up(seed: int, inner: int, count: int, classes: int, coarse: bool) -> AllHeads:
    """Logits whose scores tell which rows were chosen; coarse ones, on a grid, bring ties."""
    rng = np.random.default_rng(seed)
    values = rng.normal(size=(inner + 1, count, classes)) * 3
    logits = torch.from_numpy(np.round(values * 2) / 2 if coarse else values).float()
    layers = np.sort(rng.choice(np.arange(1, 25), inner + 1, replace=False)).tolist()
    return heads_of(logits, layers, told, patience=int(rng.integers(1, 4)))


def heads_of(logits: Tensor, layers: list[int], score: Any, patience: int = 2) -> AllHeads:
    """What these logits (heads, rows, classes) say; the answers are the logits themselves."""
    criteria = ("patience",) if logits.shape[-1] == 1 else OF_CLASSES
    return AllHeads(
        doubts={name: doubts_of_all(name, "least_certain", logits, None) for name in criteria},
        answers=[dict(enumerate(one)) for one in logits],
        layers=layers,
        score=lambda answers: score(torch.stack([*answers.values()])),
        regression=logits.shape[-1] == 1,
        patience=patience,
    )


def logits_of(heads: AllHeads) -> Tensor:
    return torch.stack([torch.stack([*one.values()]) for one in heads.answers])


def told(logits: Tensor) -> dict[str, float]:
    """Two metrics that change with any row."""
    weights = torch.linspace(0.5, 1.5, logits.numel()).reshape(logits.shape)
    return {"sum": float((logits * weights).sum()), "first": float(logits[0, 0])}


some_heads = st.builds(
    made_up,
    seed=st.integers(0, 10_000),
    inner=st.integers(1, 6),
    count=st.integers(1, 25),
    classes=st.integers(2, 4),
    coarse=st.booleans(),
)
some_regressions = st.builds(
    made_up,
    seed=st.integers(0, 10_000),
    inner=st.integers(1, 6),
    count=st.integers(1, 25),
    classes=st.just(1),
    coarse=st.booleans(),
)


def policy(criterion: Criterion, threshold: float, heads: AllHeads) -> ExitPolicy:
    most = MOST_CONFIDENCE if criterion == "confidence" else threshold
    inner = [min(threshold, most)] * (len(heads.layers) - 1)
    if criterion != "patience":
        return ExitPolicy(criterion=criterion, thresholds=inner)
    if heads.regression:
        return ExitPolicy(criterion=criterion, thresholds=inner, patience=heads.patience)
    return ExitPolicy(criterion=criterion, patience=int(threshold))


def exits(criterion: Criterion, threshold: float, heads: AllHeads) -> list[int]:
    return exit_at(policy(criterion, threshold, heads), heads.doubts[criterion]).tolist()


def by_force(criterion: Criterion, threshold: float, heads: AllHeads) -> OperatingPoint:
    """One row at a time."""
    left = exits(criterion, threshold, heads)
    chosen = torch.stack([logits_of(heads)[head, row] for row, head in enumerate(left)])
    return OperatingPoint(threshold, sum(heads.layers[head] for head in left) / len(left), told(chosen))


def check_against_force(criterion: Criterion, heads: AllHeads) -> None:
    points = curve(criterion, heads)
    assert points == [by_force(criterion, point.threshold, heads) for point in points]


@settings(max_examples=60 if exhaustive() else 15, deadline=None)
@given(heads=some_heads, criterion=st.sampled_from(OF_CLASSES))
def test_every_point_is_what_the_decisions_give(heads: AllHeads, criterion: Criterion) -> None:
    """Mean layers and scores of classes, ties included, equal those of the rows that leave one by one."""
    check_against_force(criterion, heads)


@settings(max_examples=60 if exhaustive() else 15, deadline=None)
@given(heads=some_regressions)
def test_every_point_of_a_regression_is_what_the_decisions_give(heads: AllHeads) -> None:
    """So do those of a tolerance, under patience of 1, 2 and 3, also where the heads are fewer."""
    check_against_force("patience", heads)


@settings(max_examples=60 if exhaustive() else 15, deadline=None)
@given(heads=st.one_of(some_heads, some_regressions), criterion=st.sampled_from(OF_CLASSES), tried=st.floats(0, 20))
def test_no_threshold_gives_what_is_not_on_the_curve(heads: AllHeads, criterion: Criterion, tried: float) -> None:
    """Any threshold decides as one of the points, which are all different: none is missed, none comes twice."""
    criterion = "patience" if heads.regression else criterion
    points = curve(criterion, heads, most=10**6)
    decisions = [tuple(exits(criterion, point.threshold, heads)) for point in points]
    own = [
        entropy(logits_of(heads)),
        confidence(logits_of(heads)),
        (logits_of(heads)[1:] - logits_of(heads)[:-1]).abs(),
    ]
    values = torch.cat([value.flatten() for value in own]).tolist()
    if criterion == "patience" and not heads.regression:
        assert [point.threshold for point in points] == [float(p) for p in range(len(heads.layers) - 1, 0, -1)]
        return
    assert len(set(decisions)) == len(decisions)
    for threshold in [tried, *values, *np.nextafter(np.float32(values), np.float32(0)).tolist()]:
        assert tuple(exits(criterion, threshold, heads)) in decisions


@settings(max_examples=60 if exhaustive() else 15, deadline=None)
@given(heads=st.one_of(some_heads, some_regressions), criterion=st.sampled_from(OF_CLASSES))
def test_a_curve_goes_from_the_full_model_to_the_fastest(heads: AllHeads, criterion: Criterion) -> None:
    """The first point is nobody leaving; then layers fall; in the last all leave at the first head that may."""
    criterion = "patience" if heads.regression else criterion
    points = curve(criterion, heads)
    assert points[0].mean_layers == heads.layers[-1]
    assert points[0].scores == told(logits_of(heads)[-1])
    layers = [point.mean_layers for point in points]
    assert layers == sorted(layers, reverse=True)
    if criterion != "patience":
        assert points[-1].mean_layers == heads.layers[0]
    elif heads.regression and heads.patience < len(heads.layers) - 1:
        assert points[-1].mean_layers == heads.layers[heads.patience]
    elif heads.regression:
        assert len(points) == 1


@settings(max_examples=40 if exhaustive() else 15, deadline=None)
@given(heads=st.one_of(some_heads, some_regressions), criterion=st.sampled_from(OF_CLASSES))
def test_thresholds_survive_json_and_the_policy(heads: AllHeads, criterion: Criterion) -> None:
    """Written and read, through the curve and through a policy, a threshold decides the same; none is negative."""
    criterion = "patience" if heads.regression else criterion
    for point in curve(criterion, heads):
        read = json.loads(json.dumps(asdict(point), allow_nan=False))
        assert OperatingPoint(**read) == point
        again = ExitPolicy.model_validate_json(policy(criterion, point.threshold, heads).model_dump_json())
        assert exit_at(again, heads.doubts[criterion]).tolist() == exits(criterion, point.threshold, heads)


@pytest.mark.parametrize(("criterion", "classes"), SINGLE)
def test_thinning_keeps_the_ends_and_spreads_evenly(criterion: Criterion, classes: int) -> None:
    """Of many hundreds of thresholds about a hundred are left, no gap in mean layers above twice the even one."""
    heads = made_up(seed=1, inner=5, count=700, classes=classes, coarse=False)
    every, points = curve(criterion, heads, most=10**6), curve(criterion, heads)
    assert len(every) > 500
    assert 80 <= len(points) <= 100
    assert (points[0], points[-1]) == (every[0], every[-1])
    layers = np.array([point.mean_layers for point in points])
    assert (-np.diff(layers)).max() <= 2 * (layers[0] - layers[-1]) / 99
    assert (-np.diff(layers)).min() > 0


def test_a_head_that_is_not_a_number_lets_nobody_leave() -> None:
    """NaN is never sure, alone or among others; the points stay those of the decisions, and JSON."""
    for criterion, classes in SINGLE:
        heads = made_up(seed=2, inner=4, count=9, classes=classes, coarse=False)
        logits = logits_of(heads)
        logits[1, 3], logits[0, 5], logits[:4, 7] = math.nan, math.nan, math.nan
        heads = heads_of(logits, list(heads.layers), told, heads.patience)
        points = curve(criterion, heads)
        for point in points:
            left = exits(criterion, point.threshold, heads)
            assert point.mean_layers == sum(heads.layers[head] for head in left) / 9
        assert left[7] == 4
        assert all(math.isfinite(point.threshold) for point in points)


def test_equal_heads_of_which_all_are_sure() -> None:
    """Entropy 0 and confidence 1 everywhere: still one point where nobody leaves, and one where all do."""
    logits = torch.tensor([[100.0, -100.0]]).expand(3, 4, 2).clone()
    heads = heads_of(logits, [1, 2, 3], told)
    for criterion in ("entropy", "confidence"):
        assert [point.mean_layers for point in curve(criterion, heads)] == [3.0, 1.0]
        check_against_force(criterion, heads)


def test_thresholds_between_neighbours_of_fp32_tell_them_apart() -> None:
    """Where no number lies between two, halving them gives the lower one: every decision still has its threshold."""
    one, apart = torch.tensor(1.0), [torch.tensor(1.0)]
    for _ in range(6):
        apart.append(apart[-1].nextafter(one * 2))
    ends = torch.stack(apart)
    logits = torch.stack([torch.zeros_like(ends), ends, ends])[..., None]
    heads = heads_of(logits, [1, 2, 3], told, patience=1)
    assert [point.mean_layers for point in curve("patience", heads)] == [(21 - left) / 7 for left in range(8)]
    check_against_force("patience", heads)


points_of_a_curve = st.lists(
    st.tuples(st.floats(1, 12), st.floats(0, 1) | st.just(math.nan) | st.sampled_from([0.5, 0.505, 0.51])),
    min_size=1,
    max_size=12,
)


def as_points(values: Sequence[tuple[float, float]], full: float) -> list[OperatingPoint]:
    return [
        OperatingPoint(0.0, 12.0, {"f1": full}),
        *(OperatingPoint(1.0, layers, {"f1": score}) for layers, score in values),
    ]


@settings(max_examples=200 if exhaustive() else 50, deadline=None)
@given(values=points_of_a_curve, full=st.floats(0, 1), target=st.floats(1, 12))
def test_for_a_speedup_the_best_score_is_chosen(values: list[tuple[float, float]], full: float, target: float) -> None:
    """Among those that are fast enough none has a higher score, and none of the same score fewer layers."""
    points = as_points(values, full)
    allowed = [p for p in points if 12 / p.mean_layers >= target and not math.isnan(p.scores["f1"])]
    if not allowed:
        with pytest.raises(ValueError, match="no threshold reaches target_speedup"):
            choose(points, 12, ExitsSpec(target_speedup=target))
        return
    found = choose(points, 12, ExitsSpec(target_speedup=target))
    assert found in allowed
    assert not [p for p in allowed if p.scores["f1"] > found.scores["f1"]]
    equals = [p for p in allowed if p.scores == found.scores]
    assert found.mean_layers == min(p.mean_layers for p in equals)


@settings(max_examples=200 if exhaustive() else 50, deadline=None)
@given(values=points_of_a_curve, full=st.sampled_from([0.51, 0.9, 1.0]), drop=st.floats(0, 100))
def test_for_a_drop_the_fewest_layers_are_chosen(values: list[tuple[float, float]], full: float, drop: float) -> None:
    """Among those that lose so little none has fewer layers, and none of as many a higher score; always feasible."""
    points = as_points(values, full)
    allowed = [p for p in points if p.scores["f1"] >= full - drop / 100 - 1e-6]
    found = choose(points, 12, ExitsSpec(max_drop=drop))
    assert found in allowed
    assert found.mean_layers == min(p.mean_layers for p in allowed)
    equals = [p for p in allowed if p.mean_layers == found.mean_layers]
    assert found.scores["f1"] == max(p.scores["f1"] for p in equals)


def test_a_drop_of_just_the_limit_is_allowed_in_fp32() -> None:
    """1 of 200 answers is half a point, as a metric that was computed in fp32 says it."""
    full, one_less, two_less = (float(torch.tensor(right) / 200) for right in (107, 106, 105))
    points = [OperatingPoint(float(i), 12.0 - i, {"accuracy": s}) for i, s in enumerate([full, one_less, two_less])]
    assert choose(points, 12, ExitsSpec(max_drop=0.5)) is points[1]
    assert choose(points, 12, ExitsSpec(max_drop=0.0)) is points[0]


def test_an_impossible_speedup_tells_the_fastest_that_can_be_had() -> None:
    """What it tells is possible, and a point whose score is NaN does not count."""
    points = [
        OperatingPoint(0, 6.0, {"accuracy": 0.9}),
        OperatingPoint(1, 3.1, {"accuracy": 0.8}),
        OperatingPoint(2, 1.0, {"accuracy": math.nan}),
    ]
    with pytest.raises(ValueError, match=r"target_speedup 2: set it to 1\.93 or less"):
        choose(points, 6, ExitsSpec(target_speedup=2))
    assert choose(points, 6, ExitsSpec(target_speedup=1.93)) is points[1]


def test_scores_that_are_no_numbers_leave_nothing_to_choose() -> None:
    """A full model of NaN has no drop to measure; for a speed-up another point will do, if there is one."""
    points = [OperatingPoint(0, 6.0, {"matthews": math.nan}), OperatingPoint(1, 3.0, {"matthews": 0.1})]
    with pytest.raises(ValueError, match="NaN"):
        choose(points, 6, ExitsSpec(max_drop=100))
    assert choose(points, 6, ExitsSpec(target_speedup=1)) is points[1]
    with pytest.raises(ValueError, match="NaN"):
        choose(points[:1], 6, ExitsSpec(target_speedup=1))


@settings(max_examples=40 if exhaustive() else 15, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    which=st.sampled_from(SINGLE),
    limit=st.sampled_from([{"target_speedup": 1.3}, {"max_drop": 2.0}]),
)
def test_a_threshold_a_head_is_never_worse_than_one_for_all(
    seed: int, which: tuple[Criterion, int], limit: dict[str, float]
) -> None:
    """Under the same constraint: the score at least as high for a speed-up, the layers at most as many for a drop."""
    criterion, classes = which
    heads = made_up(seed, inner=3, count=40, classes=classes, coarse=False)
    logits = logits_of(heads)
    labels = logits[-1].argmax(-1) if classes > 1 else logits[-1, :, 0] > 0

    def accuracy(logits: Tensor) -> dict[str, float]:
        answers = logits.argmax(-1) if classes > 1 else logits[:, 0] > 0
        return {"accuracy": (answers == labels).double().mean().item()}

    heads = heads_of(logits, [1, 2, 3, 4], accuracy, patience=1)
    points = curve(criterion, heads)
    single = choose(points, 4, ExitsSpec(**limit))
    found = choose_per_head(criterion, heads, points, ExitsSpec(**limit))
    assert len(found.thresholds) == 3
    own = heads.point(0.0, exit_at(found, heads.doubts[criterion]))
    if "max_drop" in limit:
        assert own.mean_layers <= single.mean_layers
        assert own.scores["accuracy"] >= 1 - 0.02 - 1e-6
    else:
        assert own.scores["accuracy"] >= single.scores["accuracy"]
        assert 4 / own.mean_layers >= 1.3


def test_a_threshold_a_head_helps_where_one_head_is_wrongly_sure() -> None:
    """The first head is sure and wrong, the second sure and right: only the first must be told to wait."""
    labels = torch.arange(20) % 2
    wrong, right = (10.0 * torch.eye(2)[rows] for rows in (1 - labels, labels))
    heads = heads_of(
        torch.stack([wrong, 0.5 * right, right]),
        [1, 2, 6],
        lambda logits: {"accuracy": float((logits.argmax(-1) == labels).double().mean())},
    )
    points = curve("entropy", heads)
    assert choose(points, 6, ExitsSpec(max_drop=0)).mean_layers == 6
    found = choose_per_head("entropy", heads, points, ExitsSpec(max_drop=0))
    assert exit_at(found, heads.doubts["entropy"]).tolist() == [1] * 20
