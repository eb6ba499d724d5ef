"""What a run writes of its recipe says the same as the recipe, without the nulls that say nothing."""

import json
import re
from pathlib import Path

import pytest
from pydantic import ValidationError
from support.launching import ROOT

from ds_trainer.files.reading import read_json
from ds_trainer.recipe.fields import Strict
from ds_trainer.recipe.recipe import Recipe

SHIPPED = sorted((ROOT / "ds_configs" / "recipes").glob("*.json"))


def written(recipe: Recipe) -> str:
    return json.dumps(recipe.model_dump(exclude_none=True))


def test_a_written_recipe_has_no_silent_null_and_reads_as_the_same():
    """Every shipped recipe; `null_score_diff_threshold` is the only "null" in them, and every default is there."""
    for path in SHIPPED:
        recipe = Recipe.model_validate(read_json(Path(path), "the recipe"))
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
