"""What version 0.1 wrote, in `tests/fixtures`, still works: its recipe, model folders, checkpoints, and its runs go on.

The run has three phases on 2 ranks under ZeRO 2: a BERT is fine-tuned; pruned, distilled and cut; and gets an exit.
"""

from __future__ import annotations

import gzip
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.launching import ROOT, run_deepspeed
from transformers import AutoTokenizer

from ds_trainer import load_model
from ds_trainer.recipe.saved_checkpoint import read_checkpoint
from ds_trainer.run.scoring import export_checkpoint

FIXTURES = ROOT / "tests" / "fixtures" / "version_0_1"
EXPECTED = json.loads((FIXTURES / "expected.json").read_text())


@pytest.fixture
def written(tmp_path) -> Path:
    """The folder as version 0.1 left it; its recipe names the data there."""
    folder = tmp_path / "written"
    shutil.copytree(FIXTURES, folder)
    recipe = folder / "run" / "recipe.json"
    recipe.write_text(recipe.read_text().replace("DATA_DIR", str(folder)))
    code = gzip.decompress((FIXTURES / "shrunk_model.py.gz").read_bytes())  # that of all three models
    for model in ("compact", "run/model", "run/prune/model"):
        (folder / model / "shrunk_model.py").write_bytes(code)
    return folder


@pytest.mark.parametrize("name", EXPECTED["logits"])
def test_a_model_folder_gives_the_same_logits(written, name):
    """A plain folder; one cut by pruning, with the code that it brings; one with an exit; a compact one."""
    folder = written / (name if name == "compact" else f"run/{name}")
    inputs = AutoTokenizer.from_pretrained(folder)(EXPECTED["texts"], padding=True, return_tensors="pt")
    with torch.no_grad():
        logits = load_model(folder)(**inputs).logits
    assert torch.allclose(logits, torch.tensor(EXPECTED["logits"][name]), atol=1e-6)


def test_a_checkpoint_becomes_the_model_that_was_exported(written):
    """Checkpoint 8 is of the last step of the phase that pruned and cut."""
    target = written / "exported"
    export_checkpoint(read_checkpoint(written / "run/prune/checkpoint-8"), str(written / "cache"), target)
    before, now = (load_file(folder / "model.safetensors") for folder in (written / "run/prune/model", target))
    assert all(torch.equal(now[name], before[name]) for name in before)


def test_a_run_goes_on_and_ends_as_it_did(written):
    """From its last checkpoint, with its own recipe; the exported heads are the same, up to the rounding of a CPU."""
    run, engine = written / "run", ("--deepspeed_config", "ds_configs/zero2.json")
    for name in ("all_results", "train_results", "eval_results"):
        results = json.loads((run / f"{name}.json").read_text())
        (run / f"{name}.json").write_text(json.dumps({phase: results[phase] for phase in ("finetune", "prune")}))
    heads = load_file(run / "model/exit_heads.safetensors")
    recipe = ("--recipe", str(run / "recipe.json"), "--output_dir", str(run), "--cache_dir", str(written / "cache"))
    done = run_deepspeed(2, "launch/train.py", *engine, *recipe, "--resume")
    assert done.returncode == 0, done.stderr[-4000:]
    assert f"exits: resumed from {run / 'checkpoint-4'}, at step 4" in done.stderr
    again = load_file(run / "model/exit_heads.safetensors")
    assert all(torch.allclose(again[name], heads[name], atol=1e-6) for name in heads)
