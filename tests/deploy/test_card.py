"""Cards describe models and load them, and none of a user's own is replaced; the hub gets a folder when asked."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from huggingface_hub import HfApi, ModelCard, RepoUrl
from huggingface_hub.utils import filter_repo_objects
from support.launching import ROOT

from ds_trainer.cli.command import run_command
from ds_trainer.cli.export import export_command, read_export_job
from ds_trainer.cli.train import read_train_job, train
from ds_trainer.deploy.card import write_cards, write_export_card
from ds_trainer.files.run_folder import CARD, RunFolder
from ds_trainer.ranks import distributed
from ds_trainer.recipe.recipe import ModelSpec, parse_recipe, parse_task

TASK = {"name": "text", "data_dir": "/home/me/secret/data", "validation_file": "validation.csv", "held_out": 0.2}


@pytest.fixture
def run(tmp_path) -> Path:
    """A run of version 0.1 with three phases: plain, cut, and with an exit."""
    return Path(shutil.copytree(ROOT / "tests" / "fixtures" / "version_0_1" / "run", tmp_path / "run"))


def write(run: Path, model: str) -> dict[str, ModelCard]:
    recipe = parse_recipe(json.loads((run / "recipe.json").read_text()) | {"task": TASK})
    write_cards(run, recipe.model_copy(update={"model": ModelSpec(name_or_path=model)}))
    return {name: ModelCard.load(run / name / "model" / CARD) for name in ("finetune", "prune", ".")}


def test_the_cards_of_a_run_describe_and_load_its_models(run):
    """With the scores as the hub reads them, the table of the phases, and the recipe without places of this machine."""
    cards = write(run, "google/bert_uncased")
    for name, card in cards.items():
        (result,) = card.data.eval_results
        assert (result.task_type, result.metric_type, result.metric_value) == ("text-classification", "accuracy", 0.375)
        assert (card.data.base_model, card.data.library_name) == ("google/bert_uncased", "transformers")
        assert "| parameters | 4,786 | 3,054 | 3,054 |" in card.text
        assert '".../data"' in card.text
        assert "secret" not in card.text
        blocks = re.findall(r"```python\n(.*?)```", card.text, re.DOTALL)
        assert ["trust_remote_code" in blocks[0], len(blocks)] == [name != "finetune", 1 + (name == ".")]
        assert ("`ignore_mismatched_sizes`" in card.text) == (name != "finetune")  # transformers' error, and its cure
    loaded: dict = {}
    exec(blocks[1].replace("FOLDER", str(run / "model")), loaded)
    assert type(loaded["model"]).__name__ == "EarlyExitModel"


def test_a_card_of_the_user_stays(run, tmp_path):
    """Where our mark is gone from it; ours are replaced, and deleted with the run, and name the model's own base."""
    write(run, "google/bert_uncased")
    mine = run / "prune" / "model" / CARD
    mine.write_text("mine")
    start = shutil.copytree(run / "model", tmp_path / "start")
    ours = write(run, str(start))["."]
    assert ours.data.base_model == "google/bert_uncased"
    assert "from google/bert_uncased, for" in ours.text
    command = [str(start), "--compact", "fp16", "--output_dir", str(mine.parent), "--overwrite"]
    assert run_command(export_command, command) == 0
    assert mine.read_text() == "mine"
    RunFolder(run).open(overwrite=True)
    assert list(run.rglob(CARD)) == [mine]


