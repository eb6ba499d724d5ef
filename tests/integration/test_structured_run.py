"""Heads and neurons pruned with a teacher, cut out, trained on; zeros kept: one run of two ranks under ZeRO-3."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.launching import log_of, read, train

import ds_trainer
from ds_trainer.models.layers import FIELD, encoder_linears

TEACH = {"distill": {"teacher": "@dense", "alpha_ce": 0.1, "alpha_distil": 0.9}}
SOON = {"initial_warmup": 0, "final_warmup": 0.3}
VIEW = {"evaluate_at_final_threshold": True}


@pytest.fixture(scope="module")
def run(tiny_recipe, tmp_path_factory) -> Path:
    common = {"train_batch_size": 16, "learning_rate": 2e-3, "per_device_eval_batch_size": 16, "logging_steps": 4}
    hybrid = {"granularity": "hybrid", "final_threshold": 0.5, "mask_init": "uniform", "mask_scale": 0.01}
    hybrid |= SOON | VIEW
    magnitude = {"pruning_method": "magnitude", "final_threshold": 0.2, **SOON}
    magnitude |= {"global_topk": True, "global_topk_frequency_compute": 3}
    sparse = {"start_from": "@dense", "max_steps": 6}
    cut = {"name": "cut", "max_steps": 6, "eval_steps": 2, "shrink": True}
    phases = [
        {"name": "dense", "max_steps": 4},
        cut | {"techniques": {"prune": hybrid, **TEACH}},
        {"name": "filled", "max_steps": 2, "techniques": TEACH},
        sparse | {"name": "unseen", "techniques": {"prune": magnitude}},
        sparse | {"name": "sparse", "techniques": {"prune": magnitude | VIEW}, "eval_steps": 2},
        {"name": "kept", "max_steps": 4, "techniques": {"keep_zeros": True}},
    ]
    folder = tmp_path_factory.mktemp("structured")
    recipe = tiny_recipe | {"phases": [common | phase for phase in phases], "tensorboard": False}
    train(2, recipe, folder / "out", engine="ds_configs/zero3.json")
    return folder / "out"


def test_a_dry_run_foretells_the_memory_of_every_phase(run):
    """Also where a technique needs what an earlier phase will have trained: a teacher, zeros to keep."""
    done = train(0, run / "recipe.json", run.parent / "dry", "--dry_run", "json", engine="ds_configs/zero3.json")
    memory = {phase["phase"]: phase["memory_per_rank"] for phase in json.loads(done.stdout)["phases"]}
    assert list(memory) == ["dense", "cut", "filled", "unseen", "sparse", "kept"]
    assert [phase for phase, parts in memory.items() if parts["teacher"]] == ["cut", "filled"]
    assert all(parts["activations"] > 0 for parts in memory.values())


def test_what_is_cut_is_smaller_and_is_trained_on(run):
    """Half of the heads and neurons are gone from the folder, and the next phase starts from and leaves such a one."""
    results = read(run / "all_results.json")
    dense = results["dense"]["weights"]["encoder"]["total"]
    for phase in ("cut", "filled"):
        weights = results[phase]["weights"]
        assert weights["before"]["encoder"] == dense
        assert weights["encoder"] == {"kept": dense // 2, "total": dense // 2}
        assert read(run / phase / "model" / "config.json")[FIELD] == {"heads": [1, 1], "neurons": [32, 32]}
    before, after = (load_file(run / phase / "model" / "model.safetensors") for phase in ("cut", "filled"))
    assert all(after[name].shape == before[name].shape for name in before)
    assert any(not torch.equal(after[name], before[name]) for name in before if "layer" in name)


def test_zeros_are_kept_under_zero_3(run):
    """Those of the phase before, no others, while the other weights of every matrix have moved."""
    zeros, kept = (
        encoder_linears(ds_trainer.load_model(folder)) for folder in (run / "sparse" / "model", run / "model")
    )
    for name, linear in kept.items():
        assert torch.equal(linear.weight == 0, zeros[name].weight == 0)
        assert not torch.equal(linear.weight, zeros[name].weight)
    counts = [found["weights"]["encoder"]["kept"] for found in read(run / "all_results.json").values()]
    assert counts[-1] == counts[-2] < counts[0] / 4


def test_evaluations_at_the_final_threshold_leave_the_training_as_it_was(run):
    """They are recorded beside the own, up to the end, and a run without them has the same weights bit by bit."""
    for phase in ("cut", "sparse"):
        scores = log_of(run, phase, "eval/accuracy")
        assert [record["step"] for record in scores] == [2, 4, 6]
        assert all("eval/final_threshold/accuracy" in record for record in scores)
        assert scores[-1]["eval/final_threshold/agreement"] == 1
        assert scores[-1]["eval/final_threshold/accuracy"] == scores[-1]["eval/accuracy"]
    with_view, without = (load_file(run / phase / "model" / "model.safetensors") for phase in ("sparse", "unseen"))
    assert all(torch.equal(with_view[name], without[name]) for name in without)
