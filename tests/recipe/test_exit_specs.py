"""What a recipe may say of exits: defaults, the loss table, and every mistake told with its place."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from ds_trainer.recipe.exit_specs import ExitPolicy, ExitsSpec, SavedExits, aim_mistakes, policy_of
from ds_trainer.recipe.recipe import Phase, parse_recipe, saved_exits


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


WITH_CE = {"distill": {"teacher": "@model", "alpha_distil": 0.7, "alpha_ce": 0.3}}
PRUNE = {"prune": {"regularization": "l1", "final_lambda": 20}}
SST2 = {"name": "sst2", "data_dir": "a"}


@pytest.mark.parametrize(
    ("data", "table"),
    [
        (with_exits(), {"task": 0.0, "exits.heads": 1.0}),
        (with_exits({"task": 0.5, "exits.heads": 2.0}), {"task": 0.5, "exits.heads": 2.0}),
        (with_exits({"task": 0.5}, training="joint"), {"task": 0.5, "exits.heads": 1.0}),
        (with_exits(others=WITH_CE, training="joint"), {"task": 0.3, "distill.logits": 0.7, "exits.heads": 1.0}),
        (with_exits(others=PRUNE, training="joint"), {"task": 0.0, "prune.penalty": 20.0, "exits.heads": 1.0}),
    ],
)
def test_the_loss_table_has_the_heads_in_it(data, table):
    """By default exits.heads 1 and task 0, the model's own head being in joint training's mean; a weight that is said
    stays. Resolved and read again, it is the same recipe."""
    recipe, phase = parse_recipe(data), phase_of(data)
    assert phase.loss == table
    assert parse_recipe(json.loads(json.dumps(recipe.model_dump()))) == recipe
    if others := [name for name in ("prune", "distill") if getattr(phase.techniques, name)]:
        data["phases"][0]["techniques"]["exits"]["training"] = "heads"
        words = ['exits.training is "heads"', *others, 'set exits.training to "joint"', "a phase of their own"]
        assert [word for word in words if word not in mistakes_of(data)] == []


def test_the_policy_of_a_recipe():
    """A threshold picks its criterion where none is named, and goes for every head; a list has one for each; patience
    has tolerances for scores alone."""
    for fields, regression, policy in (
        ({}, False, ("entropy", [0.1] * 3)),
        ({"early_exit_entropy": [0.3, 0.2, 0.0]}, False, ("entropy", [0.3, 0.2, 0.0])),
        ({"early_exit_confidence": 0.5}, False, ("confidence", [0.5] * 3)),
        ({"criterion": "confidence"}, False, ("confidence", [0.9] * 3)),
        ({"patience": 4}, False, ("patience", [], 4)),
        ({}, True, ("patience", [0.1] * 3, 2)),
        ({"patience": 3, "max_drop": 1}, True, ("patience", [0.1] * 3, 3)),
        ({"regression_threshold": [0.1, 0.2, 0.3]}, True, ("patience", [0.1, 0.2, 0.3], 2)),
    ):
        names = ("criterion", "thresholds", "patience")
        assert policy_of(ExitsSpec(**fields), 3, regression) == ExitPolicy(**dict(zip(names, policy, strict=False)))
    for fields, regression, words in (
        ({"early_exit_entropy": [0.3, 0.2]}, False, "2 thresholds for 3 heads by entropy: give 3"),
        ({"regression_threshold": 0.1}, False, "regression_threshold is set, and classes either agree or do not"),
        ({"criterion": "entropy"}, True, 'criterion is "entropy", and a regression has no probabilities'),
    ):
        with pytest.raises(ValueError, match=words):
            policy_of(ExitsSpec(**fields), 3, regression)


def test_an_aim_that_cannot_be_reached_is_told():
    """Of a model of 6 layers: what nobody can leave early enough for, and what there is not to pick."""
    for fields, criterion, layers, regression, message in (
        ({"target_speedup": 6}, "entropy", [1, 2, 3], False, None),
        ({"target_speedup": 6.01}, "entropy", [1, 2, 3], False, "target_speedup 6.01: the fastest is 6,"),
        ({"target_speedup": 3.1}, "patience", [1, 2, 3], False, "before layer 2 of 6"),
        ({"target_speedup": 2.1}, "patience", [1, 2, 3], True, "before layer 3 of 6"),
        ({"target_speedup": 2.1, "patience": 1}, "patience", [1, 2, 3], True, None),
        ({"target_speedup": 1, "patience": 900}, "patience", [1, 2, 3], True, None),
        ({"target_speedup": 1.7}, "entropy", [4], False, "the fastest is 1.5,"),
        ({"max_drop": 1, "patience": 2}, "patience", [1, 2], False, "patience 2: it goes with a regression"),
        ({"max_drop": 1}, "entropy", [1, 2], True, "a regression has no probabilities"),
    ):
        mistakes = [*aim_mistakes(ExitsSpec(**fields), criterion, layers, 6, regression)]
        assert len(mistakes) == (message is not None)
        assert message is None or message in mistakes[0]


def test_what_one_phase_holds_out_no_other_may_train_on():
    """Two shares of one data set in one run are told; the same share everywhere, or another data set, is no mistake."""
    exits = {"max_steps": 1, "name": "exits", "techniques": {"exits": {}}, "task": SST2 | {"held_out": 0.1}}
    for first, same_data in (
        (SST2 | {"held_out": 0.2}, True),
        (SST2, True),
        (SST2 | {"held_out": 0.1}, False),
        (SST2 | {"data_dir": "b"}, False),
        ({"name": "mlm", "data_dir": "a"}, False),
    ):
        data = {"phases": [{"max_steps": 1, "name": "finetune", "task": first}, exits]}
        if same_data:
            assert "in one phase and 0.1 in another on the same data: one" in mistakes_of(data)
        else:
            assert len(parse_recipe(data).phases) == 2


def test_the_exits_of_a_folder_read_back_as_they_were_written(write_json, tmp_path):
    """Also with the number just above 1 that 0.2 wrote for a confidence that nobody has; a key that exits.json
    does not know and a share that is none are mistakes."""
    limit = float(np.nextafter(np.float32(1), np.float32(2)))
    policy = ExitPolicy(criterion="confidence", thresholds=[limit, 0.5])
    saved = SavedExits(layers=[2, 5], pooling="mean", policy=policy, held_out=0.1, calibration={"speedup": 2.0})
    assert saved_exits(tmp_path) is None
    write_json("exits.json", saved.model_dump_json())
    assert saved_exits(tmp_path) == saved
    for fields, message in (
        ({"polici": 1}, r"exits\.json: polici: unknown key.*\"policy\""),
        ({"held_out": 1}, "held"),
    ):
        write_json("exits.json", saved.model_dump() | fields)
        with pytest.raises(ValueError, match=message):
            saved_exits(tmp_path)
