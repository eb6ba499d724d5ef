"""A tuning: what is tried in which order, what wins, what is refused, and that a second call goes on.

The trials are made up here, or scripts in place of runs; `tests/integration/test_tune.py` has real ones.
"""

from __future__ import annotations

import copy
import json
import math
import shlex
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import save_file

from ds_trainer.cli.train import read_train_job
from ds_trainer.cli.tune import read_tune_job
from ds_trainer.ranks.failures import NothingFitsError, TuningFailedError, UserError
from ds_trainer.recipe.jobs import TuneJob
from ds_trainer.tune import search, trials
from ds_trainer.tune.search import tune
from ds_trainer.tune.trials import ENDED_EARLY, FAILED, HUNG, MEASURED, NO_MEMORY, NO_SCORE, REFUSED, Machine, Trial

MICRO, STAGE = "train_micro_batch_size_per_gpu", "zero_optimization.stage"
RATE, STEPS = "phases.prune.learning_rate", "phases.prune.max_steps"
ACCURACY = ("--metric", "eval/accuracy")


@pytest.fixture
def job(tiny_recipe, write_json, tmp_path) -> Callable[..., TuneJob]:
    def make(space: dict | str | None = None, *more: str, held_out: float = 0.1) -> TuneJob:
        recipe = copy.deepcopy(tiny_recipe)
        recipe["task"]["held_out"] = held_out
        files = ["--deepspeed_config", "ds_configs/zero0.json", "--recipe", write_json("recipe.json", recipe)]
        spaces = [] if space is None else ["--space", space if isinstance(space, str) else json.dumps(space)]
        return read_tune_job([*files, "--output_dir", str(tmp_path / "out"), *spaces, *more])

    return make


@pytest.fixture
def run(monkeypatch) -> Callable[..., tuple[Trial, list[dict]]]:
    """Tune with made-up trials of a value, a curve of which the last is the score, or an outcome.

    Returns the best trial, and the settings of those that were started.
    """

    def tuned(job: TuneJob, result, data: str = "d", lasted: float = 0.001) -> tuple[Trial, list[dict]]:
        calls: list[dict] = []

        def run_trial(job, settings, folder, cannot_win) -> Trial:
            calls.append(settings)
            value, curve = result(settings, len(calls)), []
            if isinstance(value, str):
                return Trial(settings, value, "made up", lasted=lasted)
            for step, reached in enumerate(value if job.metric else (), start=1):
                curve.append([10 * step, reached])
                if cannot_win(*curve[-1]):
                    return Trial(settings, ENDED_EARLY, "made up", lasted=lasted, details={"curve": curve})
            (folder / "model").mkdir(parents=True)
            value, details = value[-1] if job.metric else value, {"curve": curve, "examples": 100}
            return Trial(settings, MEASURED, value=value, lasted=lasted, details=details)

        monkeypatch.setattr(trials, "run_trial", run_trial)
        monkeypatch.setattr(trials, "prepare", lambda job: Machine(0, data))
        monkeypatch.setattr(search, "time", SimpleNamespace(monotonic=lambda: lasted * len(calls)))
        return tune(job), calls

    return tuned


def written(job: TuneJob) -> tuple[dict, dict]:
    return tuple(json.loads((job.output / name).read_text()) for name in ("tuned.json", "tuned_recipe.json"))


def outcomes(job: TuneJob) -> list[str]:
    return [json.loads(line)["outcome"] for line in (job.output / "trials.jsonl").read_text().splitlines()]


# --- speed ----------------------------------------------------------------------------------------------------------