def test_a_folder_is_sent_to_the_hub_when_asked(run, tmp_path, monkeypatch, capsys):
    """A model as it is, one that is exported first, and that of a run; what fails there names the folder here."""
    sent: list[tuple[str, Path]] = []

    def upload_folder(_, repo_id: str, folder_path: Path, ignore_patterns: list[str], delete_patterns: list[str]):
        if repo_id != "me/small":
            raise OSError("403 Forbidden")
        assert [*filter_repo_objects(["a.md", "export.json", "cut.json"], ignore_patterns=ignore_patterns)] == ["a.md"]
        assert [*filter_repo_objects(["a.md", "model.onnx"], allow_patterns=delete_patterns)] == ["model.onnx"]
        sent.append((repo_id, folder_path))

    monkeypatch.setattr(HfApi, "create_repo", lambda _, name, exist_ok: RepoUrl(f"https://huggingface.co/me/{name}"))
    monkeypatch.setattr(HfApi, "upload_folder", upload_folder)
    monkeypatch.setattr("ds_trainer.run.run.run", lambda job: {})
    folder, out = run / "prune" / "model", tmp_path / "out"
    for words in (["--compact", "fp16", "--output_dir", str(out)], []):
        assert run_command(export_command, [str(folder), *words, "--push_to_hub", "small"]) == 0
    files = ["--deepspeed_config", "zero0", "--recipe", "quickstart", "--output_dir", str(run)]
    train(read_train_job([*files, "--overwrite_output_dir", "--push_to_hub", "small"]))
    assert sent == [("me/small", each) for each in (out, folder, run / "model")]
    assert run_command(export_command, [str(folder), "--push_to_hub", "full"]) == 2
    assert f"--push_to_hub full: {folder} is whole here, and was not sent: " in capsys.readouterr().err


def test_a_card_names_the_model_that_a_phase_goes_back_to(run):
    """Through the phases before it; none where the weights of a student are new."""
    student = {"model_type": "bert", "hidden_size": 8}
    recipe = json.loads((run / "recipe.json").read_text()) | {"model": {"name_or_path": "google/bert_uncased"}}
    finetune, prune, exits = recipe["phases"]
    for start, of_student, bases in (
        ("@previous", None, ["google/bert_uncased"] * 3),
        ("other/model", None, ["google/bert_uncased", "other/model", "other/model"]),
        ("@model", student, ["google/bert_uncased", None, None]),
    ):
        changed = prune | {"start_from": start, "student": of_student and {"config": of_student}}
        write_cards(run, parse_recipe(recipe | {"phases": [finetune, changed, exits]}))
        cards = [ModelCard.load(run / name / "model" / CARD) for name in ("finetune", "prune", ".")]
        assert [card.data.base_model for card in cards] == bases
    assert "from new weights" in cards[1].text


def test_the_card_of_an_export_has_the_score_of_its_weights(run, tmp_path):
    """And not that of the rougher file beside them."""
    source = run / "finetune" / "model"
    out = Path(shutil.copytree(source, tmp_path / "out"))
    job = read_export_job([str(source), "--compact", "fp16", "--output_dir", str(out), "--overwrite"])
    scores = {name: {"accuracy": score} for name, score in (("model", 0.9), ("compact", 0.8), ("int8", 0.7))}
    report = {"scores": scores, "int8": {"file": "model.int8.onnx", "bytes": 2**20}}
    hub = {"name": "text", "dataset": "owner/name/config", "text_columns": ["a"], "label_column": "b"}
    write_export_card(job.model_copy(update={"task": parse_task(hub)}), report)
    card = ModelCard.load(out / CARD)
    (result,) = card.data.eval_results
    assert (result.metric_value, result.dataset_type, result.dataset_config) == (0.8, "owner/name", "config")
    assert "| model.int8.onnx | 1.0 | 0.7000 |" in card.text


def test_a_broken_card_of_the_source_costs_the_export_its_own_alone(run, tmp_path, monkeypatch):
    """The model is written. A model that was deleted costs no other its card."""
    warnings: list[str] = []
    monkeypatch.setattr(distributed, "warn", warnings.append)
    shutil.rmtree(run / "prune" / "model")
    write_cards(run, parse_recipe(json.loads((run / "recipe.json").read_text())))
    assert [path.parent.parent.name for path in sorted(run.rglob(CARD))] == ["finetune", "run"]
    card = run / "finetune" / "model" / CARD
    card.write_text(card.read_text().replace("library_name:", "library_name: ["))
    command = [str(card.parent), "--compact", "fp16", "--output_dir", str(tmp_path / "out")]
    assert run_command(export_command, command) == 0
    assert "the export has no card" in warnings[-1]
    assert not (tmp_path / "out" / CARD).exists()
