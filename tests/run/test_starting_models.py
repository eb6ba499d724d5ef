"""What a run makes to start from is made once, whole, and again where it would be another."""

import copy
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open

from ds_trainer.cuts.cut import CutResult, cut_of
from ds_trainer.models.layers import sizes_of
from ds_trainer.models.pretrained import CLASSIFIER, load_with_head
from ds_trainer.ranks import distributed
from ds_trainer.ranks.failures import StoppedError, UserError
from ds_trainer.ranks.stopping import StopRequests
from ds_trainer.recipe.recipe import Recipe, parse_recipe
from ds_trainer.run import starting_models
from ds_trainer.run.starting_models import MadeModels, RehearsedModels, StartingModels
from ds_trainer.tasks.registry import build_task

SMALL = {"name": "small", "start_from": "@model", "max_steps": 1}
CUT = {"keep": 0.5, "uniform": True, "calibration_examples": 32, "reconstruct": {"tokens": 512, "steps": 5}}


def student_recipe(tiny_recipe: dict, layers: list[int]) -> Recipe:
    return parse_recipe(tiny_recipe | {"phases": [SMALL | {"student": {"layers": layers}}]})


def cut_recipe(tiny_recipe: dict, **changes: object) -> Recipe:
    """A phase that starts from a cut of the new model; `changes` are those of the cut."""
    return parse_recipe(tiny_recipe | {"phases": [SMALL | {"cut": CUT | changes}]})


def made(recipe: Recipe, folder: Path, kind: type[StartingModels] = StartingModels) -> Path:
    return Path(kind(recipe, folder).start(recipe.phases[0]))


