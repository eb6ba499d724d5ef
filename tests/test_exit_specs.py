"""What a recipe may say of exits: defaults, the loss table, and every mistake told with its place."""

from __future__ import annotations

from typing import Any

import pytest

from ds_trainer.exit_specs import ExitPolicy, ExitsSpec, SavedExits, policy_of
from ds_trainer.recipe import Phase, parse_exits, parse_recipe


def with_exits(loss: Any = None, others: Any = None, task: Any = None, **exits: Any) -> dict[str, Any]:
    phase = {"max_steps": 1, "techniques": {"exits": exits} | (others or {})}
    return {"phases": [phase | ({} if loss is None else {"loss": loss})]} | ({} if task is None else {"task": task})


def phase_of(data: dict[str, Any]) -> Phase:
    (phase,) = parse_recipe(data).phases
    return phase


def mistakes_of(data: Any) -> str:
    with pytest.raises(ValueError) as caught:
        parse_recipe(data)
    return str(caught.value)


DISTILL = {"distill": {"teacher": "@model", "alpha_distil": 0.7}}
WITH_CE = {"distill": {"teacher": "@model", "alpha_distil": 0.7, "alpha_ce": 0.3}}
PRUNE = {"prune": {"regularization": "l1", "final_lambda": 20}}


@pytest.mark.parametrize(
    ("data", "table", "terms"),
    [
        (with_exits(), {"task": 0.0, "exits.heads": 1.0}, ["heads"]),
        (with_exits(training="joint"), {"task": 0.0, "exits.heads": 1.0}, ["heads"]),
        (with_exits({"task": 1.0}), {"task": 1.0, "exits.heads": 1.0}, ["heads"]),
        (with_exits({"task": 0.5, "exits.heads": 2.0}), {"task": 0.5, "exits.heads": 2.0}, ["heads"]),
        (
            with_exits({"task": 1.0, "exits.distill": 0.5}),
            {"task": 1.0, "exits.distill": 0.5},
            ["distill"],
        ),
        (
            with_exits({"task": 1.0, "exits.heads": 0.25, "exits.distill": 0.5}, terms=["distill", "heads"]),
            {"task": 1.0, "exits.heads": 0.25, "exits.distill": 0.5},
            ["distill", "heads"],
        ),
        (with_exits(others=DISTILL), {"task": 0.0, "distill.logits": 0.7, "exits.heads": 1.0}, ["heads"]),
        (with_exits(others=WITH_CE), {"task": 0.3, "distill.logits": 0.7, "exits.heads": 1.0}, ["heads"]),
        (with_exits(others=PRUNE), {"task": 0.0, "prune.penalty": 20.0, "exits.heads": 1.0}, ["heads"]),
        (
            with_exits({"task": 0.1}, others=PRUNE | DISTILL),
            {"task": 0.1, "prune.penalty": 20.0, "distill.logits": 0.7, "exits.heads": 1.0},
            ["heads"],
        ),
    ],
)
def test_the_loss_table_has_the_heads_in_it(data, table, terms):
    """By default exits.heads 1 and task 0, the model's own head being in joint training's mean; a weight that is said
    stays, and the terms are those that have one."""
    phase = phase_of(data)
    assert phase.loss == table
    assert phase.techniques.exits.terms == terms


def test_a_phase_without_exits_keeps_its_table():
    """Nothing of theirs is added, and the task weighs 1."""
    assert phase_of({"phases": [{"max_steps": 1}]}).loss == {"task": 1.0}
    assert phase_of({"phases": [{"max_steps": 1, "techniques": {"exits": None}}]}).loss == {"task": 1.0}


