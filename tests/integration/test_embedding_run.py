"""Runs of an embedding task by the command on two ranks, and what becomes of their folders."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from support.launching import Done, log_of, read, run_script, run_without_library, train
from support.smaller_runs import PHASES, model_of, smaller_phases

from ds_trainer.models.layers import sizes_of
from ds_trainer.recipe.task_specs import EmbeddingSpec
from ds_trainer.tasks.evaluation import answers_of, forward_of
from ds_trainer.tasks.registry import build_task


@pytest.fixture(scope="module")
def recipe(tiny_recipe, csv_folder, tmp_path_factory) -> Path:
    """Train a model by pairs with negatives, then prune it; cut it and teach it by its own vectors, then its tokens."""
    folder = tmp_path_factory.mktemp("embedding")
    texts = (csv_folder / "train.txt").read_text().splitlines()
    triples = [{"a": one, "p": one + " now", "n": [two]} for one, two in pairwise(texts)]
    (folder / "triples.jsonl").write_text("\n".join(map(json.dumps, triples)))
    scored = [f"{one},{two},{place % 5}" for place, (one, two) in enumerate(zip(texts[:31], texts[9:40], strict=True))]
    (folder / "scored.csv").write_text("\n".join(["one,two,score", *scored]) + "\n")
    validation = [{"file": "scored.csv", "text_columns": ["one", "two"], "score_column": "score"}]
    common = {"name": "embedding", "data_dir": str(folder), "max_seq_length": 24, "validation": validation}
    pairs = common | {"train": [{"file": "triples.jsonl", "text_columns": ["a", "p", "n"]}], "prompts": {"query": "q "}}
    pairs["pooling"] = "cls"
    alone = common | {"train": [{"file": "triples.jsonl", "text_columns": ["a", "p"]}], "loss": "none"}
    numbers = {"train_batch_size": 16, "learning_rate": 4e-3, "logging_steps": 1}
    distill = {"teacher": "@pairs", "cache_teacher": True}
    taught = {"loss": {"task": 0.0, "distill.mse": 1.0}, "techniques": {"distill": distill}, "task": alone}
    phases = smaller_phases(numbers | {"max_steps": 6}, numbers | taught, {"task": alone})
    settings = tiny_recipe | {"task": pairs, "phases": phases, "report": True}
    (folder / "recipe.json").write_text(json.dumps(settings))
    return folder / "recipe.json"


@pytest.fixture(scope="module")
def done(recipe) -> Done:
    return train(2, recipe, recipe.parent / "out")


_ENCODE = """
import json, sys
from pathlib import Path
from sentence_transformers import SentenceTransformer
folder, texts, out = sys.argv[1:]
model = SentenceTransformer(folder, trust_remote_code=True)
assert model.max_seq_length == 24
Path(out).write_text(json.dumps(model.encode(json.loads(Path(texts).read_text())).tolist()))
"""


def task_for(recipe: Path, folder: Path):
    settings = json.loads(recipe.read_text())["task"]
    return build_task(EmbeddingSpec(**settings), folder, recipe.parent / "cache")


def test_every_phase_is_scored_and_learns(done, recipe) -> None:
    """Each has Spearman and Pearson; the contrastive loss falls; a teacher's scores and its agreement are beside."""
    results = read(recipe.parent / "out/all_results.json")
    assert set(results) == {*PHASES}
    assert all({"spearman", "pearson"} <= set(each["eval"]) for each in results.values())
    assert 0 < results["half"]["eval"]["teacher/agreement"] <= 1
    losses = [record["train/loss"] for record in log_of(recipe.parent / "out", "pairs")]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("phase", PHASES)
def test_sentence_transformers_gives_the_same_vectors(done, recipe, phase) -> None:
    """In a process without this library, of models that were trained, pruned, cut, made of layers, and lost tokens."""
    pytest.importorskip("sentence_transformers")
    folder = model_of(recipe, phase)
    task = task_for(recipe, folder)
    model = task.build_model(folder).eval()
    answers = answers_of(forward_of(model), task, "scored", 8)
    rows = [row.value for row in task.read("scored")[1]]
    texts, out = recipe.parent / "texts.json", recipe.parent / f"{phase}.json"
    texts.write_text(json.dumps([text for row in rows for text in row.texts]))
    ran = run_without_library(_ENCODE, str(folder), str(texts), str(out))
    assert ran.returncode == 0, ran.stderr[-2000:]
    theirs = np.array(json.loads(out.read_text())).reshape(len(rows), 2, -1)
    assert np.abs(theirs - np.stack([answers[""][id] for id in range(len(rows))])).max() < 1e-5


def test_a_cut_model_is_smaller_and_keeps_its_files(done, recipe) -> None:
    """The cut and pruned folders have fewer heads and neurons than their sources, and prompts of the first task."""
    dense, half = (
        task_for(recipe, model_of(recipe, name)).build_model(model_of(recipe, name)) for name in ("pairs", "half")
    )
    assert half.num_parameters() < dense.num_parameters()
    assert sizes_of(half) != sizes_of(dense)
    assert "SentenceTransformer(" in (model_of(recipe, "half") / "README.md").read_text()
    for phase in ("half", "small"):
        assert read(model_of(recipe, phase) / "config_sentence_transformers.json")["prompts"] == {"query": "q "}


def test_folders_are_exported_evaluated_and_measured(done, recipe, tmp_path) -> None:
    """An .onnx file gives the model's scores; a cut without training keeps the files; a benchmark runs it."""
    folder = model_of(recipe, "half")
    onnx = pytest.importorskip("onnxruntime") and tmp_path / "onnx"
    flags = ["--task_name", "embedding", "--data_dir", str(recipe.parent)]
    validation = json.dumps(json.loads(recipe.read_text())["task"]["validation"])
    flags += ["--set", f"task.validation={validation}", "--set", "task.max_seq_length=24"]
    ran = run_script("launch/export.py", str(folder), "--onnx", "--quantize", "int8", "--output_dir", str(onnx), *flags)
    assert ran.returncode == 0, ran.stderr[-2000:]
    scores = read(onnx / "export.json")["scores"]
    assert scores["onnx"] == pytest.approx(scores["model"], abs=1e-4)
    assert (onnx / "modules.json").exists()
    ran = run_script("launch/evaluate.py", str(folder), "--output_file", str(tmp_path / "scores.json"), *flags)
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert "spearman" in ran.stdout
    train_source = json.dumps([{"file": "triples.jsonl", "text_columns": ["a", "p"]}])
    more = ["--set", f"task.train={train_source}", "--set", 'task.loss="none"']
    cut = ["--cut", "0.5", "--output_dir", str(tmp_path / "cut")]
    ran = run_script("launch/export.py", str(model_of(recipe, "pairs")), *cut, *flags, *more)
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert read(tmp_path / "cut/1_Pooling/config.json")["pooling_mode_cls_token"] is True
    for flags_of_export, made, of in (
        (["--compact", "fp16"], "small", folder),
        (["--unpack"], "whole", tmp_path / "small"),
    ):
        ran = run_script("launch/export.py", str(of), *flags_of_export, "--output_dir", str(tmp_path / made))
        assert ran.returncode == 0, ran.stderr[-2000:]
        assert read(tmp_path / made / "1_Pooling/config.json")["pooling_mode_cls_token"] is True
    ran = run_script(
        "launch/benchmark.py",
        str(model_of(recipe, "pairs")),
        str(tmp_path / "cut"),
        "--seconds",
        "1",
        "--batch_sizes",
        "1",
        "8",
        *flags,
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert torch.cuda.is_available() or "spearman" in ran.stdout
