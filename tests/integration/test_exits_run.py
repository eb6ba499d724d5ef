"""Exits by the command, on 2 ranks, with the real engine: in a second stage, of heads that tag words, and jointly with
pruning and a teacher."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.launching import log_of, read, train
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

from ds_trainer.techniques.exits.early_exit import EarlyExitModel, load_for_inference

LAYERS = 3
CASES = {"stages": ("zero2", "--set", "bf16.enabled=true"), "all": ("zero3",)}
"""The engine that each run is under."""


def recipe_for(case: str, tiny: dict) -> dict:
    """finetune, then heads: they alone, or with everything else at once."""
    common = {"train_batch_size": 8, "learning_rate": 4e-3, "logging_steps": 3, "per_device_eval_batch_size": 8}
    prune = {"final_threshold": 0.5, "initial_warmup": 0, "final_warmup": 0.3}
    distill = {"teacher": "@finetune", "alpha_ce": 0.2, "alpha_distil": 0.8, "alpha_cos": 0.5}
    joint = {"exits": {"training": "joint"}, "prune": prune, "distill": distill}
    alone = {"exits": {"early_exit_entropy": [0.7, 0.6]}}
    heads = {"name": "heads", "max_steps": 6, "techniques": alone if case == "stages" else joint}
    config = tiny["model"]["config"] | {"num_hidden_layers": LAYERS, "hidden_dropout_prob": 0.1}
    return tiny | {
        "model": tiny["model"] | {"config": config},
        "phases": [{"name": "finetune", "max_steps": 12, **common}, heads | {"eval_steps": 3} | common],
    }


@pytest.fixture(scope="module", params=CASES)
def run(request, tiny_recipe, tagged_recipe, tmp_path_factory) -> tuple[str, Path]:
    folder = tmp_path_factory.mktemp(request.param)
    recipe = recipe_for(request.param, tagged_recipe if request.param == "stages" else tiny_recipe)
    engine, *settings = CASES[request.param]
    train(2, recipe, folder / "out", *settings, engine=f"ds_configs/{engine}.json")
    return request.param, folder / "out"


def test_the_second_stage_changes_no_weight_of_the_model(run):
    """Backbone and own head are the fine-tuned model's, bit for bit, and so is the score; joint training changes
    them."""
    case, output = run
    before, after = (load_file(output / folder / "model.safetensors") for folder in ("finetune/model", "model"))
    assert before.keys() == after.keys()
    same = {name for name in before if torch.equal(before[name], after[name])}
    results = read(output / "eval_results.json")
    if case == "stages":
        assert same == set(before)
        assert results["heads"]["accuracy"] == results["finetune"]["accuracy"]
    else:
        assert not any("encoder" in name and name.endswith("dense.weight") for name in same)


def test_the_folder_is_a_model_that_exits(run):
    """Heads and policy lie beside a plain model; heads were trained, apart from each other and from the own.

    They are scored beside the model at the end, and when it is evaluated while training.
    """
    case, output = run
    folder = output / "model"
    assert {"exits.json", "exit_heads.safetensors"} <= {path.name for path in folder.iterdir()}
    assert not (output / "finetune" / "model" / "exits.json").exists()
    early = load_for_inference(folder)
    assert isinstance(early, EarlyExitModel)
    assert early.layers == [1, 2, 3]
    assert early.policy.thresholds == ([0.7, 0.6] if case == "stages" else [0.1, 0.1])
    weights = [head.steps[-1].weight for head in early.heads]
    assert not any(torch.equal(weights[0], other) for other in weights[1:])
    losses = [record["train/term/exits.heads"] for record in log_of(output, "heads")]
    assert losses[-1] < losses[0]
    assert {record["step"] for record in log_of(output, "heads", "eval/exit_1/accuracy")} == {3, 6}
    assert {"exit_1/agreement", "exit_2/accuracy"} <= read(output / "eval_results.json")["heads"].keys()
    kind = AutoModelForTokenClassification if case == "stages" else AutoModelForSequenceClassification
    plain, info = kind.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values())
    kept = read(output / "all_results.json")["heads"]["weights"]["encoder"]
    assert kept["kept"] == kept["total"] // (2 if case == "all" else 1)
    ids = torch.tensor([[2, 7, 9, 11, 3], [2, 8, 3, 0, 0]])
    mask = (ids > 0).long()
    with torch.no_grad():
        own = plain.float().eval()(input_ids=ids, attention_mask=mask).logits
    torch.testing.assert_close(early.all_logits(ids, mask)[-1], own, atol=1e-5, rtol=0)
    assert early(ids, mask).logits.shape == own.shape == ((2, 5, 4) if case == "stages" else (2, 3))
