"""What a recipe may say of exits: defaults, the loss table, and every mistake told with its place."""

from __future__ import annotations

import json
import math
import re
from typing import Any

import numpy as np
import pytest

from ds_trainer.config.exit_specs import ExitPolicy, ExitsSpec, SavedExits, aim_mistakes, policy_of
from ds_trainer.config.recipe import Phase, parse_recipe, saved_exits


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


def joint(loss: Any = None, **more: Any) -> dict[str, Any]:
    return with_exits(loss, training="joint", **more)


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
        (joint(others=DISTILL), {"task": 0.0, "distill.logits": 0.7, "exits.heads": 1.0}, ["heads"]),
        (joint(others=WITH_CE), {"task": 0.3, "distill.logits": 0.7, "exits.heads": 1.0}, ["heads"]),
        (joint(others=PRUNE), {"task": 0.0, "prune.penalty": 20.0, "exits.heads": 1.0}, ["heads"]),
        (
            joint({"task": 0.1}, others=PRUNE | DISTILL),
            {"task": 0.1, "prune.penalty": 20.0, "distill.logits": 0.7, "exits.heads": 1.0},
            ["heads"],
        ),
        (with_exits(terms=["distill"]), {"task": 0.0, "exits.distill": 1.0}, ["distill"]),
        (
            joint(terms=["distill", "heads"]),
            {"task": 0.0, "exits.heads": 1.0, "exits.distill": 1.0},
            ["distill", "heads"],
        ),
        # the own head is not in this term: the task's loss teaches it
        (joint(terms=["distill"]), {"task": 1.0, "exits.distill": 1.0}, ["distill"]),
        (joint({"task": 0.5}, terms=["distill"]), {"task": 0.5, "exits.distill": 1.0}, ["distill"]),
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


@pytest.mark.parametrize(
    "data",
    [
        with_exits(),
        joint({"exits.heads": 1.0, "exits.distill": 0.5, "task": 1.0}, others=PRUNE),
        joint(terms=["distill"]),
        with_exits(early_exit_confidence=0.8),
        with_exits(patience=3, regression_threshold=[0.1, 0.2]),
        with_exits(task={"name": "sst2", "held_out": 0.1}, criterion="confidence", max_drop=0.5, per_head=True),
        with_exits(task={"name": "stsb", "held_out": 0.1}, patience=3, target_speedup=1.5),
    ],
)
def test_a_resolved_recipe_reads_back_as_itself(data):
    """What a run writes beside its results says the same again: loss table, terms, thresholds that are not said."""
    recipe = parse_recipe(data)
    assert parse_recipe(json.loads(json.dumps(recipe.model_dump()))) == recipe


@pytest.mark.parametrize("technique", ["exits", "prune", "distill"])
@pytest.mark.parametrize("value", [False, "", [1]])
def test_a_technique_that_is_no_object_is_told(technique, value):
    """By its place, whether Python takes the value for false or not."""
    message = mistakes_of({"phases": [{"max_steps": 1, "techniques": {technique: value}}]})
    assert f"techniques.{technique}: " in message


@pytest.mark.parametrize(("others", "named"), [(PRUNE, "prune"), (DISTILL, "distill"), (PRUNE | DISTILL, "and")])
def test_heads_alone_go_with_no_other_technique(others, named):
    """What they freeze the others would train; joint training, or another phase, is the way out."""
    message = mistakes_of(with_exits(others=others))
    words = ['exits.training is "heads"', named, 'set exits.training to "joint"', "a phase of their own"]
    assert [word for word in words if word not in message] == []
    assert phase_of(joint(others=others)).techniques.exits.training == "joint"


TAGS = {"name": "ner", "train_file": "train.conll", "validation_file": "dev.conll"}


