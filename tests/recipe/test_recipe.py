"""The recipe: strict, and every mistake told with its path."""

from __future__ import annotations

import json
import re

import pytest
from pydantic import ValidationError
from support.launching import ROOT

from ds_trainer.files.reading import read_json
from ds_trainer.ranks.failures import UserError
from ds_trainer.recipe.cut_specs import CutSpec
from ds_trainer.recipe.fields import Strict
from ds_trainer.recipe.recipe import Recipe, parse_recipe, task_of


def with_prune(**prune) -> dict:
    return {"phases": [{"max_steps": 10, "techniques": {"prune": prune}}]}


def prune_of(**prune):
    return parse_recipe(with_prune(**prune)).phases[0].techniques.prune


def with_distill(**distill) -> dict:
    return {"phases": [{"max_steps": 10, "techniques": {"distill": {"teacher": "@model"} | distill}}]}


def mistakes_of(data) -> str:
    with pytest.raises(ValueError) as caught:
        parse_recipe(data)
    return str(caught.value)


def test_defaults_follow_the_method():
    """A method that keeps a share starts at 1, one that compares scores at 0, l0 as in its published command; a value
    that is said wins, null is the default, and what is written back stays."""
    for method, defaults in {
        "topK": (1, 0.15, 0, 1e-2),
        "magnitude": (1, 0.15, 0, 1e-2),
        "threshold": (0, 0.1, 1, 1e-2),
        "sigmoied_threshold": (0, 0.1, 0, 1e-2),
        "l0": (1, 1, 2.197, 0.1),
    }.items():
        spec = prune_of(pruning_method=method)
        values = spec.initial_threshold, spec.final_threshold, spec.mask_scale, spec.mask_scores_learning_rate
        assert values == defaults
        assert prune_of(**spec.model_dump()) == spec
        assert prune_of(pruning_method=method, initial_threshold=None, final_threshold=None) == spec
        said = prune_of(pruning_method=method, mask_scale=0.0, final_threshold=0.5)
        assert (said.mask_scale, said.final_threshold) == (0, 0.5)
    original = prune_of(pruning_method="sigmoid_threshold", regularization="null")
    assert (original.pruning_method, original.regularization) == ("sigmoied_threshold", None)


def test_a_granularity_by_key():
    """One name is of all linear layers, or of the blocks that it goes with; an object stays as it is, in its order."""
    for granularity, choices in (
        ("block", {"*": "block"}),
        ("hybrid", {"attention": "head", "feed_forward": "neuron"}),
        ("head", {"attention": "head"}),
        ({"attention": "block", "*": "row"}, {"attention": "block", "*": "row"}),
    ):
        assert list(prune_of(granularity=granularity).choices.items()) == list(choices.items())


def test_a_penalty_that_would_begin_as_a_reward_is_refused():
    """Its weight follows the threshold, which must not change its sign on the way."""
    spec = {"pruning_method": "threshold", "regularization": "l1", "final_lambda": 1, "initial_threshold": -1.0}
    with pytest.raises(ValueError, match=r"initial_threshold is -1\.0 and final_threshold 0\.1: .* as a reward: raise"):
        parse_recipe(with_prune(**spec))
    parse_recipe(with_prune(**spec | {"final_threshold": -0.1}))


def test_the_originals_weights_become_loss_weights():
    """alpha_ce weighs the task's loss beside alpha_distil, the logits beside the others; a term is what is weighed."""
    penalty = with_prune(regularization="l1", final_lambda=400)
    assert parse_recipe(penalty).phases[0].loss == {"task": 1.0, "prune.penalty": 400}
    for distill, loss in (
        ({"alpha_ce": 0.1, "alpha_distil": 0.9}, {"task": 0.1, "distill.logits": 0.9}),
        ({"alpha_ce": 5, "alpha_mlm": 2, "alpha_clm": 0}, {"task": 2, "distill.logits": 5}),
        ({"alpha_distil": 0.9}, {"task": 1.0, "distill.logits": 0.9}),
        ({"alpha_ce": 5, "alpha_mlm": 2, "alpha_cos": 1}, {"task": 2, "distill.logits": 5, "distill.cos": 1}),
        ({"alpha_ce": 1, "alpha_squad": 2, "alpha_mse": 3}, {"task": 2, "distill.logits": 1, "distill.mse": 3}),
    ):
        phase = parse_recipe(with_distill(**distill)).phases[0]
        assert phase.loss == loss
        assert {f"distill.{term}" for term in phase.techniques.distill.terms} == loss.keys() - {"task"}


