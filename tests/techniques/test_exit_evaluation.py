"""Every threshold of exits and the choice of one against brute force; folders with exits scored, timed, calibrated."""

import json
import math
import shutil
from dataclasses import asdict

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.exit_folders import CLASSES, ENTROPY, exiting, run_early, spec_of
from support.launching import exhaustive
from torch import Tensor

from ds_trainer.recipe.exit_specs import Criterion, ExitPolicy, ExitsSpec
from ds_trainer.tasks.registry import build_task
from ds_trainer.techniques.exits.early_exit import doubts_of_all, exit_at, load_for_inference, read_exits
from ds_trainer.techniques.exits.exit_evaluation import (
    AllHeads,
    OperatingPoint,
    all_heads,
    calibrate_folder,
    choose,
    curve,
    evaluate_exits,
)

pytest_plugins = ("support.exit_fixtures",)

OF_CLASSES: tuple[Criterion, ...] = ("entropy", "confidence", "patience")


def made_up(seed: int, inner: int, count: int, classes: int, coarse: bool) -> AllHeads:
    """Logits whose scores differ for any choice of rows; coarse ones, on a grid, bring ties."""
    rng = np.random.default_rng(seed)
    values = rng.normal(size=(inner + 1, count, classes)) * 3
    logits = torch.from_numpy(np.round(values * 2) / 2 if coarse else values).float()
    layers = np.sort(rng.choice(np.arange(1, 25), inner + 1, replace=False)).tolist()
    return heads_of(logits, layers, patience=int(rng.integers(1, 4)))


def heads_of(logits: Tensor, layers: list[int], patience: int = 2) -> AllHeads:
    """What these logits (heads, rows, classes) say; the answers are the logits themselves."""
    criteria: tuple[Criterion, ...] = OF_CLASSES if logits.shape[-1] > 1 else ("patience",)
    return AllHeads(
        doubts={name: doubts_of_all(name, logits, None) for name in criteria},
        answers=[dict(enumerate(one)) for one in logits],
        layers=layers,
        score=lambda answers: score(torch.stack([*answers.values()])),
        regression=logits.shape[-1] == 1,
        patience=patience,
    )


def score(logits: Tensor) -> dict[str, float]:
    """Two metrics that change with any row."""
    weights = torch.linspace(0.5, 1.5, logits.numel()).reshape(logits.shape)
    return {"sum": float((logits * weights).sum()), "first": float(logits[0, 0])}


def exits(criterion: Criterion, threshold: float, heads: AllHeads) -> list[int]:
    """Where each row leaves by a threshold, once it is written and read."""
    written = ExitPolicy.model_validate_json(heads.policy(criterion, threshold).model_dump_json())
    return exit_at(written, heads.doubts[criterion]).tolist()


some_heads = st.builds(
    made_up,
    seed=st.integers(0, 10_000),
    inner=st.integers(1, 6),
    count=st.integers(1, 25),
    classes=st.integers(1, 4),
    coarse=st.booleans(),
)


@settings(max_examples=120 if exhaustive() else 40, deadline=None)
@given(heads=some_heads, criterion=st.sampled_from(OF_CLASSES), tried=st.floats(0, 20))
@example(heads=made_up(seed=509, inner=2, count=6, classes=3, coarse=True), criterion="confidence", tried=0.0)
def test_a_curve_has_every_threshold_that_changes_an_exit(heads, criterion, tried):
    """Its points are those of the rows that leave one by one, ties included, also once written and read. They are all
    different, and any threshold decides as one of them. They go from nobody leaving to the earliest exits."""
    criterion = "patience" if heads.regression else criterion
    logits = torch.stack([torch.stack([*one.values()]) for one in heads.answers])
    points = curve(criterion, heads, most=10**6)
    decisions = [exits(criterion, point.threshold, heads) for point in points]
    for point, left in zip(points, decisions, strict=True):
        chosen = torch.stack([logits[head, row] for row, head in enumerate(left)])
        layers = sum(heads.layers[head] for head in left) / len(left)
        assert point == OperatingPoint(point.threshold, layers, score(chosen))
        assert OperatingPoint(**json.loads(json.dumps(asdict(point), allow_nan=False))) == point
    layers_used = [point.mean_layers for point in points]
    assert layers_used == sorted(layers_used, reverse=True)
    assert points[0].mean_layers == heads.layers[-1]
    if criterion == "patience" and not heads.regression:
        assert [point.threshold for point in points] == [float(p) for p in range(len(heads.layers) - 1, 0, -1)]
        return
    earliest = heads.patience if heads.regression else 0
    assert points[-1].mean_layers == heads.layers[min(earliest, len(heads.layers) - 1)]
    assert len({tuple(left) for left in decisions}) == len(decisions)
    values = heads.doubts[criterion].abs().flatten()
    for threshold in [tried, *values[values.isfinite()].tolist()]:
        assert exits(criterion, threshold, heads) in decisions