def calibrated(**held_out: Any) -> dict[str, Any]:
    return with_exits(task={"name": "sst2"} | held_out, target_speedup=1.5)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (with_exits(layers=[]), ["exits.layers", "at least 1"]),
        (with_exits(layers=[2, 1, 2]), ["exits.layers", "[2, 1, 2]", "each once, from first to last"]),
        (with_exits(criterion="hope"), ["exits.criterion", "'patience'"]),
        (with_exits(patience=0), ["exits.patience", "0"]),
        (with_exits(patience=1001), ["exits.patience", "less than or equal to 1000"]),
        (with_exits(head_weights=[-1.0]), ["exits.head_weights.0", "-1"]),
        (with_exits(early_exit_entropie=0.1), ["unknown key", 'did you mean "early_exit_entropy"?']),
        (with_exits(target_speedup=0.5), ["target_speedup", "0.5"]),
        (with_exits(terms=[]), ["exits.terms", "at least 1"]),
        (with_exits({"exits.hedas": 1.0}), ["techniques.exits.terms", "hedas"]),
        (
            with_exits({"task": 1.0, "exits.heads": 1.0}, terms=["distill"]),
            ["the term distill", 'loss["exits.distill"]'],
        ),
        (calibrated(), ["calibrates its exits", "task.held_out", "0.02"]),
        (
            with_exits(task={"name": "sst2", "held_out": 0.1}, target_speedup=2, max_drop=1),
            ["target_speedup and max_drop are both set"],
        ),
        (with_exits(task={"name": "squad"}), ["has exits, and its task is squad", "labelled text"]),
        (with_exits(task=TAGS, pooling="mean"), ["exits.pooling, which the heads of ner lack"]),
        (with_exits(sequence_uncertainty="mean"), ["exits.sequence_uncertainty, which the heads of docstrings lack"]),
        (
            with_exits(task=TAGS, sequence_uncertainty="mean", patience=2),
            ['sequence_uncertainty is "mean"', "drop one of them"],
        ),
    ],
)
def test_mistakes_are_told_with_their_place(data, words):
    """What was found and what is allowed, in the words of the recipe."""
    message = mistakes_of(data)
    assert [word for word in words if word not in message] == []


@pytest.mark.parametrize("value", ["abc", -1, [], [0.1, -0.1], True, math.inf])
@pytest.mark.parametrize("field", ["early_exit_entropy", "early_exit_confidence"])
def test_what_is_no_threshold_is_told_once(field, value):
    """In one line of the user's words."""
    least = "a number from 0 to 1" if field == "early_exit_confidence" else "a number of 0 or more"
    (line,) = mistakes_of(with_exits(**{field: value})).splitlines()
    assert f"techniques.exits.{field}: write {least}, or a list of one per head" in line


@pytest.mark.parametrize("value", [95, 1.1, [0.9, 95]])
def test_a_confidence_is_a_probability(value):
    """95 for 0.95 is refused."""
    assert "a number from 0 to 1, or a list" in mistakes_of(with_exits(early_exit_confidence=value))


def test_what_nobody_passes_is_a_confidence_too():
    """Calibration writes the number just above 1 for it."""
    limit = float(np.nextafter(np.float32(1), np.float32(2)))
    assert ExitPolicy(criterion="confidence", thresholds=[limit]).thresholds == [limit]
    assert ExitsSpec(early_exit_confidence=limit).early_exit_confidence == limit


@pytest.mark.parametrize(
    ("fields", "regression", "criterion"),
    [
        ({}, False, "entropy"),
        ({}, True, "patience"),
        ({"early_exit_entropy": 0.0}, False, "entropy"),
        ({"early_exit_confidence": 0.5}, False, "confidence"),
        ({"patience": 3}, False, "patience"),
        ({"patience": 3}, True, "patience"),
        ({"regression_threshold": 0.5}, True, "patience"),
        ({"patience": 3, "regression_threshold": 0.5}, True, "patience"),
        ({"patience": 3, "max_drop": 1}, True, "patience"),
    ],
)
def test_a_threshold_picks_its_criterion(fields, regression, criterion):
    """Where none is named."""
    assert policy_of(ExitsSpec(**fields), 3, regression).criterion == criterion


AIM = {"task": {"name": "sst2", "held_out": 0.1}, "max_drop": 1}


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (with_exits(criterion="confidence", early_exit_entropy=0.1), ["early_exit_entropy goes with criterion"]),
        (with_exits(criterion="entropy", early_exit_confidence=0.9), ['with criterion "confidence"', 'with "entropy"']),
        (with_exits(criterion="entropy", patience=2), ['patience goes with criterion "patience"', "drop one"]),
        (with_exits(criterion="entropy", regression_threshold=2), ['regression_threshold goes with criterion "pat']),
        (
            with_exits(early_exit_entropy=0.1, patience=2),
            ['patience goes with criterion "patience", not with "entropy"'],
        ),
        (with_exits(early_exit_entropy=0.1, **AIM), ["early_exit_entropy is set, and max_drop picks it"]),
        (with_exits(early_exit_confidence=[0.9, 0.8], **AIM), ["early_exit_confidence is set, and max_drop picks it"]),
        (with_exits(regression_threshold=0.1, **AIM), ["regression_threshold is set, and max_drop picks it"]),
        (with_exits(criterion="entropy", patience=2, **AIM), ['patience goes with criterion "patience"']),
    ],
)
def test_a_threshold_that_would_do_nothing_is_told(data, words):
    """With what to drop."""
    message = mistakes_of(data)
    assert [word for word in words if word not in message] == []