def test_the_fastest_is_timed_again_and_written(job, run, caplog):
    """Two rounds in turns of the three fastest and the user's own; the printed command trains with both files."""
    caplog.set_level("INFO", "ds_trainer")
    made = job({MICRO: [16, 8, 4, 2, 1]}, "--set", "phases.prune.dropout=0.1", "--seed", "7")
    speeds = {None: 50, 8: 90, 4: 100, 2: 95, 1: 60}  # a micro-batch of 16 is the user's own
    best, calls = run(made, lambda settings, _: speeds[settings.get(MICRO)])
    assert [call.get(MICRO) for call in calls] == [None, 8, 4, 2, 1, *[4, 2, 8, None] * 2]
    assert (best.settings[MICRO], best.value) == (4, 100)
    engine, recipe = written(made)
    assert engine == made.engine_file | {MICRO: 4, "gradient_accumulation_steps": "auto"}
    assert (recipe["seed"], recipe["phases"][1]["dropout"]) == (7, 0.1)
    assert "best: ranks 1, train_micro_batch_size_per_gpu 4: 100 examples/s, the user's own files 50" in caplog.text
    words = shlex.split(caplog.text.split("train with:\n")[1].splitlines()[0])
    assert words[:3] == ["deepspeed", "--num_gpus", "1"]
    again = read_train_job([*words[5:], "--dry_run"])
    assert (again.engine_config[MICRO], again.recipe.phases[1].dropout, again.recipe.seed) == (4, 0.1, 7)


def test_the_users_own_files_win_within_the_noise(job, run):
    """The other is faster by 3%, and trials of one candidate are 6% from their median."""
    speeds = [94, 96, 103, 100, 109, 106]
    best, _ = run(job({MICRO: [8]}), lambda _, number: speeds[number - 1])
    assert (MICRO in best.settings, best.value) == (False, 100)


def test_what_differs_least_from_the_fastest_is_tried_next(job, run):
    """Of two settings with 12 combinations the best is the fifth trial, and all are tried in the end."""
    made = job({STAGE: [1, 2, 3], "gradient_clipping": [0.4, 0.3, 0.2, 0.1]})
    best, calls = run(
        made, lambda settings, _: 10 - settings.get("gradient_clipping", 9) + 9 * (settings.get(STAGE) == 2)
    )
    tried = [(settings[STAGE], settings["gradient_clipping"]) for settings in calls[1:13]]
    assert tried[:5] == [(1, 0.4), (1, 0.3), (1, 0.2), (1, 0.1), (2, 0.1)]
    assert len(set(tried)) == 12
    assert (best.settings[STAGE], best.settings["gradient_clipping"]) == (2, 0.1)


def test_a_budget_that_is_too_small_is_an_error_that_names_a_better_one(job, run, caplog):
    """With time for a comparison it is a warning; two fifths are kept for the finals."""
    made = job({MICRO: [8, 4, 2, 1]}, "--budget", "60s")
    with pytest.raises(UserError, match="give --budget 167s at least"):
        run(made, lambda *_: 10.0, lasted=50.0)
    longer = made.model_copy(update={"budget": 300.0, "trial_steps": 8})
    _, calls = run(longer, lambda *_: 10.0, lasted=50.0)
    assert [call.get(MICRO) for call in calls] == [None, 8, 4, None, 8, 4]
    assert "the budget is used up, and 2 combinations were not tried" in caplog.text


def test_a_second_call_goes_on(job, run):
    """Killed after two trials, it starts the third; trials of other data are not used."""

    def killed(settings: dict, number: int) -> float:
        if number == 3:
            raise KeyboardInterrupt
        return 20.0

    made = job({MICRO: [8, 4, 2]})
    with pytest.raises(KeyboardInterrupt):
        run(made, killed)
    _, calls = run(made, lambda *_: 20.0)
    assert [call.get(MICRO) for call in calls[:2]] == [4, 2]
    assert len(run(made, lambda *_: 20.0)[1]) == 0
    assert len(run(made, lambda *_: 20.0, data="other")[1]) == 10


def test_the_default_space_keeps_the_global_batch(job):
    """Every candidate divides it; on one rank only ZeRO 0 without offload, on a GPU offload too."""
    made = job()
    for gpus in (0, 2):
        every = list(trials.combinations(made, gpus))
        assert len(every) > 4
        for settings in every:
            assert 16 % (settings[MICRO] * settings["ranks"]) == 0
            assert settings["ranks"] == (gpus or 1)
            assert settings["ranks"] > 1 or settings[STAGE] == 0
    assert any(settings["zero_optimization.offload_optimizer"] for settings in every)