def test_a_loss_table_and_alphas_must_agree():
    """The same number twice is no mistake, another one is, naming both; the table alone decides the terms, too."""
    # a technique that is only switched on hides no weights of the others
    data = with_distill(alpha_distil=0.9)
    data["phases"][0]["techniques"]["keep_zeros"] = True
    data["phases"][0]["loss"] = {"task": 1.0, "distill.logits": 0.9}
    assert parse_recipe(data).phases[0].loss["distill.logits"] == 0.9
    data["phases"][0]["loss"]["distill.logits"] = 2
    message = mistakes_of(data)
    assert "is 2, and the techniques have 0.9" in message
    data["phases"][0]["loss"]["distill.logits"] = "x" * 30_000
    assert len(mistakes_of(data)) < 500
    data = with_distill()
    data["phases"][0]["loss"] = {"task": 1, "distill.hidden": 3}
    assert parse_recipe(data).phases[0].techniques.distill.terms == ["hidden"]


def test_masked_heads_follow_from_the_restriction():
    """Without restrict_ce_to_mask MLM gives logits everywhere; with it, as the task says."""
    for restricted, positions in ((False, "all"), (True, "labels")):
        data = with_distill(alpha_distil=1, restrict_ce_to_mask=restricted) | {"task": {"name": "mlm"}}
        recipe = parse_recipe(data)
        assert task_of(recipe.phases[0], recipe).head_positions == positions


MLM = {"name": "mlm", "dataset": "x"}
NER = {"name": "ner", "dataset": "x"}
BY_METRIC = {"max_steps": 4, "eval_steps": 2, "save_steps": 2}


@pytest.mark.parametrize(
    ("task", "metric", "greater"),
    [
        (MLM, "perplexity", False),
        (MLM, "teacher/loss", False),
        (NER, "f1/loss", True),
        ({}, "f1/Sci/Tech", True),
        ({}, "early_exit/mean_layers", False),
        ({"name": "squad", "dataset": "x"}, "HasAns_f1", True),
        ({}, "perplexity", None),
        ({}, "early_exit/leave_at_1", None),
    ],
)
def test_what_gives_a_score_says_whether_more_of_it_is_better(task, metric, greater):
    """Whatever its prefix; the recipe need only say so of others, and can say otherwise."""
    exits = {"techniques": {"exits": {}}, "loss": {"exits.heads": 1.0}} if metric.startswith("early_exit") else {}
    data = {"task": {"name": "docstrings"} | task, "phases": [BY_METRIC | exits | {"metric_for_best_model": metric}]}
    if greater is None:
        with pytest.raises(UserError, match=f'is a higher or a lower "{metric}" better.* such as [a-z]\\w+$'):
            parse_recipe(data)
    else:
        recipe = parse_recipe(data)
        assert recipe.phases[0].prefers_more(metric, recipe.task) is greater
    for said in (True, False):
        data["phases"][0]["greater_is_better"] = said
        assert parse_recipe(data).phases[0].prefers_more(metric, recipe.task if greater is not None else None) is said


def test_what_depends_on_answers_needs_a_trained_head():
    """Sizes by loss and Fisher costs do; uniform cuts by the inputs of matrices do not."""
    for spec, judges in (
        ({"keep": 0.5}, True),
        ({"keep": 0.5, "uniform": True}, False),
        ({"keep": 0.5, "granularity": "weight"}, True),
        ({"keep": 0.5, "granularity": "weight", "method": "magnitude"}, False),
        ({"granularity": "2:4"}, False),
        ({"layers": 0.5, "width": 0.5, "contiguous": False, "layer_criterion": "loss"}, True),
        ({"width": 0.5, "neurons": 0.5}, False),
    ):
        assert CutSpec(**spec).judges_answers is judges


def written(recipe: Recipe) -> str:
    return json.dumps(recipe.model_dump(exclude_none=True))


def test_a_written_recipe_has_no_silent_null_and_reads_as_the_same():
    """Every shipped recipe; `null_score_diff_threshold` is the only "null" in them, and every default is there."""
    for path in sorted((ROOT / "ds_configs" / "recipes").glob("*.json")):
        recipe = Recipe.model_validate(read_json(path, "the recipe"))
        assert ": null" not in written(recipe), path
        assert '"seed": 42' in written(recipe)
        assert Recipe.model_validate_json(written(recipe)) == recipe, path


def test_a_null_in_a_models_config_stays():
    """It is not ours."""
    config = {"model_type": "bert", "pad_token_id": None}
    recipe = Recipe.model_validate({"model": {"config": config}, "phases": [{"num_train_epochs": 1}]})
    assert json.loads(written(recipe))["model"]["config"] == config


def test_a_removed_field_is_read_where_it_changes_nothing():
    """A recipe that 0.2 has written holds every field: one at its default is dropped, another value is an error with
    what replaces it."""
    kinds = [Strict]
    for kind in kinds:
        kinds += kind.__subclasses__()
        for name, (idle, way_out) in kind.removed.items():
            assert name not in kind.model_fields
            assert kind._with_known_fields({name: idle}) == kind._with_known_fields({name: None}) == {}
            with pytest.raises(ValidationError, match=re.escape(f"{name} was removed in 0.3: {way_out}")):
                kind.model_validate({name: "other"})
    assert {"Phase", "PruneSpec", "ExitsSpec", "CutSpec"} <= {kind.__name__ for kind in kinds if kind.removed}
