"""Exits of a real model folder: scored offline as run, timed, calibrated on held-out examples."""

import json
import random
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.exit_folders import CLASSES, ENTROPY, WORDS, exiting, make_folder, spec_of

from ds_trainer.config.exit_specs import ExitPolicy, ExitsSpec
from ds_trainer.config.recipe import TextSpec
from ds_trainer.tasks.registry import build_task
from ds_trainer.tasks.task import Batch, Task
from ds_trainer.techniques.exits import exit_evaluation
from ds_trainer.techniques.exits.early_exit import EarlyExitModel, load_for_inference
from ds_trainer.techniques.exits.exit_evaluation import (
    all_heads,
    calibrate,
    calibrate_folder,
    evaluate_exits,
    flat_scores,
    measured_speed,
    without_curves,
)
from ds_trainer.techniques.exits.heads import read_exits
from ds_trainer.techniques.exits.policy import entropy, exit_at

pytest_plugins = ("support.exit_fixtures",)


@pytest.fixture
def scores_task(regressor: Path, cache: Path, tmp_path: Path) -> Task:
    """The same texts with the number of their words as the score."""
    rng = random.Random(1)
    for file in ("train.csv", "validation.csv"):
        texts = [rng.choices(WORDS, k=rng.randint(1, 9)) for _ in range(40)]
        rows = "".join(f"{' '.join(text)},{len(text)}\n" for text in texts)
        (tmp_path / file).write_text(f"text,score\n{rows}")
    return build_task(spec_of(tmp_path, regression=True, label_column="score"), regressor, cache)


@pytest.fixture(scope="module")
def evaluated(csv_folder: Path, classifier: Path, cache: Path) -> dict[str, Any]:
    """The evaluation of the classifier's exits, in batches of 8; tests leave it as it is."""
    task = build_task(spec_of(csv_folder), classifier, cache)
    return evaluate_exits(exiting(task, classifier), task, 8)


