"""The rehearsal: what only DeepSpeed's engine refuses is refused before a run writes or deletes anything."""

import copy
import json

import pytest
from support.launching import run_deepspeed

from ds_trainer.config.recipe import Phase
from ds_trainer.engine.engine_file import resolve_engine_file
from ds_trainer.files.run_folder import RunFolder


def zero(stage, **keys):
    return {"zero_optimization": {"stage": stage} | keys}


def half(precision, **keys):
    return {precision: {"enabled": True} | keys}


ADAMW = {"optimizer": {"type": "AdamW", "params": {"lr": 0.1}}}
AUTOCAST = half("torch_autocast", dtype="bfloat16")
REFUSED = {
    "max_grad_norm": ({"optimizer": {"type": "AdamW", "params": {"max_grad_norm": 1}}}, "gradient_clipping"),
    "untested optimizer": ({"optimizer": {"type": "SGD"}} | zero(1), "zero_allow_untested_optimizer"),
    "one group": ({"optimizer": {"type": "LBFGS"}}, "parameter groups"),
    "step size": ({"scheduler": {"type": "StepLR", "params": {"step_size": 0}}}, "zero"),
    "period": ({"scheduler": {"type": "CosineAnnealingLR", "params": {"T_max": 0}}}, "zero"),
    "momentum": ({"optimizer": {"type": "SGD", "params": {"momentum": -1}}}, "Invalid momentum value"),
    "fixed scale": ({"optimizer": {"type": "Lamb"}} | half("fp16", loss_scale=8), "requires dynamic loss scaling"),
    "no package": ({"wandb": {"enabled": True}}, "wandb"),
    "no total": ({"scheduler": {"type": "WarmupDecayLR"}}, "total_num_steps"),
    "sums": (ADAMW | zero(3) | {"gradient_allreduce_op": "SUM"}, "ZeRO stage 3"),
    "window": (half("fp16", loss_scale_window=0), "fp16.loss_scale_window must be > 0"),
    "fp16 masters": (half("fp16", fp16_master_weights_and_grads=True), "Fp16_master_weights_and_grads"),
    "bf16 masters": (zero(2) | half("bf16", bf16_master_weights_and_grads=True), "requires ZeRO-2 Offload"),
    "grad_accum_dtype": (ADAMW | {"data_types": {"grad_accum_dtype": "fp32"}} | half("bf16"), "grad_accum_dtype"),
    "param_dtype": (ADAMW | {"data_types": {"param_dtype": "bf16"}}, "data_types.param_dtype"),
    "ratio": (zero(2, offload_optimizer={"device": "cpu", "ratio": 0.5}), "ZeRO Stage 3"),
    "norm at stage 3": (zero(3, compute_grad_norm=False), "compute_grad_norm"),
    "norm and clipping": (zero(1, compute_grad_norm=False), "requires gradient_clipping=0"),
    "quantized": (AUTOCAST | zero(3, zero_quantized_weights=True), "torch autocast and zero quantized weights"),
    "safe modules": (half("torch_autocast", lower_precision_safe_modules=["torch.nn.Lin"]), "torch.nn.Lin"),
}
"""Files in which the check of the text sees no mistake, and what DeepSpeed says of them."""
RATES = {"cycle_min_lr": [1e-5, 1e-3], "cycle_max_lr": [1e-4, 1e-2]}
GOOD = {
    "empty": {},
    "rates by group": {"scheduler": {"type": "OneCycle", "params": RATES}},
    "Muon": {"optimizer": {"type": "Muon"}} | zero(1),
    "stage 3": zero(3, leaf_module={"classes": ["BertLayer"]}) | half("bf16"),
    "autocast": AUTOCAST | zero(2) | {"disable_python_gc": True, "comms_logger": {"enabled": True}},
    "monitors": {name: {"enabled": True} for name in ("csv_monitor", "tensorboard")},
}


@pytest.fixture(scope="module")
def rehearsed(tmp_path_factory):
    """The refusals by the case's name, what the engine of training raises, and the folder for monitors."""
    folder = tmp_path_factory.mktemp("rehearsed")
    files = {name: config for name, (config, _) in REFUSED.items()} | copy.deepcopy(GOOD)
    for block in files["monitors"].values():
        block["output_path"] = str(folder / "monitored")
    resolved = [resolve_engine_file(config, Phase(max_steps=1), 1, hidden_size=8) for config in files.values()]
    done = run_deepspeed(1, "tests/support/rehearsal_worker.py", json.dumps(resolved), str(folder / "out.json"))
    assert done.returncode == 0, done.stderr[-3000:]
    results = json.loads((folder / "out.json").read_text())
    return dict(zip(files, results["refusals"], strict=True)), results, folder, done


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_engine_refuses_is_refused_at_the_rehearsal(name, rehearsed):
    """The error names the engine file, and has DeepSpeed's words."""
    refusal = rehearsed[0][name]
    assert refusal.startswith("DeepSpeed refuses the engine file (--deepspeed_config): ")
    assert REFUSED[name][1] in refusal


def test_files_that_train_are_not_refused(rehearsed):
    """Neither are modules that the stand-in does not have, nor one rate per parameter group."""
    assert {name: rehearsed[0][name] for name in GOOD} == dict.fromkeys(GOOD)


def test_a_rehearsal_leaves_nothing_behind(rehearsed):
    """No monitor writes, nothing is printed, and neither autocast nor ZeRO's linear function stays switched on."""
    _, results, folder, done = rehearsed
    assert not (folder / "monitored").exists()
    assert (results["autocast"], results["linear"]) == (False, True)
    assert "WARNING" not in done.stderr
    assert "Comm. Op" not in done.stdout


def test_errors_of_the_engine_of_training_are_left_as_they_are(rehearsed):
    """An error that the rehearsal has not had may be a bug, whose traceback would be lost in a message to the user."""
    assert rehearsed[1]["training"] == "ValueError"


def test_a_refused_file_leaves_the_old_run(server, tiny_recipe, write_json, tmp_path):
    """With --overwrite_output_dir too: what DeepSpeed refuses ends the run before the old one is deleted."""
    output = tmp_path / "out"
    old = RunFolder(output)
    old.write_json("results.json", {"old": "run"})
    recipe = write_json("recipe.json", tiny_recipe)
    engine = write_json("engine.json", {"optimizer": {"type": "SGD"}} | zero(1))
    run = server.run(1, output, "--recipe", recipe, "--overwrite_output_dir", engine=engine)
    assert run.codes() == [2]
    assert "zero_allow_untested_optimizer" in run.text
    assert "Traceback" not in run.text
    assert json.loads((output / "results.json").read_text()) == {"old": "run"}
