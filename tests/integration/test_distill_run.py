"""Prune and distill, alone and together, on every family of tasks: by the command, on 2 ranks, with the real engine."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from support.distill_files import lm_files, squad_files
from support.launching import becomes_model, log_of, read, train

NAMES = ("finetune", "prune", "distill", "both")
CASES = {
    "text": ("zero2", "--set", "bf16.enabled=true"),
    "squad": ("zero3",),
    "mlm": ("zero1",),
    "clm": ("zero1",),
}
"""The task, and the engine it is run under."""
BERT = {"model_type": "bert", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
BERT |= {"intermediate_size": 64, "max_position_embeddings": 64}
GPT2 = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64}


def recipe_for(name: str, text_task: dict, folder: Path) -> dict:
    task = {"text": lambda: text_task, "squad": lambda: squad_files(folder)}.get(name, lambda: lm_files(name, folder))()
    task |= {"packing": True} if name == "clm" else {}
    common = {"train_batch_size": 8, "learning_rate": 4e-3, "logging_steps": 3, "per_device_eval_batch_size": 8}
    prune = {"final_threshold": 0.5, "initial_warmup": 0, "final_warmup": 0.3}
    distill = {"teacher": "@finetune", "alpha_ce": 0.2, "alpha_distil": 0.8, "alpha_cos": 0.5}
    distill |= {"cache_teacher": {"top_k": 8} if name == "clm" else name != "mlm"}
    whole = {"cache_teacher": False, "teacher_zero_stage": 3} if name == "squad" else {}
    start = {"start_from": "@finetune", "max_steps": 6, **common}
    both: dict = {"techniques": {"prune": prune, "distill": distill}}
    if name == "text":  # with the loss table itself
        terms = {"task": 0.2, "distill.logits": 0.8, "distill.cos": 0.5, "distill.hidden": 0.1}
        both = {"techniques": {"prune": prune, "distill": {"teacher": "@finetune"}}, "loss": terms}
    return {
        "model": {"config": GPT2 if name == "clm" else BERT, "tokenizer": {"vocab_size": 256}},
        "task": task,
        "report": False,
        "phases": [
            {"name": "finetune", **common, "max_steps": 12},
            {"name": "prune", "techniques": {"prune": prune}, **start},
            {"name": "distill", "techniques": {"distill": distill | whole}, "student": {"layers": [1]}, **start},
            {"name": "both", "save_steps": 3, **both, **start},
        ],
    }


@pytest.fixture(scope="module", params=CASES)
def run(request, tiny_recipe, tmp_path_factory) -> tuple[str, Path]:
    folder = tmp_path_factory.mktemp(request.param)
    engine, *more = CASES[request.param]
    recipe = recipe_for(request.param, tiny_recipe["task"], folder)
    train(2, recipe, folder / "out", *more, "--cache_dir", str(folder / "cache"), engine=f"ds_configs/{engine}.json")
    return request.param, folder / "out"


def test_every_combination_trains(run):
    """Four phases: nothing, prune, distill, both. Each logs its own terms, and their weighted sum is the loss."""
    name, output = run
    for phase in NAMES:
        records = log_of(output, phase)
        terms = {key.removeprefix("train/term/") for key in records[0] if key.startswith("train/term/")}
        taught = {"distill.logits", "distill.cos"} if phase in ("distill", "both") else set()
        taught |= {"distill.hidden"} if (name, phase) == ("text", "both") else set()
        assert terms == {"task", *taught}
        for record in records:
            total = sum(record[f"train/weight/{term}"] * record[f"train/term/{term}"] for term in terms)
            assert record["train/loss"] == pytest.approx(total, rel=1e-5)
            assert ("prune/density" in record) == (phase in ("prune", "both"))
    assert log_of(output, "finetune")[-1]["train/loss"] < log_of(output, "finetune")[0]["train/loss"]


def test_the_scores_are_reported(run):
    """The teacher's is the one it had when it was trained. SQuAD leaves its predictions."""
    name, output = run
    results = read(output / "eval_results.json")
    predictions = output / "eval" / "predictions.json"
    assert predictions.is_file() == (name == "squad")
    if name == "squad":
        assert read(predictions).keys() == {f"q{number}" for number in range(40)}
    for phase in ("distill", "both"):
        of_teacher = {name: value for name, value in results[phase].items() if name.startswith("teacher/")}
        assert 0 <= of_teacher.pop("teacher/agreement") <= 1
        assert of_teacher
        for name, value in of_teacher.items():
            assert value == pytest.approx(results["finetune"][name.removeprefix("teacher/")], rel=1e-4)
    assert "teacher/agreement" not in results["prune"]


def names_in(folder: Path) -> set[str]:
    with safe_open(folder / "model.safetensors", "pt") as file:
        return set(file.keys())


def test_folders_are_plain_and_of_the_asked_size(run):
    """A student of one layer, a pruned model with half its encoder's weights; no teacher and no scores inside."""
    _, output = run
    results = read(output / "all_results.json")
    folders = {phase: output / phase / "model" for phase in NAMES} | {"both": output / "model"}
    keys = {phase: names_in(folder) for phase, folder in folders.items()}
    assert keys["prune"] == keys["both"] == keys["finetune"] > keys["distill"]
    weights = {phase: results[phase]["weights"]["encoder"] for phase in NAMES}
    assert weights["distill"]["total"] * 2 == weights["finetune"]["total"]
    for phase in ("prune", "both"):
        assert weights[phase]["kept"] == weights[phase]["total"] // 2


def test_no_checkpoint_holds_the_teacher_and_the_last_becomes_the_exported_model(run, tmp_path):
    """The parameters that a checkpoint has, and those that its optimizer trains, are the model's and its scores."""
    _, output = run
    assert becomes_model(output / "checkpoint-6", output / "model", tmp_path / "model")
    for path in (output / "checkpoint-6").glob("*model_states.pt"):
        state = torch.load(path, weights_only=False)
        trained = {name for group in state["param_shapes"] for name in group}
        assert trained, path
        names = {name for name in trained | set(state["module"]) if not name.endswith("mask_scores")}
        tied = {"lm_head.weight", "cls.predictions.decoder.weight", "cls.predictions.decoder.bias"}
        assert names - names_in(output / "model") <= tied


def test_phases_share_a_cache(run):
    """One teacher, two phases that ask the same of it: one cache. MLM, whose masks vary, has none."""
    name, output = run
    assert len(list((output.parent / "cache").glob("teacher-*"))) == (0 if name == "mlm" else 1)


def test_an_untrained_teacher_is_told_before_anything_is_trained(tiny_recipe, tmp_path):
    """The recipe's own new model has no head to teach with: exit code 2, and no phase was begun."""
    taught = tiny_recipe["phases"][0] | {"name": "taught", "start_from": "@model"}
    taught |= {"techniques": {"distill": {"teacher": "@model", "alpha_distil": 1.0}}}
    phases = [tiny_recipe["phases"][0], taught]
    with pytest.raises(AssertionError, match="no trained head"):
        train(0, tiny_recipe | {"phases": phases}, tmp_path / "out")
    assert not (tmp_path / "out").exists()
