"""What a run writes of its recipe says the same as the recipe, without the nulls that say nothing."""

import json
from pathlib import Path
from typing import ClassVar

import pytest
from pydantic import ValidationError
from support.launching import ROOT

from ds_trainer.files.reading import read_json
from ds_trainer.recipe.fields import Strict, without_silent_nulls
from ds_trainer.recipe.recipe import Recipe

SHIPPED = sorted((ROOT / "ds_configs" / "recipes").glob("*.json"))


def written(recipe: Recipe) -> str:
    return json.dumps(without_silent_nulls(recipe))


def test_a_written_recipe_has_no_silent_null_and_reads_as_the_same():
    """Every shipped recipe; `null_score_diff_threshold` is the only "null" in them, and every default is there."""
    for path in SHIPPED:
        recipe = Recipe.model_validate(read_json(Path(path), "the recipe"))
        assert ": null" not in written(recipe), path
        assert '"seed": 42' in written(recipe)
        assert Recipe.model_validate_json(written(recipe)) == recipe, path


def test_a_null_that_says_something_stays():
    """In a model's config, which is not ours."""
    phase = {"name": "a", "num_train_epochs": 1, "warmup_steps": 0.1, "techniques": {"prune": {}}}
    config = {"model_type": "bert", "pad_token_id": None}
    recipe = Recipe.model_validate({"model": {"config": config}, "phases": [phase]})
    value = without_silent_nulls(recipe)
    assert value["model"]["config"] == config
    assert "distill" not in value["phases"][0]["techniques"]
    assert Recipe.model_validate_json(written(recipe)) == recipe


class _Newer(Strict):
    removed: ClassVar = {"uniform": (False, "write a cut")}
    kept: int = 1


def test_a_removed_field_is_read_where_it_changes_nothing():
    """A recipe of an older version holds every field: one at its default is skipped, another value is an error."""
    assert _Newer.model_validate({"uniform": False, "kept": 2}).kept == 2
    with pytest.raises(ValidationError, match=r"uniform was removed in 0\.3: write a cut"):
        _Newer.model_validate({"uniform": True})