def times_in(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


def test_a_student_is_made_once_and_anew_where_it_would_be_another(tiny_recipe, tmp_path):
    """A resumed run starts from the files that are there; other layers, or a folder without its marker, do not count.

    A reader of the run gets the same folder, whether it exists or not, and makes nothing.
    """
    recipe, run = student_recipe(tiny_recipe, [1]), tmp_path / "run"
    assert made(recipe, run, MadeModels) == run / "small"
    assert not run.exists()
    folder = made(recipe, run)
    before = times_in(run)
    assert made(recipe, run) == made(recipe, run, MadeModels) == folder == run / "small"
    assert before == times_in(run)
    for _ in range(2):
        made(student_recipe(tiny_recipe, [0, 1]), run)
        assert json.loads((folder / "config.json").read_text())["num_hidden_layers"] == 2
        (folder / "complete.json").unlink()
        (folder / "config.json").write_text("{}")


def test_a_cut_is_made_once_with_its_report(tiny_recipe, tmp_path):
    """A request to stop leaves nothing half written. A second run reads the same files, and runs no calibration."""
    recipe = cut_recipe(tiny_recipe)
    with StopRequests() as requests:
        requests._note("SIGINT")
        with pytest.raises(StoppedError, match="SIGINT"):
            StartingModels(recipe, tmp_path).start(recipe.phases[0])
    assert not (tmp_path / "small").exists()
    folder = made(recipe, tmp_path)
    before = times_in(tmp_path)
    assert made(recipe, tmp_path) == made(recipe, tmp_path, MadeModels) == folder
    assert before == times_in(tmp_path)
    assert sizes_of(load_with_head(folder, CLASSIFIER)) == {"heads": [1, 1], "neurons": [32, 32]}
    report = json.loads((folder / "cut.json").read_text())
    assert (report["spec"], report["examples"]) == (CUT, 32)
    assert [(part["count"], part["kept"]) for part in report["parts"]] == [(2, 1), (64, 32)] * 2
    assert all(0 < part["error"] < 1 for part in report["parts"])
    assert [layer["name"] for layer in report["reconstruction"]] == ["bert.encoder.layer.0", "bert.encoder.layer.1"]
    assert all(0 < layer["after"] <= layer["before"] < 2 for layer in report["reconstruction"])


def test_a_cut_of_something_else_is_made_anew(tiny_recipe, tmp_path, csv_folder, monkeypatch):
    """Another share, seed, model, training file or list of tokens; and what a killed run has not finished."""
    tokens, made_of = tmp_path / "tokens.txt", []
    tokens.write_text("the\n")
    result = SimpleNamespace(summary="", save=lambda target: target.mkdir(exist_ok=True))
    monkeypatch.setattr(starting_models, "cut_of", lambda *given: made_of.append(given) or result)

    def is_made_anew(recipe: dict, **cut: object) -> bool:
        before = len(made_of)
        made(cut_recipe(recipe, **{"vocabulary": {"keep": str(tokens)}} | cut), tmp_path)
        return len(made_of) > before

    assert [is_made_anew(tiny_recipe) for _ in range(2)] == [True, False]
    assert is_made_anew(tiny_recipe, keep=0.25)
    assert is_made_anew(tiny_recipe | {"seed": 7})
    other = copy.deepcopy(tiny_recipe)
    other["model"]["config"]["hidden_act"] = "relu"
    assert is_made_anew(other)
    data = tmp_path / "data"
    data.mkdir()
    for name in ("train.csv", "validation.csv"):
        (data / name).write_text("\n".join((csv_folder / "train.csv").read_text().splitlines()[:100]) + "\n")
    assert is_made_anew(tiny_recipe | {"task": tiny_recipe["task"] | {"data_dir": str(data)}})
    assert [is_made_anew(tiny_recipe) for _ in range(2)] == [True, False]
    tokens.write_text("a\n")
    assert is_made_anew(tiny_recipe)
    (tmp_path / "small" / "complete.json").unlink()
    assert is_made_anew(tiny_recipe)


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
    result = CutResult(
        None, None, {"parts": [], "reconstruction": [], "parameters": sizes, "tokens": sizes, "seconds": 0}, None
    )
    before = times_in(made(recipe, tmp_path))
    monkeypatch.setattr(distributed, "numbers_of_all", lambda values: [list(values), [1]])
    monkeypatch.setattr(starting_models, "cut_of", lambda *given: calls.append(given) or result)
    assert times_in(made(recipe, tmp_path)) == before
    assert len(calls) == 1


def test_what_is_made_has_the_precision_of_its_source(tiny_recipe, tmp_path):
    """A student, a cut and its outline of a folder in bf16: each would otherwise be twice as large."""
    folder = made(cut_recipe(tiny_recipe), tmp_path / "first")
    load_with_head(folder, CLASSIFIER).bfloat16().save_pretrained(folder)
    of_folder = tiny_recipe | {"model": {"name_or_path": str(folder)}}
    of_student, of_cut = student_recipe(of_folder, [1]), cut_recipe(of_folder)
    kinds = [(of_student, StartingModels), (of_cut, StartingModels), (of_cut, RehearsedModels)]
    for number, (recipe, kind) in enumerate(kinds):
        with safe_open(made(recipe, tmp_path / str(number), kind) / "model.safetensors", "pt") as file:
            assert {file.get_slice(name).get_dtype() for name in file.keys()} == {"BF16"}  # noqa: SIM118


def test_a_head_that_is_not_trained_is_the_same_on_every_rank(tiny_recipe, tmp_path):
    """It comes from the seed, whatever a process drew before; sizes by such a head's answers are refused."""
    recipe = cut_recipe(tiny_recipe)
    made(recipe, tmp_path)
    source, spec = str(tmp_path / "initial_model"), recipe.phases[0].cut
    task, heads = build_task(recipe.task, source, tmp_path / "cache"), []
    for _ in range(2):
        torch.rand(3)
        heads.append(cut_of(task, source, spec, seed=1).model.classifier.weight)
    assert torch.equal(*heads)
    with pytest.raises(
        UserError, match=r"^cut: .* has no trained head .* Fine-tune it first, or set keep with uniform"
    ):
        cut_of(task, source, spec.model_copy(update={"uniform": False}), seed=1)
