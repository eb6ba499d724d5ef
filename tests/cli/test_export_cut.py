"""`launch/export.py --cut`: a trained model is cut by examples of a task, and exported as any other."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support import exported_models
from transformers import AutoConfig, AutoModelForSequenceClassification

import ds_trainer
from ds_trainer.cli.command import run_command
from ds_trainer.cli.export import export_command
from ds_trainer.config.exit_specs import EXITS_FILE
from ds_trainer.files.reading import read_value
from ds_trainer.models.model_folder import is_compact
from ds_trainer.models.pretrained import load_tokenizer


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return exported_models.save("cls", tmp_path_factory.mktemp("models") / "cls")


@pytest.fixture
def task(csv_folder) -> list[str]:
    settings = {"train_file": "train.csv", "validation_file": "validation.csv", "text_columns": ["text"]}
    settings |= {"label_column": "kind", "max_seq_length": 24, "max_eval_samples": 20}
    flags = ["--task_name", "text", "--data_dir", str(csv_folder)]
    return [*flags, *(part for name, value in settings.items() for part in ("--set", f"{name}={json.dumps(value)}"))]


def exported(*arguments: object) -> int:
    return run_command(export_command, [str(argument) for argument in arguments])


def test_a_share_is_cut_scored_and_exported_as_onnx(model, task, tmp_path, capsys):
    """The .onnx files are of the cut model, which lies beside them; the report has the scores of all, and the cut's."""
    out = tmp_path / "out"
    assert exported(model, "--cut", "0.5", "--onnx", "--quantize", "int8", "--output_dir", out, *task) == 0
    report = json.loads(capsys.readouterr().out)
    assert report == read_value(out / "export.json")
    assert report["folder"] == str(model)
    assert report["scores"].keys() == {"model", "cut", "onnx", "int8"}
    assert report["scores"]["onnx"] == report["scores"]["cut"]
    assert report["cut"] == read_value(out / "cut.json")
    assert report["cut"]["spec"] == {"keep": 0.5}
    sizes = report["cut"]["parameters"]
    assert sizes["after"] == sum(weight.numel() for weight in load_file(out / "model.safetensors").values())
    assert sizes["after"] < sizes["before"]
    assert ds_trainer.load_model(out).num_parameters() == sizes["after"]


def test_a_cut_in_json_is_compact_and_as_precise_as_its_source(model, task, tmp_path):
    """A cut of a bfloat16 folder is one; the compact file is of the cut model, and the function gives the report."""
    source = Path(shutil.copytree(model, tmp_path / "source"))
    config = read_value(source / "config.json") | {"dtype": "bfloat16"}
    (source / "config.json").write_text(json.dumps(config))
    spec = {"keep": 0.5, "uniform": True, "granularity": "neuron", "calibration_examples": 16}
    report = ds_trainer.cut(source, tmp_path / "cut", spec, *task)
    assert report["cut"]["examples"] == 16
    assert {weight.dtype for weight in load_file(tmp_path / "cut" / "model.safetensors").values()} == {torch.bfloat16}
    ds_trainer.cut(source, tmp_path / "small", spec, "--compact", "fp16", *task)
    assert is_compact(tmp_path / "small")
    assert read_value(tmp_path / "small" / "export.json")["scores"]["cut"] == report["scores"]["cut"]


def test_a_vocabulary_is_cut_with_heads_and_neurons_or_alone(model, task, tmp_path):
    """The .onnx file, the scores and the sentences that are compared are those of the smaller tokenizer."""
    whole = len(load_tokenizer(model))
    for name, spec in (("alone", {}), ("both", {"keep": 0.5, "uniform": True})):
        spec |= {"vocabulary": {"keep": 40}}
        report = ds_trainer.cut(model, tmp_path / name, spec, "--onnx", *task)
        assert report["cut"]["tokens"] == {"before": whole, "after": len(load_tokenizer(tmp_path / name))}
        assert report["cut"]["tokens"]["after"] < whole
        assert ds_trainer.load_model(tmp_path / name).config.vocab_size == report["cut"]["tokens"]["after"]
        assert report["scores"]["onnx"] == report["scores"]["cut"]
        assert bool(report["cut"]["examples"]) == bool(report["cut"]["parts"]) == (name == "both")


def test_bad_cuts_are_refused(model, task, tmp_path, capsys):
    """By one clear message each, before anything is written."""
    exits = Path(shutil.copytree(model, tmp_path / "exits"))
    (exits / EXITS_FILE).write_text("{}")
    out = ("--output_dir", tmp_path / "out")
    for arguments, message in (
        ((model, "--cut", "0.5"), "--cut fits the model to training examples"),
        ((model, "--cut", "half", *task), "give the share to keep, such as 0.5"),
        ((model, "--cut", "1.5", *task), "cut: keep: give a share between 0 and 1"),
        ((model, "--cut", '{"kep": 0.5}', *task), 'did you mean "keep"'),
        ((model, "--cut", "[0.7, 0.5]", *task), "a cut in steps with training between: make it in a phase"),
        ((model, "--cut", "0.5", "--shrink", *task), "drop --shrink"),
        ((exits, "--cut", "0.5", *task), "has exit heads"),
    ):
        assert exported(*arguments, *out) == 2
        assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_family_that_cannot_be_cut_is_refused_before_anything_is_scored(model, task, tmp_path, capsys, monkeypatch):
    """By its name and with exit code 2, whether it was to be cut or shrunk."""
    monkeypatch.setattr("ds_trainer.deploy.export_folder.score_folder", None)
    config = AutoConfig.for_model("albert", hidden_size=32, num_hidden_layers=2, num_attention_heads=2, vocab_size=96)
    config.id2label = {0: "bird", 1: "fruit", 2: "tool"}
    folder = Path(shutil.copytree(model, tmp_path / "albert"))
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    for flags in (("--cut", "0.5", *task), ("--shrink",)):
        assert exported(folder, *flags, "--output_dir", tmp_path / "out") == 2
        assert "the layers of AlbertForSequenceClassification are of a family" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