def test_candidates_that_need_no_run(job, run):
    """A micro-batch of 8 does not divide the batch of another phase; 16 is the user's own in other words.

    What runs out of memory with 1 would do so with 2 and 4 as well, but not under other settings.
    """
    assert len(run(job({MICRO: [16]}), lambda *_: 10.0)[1]) == 1
    made = job({MICRO: [8, 4]}, "--set", "phases.finetune.train_batch_size=4")
    _, calls = run(made, lambda *_: 10.0)
    assert 8 not in [call.get(MICRO) for call in calls]
    assert outcomes(made)[:3] == [MEASURED, REFUSED, MEASURED]
    made = job({"gradient_clipping": [0.5, 1], MICRO: [1, 2, 4]})
    _, calls = run(made, lambda settings, _: NO_MEMORY if settings.get("gradient_clipping") == 0.5 else 10.0)
    assert [call[MICRO] for call in calls if call.get("gradient_clipping") == 0.5] == [1]
    assert outcomes(made).count(NO_MEMORY) == 3


# --- a score --------------------------------------------------------------------------------------------------------


def test_the_best_score_wins_and_its_model_is_kept(job, run, caplog):
    """The user's own is the first, and wins among equals; settings of both files are written."""
    caplog.set_level("INFO", "ds_trainer")
    made = job({RATE: [1e-3, 2e-3, 3e-3], "gradient_clipping": [0.5]}, *ACCURACY)
    scores = {None: 0.5, 1e-3: 0.6, 2e-3: 0.9, 3e-3: 0.9}
    best, calls = run(made, lambda settings, _: [scores[settings.get(RATE)]])
    assert calls[0] == {"ranks": 1}
    assert sorted(call[RATE] for call in calls[1:]) == [1e-3, 2e-3, 3e-3]
    engine, recipe = written(made)
    assert engine == made.engine_file | {"gradient_clipping": 0.5}
    assert recipe["phases"][1]["learning_rate"] == best.settings[RATE]
    assert "score_held_out" not in json.dumps(recipe)
    assert "one standard error of 100 held-out examples is 0.0300" in caplog.text
    assert [path.parent.name for path in (made.output / "trials").glob("*/model")] == [best.key[:12]]
    best, _ = run(job({RATE: [4e-3]}, *ACCURACY, "--set", "seed=1"), lambda *_: [0.5])
    assert best.settings == {"ranks": 1}
    # of a score that the task does not know the recipe says that less is better
    made = job({RATE: [1e-3]}, "--metric", "early_exit/agreement", "--set", "phases.prune.greater_is_better=false")
    assert run(made, lambda settings, _: [0.4 if RATE in settings else 0.5])[0].settings[RATE] == 1e-3


def test_a_run_that_cannot_win_is_ended_early(job, run):
    """From the fourth on, after a third of the steps, and not where it was better before."""
    rates = [1e-3, 2e-3, 3e-3, 6e-3, 5e-3, 7e-3]
    made = job({RATE: rates}, *ACCURACY)
    curves = [[0.3, 0.6, 0.9], [0.3, 0.6, 0.8], [0.1, 0.1, 0.1], [0.9, 0.1, 0.1], [0.1, 0.7, 0.9], [0.1, 0.1, 0.9]]
    run(made, lambda _, number: [*curves[min(number, 6) - 1], 0.5])
    assert outcomes(made) == [*[MEASURED] * 5, ENDED_EARLY, ENDED_EARLY]


def test_a_range_is_sampled(job, run):
    """Optuna comes within a factor of 2 of the best rate of four decades in 40 runs; whole numbers stay whole."""
    made = job(
        {RATE: {"low": 1e-6, "high": 1e-2, "log": True}, STEPS: {"low": 10, "high": 99, "whole": True}}, *ACCURACY
    )
    seen: list[dict] = []

    def score(settings: dict, number: int) -> list[float]:
        if number > 41:
            raise KeyboardInterrupt
        seen.append(settings)
        return [1 - abs(math.log10(settings.get(RATE, 1e-2) / 1e-4)) / 4]

    with pytest.raises(KeyboardInterrupt):
        run(made, score)
    rates = [settings[RATE] for settings in seen[1:]]
    assert 1e-6 <= min(rates) < 1e-4 < max(rates) <= 1e-2
    assert any(0.5e-4 < rate < 2e-4 for rate in rates)
    assert all(isinstance(settings[STEPS], int) and 10 <= settings[STEPS] <= 99 for settings in seen[1:])


