"""A model that tags words goes through the commands as others do: shrunk, as ONNX, scored, measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from support.launching import WORDS
from transformers import BertConfig, BertForTokenClassification

from ds_trainer.cli.benchmark import read_benchmark_job
from ds_trainer.cli.command import run_command
from ds_trainer.cli.export import export_command
from ds_trainer.deploy.benchmark import measure
from ds_trainer.models.folders import train_tokenizer

TAGS = ["O", *(f"B-{kind}" for kind in WORDS)]


@pytest.fixture(scope="module")
def tagger(tmp_path_factory) -> Path:
    """A tiny BERT that tags some words, with an attention head and neurons that do nothing."""
    folder, tokenizer = tmp_path_factory.mktemp("tagger"), train_tokenizer([*WORDS.values()] * 5, 90, True)
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 48}
    config = BertConfig(vocab_size=len(tokenizer), id2label=dict(enumerate(TAGS)), **sizes)
    model = BertForTokenClassification(config)
    with torch.no_grad():
        model.classifier.weight.mul_(50)
        layer = model.bert.encoder.layer[0]
        layer.attention.output.dense.weight[:, :16] = 0
        layer.output.dense.weight[:, 8:] = 0
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def task(csv_folder) -> list[str]:
    settings = {"validation_file": "validation.conll", "max_seq_length": 24}
    flags = ["--task_name", "ner", "--data_dir", str(csv_folder)]
    return [*flags, *(part for name, value in settings.items() for part in ("--set", f"{name}={json.dumps(value)}"))]


def test_it_is_shrunk_written_as_onnx_and_measured(tagger, task, tmp_path, capsys) -> None:
    """Without what does nothing, in fp32 and int8, with the same scores; its sentences are what it is timed on."""
    flags = ["--shrink", "--onnx", "--quantize", "int8", "--output_dir", str(tmp_path / "out")]
    assert run_command(export_command, [str(tagger), *flags, *task]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["shrunk"]["weights"]["sizes"] == {"heads": [1], "neurons": [8]}
    assert report["scores"]["onnx"] == report["scores"]["model"]
    of_classes = {f"f1/{kind}" for kind in WORDS}
    assert report["scores"]["int8"].keys() == {"f1", "precision", "recall", "accuracy"} | of_classes
    flags = ["--batch_sizes", "4", "--threads", "1", "--devices", "cpu", "--backends", "torch", "onnxruntime"]
    results = measure(read_benchmark_job([str(tagger), *flags, *task]))
    assert [one["notes"] for one in results["measurements"]] == [{}, {}]
    (described,) = results["folders"].values()
    assert described["scores"]["onnxruntime"] == described["scores"]["torch"]
