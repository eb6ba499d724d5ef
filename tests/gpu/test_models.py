"""A run by the command on a GPU: scored, cut and timed; and one that does not fit."""

from __future__ import annotations

import json

import pytest
import torch

from ds_trainer.cli.api import evaluate
from ds_trainer.cli.command import run_command
from ds_trainer.cli.export import benchmark_command
from ds_trainer.cli.train import train_command

HYBRID = {"granularity": "hybrid", "final_threshold": 0.5, "mask_init": "uniform", "mask_scale": 0.01}
SOON = {"initial_warmup": 0, "final_warmup": 0.3}


@pytest.mark.parametrize("stage", [2, 3])
def test_a_run_by_the_command_scores_and_is_cut_as_it_was_trained(stage, tiny_recipe, tmp_path):
    """Half of the heads and neurons: the folder has the masked model's logits and score, and can be timed."""
    first, second = tiny_recipe["phases"]
    second = second | {"techniques": {"prune": HYBRID | SOON}, "shrink": True}
    recipe = tiny_recipe | {"phases": [first | {"max_steps": 30}, second]}
    (tmp_path / "recipe.json").write_text(json.dumps(recipe))
    out, files = tmp_path / "out", ["--recipe", str(tmp_path / "recipe.json")]
    engine = ["--deepspeed_config", f"ds_configs/zero{stage}.json", "--set", "bf16.enabled=true"]
    assert run_command(train_command, [*files, *engine, "--output_dir", str(out)]) == 0
    results = json.loads((out / "all_results.json").read_text())["prune"]
    assert results["weights"]["encoder"]["total"] * 2 == results["weights"]["before"]["encoder"]
    scores = evaluate(out / "model", "--recipe", str(tmp_path / "recipe.json"))
    assert scores["accuracy"] == pytest.approx(results["eval"]["accuracy"], abs=0.02)  # bf16 in training, fp32 here
    benchmark_command([str(out / "finetune/model"), str(out / "model"), "--lengths", "8", "--batch_sizes", "4"])


def test_too_large_a_batch_ends_with_a_code_and_a_cure(gpu, tiny_recipe, tmp_path, capfd):
    """Exit code 6, what the rank held, and what to lower."""
    large = {"max_steps": 1, "train_batch_size": 240, "learning_rate": 1e-3}
    config = tiny_recipe["model"]["config"] | {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24}
    recipe = tiny_recipe | {"model": tiny_recipe["model"] | {"config": config}, "phases": [large]}
    (tmp_path / "recipe.json").write_text(json.dumps(recipe))
    files = ["--deepspeed_config", "ds_configs/zero0.json", "--recipe", str(tmp_path / "recipe.json")]
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(3 * 2**30 / torch.cuda.mem_get_info()[1])
    try:
        code = run_command(train_command, [*files, "--output_dir", str(tmp_path / "out")])
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    message = capfd.readouterr().err
    assert code == 6, message[-3000:]
    assert "the peak of the GPU's allocator since the last record is" in message
    assert "Lower per_device_train_batch_size" in message