def test_thinning_keeps_the_ends_and_spreads_evenly():
    """Of many hundreds of thresholds about a hundred are left, no gap in mean layers above twice the even one."""
    for criterion, classes in (("entropy", 3), ("confidence", 3), ("patience", 1)):
        heads = made_up(seed=1, inner=5, count=400, classes=classes, coarse=False)
        every, points = curve(criterion, heads, most=10**6), curve(criterion, heads)
        assert len(every) > 500
        assert 80 <= len(points) <= 100
        assert (points[0], points[-1]) == (every[0], every[-1])
        layers = np.array([point.mean_layers for point in points])
        assert (-np.diff(layers)).max() <= 2 * (layers[0] - layers[-1]) / 99


def test_heads_that_are_not_a_number_or_wholly_sure_have_a_curve():
    """NaN is never sure. Entropy 0 and confidence 1 everywhere: one point where nobody leaves, and one where all do."""
    logits = torch.randn(4, 9, 3, generator=torch.Generator().manual_seed(2))
    logits[1, 3], logits[:3, 7] = math.nan, math.nan
    heads = heads_of(logits, [1, 2, 3, 4])
    certain = heads_of(torch.tensor([[100.0, -100.0]]).expand(3, 4, 2).clone(), [1, 2, 3])
    for criterion in ("entropy", "confidence"):
        for point in curve(criterion, heads):
            left = exits(criterion, point.threshold, heads)
            assert (left[7], math.isfinite(point.threshold)) == (3, True)
            assert point.mean_layers == sum(heads.layers[head] for head in left) / 9
        assert [point.mean_layers for point in curve(criterion, certain)] == [3.0, 1.0]


points_of_a_curve = st.lists(
    st.tuples(st.floats(1, 12), st.floats(0, 1) | st.just(math.nan) | st.sampled_from([0.5, 0.505, 0.51])),
    min_size=1,
    max_size=12,
)


@settings(max_examples=200 if exhaustive() else 60, deadline=None)
@given(
    values=points_of_a_curve,
    full=st.floats(0, 1) | st.sampled_from([0.51, 0.9, 1.0]),
    aim=st.tuples(st.just("target_speedup"), st.floats(1, 12)) | st.tuples(st.just("max_drop"), st.floats(0, 100)),
)
def test_the_best_point_that_reaches_the_aim_is_chosen(values, full, aim):
    """For a speed-up the best score, then the fewest layers; for a drop the fewest layers, then the best score."""
    points = [OperatingPoint(0.0, 12.0, {"f1": full}), *(OperatingPoint(1.0, n, {"f1": value}) for n, value in values)]
    spec = ExitsSpec(**dict([aim]))
    valid = [point for point in points if not math.isnan(point.main_score)]
    if "target_speedup" in aim:
        allowed = [point for point in valid if 12 / point.mean_layers >= aim[1]]
        keys = [(-point.main_score, point.mean_layers) for point in allowed]
        if not allowed:
            with pytest.raises(ValueError, match="no threshold reaches target_speedup"):
                choose(points, 12, spec)
            return
    else:
        allowed = [point for point in valid if point.main_score >= full - aim[1] / 100 - 1e-6]
        keys = [(point.mean_layers, -point.main_score) for point in allowed]
    best = choose(points, 12, spec)
    key = (-best.main_score, best.mean_layers) if "target_speedup" in aim else (best.mean_layers, -best.main_score)
    assert key == min(keys)