@pytest.mark.parametrize("varied", [False, True])
def test_another_model_or_teacher_in_the_same_folder_is_measured_anew(job, run, tmp_path, varied):
    """Whether the recipe names the folder, or only a value that is tried."""
    place, teacher = "phases.prune.techniques.distill.teacher", tmp_path / "teacher"
    teacher.mkdir()
    save_file({"w": np.zeros(1)}, teacher / "model.safetensors")
    fields = {"teacher": "@finetune" if varied else str(teacher), "alpha_distil": 1.0}
    space = {place: [str(teacher)]} if varied else {RATE: [1e-3]}
    (teacher / "config.json").write_text('{"model_type": "bert"}')
    made = job(space, *ACCURACY, "--set", f"phases.prune.techniques.distill={json.dumps(fields)}")
    for number, started in ((1, 2), (1, 0), (2, 1 if varied else 2)):
        (teacher / "config.json").write_text(f'{{"model_type": "bert", "number": {number}}}')
        assert len(run(made, lambda *_: [0.5])[1]) == started


# --- both -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("aim", [(), ACCURACY])
def test_a_trial_without_a_result_is_recorded_and_the_search_goes_on(job, run, aim):
    """The user's own may fail too."""
    made = job({RATE: [1e-3, 2e-3]}, *aim)
    best, _ = run(made, lambda settings, _: HUNG if settings.get(RATE) != 2e-3 else [5.0] if aim else 5.0)
    assert best.settings[RATE] == 2e-3
    assert outcomes(made).count(HUNG) == 2


def test_a_tuning_without_any_result_says_why(job, run):
    """Whether nothing fits, nothing runs, or the metric is none that a run has."""
    cases = [(NO_MEMORY, (), NothingFitsError, "made up"), (FAILED, ACCURACY, TuningFailedError, "made up")]
    cases += [(NO_SCORE, ("--metric", "teacher/accuracy"), UserError, "--metric is eval/teacher/accuracy: made up")]
    for outcome, aim, error, message in cases:
        with pytest.raises(error, match=message):
            run(job({RATE: [1e-3]}, *aim), lambda *_, outcome=outcome: outcome)


@pytest.mark.parametrize(
    ("space", "more", "message"),
    [
        ({MICRO: ["auto"]}, [], "write whole numbers above 0"),
        ({"ranks": [2]}, ["--num_gpus", "2"], "is fixed by the global batch, --num_gpus"),
        ({RATE: {"low": 1e-5, "high": 1.0}}, [], "only a search with --metric draws from"),
        (None, ["--set", "phases.prune.per_device_train_batch_size=8"], "which a tuning is to find"),
        (None, ["--debug_port", "5678"], "--debug_port is for a run"),
        ({"phases.prune.learning_rat": [1e-3]}, ACCURACY, 'unknown key; did you mean "learning_rate"'),
        ({RATE: {"low": 0, "high": 1, "log": True}}, ACCURACY, "low must be below high"),
        ({RATE: [1e-3]}, ["--metric", "eval/f1"], 'the metric is "f1"; the scores of text are '),
        ({"task.held_out": [0.2]}, ACCURACY, "could not be compared"),
        ({RATE: [1e-3]}, [*ACCURACY, "--set", "task.held_out=0"], "give --set task.held_out=0.1"),
        (
            {RATE: [1e-3]},
            [*ACCURACY, "--set", 'phases.finetune.task={"name": "mlm", "dataset": "x"}'],
            "only labelled text and tagged words have held-out examples",
        ),
    ],
)
def test_mistakes_are_one_error_before_anything_is_tried(job, space, more, message):
    with pytest.raises(ValueError) as caught:
        job(space, *more)
    assert message in str(caught.value)