@pytest.mark.parametrize("training", ["heads", "joint"])
def test_a_resolved_recipe_reads_back_as_itself(training):
    """What a run writes beside its results says the same again: loss table, terms and all."""
    data = with_exits({"exits.heads": 1.0, "exits.distill": 0.5, "task": 1.0}, others=PRUNE, training=training)
    recipe = parse_recipe(data)
    assert parse_recipe(recipe.model_dump()) == recipe
    default = parse_recipe(with_exits(training=training))
    assert parse_recipe(default.model_dump()) == default


def calibrated(**held_out: Any) -> dict[str, Any]:
    return with_exits(task={"name": "sst2"} | held_out, target_speedup=1.5)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (with_exits(layers=[]), ["exits.layers", "at least 1"]),
        (with_exits(layers=[0]), ["exits.layers.0", "0"]),
        (with_exits(layers=[2, 1, 2]), ["layers names one twice: [2, 1, 2]"]),
        (with_exits(training="both"), ["exits.training", "'joint'", '"both"']),
        (with_exits(criterion="hope"), ["exits.criterion", "'patience'"]),
        (with_exits(pooling="max"), ["exits.pooling", "'mean'"]),
        (with_exits(patience=0), ["exits.patience", "0"]),
        (with_exits(temperature=0), ["exits.temperature", "greater than 0"]),
        (with_exits(head_weights=[-1.0]), ["exits.head_weights.0", "-1"]),
        (with_exits(early_exit_entropy=-0.1), ["early_exit_entropy", "-0.1"]),
        (with_exits(early_exit_entropy=[]), ["early_exit_entropy"]),
        (with_exits(early_exit_entropie=0.1), ["unknown key", 'did you mean "early_exit_entropy"?']),
        (with_exits(target_speedup=0.5), ["target_speedup", "0.5"]),
        (with_exits(terms=[]), ["exits.terms", "at least 1"]),
        (with_exits({"exits.hedas": 1.0}), ["hedas", "'heads'"]),
        (
            with_exits({"task": 1.0, "exits.heads": 1.0}, terms=["distill"]),
            ["the term distill", 'loss["exits.distill"]'],
        ),
        (with_exits(terms=["distill"]), ["the term distill but no weight for it", 'loss["exits.distill"]']),
        (with_exits(terms=["heads", "heads"]), ["names one twice"]),
        (calibrated(), ["calibrates its exits", "task.held_out", "0.02"]),
        (
            with_exits(task={"name": "sst2", "held_out": 0.1}, target_speedup=2, max_drop=1),
            ["target_speedup and max_drop are both set"],
        ),
        (with_exits(task={"name": "squad"}), ["has exits, and its task is squad", "labelled text"]),
        (with_exits(task={"name": "mlm"}), ["has exits, and its task is mlm", "labelled text"]),
        (with_exits(task={"name": "sst2", "held_out": 1.0}), ["held_out", "less than 1"]),
    ],
)
def test_mistakes_are_told_with_their_place(data, words):
    """What was found and what is allowed, in the words of the recipe."""
    message = mistakes_of(data)
    assert [word for word in words if word not in message] == []


def test_held_out_examples_let_exits_be_calibrated():
    """target_speedup or max_drop, one of them, once a share of the training set is kept out."""
    assert phase_of(calibrated(held_out=0.02)).techniques.exits.calibrated
    assert phase_of(with_exits(task={"name": "sst2", "held_out": 0.02}, max_drop=0.5)).techniques.exits.calibrated
    assert not phase_of(with_exits()).techniques.exits.calibrated


def two_phases(first: Any, second: Any) -> dict[str, Any]:
    exits = {"max_steps": 1, "name": "exits", "task": second, "techniques": {"exits": {}}}
    return {"phases": [{"max_steps": 1, "name": "finetune", "task": first}, exits]}


SST2 = {"name": "sst2", "data_dir": "a"}