def run_early(model: EarlyExitModel, task: Task, split: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and layers of every example, by the position in the split, run in batches of other sizes."""
    examples = task.examples(split)
    starts = range(0, len(examples), 13)
    outs = [model(**task.collate(examples, range(len(examples))[start : start + 13]).inputs) for start in starts]
    return torch.cat([out.logits for out in outs]), torch.cat([out.exit_layers for out in outs])


def score_of(task: Task, split: str, logits: torch.Tensor) -> dict[str, float]:
    ids = torch.arange(len(logits))
    return task.score(split, task.answers(SimpleNamespace(logits=logits), Batch({}, ids, ids)))


def policies(model: EarlyExitModel, curves: dict[str, Any]) -> list[tuple[ExitPolicy, dict[str, Any]]]:
    """A few points of every curve, as policies."""
    found = []
    for criterion, points in curves.items():
        for point in points[:: max(1, len(points) // 3)]:
            thresholds, patience = [point["threshold"]] * 3, None
            if criterion == "patience":
                patience = model.policy.patience if model.regression else int(point["threshold"])
                thresholds = thresholds if model.regression else []
            found.append((ExitPolicy(criterion=criterion, thresholds=thresholds, patience=patience), point))
    return found


def test_what_all_heads_say_comes_in_the_order_of_the_split(task: Task, classifier: Path) -> None:
    """However batches are sorted and padded; the last head is the model's own."""
    model = exiting(task, classifier)
    heads = all_heads(model, task, "validation", 7, model.policy)
    assert (len(heads.answers), heads.doubts.keys()) == (4, {"entropy", "confidence", "patience"})
    examples = task.examples("validation")
    with torch.no_grad():
        for place in range(0, 61, 7):
            batch = task.collate(examples, [place])
            logits = model.all_logits(**batch.inputs)
            torch.testing.assert_close(heads.doubts["entropy"][:, place], entropy(logits)[:-1, 0], atol=1e-5, rtol=1e-4)
            for answers, one in zip(heads.answers, logits, strict=True):
                expected = task.answers(SimpleNamespace(logits=one), batch)[place]
                assert task.decisions(answers[place]) == task.decisions(expected)
            torch.testing.assert_close(logits[-1], model.model(**batch.inputs).logits, atol=1e-5, rtol=1e-4)


def test_what_is_found_offline_is_what_the_model_does(task: Task, classifier: Path, evaluated: dict[str, Any]) -> None:
    """Points of each curve, set as the policy and run, give their scores and layers; and so does the folder's own."""
    model = exiting(task, classifier)
    of_split = evaluated["splits"]["validation"]
    tried = policies(model, of_split["curves"])
    early = of_split["early_exit"]
    assert len(tried) >= 9
    for policy, point in [*tried, (model.policy, early)]:
        logits, layers = run_early(exiting(task, classifier, policy), task, "validation")
        assert point["mean_layers"] == pytest.approx(layers.float().mean().item())
        assert point["scores"] == score_of(task, "validation", logits)
    offline = exit_at(model.policy, all_heads(model, task, "validation", 8, model.policy).doubts["entropy"])
    assert early["exit_counts"] == {str(n): int((offline == n - 1).sum()) for n in range(1, 5)}


def test_the_result_is_json_of_the_agreed_form(evaluated: dict[str, Any]) -> None:
    """Each name at its place; counts add up to the examples; saving and speed-up follow from the mean layers."""
    found = evaluated
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert {name: found[name] for name in ("layers", "num_layers", "calibration")} == {
        "layers": [1, 2, 3, 4],
        "num_layers": 4,
        "calibration": None,
    }
    assert ExitPolicy(**found["policy"]) == ENTROPY
    of_split = found["splits"]["validation"]
    assert list(of_split) == ["heads", "curves", "early_exit"]
    assert list(of_split["heads"]) == ["1", "2", "3", "4"]
    assert list(of_split["curves"]) == ["entropy", "confidence", "patience"]
    assert set(of_split["curves"]["entropy"][0]) == {"threshold", "mean_layers", "scores"}
    early = of_split["early_exit"]
    assert sum(early["exit_counts"].values()) == 61
    assert sum(count > 0 for count in early["exit_counts"].values()) >= 3, "the example exits at several heads"
    mean = sum(int(layer) * count for layer, count in early["exit_counts"].items()) / 61
    assert early["mean_layers"] == pytest.approx(mean)
    assert early["expected_saving"] == pytest.approx(mean / 4)
    assert early["expected_speedup"] == pytest.approx(4 / mean)
    assert set(early["measured"]) == {"batch_1", "batch_8"}
    assert without_curves(found)["splits"]["validation"].keys() == {"heads", "early_exit"}
    assert "curves" in of_split


def test_every_head_is_scored_by_itself_with_the_models_own_label_order(
    task: Task, classifier: Path, evaluated: dict[str, Any]
) -> None:
    """The last as the plain model, the first as if everybody left there; classes are not taken for the task's."""
    model = exiting(task, classifier)
    heads = evaluated["splits"]["validation"]["heads"]
    batch = task.collate(task.examples("validation"), range(61))
    assert task.label_names == tuple(CLASSES) != tuple(sorted(CLASSES))
    with torch.no_grad():
        for layer, logits in zip((1, 2, 3, 4), model.all_logits(**batch.inputs), strict=True):
            right = (logits.argmax(-1) == batch.labels).float().mean().item()
            assert heads[str(layer)]["accuracy"] == pytest.approx(right)
        assert heads["4"] == score_of(task, "validation", model.model(**batch.inputs).logits)
    assert len({scores["accuracy"] for scores in heads.values()}) > 1


def test_a_regression_has_one_curve_of_its_tolerances(scores_task: Task, regressor: Path) -> None:
    """Of patience at the policy's; its points are what the model does; metrics are correlations."""
    model = exiting(scores_task, regressor)
    of_split = evaluate_exits(model, scores_task, 8)["splits"]["validation"]
    assert list(of_split["curves"]) == ["patience"]
    tried = policies(model, of_split["curves"])
    assert len(tried) >= 3
    assert of_split["curves"]["patience"][-1]["mean_layers"] == 2
    for policy, point in tried:
        logits, layers = run_early(exiting(scores_task, regressor, policy), scores_task, "validation")
        assert point["mean_layers"] == pytest.approx(layers.float().mean().item())
        for name, value in score_of(scores_task, "validation", logits).items():
            assert point["scores"][name] == pytest.approx(value, abs=1e-4)


def test_both_evaluation_splits_of_mnli_are_evaluated(tmp_path: Path, cache: Path) -> None:
    """Matched and mismatched, each on its own examples; the scores of the second carry its name."""
    labels = ["entailment", "neutral", "contradiction"]
    (tmp_path / "MNLI").mkdir()
    rng = random.Random(2)
    for file, count in (("train", 12), ("dev_matched", 9), ("dev_mismatched", 14)):
        texts = [" ".join(rng.choices(WORDS, k=4)) for _ in range(count)]
        lines = [f"{text}\t{rng.choice(WORDS)}\t{rng.choice(labels)}" for text in texts]
        text = "\n".join(["sentence1\tsentence2\tgold_label", *lines]) + "\n"
        (tmp_path / "MNLI" / f"{file}.tsv").write_text(text)
    folder = make_folder(tmp_path / "model", labels, ENTROPY)
    task = build_task(TextSpec(name="mnli", data_dir=str(tmp_path)), folder, cache)
    found = evaluate_exits(exiting(task, folder), task, 8)
    second_counts = found["splits"]["validation_mismatched"]["early_exit"]["exit_counts"]
    counts = {split: sum(of["early_exit"]["exit_counts"].values()) for split, of in found["splits"].items()}
    assert counts == {"validation": 9, "validation_mismatched": 14}
    flat = flat_scores(task, found)
    names = ["accuracy", "mean_layers", "expected_saving", "speedup", "seconds", "full_seconds"]
    names += [f"leave_at_{layer}" for layer in found["layers"]]
    of_one = {f"exit_{layer}/accuracy" for layer in found["layers"][:-1]}
    expected = {f"early_exit/{name}" for name in names} | of_one
    assert set(flat) == expected | {f"validation_mismatched/{name}" for name in expected}
    assert flat["exit_1/accuracy"] == found["splits"]["validation"]["heads"]["1"]["accuracy"]
    assert flat["validation_mismatched/early_exit/leave_at_1"] == second_counts["1"]
    second = found["splits"]["validation_mismatched"]["early_exit"]
    assert flat["validation_mismatched/early_exit/accuracy"] == second["scores"]["accuracy"]
    assert flat["early_exit/speedup"] == found["splits"]["validation"]["early_exit"]["measured"]["batch_8"]["speedup"]


def test_times_are_of_both_models_in_turn_after_a_warm_up(
    task: Task, classifier: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each batch goes through both, who is first changes, and the first round counts for nothing."""
    runs: list[str] = []
    seconds = {"early": 1.0, "full": 3.0}

    def timed(run: Any, device: torch.device) -> float:
        assert torch.is_inference_mode_enabled()
        runs.append("early" if isinstance(run.func, EarlyExitModel) else "full")
        assert len(run.keywords["input_ids"]) <= 8
        return seconds[runs[-1]] if len(runs) > 2 else 1000.0

    monkeypatch.setattr(exit_evaluation.timing, "seconds", timed)
    found = measured_speed(exiting(task, classifier), task, "validation", batch_size=8, limit=20)
    assert found == {"examples": 20, "seconds": 3.0, "full_seconds": 9.0, "speedup": 3.0}
    assert runs == [*["early", "full"], *["full", "early"], *["early", "full"], *["full", "early"]]


def test_timing_ends_when_its_time_is_up(task: Task, classifier: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With no time at all one batch is measured, and it is said of how many examples."""
    monkeypatch.setattr(exit_evaluation, "_SECONDS", 0.0)
    assert measured_speed(exiting(task, classifier), task, "validation", batch_size=8, limit=20)["examples"] in (4, 8)


@pytest.mark.parametrize(("batch_size", "expected"), [(8, {1: 64, 8: 1000}), (1, {1: 64})])
def test_times_are_taken_one_by_one_and_at_the_size_of_the_evaluation(
    task: Task, classifier: Path, monkeypatch: pytest.MonkeyPatch, batch_size: int, expected: dict[int, int]
) -> None:
    """64 examples of the one, 1,000 of the other, each under its size; the speed-up told is that of the evaluation."""
    monkeypatch.setattr(
        exit_evaluation,
        "measured_speed",
        lambda m, t, split, size, limit: {"speedup": size, "examples": limit, "seconds": 1, "full_seconds": 1},
    )
    found = evaluate_exits(exiting(task, classifier), task, batch_size)
    measured = found["splits"]["validation"]["early_exit"]["measured"]
    told = {name: {key: of[key] for key in ("speedup", "examples")} for name, of in measured.items()}
    assert told == {f"batch_{size}": {"speedup": size, "examples": limit} for size, limit in expected.items()}
    assert flat_scores(task, found)["early_exit/speedup"] == batch_size


def test_early_exit_at_the_first_head_is_faster_than_the_full_model(task: Task, classifier: Path) -> None:
    """The seconds are of the models that they are said to be of: one layer of four."""
    model = exiting(task, classifier, ExitPolicy(criterion="entropy", thresholds=[10.0] * 3))
    best = max(measured_speed(model, task, "validation", 1, 20)["speedup"] for _ in range(3))
    assert best > 1.3


def test_calibration_reaches_its_target_on_the_held_out_examples(task: Task, classifier: Path) -> None:
    """Run under the policy found, the held-out examples are as fast and as well scored as is said."""
    model = exiting(task, classifier)
    for fields in ({"target_speedup": 1.5}, {"max_drop": 3.0}, {"target_speedup": 1.5, "criterion": "confidence"}):
        policy, told = calibrate(model, task, 16, ExitsSpec(**fields))
        logits, layers = run_early(exiting(task, classifier, policy), task, "held_out")
        assert len(logits) == told["examples"] == 60
        assert (told["split"], told["criterion"]) == ("held_out", fields.get("criterion", "entropy"))
        assert policy.thresholds == [told["threshold"]] * 3
        assert told["mean_layers"] == pytest.approx(layers.float().mean().item())
        assert told["expected_speedup"] == pytest.approx(4 / told["mean_layers"])
        assert told["scores"] == score_of(task, "held_out", logits)
        assert (told["target_speedup"], told["max_drop"]) == (fields.get("target_speedup"), fields.get("max_drop"))
        if "max_drop" in fields:
            assert told["scores"]["accuracy"] >= told["full_scores"]["accuracy"] - 0.03 - 1e-6
        else:
            assert told["expected_speedup"] >= 1.5


def test_patience_is_calibrated_as_a_number_of_heads_or_as_a_tolerance(
    task: Task, classifier: Path, scores_task: Task, regressor: Path
) -> None:
    """Of a classification the patience, of a regression its tolerances at the patience given."""
    spec = ExitsSpec(criterion="patience", max_drop=100)
    policy, told = calibrate(exiting(task, classifier), task, 16, spec)
    assert policy == ExitPolicy(criterion="patience", patience=1)
    assert told["threshold"] == 1
    for patience in (1, 2):
        spec = ExitsSpec(max_drop=300, patience=patience)
        policy, told = calibrate(exiting(scores_task, regressor), scores_task, 16, spec)
        assert policy == ExitPolicy(criterion="patience", thresholds=[told["threshold"]] * 3, patience=patience)
        assert told["mean_layers"] == patience + 1


def test_a_threshold_a_head_is_told_and_at_least_as_good(task: Task, classifier: Path) -> None:
    """The result names them, and what they give on the held-out examples when run."""
    model = exiting(task, classifier)
    single = calibrate(model, task, 16, ExitsSpec(max_drop=1))[1]
    policy, told = calibrate(model, task, 16, ExitsSpec(max_drop=1, per_head=True))
    assert told["thresholds"] == policy.thresholds
    assert told["mean_layers"] <= single["mean_layers"]
    logits, layers = run_early(exiting(task, classifier, policy), task, "held_out")
    assert told["mean_layers"] == pytest.approx(layers.float().mean().item())
    assert told["scores"] == score_of(task, "held_out", logits)


def test_calibration_never_looks_at_what_is_evaluated_on(
    task: Task, classifier: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one split that is ever asked for is the held-out one."""
    asked, examples = set(), task.examples

    def recorded(split: str) -> Any:
        asked.add(split)
        return examples(split)

    monkeypatch.setattr(task, "examples", recorded)
    calibrate(exiting(task, classifier), task, 16, ExitsSpec(target_speedup=1.2, per_head=True))
    assert asked == {"held_out"}


@pytest.mark.parametrize(
    ("fields", "per_head", "message"),
    [
        ({"target_speedup": 4.5}, False, r"target_speedup 4\.5: .*the fastest is 4"),
        ({"max_drop": 1, "criterion": "patience"}, True, "patience is the same for all heads"),
    ],
)
def test_what_cannot_be_calibrated_is_told(
    task: Task, classifier: Path, fields: dict[str, Any], per_head: bool, message: str
) -> None:
    """A ValueError each."""
    with pytest.raises(ValueError, match=message):
        calibrate(exiting(task, classifier), task, 16, ExitsSpec(**fields, per_head=per_head))


def test_without_held_out_examples_there_is_no_calibration(csv_folder: Path, classifier: Path, cache: Path) -> None:
    """It says what to set."""
    task = build_task(spec_of(csv_folder, held_out=0.0), classifier, cache)
    with pytest.raises(ValueError, match=r"set task\.held_out"):
        calibrate(exiting(task, classifier), task, 16, ExitsSpec(max_drop=1))


def test_a_regression_has_no_entropy_to_calibrate(scores_task: Task, regressor: Path) -> None:
    """Told before any pass over the data."""
    with pytest.raises(ValueError, match='a regression has no probabilities: set "patience"'):
        calibrate(exiting(scores_task, regressor), scores_task, 16, ExitsSpec(criterion="entropy", max_drop=1))


def test_a_calibrated_folder_runs_under_what_was_found(
    task: Task, classifier: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It loads as before, with the new policy; layers, heads and share are as they were; evaluation tells of it."""
    folder = shutil.copytree(classifier, tmp_path / "model")
    before = read_exits(folder)
    told = calibrate_folder(folder, task, 16, ExitsSpec(criterion="confidence", target_speedup=1.3))
    saved = read_exits(folder)
    assert saved.policy == ExitPolicy(criterion="confidence", thresholds=[told["threshold"]] * 3)
    assert saved.calibration == told
    assert saved.model_copy(update={"policy": before.policy, "calibration": None}) == before
    loaded: Any = load_for_inference(folder)
    assert loaded.policy == saved.policy
    monkeypatch.setattr(exit_evaluation, "_evaluate_split", lambda *_: {})
    assert evaluate_exits(exiting(task, folder), task, 64)["calibration"] == told
    assert evaluate_exits(exiting(task, folder, ENTROPY), task, 64)["calibration"] is None


def test_other_examples_than_those_held_out_in_training_are_refused(
    csv_folder: Path, classifier: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many of another file, or of a file that has changed, before any pass; another length is the same examples."""
    folder = shutil.copytree(classifier, tmp_path / "model")
    rows = (csv_folder / "train.csv").read_text()
    for name, text in (("validation.csv", rows), ("train.csv", rows + "old fig,fruit\n")):
        (tmp_path / name).write_text(text)
    with monkeypatch.context() as context:
        context.setattr(exit_evaluation, "calibrate", lambda *_: pytest.fail("no pass comes before it"))
        for fields in ({"data_dir": str(tmp_path)}, {"train_file": "validation.csv"}):
            other = build_task(spec_of(csv_folder, **fields), folder, cache)
            with pytest.raises(ValueError, match="held out now are not those that were held out in training"):
                calibrate_folder(folder, other, 16, ExitsSpec(max_drop=1))
    assert read_exits(folder) == read_exits(classifier)
    same = build_task(spec_of(csv_folder, max_seq_length=16), folder, cache)
    assert calibrate_folder(folder, same, 16, ExitsSpec(max_drop=1))["examples"] == 60
