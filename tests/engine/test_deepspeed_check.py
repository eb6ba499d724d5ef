"""What only DeepSpeed's engine refuses, and a schedule that undoes the groups' rates, end a run before it writes.

As a script, this file checks engine files on one rank: `test_deepspeed_check.py [[FILE, RATES], ...] OUT` writes, for
each, the error that it is refused by, or null, and what the checks have left behind.
"""

import copy
import json
import sys
from pathlib import Path

import pytest
from support.launching import run_deepspeed

from ds_trainer.engine.engine_file import check_engine_file, resolve_engine_file
from ds_trainer.files.run_folder import RunFolder
from ds_trainer.recipe.recipe import Phase


def zero(stage, **keys):
    return {"zero_optimization": {"stage": stage} | keys}


def half(precision, **keys):
    return {precision: {"enabled": True} | keys}


def schedule(kind, **params):
    return {"scheduler": {"type": kind, "params": params}}


ADAMW = {"optimizer": {"type": "AdamW", "params": {"lr": 0.1}}}
TWO = [1e-5, 1e-2]
FLAT = "sets one rate on parameter groups with different ones (1e-05, 0.01)"
REFUSED = {
    "optimizer type": ({"optimizer": {"type": "AdanW"}}, "AdanW"),
    "optimizer params": ({"optimizer": {"type": "AdamW", "params": {"weigth_decay": 0.1}}}, "weigth_decay"),
    "untested optimizer": ({"optimizer": {"type": "SGD"}} | zero(1), "zero_allow_untested_optimizer"),
    "no package": ({"wandb": {"enabled": True}}, "wandb"),
    "no total": (schedule("WarmupDecayLR"), "total_num_steps"),
    "one rate": (schedule("WarmupLR", warmup_max_lr="auto"), FLAT),
    "one rate of a cycle": (schedule("OneCycle", cycle_min_lr=1e-5, cycle_max_lr=1e-3), FLAT),
    "too few rates": (schedule("WarmupLR", warmup_max_lr=[1e-5]), "expected 2"),
}
"""Files in which the check of the text sees no mistake, and what is said of them, for parameter groups of two rates."""
GOOD = {
    "empty": {},
    "rates by group": schedule("OneCycle", cycle_min_lr=[1e-5, 1e-3], cycle_max_lr=[1e-4, 1e-2]),
    "rates of the groups": schedule("WarmupLR"),
    "Muon": {"optimizer": {"type": "Muon"}} | zero(1),
    "stage 3": zero(3, leaf_module={"classes": ["BertLayer"]}, sub_group_size="auto") | half("bf16"),
    "autocast": half("torch_autocast", dtype="bfloat16")
    | zero(2)
    | {"disable_python_gc": True, "comms_logger": {"enabled": True}},
    "monitors": {name: {"enabled": True} for name in ("csv_monitor", "tensorboard")},
}
ONE_RATE = {"one rate, groups of one": schedule("WarmupLR", warmup_max_lr="auto")}


@pytest.fixture(scope="module")
def checked(tmp_path_factory):
    """The refusals by the case's name, what the checks have left behind, and the folder for monitors."""
    folder = tmp_path_factory.mktemp("checked")
    files = {name: config for name, (config, _) in REFUSED.items()} | copy.deepcopy(GOOD) | ONE_RATE
    for block in files["monitors"].values():
        block["output_path"] = str(folder / "monitored")
    phase = Phase(max_steps=1)
    assert not [mistake for config in files.values() for mistake in check_engine_file(config, phase, 1)]
    cases = [
        [resolve_engine_file(config, phase, 1, hidden_size=8), [0.1] * 2 if name in ONE_RATE else TWO]
        for name, config in files.items()
    ]
    done = run_deepspeed(1, "tests/engine/test_deepspeed_check.py", json.dumps(cases), str(folder / "out.json"))
    assert done.returncode == 0, done.stderr[-3000:]
    results = json.loads((folder / "out.json").read_text())
    return dict(zip(files, results["refusals"], strict=True)), results, folder, done


def test_what_the_engine_refuses_is_refused_before_and_no_more(checked):
    """The error names the engine file and has DeepSpeed's words, or those on the rates. Modules that the stand-in does
    not have are no mistake, nor is one rate for groups that all have it."""
    refusals = checked[0]
    assert {name: refusals[name] for name in GOOD | ONE_RATE} == dict.fromkeys(GOOD | ONE_RATE)
    for name, (_, words) in REFUSED.items():
        assert words in refusals[name], name
        assert refusals[name].startswith("DeepSpeed refuses the engine file (--deepspeed_config): ") or words == FLAT


def test_a_check_leaves_nothing_behind(checked):
    """No monitor writes, nothing is printed, and neither autocast nor ZeRO's linear function stays switched on."""
    _, results, folder, done = checked
    assert not (folder / "monitored").exists()
    assert (results["autocast"], results["linear"]) == (False, True)
    assert "WARNING" not in done.stderr
    assert "Comm. Op" not in done.stdout


def test_a_refused_file_leaves_the_old_run(server, tiny_recipe, write_json, tmp_path):
    """With --overwrite_output_dir too: what DeepSpeed refuses ends the run before the old one is deleted."""
    output = tmp_path / "out"
    RunFolder(output).write_json("results.json", {"old": "run"})
    recipe = write_json("recipe.json", tiny_recipe)
    engine = write_json("engine.json", {"optimizer": {"type": "SGD"}} | zero(1))
    run = server.run(1, output, "--recipe", recipe, "--overwrite_output_dir", engine=engine)
    assert run.codes() == [2]
    assert "zero_allow_untested_optimizer" in run.text
    assert "Traceback" not in run.text
    assert json.loads((output / "results.json").read_text()) == {"old": "run"}


def main(cases: list[list], out: Path) -> None:
    import torch
    from deepspeed.accelerator import get_accelerator
    from deepspeed.runtime import torch_autocast

    from ds_trainer.engine.engine import check_with_deepspeed
    from ds_trainer.engine.engine_file import Hyperparameters
    from ds_trainer.ranks import distributed
    from ds_trainer.ranks.failures import UserError

    def refusal(config: dict, rates: list[float]) -> str | None:
        try:
            check_with_deepspeed(config, Hyperparameters(0.1), rates)
        except UserError as error:
            return str(error)
        return None

    get_accelerator().is_fp16_supported = lambda: True  # DeepSpeed refuses it on a CPU, where torch computes it
    distributed.start()
    linear = torch.nn.functional.linear
    results = {"refusals": [refusal(*case) for case in cases], "autocast": torch_autocast.is_autocast_initialized()}
    out.write_text(json.dumps(results | {"linear": torch.nn.functional.linear is linear}))
    distributed.stop()
    distributed.leave(0)  # as a run does: threads of gloo can abort Python's own end


if __name__ == "__main__":
    main(json.loads(sys.argv[-2]), Path(sys.argv[-1]))