RUN = """
import json, sys, time
from pathlib import Path
out = Path(sys.argv[1])
rate = json.loads((out / "recipe_of_trial.json").read_text())["phases"][-1]["learning_rate"]
for step in range(1, 5):
    records = [{"phase": "finetune", "step": step, "eval/accuracy": 0.0}]
    values = {"eval/accuracy": step / 10, "train/examples_per_s": 2.0**step, "memory/resident/rank0": 2**20}
    records += [{"phase": "prune", "step": step, **values}]
    with (out / "log.jsonl").open("a") as log:
        log.writelines(json.dumps(record) + "\\n" for record in records)
if rate == 0.5:
    (out / "log.jsonl").open("a").write('{"phase": "prune", "st')
    time.sleep(60)
last = {"eval": {"accuracy": 0.3}, "size": {"bytes": 2**20}, "latency": {"batch_1": {"median_ms": 5.0}}}
(out / "all_results.json").write_text(json.dumps({"finetune": {}, "prune": last}))
(out / "checkpoint-3").mkdir()
(out / "status.json").write_text('{"state": "finished"}')
"""


@pytest.fixture
def follow(monkeypatch, tmp_path, job) -> Callable[..., tuple[Trial, Path]]:
    """Run a trial with a script, in place of training, that writes what a run writes."""
    (tmp_path / "run.py").write_text(RUN)
    command = trials._command

    def script(job, settings, recipe, engine, folder) -> list[str]:
        command(job, settings, recipe, engine, folder)
        return [sys.executable, str(tmp_path / "run.py"), str(folder)]

    def trial(rate: float, aim=ACCURACY, cannot_win=lambda *_: False, more=()) -> tuple[Trial, Path]:
        made = job({RATE: [0.5]}, *aim, *more)
        folder = made.output / "trials/one"
        return trials.run_trial(made, {"ranks": 1, RATE: rate}, folder, cannot_win), folder

    monkeypatch.setattr(trials, "_command", script)
    return trial


def test_a_finished_run_gives_its_score_and_costs(follow):
    """Of the last phase, scored on held-out examples; its checkpoints are deleted."""
    trial, folder = follow(0.1)
    assert (trial.outcome, trial.value) == (MEASURED, 0.3)
    assert trial.details["costs"] == {"MiB": 1.0, "ms (batch 1)": 5.0}
    assert trial.details["curve"] == [(1, 0.1), (2, 0.2), (3, 0.3), (4, 0.4)]
    assert not (folder / "checkpoint-3").exists()
    assert json.loads((folder / "recipe_of_trial.json").read_text())["task"]["score_held_out"]
    trial, _ = follow(0.1, aim=("--metric", "teacher/agreement"))
    assert (trial.outcome, trial.reason) == (NO_SCORE, "the run has the scores accuracy")


def test_a_run_is_ended_where_its_evaluations_say_so_or_it_is_silent(follow):
    """A second run in the folder does not see the first one's."""
    trial, _ = follow(0.5, cannot_win=lambda step, score: step == 2)
    assert (trial.outcome, trial.value) == (ENDED_EARLY, None)
    assert trial.lasted < 30
    trial, _ = follow(0.5, more=("--trial_timeout", "1s"))
    assert (trial.outcome, trial.reason) == (HUNG, "it printed and logged nothing for 1 s")
    assert replace(follow(0.1)[0], lasted=0).outcome == MEASURED


def test_a_trial_for_speed_is_the_first_steps_of_one_phase(follow, job, tmp_path):
    """It ends at the fourth record, of which the first does not count, and starts from models that were made before.

    A run that ends by itself before that, and is not finished, has no speed.
    """
    teacher = {"teacher": "@finetune", "alpha_distil": 1.0}
    more = ("--set", f"phases.prune.techniques.distill={json.dumps(teacher)}", "--set", "phases.prune.cut.keep=0.5")
    trial, folder = follow(0.5, aim=("--trial_steps", "12"), more=more)
    assert (trial.outcome, trial.details) == (MEASURED, {"costs": {"MiB of a rank": 1.0}})
    assert trial.value == pytest.approx(3 / (1 / 4 + 1 / 8 + 1 / 16))
    (phase,) = json.loads((folder / "recipe_of_trial.json").read_text())["phases"]
    start = tmp_path / "out/trials/start"
    assert (phase["start_from"], phase["logging_steps"]) == (str(start / "model"), 3)
    assert phase["techniques"]["distill"]["teacher"] == str(start / "finetune/model")
    assert "cut" not in phase
    (folder / "log.jsonl").write_text((folder / "log.jsonl").read_text().rpartition('{"phase": "finetune"')[0])
    failed = Trial({}, FAILED)
    assert trials._speed(job({RATE: [0.5]}), folder, failed) == failed
