"""What a run makes to start from is made once, whole, and again where it would be another."""

import copy
import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from ds_trainer import starting_models
from ds_trainer.config.recipe import Recipe, parse_recipe
from ds_trainer.models.layers import sizes_of
from ds_trainer.models.pretrained import CLASSIFIER, load_with_head
from ds_trainer.ranks import distributed
from ds_trainer.ranks.failures import StoppedError, UserError
from ds_trainer.ranks.stopping import StopRequests
from ds_trainer.starting_models import MadeModels, RehearsedModels, StartingModels
from ds_trainer.tasks.cut_folder import CutResult, cut_of
from ds_trainer.tasks.registry import build_task

SMALL = {"name": "small", "start_from": "@model", "max_steps": 1}
CUT = {"keep": 0.5, "uniform": True, "calibration_examples": 32}


def recipe_with(tiny_recipe: dict, layers: list[int]) -> Recipe:
    return parse_recipe(tiny_recipe | {"phases": [SMALL | {"student": {"layers": layers}}]})


def cut_recipe(tiny_recipe: dict, **changes: object) -> Recipe:
    """A phase that starts from a cut of the new model; `changes` are those of the cut."""
    return parse_recipe(tiny_recipe | {"phases": [SMALL | {"cut": CUT | changes}]})


def made(recipe: Recipe, folder: Path, kind: type[StartingModels] = StartingModels) -> Path:
    return Path(kind(recipe, folder).start(recipe.phases[0]))


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


def test_a_request_to_stop_ends_a_cut_and_nothing_half_written_is_left(tiny_recipe, tmp_path):
    """The cut is made anew by the next run."""
    recipe = cut_recipe(tiny_recipe)
    with StopRequests() as requests:
        requests._note("SIGINT")
        with pytest.raises(StoppedError, match="SIGINT"):
            StartingModels(recipe, tmp_path).start(recipe.phases[0])
    assert not (tmp_path / recipe.phases[0].name).exists()
    assert (made(recipe, tmp_path) / "cut.json").is_file()


