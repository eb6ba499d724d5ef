"""A run that is stopped and resumed ends as one that is not: the same records, the same weights, bit by bit.

And what its engine would export at a checkpoint is what becomes of the checkpoint alone.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from interrupting import records_of, without_rates
from launching import run_deepspeed
from resume_matrix import CASES, FEW, OFTEN, ONLY_WHOLE, SAVE, STEPS, STOPS
from safetensors.torch import load_file

from ds_trainer.checkpoint_model import export_checkpoint
from ds_trainer.saved_checkpoint import read_checkpoint


@pytest.fixture(scope="module")
def matrix(taught_recipe, tmp_path_factory) -> tuple[Path, str]:
    """What every case left, and what was said."""
    folder = tmp_path_factory.mktemp("resume")
    first, second = taught_recipe["phases"]
    recipe = taught_recipe | {"phases": [first, second | {"logging_steps": 4}]}  # not at every stop: some lie between
    (folder / "recipe.json").write_text(json.dumps(recipe))
    done = run_deepspeed(2, "tests/resume_matrix.py", str(folder / "recipe.json"), str(folder / "out"))
    assert done.returncode == 0, done.stderr[-4000:]
    return folder / "out", done.stderr


@pytest.mark.parametrize("case", CASES)
def test_records_and_weights_are_those_of_an_uninterrupted_run(matrix, case):
    """On 2 ranks, with dropout, pruning and a teacher: every loss, rate, density and score, and every weight."""
    whole, stopped = (matrix[0] / case / name for name in ("whole", "stopped"))
    records = [[without_rates(record) for record in records_of(folder / "log.jsonl")] for folder in (whole, stopped)]
    assert len(records[0]) == STEPS // 4 + 1 + 3
    assert records[1] == records[0]
    first, second = (load_file(folder / "model" / "model.safetensors") for folder in (whole, stopped))
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("case", [*CASES, *ONLY_WHOLE])
def test_a_checkpoint_becomes_what_the_run_would_have_exported(matrix, case, tmp_path):
    """On one process, without an engine, of what 2 ranks wrote under every ZeRO stage: every file, byte by byte.

    Pruned, distilled by a wider teacher, with exit heads, with frozen weights, cut; in fp32, bf16, fp16 and autocast.
    """
    whole = matrix[0] / case / "whole"
    steps = range(SAVE, STEPS, SAVE) if case in CASES else range(OFTEN, FEW, OFTEN)
    for step in steps:
        expected, folder = whole / f"exported-{step}", tmp_path / f"checkpoint-{step}"
        export_checkpoint(read_checkpoint(whole / folder.name), None, folder)
        files = {path.name: path.read_bytes() for path in expected.iterdir()}
        assert "model.safetensors" in files
        assert ("shrunk_model.py" in files) == case.startswith("shrunk")
        assert ("exit_heads.safetensors" in files) == case.startswith(("all", "heads"))
        assert {path.name: path.read_bytes() == files.get(path.name) for path in folder.iterdir()} == dict.fromkeys(
            files, True
        )


def test_the_runs_were_stopped_where_it_is_hard(matrix):
    """In an epoch, in an evaluation, at the end of an epoch, and at the last evaluation: four times each."""
    said = matrix[1].splitlines()
    for case in CASES:
        stops = [line for line in said if line.startswith(f"{case}: stopped at step ")]
        assert [int(line.split()[4]) for line in stops] == [4, 6, 15, STEPS]
        assert len(stops) == len(STOPS)