def test_limits_of_a_choice():
    """1 of 200 answers is half a point in fp32. A fastest that the message names is possible, and NaN does not count; a
    full model of NaN has no drop."""
    full, one_less, two_less = (float(torch.tensor(right) / 200) for right in (107, 106, 105))
    points = [OperatingPoint(float(i), 12.0 - i, {"accuracy": s}) for i, s in enumerate([full, one_less, two_less])]
    assert choose(points, 12, ExitsSpec(max_drop=0.5)) is points[1]
    assert choose(points, 12, ExitsSpec(max_drop=0.0)) is points[0]
    points = [OperatingPoint(i, n, {"f1": s}) for i, n, s in ((0, 6.0, 0.9), (1, 3.1, 0.8), (2, 1.0, math.nan))]
    with pytest.raises(ValueError, match=r"target_speedup 2: set it to 1\.93 or less"):
        choose(points, 6, ExitsSpec(target_speedup=2))
    assert choose(points, 6, ExitsSpec(target_speedup=1.93)) is points[1]
    points = [OperatingPoint(0, 6.0, {"f1": math.nan}), points[1]]
    assert choose(points, 6, ExitsSpec(target_speedup=1)) is points[1]
    for wrong, spec in ((points, ExitsSpec(max_drop=100)), (points[:1], ExitsSpec(target_speedup=1))):
        with pytest.raises(ValueError, match="NaN"):
            choose(wrong, 6, spec)


KINDS = {"classes": ("task", "classifier"), "scores": ("scores_task", "regressor"), "tags": ("tags_task", "tagger")}


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_computed_from_all_heads_is_what_the_model_does(kind, request):
    """Points of each curve, set as the policy and run, give their scores and layers, and so does the folder's policy.
    However batches are sorted and padded. A regression has one curve, of its tolerances."""
    task, folder = map(request.getfixturevalue, KINDS[kind])
    of_split = evaluate_exits(folder, task, 8)[1]["splits"]["validation"]
    heads = all_heads(exiting(task, folder), task, "validation", 7, 1)
    assert list(of_split["curves"]) == (["patience"] if kind == "scores" else list(OF_CLASSES))
    for criterion, points in of_split["curves"].items():
        for point in points[:: max(1, len(points) // 3)]:
            policy = heads.policy(criterion, point["threshold"])
            computed = {name: point[name] for name in ("scores", "mean_layers")}
            assert computed == run_early(exiting(task, folder, policy), task, "validation")
    early = of_split["early_exit"]
    assert kind == "scores" or sum(count > 0 for count in early["exit_counts"].values()) >= 2
    computed = {name: early[name] for name in ("scores", "mean_layers")}
    assert computed == run_early(exiting(task, folder), task, "validation")


def test_the_result_is_json_of_the_agreed_form(task, classifier):
    """Every head is scored by itself; its classes are not taken for the task's, whose order is another."""
    scores, results = evaluate_exits(classifier, task, 8)
    assert json.loads(json.dumps(results, allow_nan=False)) == results
    assert (results["layers"], results["num_layers"], results["calibration"]) == ([1, 2, 3, 4], 4, None)
    assert ExitPolicy(**results["policy"]) == ENTROPY
    of_split = results["splits"]["validation"]
    early, heads, counts = of_split["early_exit"], of_split["heads"], of_split["early_exit"]["exit_counts"]
    assert early["expected_speedup"] == pytest.approx(4 / early["mean_layers"])
    added = early["scores"] | {name: early[name] for name in ("mean_layers", "expected_saving")}
    added |= {f"leave_at_{layer}": count for layer, count in counts.items()}
    of_heads = {f"exit_{n}/{name}": value for n in "123" for name, value in heads[n].items()}
    assert scores == of_heads | {f"early_exit/{name}": value for name, value in added.items()}
    batch = task.collate(task.examples("validation"), range(61))
    assert task.label_names == tuple(CLASSES) != tuple(sorted(CLASSES))
    model = exiting(task, classifier)
    for layer, logits in zip("1234", model.all_logits(**batch.inputs), strict=True):
        assert heads[layer]["accuracy"] == pytest.approx((logits.argmax(-1) == batch.labels).float().mean().item())


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("tags", {"max_drop": 2.0}),
        ("classes", {"target_speedup": 1.5, "criterion": "confidence"}),
        ("classes", {"max_drop": 100, "criterion": "patience"}),
    ],
)
def test_calibration_reaches_its_target_on_the_held_out_examples(kind, fields, request, tmp_path, monkeypatch):
    """Run under the folder's new policy, the held-out examples are as fast and as well scored as recorded; no other
    split is looked at, and the rest of exits.json stays."""
    task, folder = map(request.getfixturevalue, KINDS[kind])
    before, folder = read_exits(folder), shutil.copytree(folder, tmp_path / "model")
    asked, examples = set(), task.examples
    monkeypatch.setattr(task, "examples", lambda split: (asked.add(split), examples(split))[1])
    record = calibrate_folder(folder, task, 16, ExitsSpec(**fields))
    assert asked == {"held_out"}
    saved, criterion = read_exits(folder), fields.get("criterion", "entropy")
    assert saved.calibration == record
    assert saved.model_copy(update={"policy": before.policy, "calibration": None}) == before
    limit = {"patience": 1} if criterion == "patience" else {"thresholds": [record["threshold"]] * 3}
    assert saved.policy == ExitPolicy(criterion=criterion, **limit)
    early = load_for_inference(folder)
    assert {name: record[name] for name in ("scores", "mean_layers")} == run_early(early, task, "held_out")
    expected = {"split": "held_out", "examples": 60, "criterion": criterion, "target_speedup": None, "max_drop": None}
    assert expected | fields == {name: record[name] for name in expected}
    assert record["expected_speedup"] == pytest.approx(4 / record["mean_layers"])
    assert record["expected_speedup"] >= fields.get("target_speedup", 1)
    never = ExitPolicy(criterion="entropy", thresholds=[0.0] * 3)
    assert record["full_scores"] == run_early(exiting(task, folder, never), task, "held_out")["scores"]