def test_a_cut_is_made_once_with_its_report(tiny_recipe, tmp_path):
    """A second run reads the same files, and runs no calibration; what was cut is in the folder."""
    recipe = cut_recipe(tiny_recipe)
    folder = made(recipe, tmp_path)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    assert made(recipe, tmp_path) == made(recipe, tmp_path, MadeModels) == folder
    assert before == {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    assert sizes_of(load_with_head(folder, CLASSIFIER)) == {"heads": [1, 1], "neurons": [32, 32]}
    report = json.loads((folder / "cut.json").read_text())
    assert report["spec"] == CUT
    assert report["examples"] == 32
    assert [(part["count"], part["kept"]) for part in report["parts"]] == [(2, 1), (64, 32)] * 2
    assert all(0 < part["error"] < 1 for part in report["parts"])


@pytest.mark.parametrize("change", ["spec", "seed", "source", "data", "tokens", "unfinished"])
def test_a_cut_of_something_else_is_made_anew(change, tiny_recipe, tmp_path, csv_folder):
    """Another share, seed, model, training file or list of tokens; and what a killed run has not finished."""
    tokens = tmp_path / "tokens.txt"
    tokens.write_text("the\n")
    listed = {"vocabulary": {"keep": str(tokens)}} if change == "tokens" else {}
    folder = made(cut_recipe(tiny_recipe, **listed), tmp_path)
    marker, changed = folder / "complete.json", copy.deepcopy(tiny_recipe)
    before = marker.read_text()
    if change == "seed":
        changed["seed"] = 7
    if change == "source":
        changed["model"]["config"]["hidden_act"] = "relu"
    if change == "data":
        data = tmp_path / "data"
        data.mkdir()
        rows = (csv_folder / "train.csv").read_text().splitlines()
        for name in ("train.csv", "validation.csv"):
            (data / name).write_text("\n".join(rows[:100]) + "\n")
        changed["task"]["data_dir"] = str(data)
    if change == "unfinished":
        marker.unlink()
        (folder / "model.safetensors").write_bytes(b"")
    if change == "tokens":
        tokens.write_text("a\n")
    recipe = cut_recipe(changed, **({"keep": 0.25} if change == "spec" else listed))
    assert made(recipe, tmp_path) == folder
    assert (marker.read_text() == before) == (change == "unfinished")
    neurons = 16 if change == "spec" else 32
    assert sizes_of(load_with_head(folder, CLASSIFIER))["neurons"] == [neurons] * 2


def test_a_rehearsal_makes_the_shape_of_a_cut_without_calibration(tiny_recipe, tmp_path, monkeypatch):
    """In its folder alone. Sizes by the answers of an untrained model are refused before anything is trained."""
    monkeypatch.setattr(starting_models, "cut_of", None)
    folder = made(cut_recipe(tiny_recipe), tmp_path / "uniform", RehearsedModels)
    assert sizes_of(load_with_head(folder, CLASSIFIER)) == {"heads": [1, 1], "neurons": [32, 32]}
    by_loss = cut_recipe(tiny_recipe, uniform=False, keep=None, target_flops=0.5)
    with pytest.raises(UserError, match="say nothing about what to keep"):
        made(by_loss, tmp_path / "by_loss", RehearsedModels)


def test_a_host_without_the_cut_makes_all_ranks_cut(tiny_recipe, tmp_path, monkeypatch):
    """This one has its folder already, and keeps it; the calibration is run, since another rank waits in it."""
    recipe, calls = cut_recipe(tiny_recipe), []
    sizes = {"before": 2, "after": 1}
    result = CutResult(None, None, {"parts": [], "parameters": sizes, "tokens": sizes, "seconds": 0})
    before = {path: path.stat().st_mtime_ns for path in made(recipe, tmp_path).iterdir()}
    monkeypatch.setattr(distributed, "numbers_of_all", lambda values: [list(values), [1]])
    monkeypatch.setattr(starting_models, "cut_of", lambda *given: calls.append(given) or result)
    assert {path: path.stat().st_mtime_ns for path in made(recipe, tmp_path).iterdir()} == before
    assert len(calls) == 1


def test_the_summary_of_a_weight_cut_counts_weights_and_tokens():
    """Also where fewer tokens make the model smaller; of heads and neurons it counts parameters."""
    part = {"name": "layer", "count": 100, "kept": 30, "error": 0.1}
    report = {"parameters": {"before": 250, "after": 200}, "seconds": 1}
    report["tokens"] = {"before": 40, "after": 20}
    told = [
        CutResult(None, None, report | {"parts": [part | {"unit": unit}]}).summary for unit in ("weights", "neurons")
    ]
    assert [text.partition(" s, ")[2].partition(", error")[0] for text in told] == [
        "100 -> 30 weights of the encoder, 40 -> 20 tokens",
        "250 -> 200 parameters, 40 -> 20 tokens",
    ]


def test_what_is_made_has_the_precision_of_its_source(tiny_recipe, tmp_path):
    """A student, a cut and its outline of a folder in bf16: each would otherwise be twice as large."""
    folder = made(cut_recipe(tiny_recipe), tmp_path / "first")
    load_with_head(folder, CLASSIFIER).bfloat16().save_pretrained(folder)
    recipe = {"model": {"name_or_path": str(folder)}}
    of_student, of_cut = recipe_with(tiny_recipe | recipe, [1]), cut_recipe(tiny_recipe | recipe)
    for number, (its, kind) in enumerate(
        [(of_student, StartingModels), (of_cut, StartingModels), (of_cut, RehearsedModels)]
    ):
        with safe_open(made(its, tmp_path / str(number), kind) / "model.safetensors", "pt") as file:
            assert {file.get_slice(name).get_dtype() for name in file.keys()} == {"BF16"}  # noqa: SIM118


def test_a_head_that_is_not_trained_is_the_same_on_every_rank(tiny_recipe, tmp_path):
    """It comes from the seed, whatever a process drew before; sizes by such a head's answers are refused."""
    recipe = cut_recipe(tiny_recipe)
    made(recipe, tmp_path)
    source = str(tmp_path / "initial_model")
    task = build_task(recipe.task, source, tmp_path / "cache")
    spec = recipe.phases[0].cut
    heads = []
    for _ in range(2):
        torch.rand(3)
        heads.append(cut_of(task, source, spec, seed=1).model.classifier.weight)
    assert torch.equal(*heads)
    with pytest.raises(
        UserError, match=r"^cut: .* has no trained head .* Fine-tune it first, or set keep with uniform"
    ):
        cut_of(task, source, spec.model_copy(update={"uniform": False}), seed=1)
