"""What a run makes to start from is made once, whole, and again where it would be another."""

import json
from pathlib import Path

import pytest
from safetensors import safe_open

from ds_trainer.config.recipe import Recipe, parse_recipe
from ds_trainer.starting_models import MadeModels, StartingModels


def recipe_with(tiny_recipe: dict, layers: list[int]) -> Recipe:
    phase = {"name": "small", "start_from": "@model", "max_steps": 1, "student": {"layers": layers}}
    return parse_recipe(tiny_recipe | {"phases": [phase]})


@pytest.fixture
def student(tiny_recipe, tmp_path):
    """Make the student of these layers in the test's folder; gives its folder."""

    def make(layers: list[int]) -> Path:
        recipe = recipe_with(tiny_recipe, layers)
        return Path(StartingModels(recipe, tmp_path).start(recipe.phases[0]))

    return make


def layers_in(folder: Path) -> int:
    with safe_open(folder / "model.safetensors", "pt") as file:
        return len({name.split(".layer.")[1].split(".")[0] for name in file.keys() if ".layer." in name})  # noqa: SIM118


def test_a_student_is_found_again(student):
    """A resumed run starts from the files that are there, initial model and student."""
    folder = student([1])
    files = {path: path.stat().st_mtime_ns for path in folder.parent.rglob("*.safetensors")}
    assert len(files) == 2
    assert student([1]) == folder
    assert files == {path: path.stat().st_mtime_ns for path in folder.parent.rglob("*.safetensors")}


def test_what_a_run_has_made_is_found_and_nothing_is_made(tiny_recipe, tmp_path):
    """A reader of a run gets the same folders, whether they exist or not."""
    recipe = recipe_with(tiny_recipe, [1])
    found = MadeModels(recipe, tmp_path / "run")
    assert found.start(recipe.phases[0]) == str(tmp_path / "run" / "small")
    assert not (tmp_path / "run").exists()
    assert found.start(recipe.phases[0]) == StartingModels(recipe, tmp_path / "run").start(recipe.phases[0])


def test_a_student_of_other_layers_is_made_anew(student):
    """A recipe that changed is not answered with yesterday's model."""
    assert layers_in(student([1])) == 1
    assert layers_in(student([0, 1])) == 2


def test_a_student_that_was_not_finished_is_made_anew(student):
    """What a killed run left without its marker does not count."""
    folder = student([0])
    (folder / "complete.json").unlink()
    (folder / "config.json").write_text("{}")
    student([0])
    assert json.loads((folder / "config.json").read_text())["num_hidden_layers"] == 1