def test_a_regression_calibrates_its_tolerance_at_the_given_patience(scores_task, regressor, tmp_path):
    """By default that of the folder; evaluation has the record, unless the model runs under another policy."""
    folder = shutil.copytree(regressor, tmp_path / "model")
    for patience, layers in ((2, 3), (None, 3), (1, 2)):
        record = calibrate_folder(folder, scores_task, 16, ExitsSpec(max_drop=300, patience=patience))
        limits = [record["threshold"]] * 3
        assert read_exits(folder).policy == ExitPolicy(criterion="patience", thresholds=limits, patience=layers - 1)
        assert record["mean_layers"] == layers
    assert evaluate_exits(folder, scores_task, 64)[1]["calibration"] == record
    other = ExitPolicy(criterion="patience", thresholds=[0.1] * 3, patience=3)
    assert evaluate_exits(folder, scores_task, 64, other)[1]["calibration"] is None


def test_what_cannot_be_calibrated_changes_nothing(csv_folder, classifier, cache, task, tmp_path):
    """An aim that is out of reach, and other examples than those that training held out: as many of another file, or of
    a file that has changed."""
    folder = shutil.copytree(classifier, tmp_path / "model")
    with pytest.raises(ValueError, match=r"target_speedup 4\.5: .*the fastest is 4"):
        calibrate_folder(folder, task, 16, ExitsSpec(target_speedup=4.5))
    rows = (csv_folder / "train.csv").read_text()
    for name, text in (("validation.csv", rows), ("train.csv", rows + "old fig,fruit\n")):
        (tmp_path / name).write_text(text)
    for fields in ({"data_dir": str(tmp_path)}, {"train_file": "validation.csv"}):
        other = build_task(spec_of(csv_folder, **fields), folder, cache)
        with pytest.raises(ValueError, match="held out now are not those that were held out in training"):
            calibrate_folder(folder, other, 16, ExitsSpec(max_drop=1))
    assert read_exits(folder) == read_exits(classifier)