@pytest.mark.parametrize("other", [{"held_out": 0.2}, {"held_out": 0.0}, {}])
def test_what_one_phase_holds_out_no_other_may_train_on(other):
    """Two shares of one data set in one run are told, whichever phase has the exits; also where one has none."""
    message = mistakes_of(two_phases(SST2 | other, SST2 | {"held_out": 0.1}))
    assert "in one phase and 0.1 in another on the same data" in message
    assert "write the same in both" in message


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (SST2 | {"held_out": 0.1}, SST2 | {"held_out": 0.1}),
        (SST2 | {"data_dir": "b"}, SST2 | {"held_out": 0.1}),
        ({"name": "mnli", "data_dir": "a"}, SST2 | {"held_out": 0.1}),
        ({"name": "mlm", "data_dir": "a"}, SST2 | {"held_out": 0.1}),
        (SST2 | {"train_file": "other.tsv"}, SST2 | {"held_out": 0.1}),
    ],
)
def test_other_data_may_be_held_out_otherwise(first, second):
    """The same share everywhere, or another data set, is no mistake."""
    assert len(parse_recipe(two_phases(first, second)).phases) == 2


@pytest.mark.parametrize(
    ("fields", "regression", "policy"),
    [
        ({}, False, {"criterion": "entropy", "thresholds": [0.1] * 3}),
        ({"early_exit_entropy": 0.3}, False, {"criterion": "entropy", "thresholds": [0.3] * 3}),
        ({"early_exit_entropy": [0.3, 0.2, 0.1]}, False, {"criterion": "entropy", "thresholds": [0.3, 0.2, 0.1]}),
        ({"criterion": "confidence"}, False, {"criterion": "confidence", "thresholds": [0.9] * 3}),
        ({"criterion": "patience", "patience": 4}, False, {"criterion": "patience", "patience": 4}),
        ({}, True, {"criterion": "patience", "patience": 2, "thresholds": [0.1] * 3}),
        (
            {"regression_threshold": [0.1, 0.2, 0.3]},
            True,
            {"criterion": "patience", "patience": 2, "thresholds": [0.1, 0.2, 0.3]},
        ),
    ],
)
def test_the_policy_of_a_recipe(fields, regression, policy):
    """One threshold goes for every head; a list is one a head; patience has tolerances for scores alone."""
    assert policy_of(ExitsSpec(**fields), 3, regression) == ExitPolicy(**policy)


@pytest.mark.parametrize(
    ("fields", "regression", "words"),
    [
        ({"early_exit_entropy": [0.3, 0.2]}, False, "early_exit_entropy has 2 values, and there are 3 heads"),
        ({"criterion": "confidence", "early_exit_confidence": [0.3]}, False, "early_exit_confidence has 1 values"),
        ({"regression_threshold": [0.1]}, True, "regression_threshold has 1 values"),
        ({"criterion": "entropy"}, True, 'criterion is "entropy", and a regression has no probabilities'),
    ],
)
def test_a_policy_that_does_not_fit_is_told(fields, regression, words):
    """The number of values, and what a regression cannot be asked."""
    with pytest.raises(ValueError, match=words):
        policy_of(ExitsSpec(**fields), 3, regression)


def test_thresholds_of_another_criterion_are_not_looked_at():
    """A list for entropy that is too short is no mistake where confidence decides."""
    policy = policy_of(ExitsSpec(criterion="confidence", early_exit_entropy=[0.1]), 3, regression=False)
    assert policy.thresholds == [0.9] * 3


def test_what_a_folder_says_reads_back_as_itself():
    """exits.json holds all of it, and nothing that it does not know."""
    policy = ExitPolicy(criterion="patience", patience=2, thresholds=[0.1, 0.5])
    saved = SavedExits(layers=[2, 5], pooling="mean", policy=policy, held_out=0.1, calibration={"speedup": 2.0})
    assert SavedExits.model_validate_json(saved.model_dump_json()) == saved
    with pytest.raises(ValueError, match=r"exits\.json: polici: unknown key.*\"policy\""):
        parse_exits(saved.model_dump() | {"polici": 1}, "exits.json")
