"""A run that is stopped and resumed ends as one that is not: the same records, the same weights, bit by bit.

And what its engine would export at a checkpoint is what becomes of the checkpoint alone.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.killing import alike, records_of
from support.launching import run_deepspeed
from support.resume_matrix import BEST, CASES, FEW, OFTEN, OFTEN_STOPPED, ONLY_WHOLE, SAVE, SETTINGS, STEPS

from ds_trainer.recipe.saved_checkpoint import read_checkpoint
from ds_trainer.run.scoring import export_checkpoint


@pytest.fixture(scope="module")
def matrix(taught_recipe, tmp_path_factory) -> tuple[Path, str]:
    """What every case left, and what was said."""
    folder = tmp_path_factory.mktemp("resume")
    first, second = taught_recipe["phases"]
    recipe = taught_recipe | {
        "phases": [first, second | {"logging_steps": 4}],
        "task": taught_recipe["task"] | {"max_train_samples": 80},
    }  # not at every stop: some lie between
    (folder / "recipe.json").write_text(json.dumps(recipe))
    done = run_deepspeed(2, "tests/support/resume_matrix.py", str(folder / "recipe.json"), str(folder / "out"))
    assert done.returncode == 0, done.stderr[-4000:]
    return folder / "out", done.stderr


@pytest.mark.parametrize("case", [*CASES, *BEST])
def test_records_and_weights_are_those_of_an_uninterrupted_run(matrix, case):
    """On 2 ranks, with dropout, pruning and a teacher: every loss, rate, density and score, and every weight.

    And the checkpoints that are left are the same, also where signals came in the midst of every evaluation.
    """
    whole, stopped = (matrix[0] / case / name for name in ("whole", "stopped"))
    assert len(records_of(whole / "log.jsonl")) == STEPS // 4 + 1 + 3
    assert alike(whole, stopped)
    if case in CASES:  # in an epoch, in an evaluation, at the end of an epoch, and at the last evaluation
        assert stops_of(matrix, case) == ([2, 3, 5, STEPS] if case in OFTEN_STOPPED else [3, 5])
    assert checkpoints_in(stopped) == checkpoints_in(whole)
    first, second = (json.loads((folder / "results.json").read_text()) for folder in (whole, stopped))
    assert (second["eval"], second["train"]["steps"]) == (first["eval"], first["train"]["steps"])


def stops_of(matrix, case: str) -> list[int]:
    """The steps at which the case was stopped, each of which lost nothing."""
    lines = [line for line in matrix[1].splitlines() if line.startswith(f"{case}: stopped at step ")]
    assert not any("lost" in line for line in lines)
    return [int(line.split()[4]) for line in lines]


def checkpoints_in(folder: Path) -> dict[int, dict]:
    """The scores of every checkpoint of its own step."""
    positions = [json.loads(file.read_text())["position"] for file in folder.glob("checkpoint-*/complete.json")]
    return {one["step"]: one["scores"] if one["evaluated"] == one["step"] else {} for one in positions}


@pytest.mark.parametrize("case", BEST)
def test_a_stop_in_an_evaluation_changes_nothing_of_what_is_best(matrix, case):
    """The worst checkpoint, which the case asks for, is kept beside the newest, and exported where that is asked for.

    Only checkpoints that a run without stops has, too, are compared; nothing that was trained is lost at a stop.
    """
    save, load = BEST[case]
    folder = matrix[0] / case / "stopped"
    scores = {r["step"]: r["eval/accuracy"] for r in records_of(folder / "log.jsonl") if "eval/accuracy" in r}
    assert list(scores) == [3, 6, STEPS]
    (worst,) = {min([step for step in scores if step % save == 0 or step == STEPS], key=scores.get)}
    assert worst < STEPS, "the case shows nothing"
    assert set(checkpoints_in(folder)) == {worst, STEPS}
    results = json.loads((folder / "results.json").read_text())
    assert results["train"]["steps"] == (worst if load else STEPS)
    assert results["eval"]["accuracy"] == scores[results["train"]["steps"]]
    assert stops_of(matrix, case) == [3, 6, STEPS, STEPS][: 4 if load else 3]


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
        assert ("exit_heads.safetensors" in files) == case.startswith(("all", "heads", "ner"))
        assert {path.name: path.read_bytes() == files.get(path.name) for path in folder.iterdir()} == dict.fromkeys(
            files, True
        )


@pytest.fixture(scope="module")
def settings(matrix) -> dict[str, dict]:
    return json.loads((matrix[0] / "settings.json").read_text())


@pytest.mark.parametrize("case", SETTINGS)
def test_the_files_count_for_every_hyperparameter(settings, case):
    """Without a change the bits are those of a run that was not stopped. With one, a resumed optimizer has what a fresh
    one would have, where the schedule does not move it."""
    same = settings[case]["same"]
    assert same["bits"]
    assert same["now"] == same["loaded"]
    other, schedule = settings[case]["other"], case == "OneCycle"
    moved = ("betas",) if schedule else ()
    now, fresh = ([{k: v for k, v in g.items() if k not in moved} for g in other[name]] for name in ("now", "fresh"))
    assert now == fresh != other["loaded"]
    assert not other["bits"]
    assert other["clip"] in (None, 0.5)


def test_rates_are_those_of_the_new_schedule_at_its_place(settings):
    """The place in the schedule is the checkpoint's, all else is this run's; the same holds for the loss scale."""
    rates = {case: (seen["other"]["rates"][0], seen["other"]["last_rate"]) for case, seen in settings.items()}
    ours = {case: rates.pop(case) for case in list(rates) if case not in ("WarmupDecayLR", "OneCycle")}
    assert all(pair == pytest.approx((0.02 * 0.9**3, 0.02 * 0.9**5)) for pair in ours.values())
    assert rates["WarmupDecayLR"] == (pytest.approx(0.02 * 2 / 4), pytest.approx(0.02))
    assert rates["OneCycle"][0] == pytest.approx(1e-3 + (0.02 - 1e-3) * 3 / 4)
    for stage in (0, 1, 3):
        assert settings[f"fp16, stage {stage}"]["other"]["scaler"] == [7, 2**8, 3]
