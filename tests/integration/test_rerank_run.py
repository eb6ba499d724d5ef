"""Runs of a rerank task by the command on two ranks, and what becomes of their folders."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from support.launching import Done, log_of, read, run_script, run_without_library, train
from support.smaller_runs import PHASES, model_of, smaller_phases

from ds_trainer.models.layers import sizes_of
from ds_trainer.recipe.task_specs import RerankSpec
from ds_trainer.tasks.evaluation import answers_of, forward_of
from ds_trainer.tasks.registry import build_task

COLUMNS = {"text_columns": ["query", "good", "bad"]}


@pytest.fixture(scope="module")
def recipe(tiny_recipe, csv_folder, tmp_path_factory) -> Path:
    """Train a model by lists, then prune it; cut it, and teach it margins; take a layer of it; then cut its tokens."""
    folder = tmp_path_factory.mktemp("rerank")
    texts = (csv_folder / "train.txt").read_text().splitlines()[:60]
    rows = [
        {"query": text, "good": f"{text} now", "bad": texts[place + 1 : place + 4]} for place, text in enumerate(texts)
    ]
    for name, part in (("train", rows[:40]), ("dev", rows[40:])):
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, part)))
    files = {name: [{"file": f"{file}.jsonl", **COLUMNS}] for name, file in (("train", "train"), ("validation", "dev"))}
    task = {"name": "rerank", "data_dir": str(folder), "max_seq_length": 24, "loss": "softmax", **files}
    numbers = {"train_batch_size": 8, "learning_rate": 4e-3, "logging_steps": 1}
    distill = {"teacher": "@pairs", "cache_teacher": True}
    taught = {"loss": {"task": 0.0, "distill.logits": 1.0, "distill.mse": 0.1}, "techniques": {"distill": distill}}
    phases = smaller_phases(numbers | {"max_steps": 8}, numbers | taught, {})
    (folder / "recipe.json").write_text(json.dumps(tiny_recipe | {"task": task, "phases": phases, "report": True}))
    return folder / "recipe.json"


@pytest.fixture(scope="module")
def done(recipe) -> Done:
    return train(2, recipe, recipe.parent / "out")


_PREDICT = """
import json, sys
from pathlib import Path
from sentence_transformers import CrossEncoder
from torch import nn
folder, pairs, out = sys.argv[1:]
model, pairs = CrossEncoder(folder, trust_remote_code=True), json.loads(Path(pairs).read_text())
scores = [model.predict(pairs).tolist(), model.predict(pairs, activation_fn=nn.Identity()).tolist()]
Path(out).write_text(json.dumps(scores))
"""


def task_for(recipe: Path, folder: Path):
    settings = json.loads(recipe.read_text())["task"]
    return build_task(RerankSpec(**settings), folder, recipe.parent / "cache")


def test_every_phase_is_scored_and_learns(done, recipe) -> None:
    """Each has nDCG and MRR; the loss falls; the folders of a teacher and its agreement are beside."""
    results = read(recipe.parent / "out/all_results.json")
    assert all({"ndcg@10", "mrr@10"} <= set(results[phase]["eval"]) for phase in PHASES)
    assert 0 < results["half"]["eval"]["teacher/agreement"] <= 1
    losses = [line["train/loss"] for line in log_of(recipe.parent / "out", "pairs")]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("phase", PHASES)
def test_sentence_transformers_gives_the_same_scores(done, recipe, phase) -> None:
    """In a process without this library: the logits, and by default their sigmoids."""
    pytest.importorskip("sentence_transformers")
    folder = model_of(recipe, phase)
    task = task_for(recipe, folder)
    answers = answers_of(forward_of(task.build_model(folder).eval()), task, "dev", 8)[""]
    rows = [row.value for row in task.read("dev")[1]]
    pairs, out = recipe.parent / "pairs.json", recipe.parent / f"{phase}.json"
    pairs.write_text(json.dumps([[row.query, row.documents[0]] for row in rows]))
    ran = run_without_library(_PREDICT, str(folder), str(pairs), str(out))
    assert ran.returncode == 0, ran.stderr[-2000:]
    scores, logits = np.array(read(out))
    ours = np.concatenate([answers[id] for id in range(len(rows))])
    assert np.abs(logits - ours).max() < 1e-5
    assert np.abs(scores - 1 / (1 + np.exp(-ours))).max() < 1e-5


def test_folders_are_exported_evaluated_and_measured(done, recipe, tmp_path) -> None:
    """The cut folder is smaller; .onnx files give its scores; a cut without training and a benchmark work as ever."""
    folder, dense = model_of(recipe, "half"), model_of(recipe, "pairs")
    half, whole = (task_for(recipe, each).build_model(each) for each in (folder, dense))
    assert sizes_of(half) != sizes_of(whole)
    task = json.loads(recipe.read_text())["task"]
    flags = ["--task_name", "rerank", "--data_dir", task["data_dir"], "--set", "task.max_seq_length=24"]
    flags += ["--set", f"task.validation={json.dumps(task['validation'])}"]
    onnx = pytest.importorskip("onnxruntime") and tmp_path / "onnx"
    ran = run_script("launch/export.py", str(folder), "--onnx", "--quantize", "int8", "--output_dir", str(onnx), *flags)
    assert ran.returncode == 0, ran.stderr[-2000:]
    scores = read(onnx / "export.json")["scores"]
    assert scores["onnx"] == pytest.approx(scores["model"], abs=1e-4)
    ran = run_script("launch/evaluate.py", str(folder), *flags)
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert "ndcg@10" in ran.stdout
    more = ["--set", f"task.train={json.dumps(task['train'])}", "--cut", "0.5", "--output_dir", str(tmp_path / "cut")]
    ran = run_script("launch/export.py", str(dense), *flags, *more)
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert 'CrossEncoder("FOLDER"' in (tmp_path / "cut/README.md").read_text()
    ran = run_script("launch/benchmark.py", str(dense), str(tmp_path / "cut"), "--seconds", "1", *flags)
    assert ran.returncode == 0, ran.stderr[-2000:]