@pytest.mark.parametrize(
    ("fields", "criterion", "layers", "regression", "message"),
    [
        ({"target_speedup": 6}, "entropy", [1, 2, 3], False, None),
        ({"target_speedup": 6.01}, "entropy", [1, 2, 3], False, "target_speedup 6.01: the fastest is 6,"),
        (
            {"target_speedup": 3.1},
            "confidence",
            [2, 3],
            False,
            "the fastest is 3, for nobody leaves before layer 2 of 6",
        ),
        ({"target_speedup": 3}, "patience", [1, 2, 3], False, None),
        ({"target_speedup": 3.1}, "patience", [1, 2, 3], False, "before layer 2 of 6"),
        ({"target_speedup": 2, "patience": 2}, "patience", [1, 2, 3], True, None),
        ({"target_speedup": 2.1, "patience": 2}, "patience", [1, 2, 3], True, "before layer 3 of 6"),
        ({"target_speedup": 2.1}, "patience", [1, 2, 3], True, "before layer 3 of 6"),
        ({"target_speedup": 2.1, "patience": 1}, "patience", [1, 2, 3], True, None),
        ({"target_speedup": 1.1, "patience": 3}, "patience", [1, 2, 3], True, "before layer 6 of 6"),
        ({"target_speedup": 1, "patience": 900}, "patience", [1, 2, 3], True, None),
        ({"target_speedup": 1.7}, "entropy", [4], False, r"the fastest is 1\.5,"),
        ({"max_drop": 1, "per_head": True}, "patience", [1, 2], False, "per_head: patience is the same for all heads"),
        ({"max_drop": 1, "per_head": True}, "patience", [1, 2], True, None),
        ({"max_drop": 1, "patience": 2}, "patience", [1, 2], False, "patience 2: it goes with a regression"),
        ({"max_drop": 1}, "entropy", [1, 2], True, "a regression has no probabilities"),
    ],
)
def test_an_aim_that_cannot_be_reached_is_told(fields, criterion, layers, regression, message):
    """Of a model of 6 layers: what nobody can leave early enough for, and what there is not to pick."""
    found = aim_mistakes(ExitsSpec(**fields), criterion, layers, 6, regression)
    assert len(found) == (message is not None)
    assert message is None or re.search(message, found[0])


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
        ({"early_exit_entropy": [0.3, 0.2]}, False, "2 thresholds for 3 heads by entropy: give 3"),
        (
            {"regression_threshold": 0.1},
            False,
            "regression_threshold is set, and classes either agree or do not: drop it",
        ),
        ({"criterion": "confidence", "early_exit_confidence": [0.3]}, False, "1 thresholds for 3 heads by confidence"),
        ({"regression_threshold": [0.1]}, True, "1 thresholds for 3 heads by patience"),
        ({"criterion": "entropy"}, True, 'criterion is "entropy", and a regression has no probabilities'),
    ],
)
def test_a_policy_that_does_not_fit_is_told(fields, regression, words):
    """The number of values, and what a regression cannot be asked."""
    with pytest.raises(ValueError, match=words):
        policy_of(ExitsSpec(**fields), 3, regression)


def test_the_exits_of_a_folder_read_back_as_they_were_written(write_json, tmp_path):
    """exits.json holds all of it; a key that it does not know and a share that is none are mistakes."""
    policy = ExitPolicy(criterion="patience", patience=2, thresholds=[0.1, 0.5])
    saved = SavedExits(layers=[2, 5], pooling="mean", policy=policy, held_out=0.1, calibration={"speedup": 2.0})
    assert saved_exits(tmp_path) is None
    write_json("exits.json", saved.model_dump_json())
    assert saved_exits(tmp_path) == saved
    wrong = [({"polici": 1}, r"exits\.json: polici: unknown key.*\"policy\"")]
    for fields, message in [*wrong, *(({"held_out": share}, "held_out") for share in (-0.1, 1.0, "0.1"))]:
        write_json("exits.json", saved.model_dump() | fields)
        with pytest.raises(ValueError, match=message):
            saved_exits(tmp_path)
